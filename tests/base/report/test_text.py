"""Whatever a purpose or a name holds: a page has no HTML of it, its markers are whole, a reader sees every letter."""

import pytest
from hypothesis import given, settings
from markdown_reader import MARKDOWN, hostile, raw_html, read

from tomat.base.report.document import empty_section, find_sections, replace_sections
from tomat.base.report.markdown import markdown_table
from tomat.base.report.text import code, fenced, plain, without_html


@settings(max_examples=600, deadline=None)
@given(hostile, hostile)
def test_no_html_and_no_marker_is_left_whatever_was_put_in(first, second):
    content = f"**Goal**: {first}\n\n{markdown_table(('x', 'y'), [(second, first)])}\n\n```bash\n{second}\n```\n\nend"
    assert not raw_html(without_html(content))
    page = replace_sections(f"# T\n\n{empty_section('a')}\n\nby hand\n\n{empty_section('b')}\n", {"a": content}, "x")
    assert list(find_sections(page, "x")) == ["a", "b"]
    again = replace_sections(page, {"a": content}, "x")
    assert again == page and "by hand" in page
    # A block of code that was left open does not swallow what follows.
    assert "<p>by hand</p>" in MARKDOWN.render(page)


@settings(max_examples=600, deadline=None)
@given(hostile)
def test_words_are_shown_letter_by_letter(words):
    line = " ".join(words.split())
    for written in (plain(words), f"# {plain(words)}", markdown_table(("x",), [(plain(words),)])):
        seen = read(without_html(written))
        assert seen.tags <= {"p", "h1", "table", "thead", "tbody", "tr", "th", "td"}, written
        assert line in " ".join(seen.text.split()) or not line, written
    # With a bar it could be two cells of a table.
    assert line.replace("&lt;", "<") in read(without_html(f"a {code(words)} b")).text.replace("&lt;", "<")
    shown = read(without_html(fenced(words))).text
    assert shown.replace("&lt;!--", "<!--").split() == words.split()


@pytest.mark.parametrize("own", ["a < b, `<x>` and ``<b> ` <c>``", "| `<x>` | 1 |", "```\n<x>\n```", "[a](b.md)", ""])
def test_what_is_no_html_stays_as_it_is_and_html_in_prose_is_shown(own):
    assert without_html(own) == own
    assert without_html("<b>x</b> `<b>`") == "&lt;b>x&lt;/b> `<b>`"
