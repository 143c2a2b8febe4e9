import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.base.report.document import (
    begin_marker,
    empty_section,
    end_marker,
    find_sections,
    replace_sections,
    section_text,
)
from tomat.base.report.markdown import update_page
from tomat.base.report.model import Report, Section

lines = st.lists(st.sampled_from(["text", "", "## Head", "<!-- a note -->", "| a | b |"]), max_size=5)


@settings(max_examples=50, deadline=None)
@given(lines, lines, lines, lines)
def test_hand_written_text_survives(before, between, after, content):
    text = "\n".join([*before, empty_section("a"), *between, empty_section("b"), *after]) + "\n"
    done = replace_sections(text, {"a": "\n".join(content), "b": "new"}, "x")
    again = replace_sections(done, {"a": "\n".join(content), "b": "new"}, "x")
    assert done == again
    assert replace_sections(done, {"a": "", "b": ""}, "x") == text
    assert list(find_sections(done, "x")) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"{begin_marker('a')}\nx\n", "never ends"),
        (f"x\n{end_marker('a')}\n", "ends but was not open"),
        (f"{empty_section('a')}\n{empty_section('a')}\n", "a second time"),
        (f"{begin_marker('a')}\n{empty_section('b')}\n{end_marker('a')}\n", "begins inside 'a'"),
        (f"{begin_marker('a')}\n{end_marker('b')}\n", "ends but was not open"),
        ("<!-- tomat:begin a ->\n", "damaged marker"),
        ("<!--tomat:end a-->\n", "damaged marker"),
    ],
)
def test_broken_markers_leave_the_document_untouched(tmp_path, text, what):
    path = tmp_path / "x.md"
    path.write_text(text)
    with pytest.raises(TomatError, match=f"x.md:[0-9]+: .*{what}.*was not changed"):
        update_page(path, Report("Title", [Section("", ["new"], "a")]))
    assert path.read_text() == text


def test_what_people_wrote_is_theirs():
    text = "# T\n## Verdict\n<!-- why -->\nIt was slower.\n\nSee `tomat:begin NAME`.\n## Next\nx\n"
    assert section_text(text, "Verdict") == "It was slower.\n\nSee `tomat:begin NAME`."
    assert section_text(text, "Absent") == "" and find_sections(text, "x") == {}
    text = f"a form feed \x0c, a separator \u2028 and \x85\n{empty_section('a')}\n\x1c\n"
    assert replace_sections(text, {"a": ""}, "x") == text
