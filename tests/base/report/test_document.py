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


def update(path, **contents: str) -> None:
    update_page(path, Report("Title", [Section("", [words], name) for name, words in contents.items()]))


def test_only_sections_change(tmp_path):
    path = tmp_path / "x.md"
    path.write_text(f"# Title\n\nby hand\n\n{empty_section('a')}\n\nmore by hand\n\n{empty_section('b')}\n")
    update(path, a="one two", b="three")
    text = path.read_text()
    edited = text.replace("by hand", "by hand, edited").replace("# Title", "# Other")
    path.write_text(edited)
    update(path, a="new", b="three")
    assert path.read_text() == edited.replace("one two", "new")


def test_twice_changes_nothing(tmp_path):
    path = tmp_path / "x.md"
    update(path, a="one", b="two")
    before = path.stat().st_mtime_ns
    update(path, a="one", b="two")
    assert path.stat().st_mtime_ns == before


lines = st.lists(st.sampled_from(["text", "", "## Head", "<!-- a note -->", "| a | b |"]), max_size=5)


@settings(max_examples=50, deadline=None)
@given(lines, lines, lines, lines)
def test_hand_written_text_survives(before, between, after, content):
    text = "\n".join([*before, empty_section("a"), *between, empty_section("b"), *after]) + "\n"
    done = replace_sections(text, {"a": "\n".join(content), "b": "new"}, "x")
    again = replace_sections(done, {"a": "\n".join(content), "b": "new"}, "x")
    assert done == again
    emptied = replace_sections(done, {"a": "", "b": ""}, "x")
    assert emptied == text.replace("\n\n\n", "\n\n\n")
    assert [s for s in find_sections(done, "x")] == ["a", "b"]


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
        update(path, a="new")
    assert path.read_text() == text


def test_a_document_without_the_section_gets_it_at_its_end(tmp_path):
    path = tmp_path / "x.md"
    path.write_text("# Mine\n")
    update(path, a="one")
    assert path.read_text() == f"# Mine\n\n{begin_marker('a')}\none\n{end_marker('a')}\n"


def test_markers_in_prose_are_prose():
    assert find_sections("write `tomat:begin NAME` between comments\n", "x") == {}


def test_section_text():
    text = "# T\n## Verdict\n<!-- why -->\nIt was slower.\n\nMore.\n## Next\nx\n"
    assert section_text(text, "Verdict") == "It was slower.\n\nMore."
    assert section_text(text, "Absent") == ""
