from hypothesis import given, settings
from markdown_reader import hostile, read

from tomat.base.report.markdown import markdown_table
from tomat.base.report.text import code, fenced, plain


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
