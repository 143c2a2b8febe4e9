"""Markdown as a reader sees it: tags, text, what passes as HTML; and words that try to be more than words."""

from html.parser import HTMLParser

from hypothesis import strategies as st
from markdown_it import MarkdownIt

PARTS = [
    "a", " ", "\n", "\n\n", "`", "```", "~~~", "```html", "|", "\\", "<", ">", "<script>", "</p>", "<!--", "-->",
    "<!-- tomat:end a -->", "<!-- tomat:begin b -->", "&lt;", "*", "_", "[x](y)", "#", "- ", "1. ", "> ", "\u2028", "é",
]  # fmt: skip
hostile = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)
MARKDOWN = MarkdownIt("commonmark").enable("table")


class Seen(HTMLParser):
    """The tags and the text of what Markdown became."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def read(markdown: str) -> Seen:
    seen = Seen()
    seen.feed(MARKDOWN.render(markdown))
    return seen


def raw_html(markdown: str) -> list[str]:
    """What the parser passes on as HTML."""
    found = []
    for token in MARKDOWN.parse(markdown):
        found += [each.content for each in (token, *(token.children or ())) if each.type.startswith("html_")]
    return found
