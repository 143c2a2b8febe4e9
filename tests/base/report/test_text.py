"""Whatever a purpose or a name holds: a page has no HTML of it, its markers are whole, a reader sees every letter."""

from hypothesis import given, settings
from markdown_reader import MARKDOWN, hostile, raw_html, read

from tomat.base.report.document import empty_section, find_sections, replace_sections
from tomat.base.report.markdown import markdown, markdown_table
from tomat.base.report.model import Code, Column, Facts, Lines, Table
from tomat.base.report.text import code, fenced, plain


@settings(max_examples=300, deadline=None)
@given(hostile, hostile)
def test_no_html_and_no_marker_is_left_whatever_was_put_in(first, second):
    table = Table(first, [Column("x"), Column("y", prose=True)], [(Code(second), first), (second, second)])
    content = markdown([f"Goal: {first}", Facts({"fact": second}), table, Lines(f"{second}\n{first}", "bash"), "end"])
    assert not raw_html(content)
    page = replace_sections(f"# T\n\n{empty_section('a')}\n\nby hand\n\n{empty_section('b')}\n", {"a": content}, "x")
    assert list(find_sections(page, "x")) == ["a", "b"]
    again = replace_sections(page, {"a": content}, "x")
    assert again == page and "by hand" in page
    # A block of code that was left open does not swallow what follows.
    assert "<p>by hand</p>" in MARKDOWN.render(page)


@settings(max_examples=300, deadline=None)
@given(hostile)
def test_words_are_shown_letter_by_letter(words):
    line = " ".join(words.split())
    for written in (plain(words), f"# {plain(words)}", markdown_table(("x",), [(plain(words),)])):
        seen = read(written)
        assert seen.tags <= {"p", "h1", "table", "thead", "tbody", "tr", "th", "td"}, written
        assert line in " ".join(seen.text.split()) or not line, written
    # With a bar it could be two cells of a table.
    assert line in read(f"a {code(words)} b").text
    shown = read(fenced(words)).text
    assert shown.replace("&lt;!--", "<!--").split() == words.split()
