"""Markdown as a reader sees it: tags, text, what passes as HTML; and words that try to be more than words."""

import html
import re
from dataclasses import dataclass

from hypothesis import strategies as st
from markdown_it import MarkdownIt

PARTS = [
    "a", " ", "\n", "\n\n", "`", "```", "~~~", "```html", "|", "\\", "<", ">", "<script>", "</p>", "<!--", "-->",
    "<!-- tomat:end a -->", "<!-- tomat:begin b -->", "&lt;", "*", "_", "[x](y)", "#", "- ", "1. ", "> ", "\u2028", "é",
]  # fmt: skip
hostile = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)
MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclass
class Seen:
    """The tags and the text of what Markdown became."""

    tags: set[str]
    text: str


def read(markdown: str) -> Seen:
    rendered = MARKDOWN.render(markdown)
    return Seen(set(re.findall(r"<(\w+)", rendered)), html.unescape(re.sub(r"<[^>]*>", "", rendered)))


def raw_html(markdown: str) -> list[str]:
    """What the parser passes on as HTML."""
    found = []
    for token in MARKDOWN.parse(markdown):
        found += [each.content for each in (token, *(token.children or ())) if each.type.startswith("html_")]
    return found
