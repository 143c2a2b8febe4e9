"""Markdown as a reader sees it: tags, text, what passes as HTML; and words that try to be more than words."""

import html
import re
from types import SimpleNamespace

from hypothesis import strategies as st
from markdown_it import MarkdownIt

PARTS = [
    "a", " ", "\n", "\n\n", "`", "```", "~~~", "```html", "|", "\\", "<", ">", "<script>", "</p>", "<!--", "-->",
    "<!-- tomat:end a -->", "<!-- tomat:begin b -->", "&lt;", "*", "_", "[x](y)", "#", "- ", "1. ", "> ", "\u2028", "é",
]  # fmt: skip
hostile = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)
MARKDOWN = MarkdownIt("commonmark").enable("table")


def read(markdown: str) -> SimpleNamespace:
    """The `tags` and the `text` of what Markdown becomes."""
    rendered = MARKDOWN.render(markdown)
    text = html.unescape(re.sub(r"<[^>]*>", "", rendered))
    return SimpleNamespace(tags=set(re.findall(r"<(\w+)", rendered)), text=text)


def raw_html(markdown: str) -> list[str]:
    """What the parser passes on as HTML."""
    found = []
    for token in MARKDOWN.parse(markdown):
        found += [each.content for each in (token, *(token.children or ())) if each.type.startswith("html_")]
    return found
