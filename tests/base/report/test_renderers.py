"""A report as Markdown and on the terminal: whatever it was made of, it is text, and no figure of it is lost."""

from dataclasses import replace
from xml.etree import ElementTree

from hypothesis import given, settings
from markdown_reader import MARKDOWN, hostile, raw_html, read

from tomat.base import reporting
from tomat.base.report.document import empty_section, find_sections, replace_sections
from tomat.base.report.formats import number
from tomat.base.report.markdown import markdown, markdown_table, update_page
from tomat.base.report.model import (
    Axis,
    Chart,
    Code,
    Column,
    Facts,
    Heading,
    Image,
    Items,
    Lines,
    Link,
    Note,
    Report,
    Section,
    Series,
    State,
    Table,
    Verdict,
)
from tomat.base.report.svg import chart_svg
from tomat.base.report.terminal import show
from tomat.base.report.text import code, fenced, plain

LOSSES = Chart("Losses", [Series("a", [0, 1], [2.0, 1.0])], Axis("step"), Axis("loss"), "It falls.", "losses.svg")


def parts(words: str):
    columns = [Column("name"), Column("value", number(2, 100, " %")), Column("verdict")]
    rows = [(words, 0.5, Verdict("fails", State.BAD)), (Code("x"), None, Link("there", "x.md"))]
    return [
        f"Some prose: {words}",
        Note(words),
        Heading(words),
        Items([words]),
        Facts({"fact": words, "unknown": None}),
        Table("", columns, rows, footer=("sum", 1.0, "")),
    ]


@settings(max_examples=300, deadline=None)
@given(hostile, hostile)
def test_words_are_no_html_and_no_marker_of_a_page_and_every_letter_of_them_is_seen(words, others):
    more = Table(others, [Column("x"), Column("y", prose=True)], [(Code(others), others)])
    files = [Image(words, others), replace(LOSSES, title=words, file=others), Facts({"x": Link(words, others)})]
    written = markdown([*parts(words), more, *files, Lines(f"{others}\n{words}", "bash"), "end"])
    assert not raw_html(written)
    seen = read(written)
    assert "".join(words.split()) in "".join(seen.text.split())
    for figure in ("50.00 %", "100.00 %", "fails", "–"):
        assert figure in seen.text
    page = f"# T\n\n{empty_section('a')}\n\nby hand\n\n{empty_section('b')}\n"
    page = replace_sections(page, {"a": written}, "x")
    assert list(find_sections(page, "x")) == ["a", "b"] and replace_sections(page, {"a": written}, "x") == page
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
    assert read(fenced(words)).text.replace("&lt;!--", "<!--").split() == words.split()


def test_words_are_no_markup_of_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(reporting.console, "_width", 200)
    show(*parts("qa[bold]bq :dog: [/x]"), LOSSES)
    said = capsys.readouterr().out
    assert said.count("qa[bold]bq :dog: [/x]") == 6
    assert "50.00 %" in said and "fails" in said and "losses" not in said.lower()


def test_cells_of_several_lines_leave_room_for_the_words_before_them(monkeypatch, capsys):
    monkeypatch.setattr(reporting.console, "_width", 60)
    columns = [Column("layout"), *(Column(name, right=True) for name in ("one", "two"))]
    show(Table("", columns, [("packed cubes", *["19 x 19 x 19\n6,859 voxels\n(85.0 %)"] * 2)]))
    assert "packed cubes" in capsys.readouterr().out


def report(words: str, *more: Section) -> Report:
    first = Section("Figures", parts(words), "figures", level=3, owns_heading=True)
    rest = (Section("Drawn", [LOSSES], "drawn"), Section("Verdict", by_hand="<!-- What follows. -->"))
    return Report(f"T {words}", [Section("Results"), first, *rest, *more])


def test_a_page_keeps_what_people_wrote_and_gets_sections_that_it_lacks(tmp_path):
    page, figures = tmp_path / "page.md", tmp_path / "figures"
    update_page(page, report("a <b> <!-- tomat:end figures -->"), figures)
    text = page.read_text()
    assert text.index("## Results") < text.index("tomat:begin figures") < text.index("### Figures")
    assert "![Losses](figures/losses.svg)" in text and (figures / "losses.svg").is_file()
    page.write_text(text.replace("<!-- What follows. -->", "It is so.").replace("## Verdict", "## My verdict"))
    update_page(page, report("other", Section("Later", ["new"], "later", "**Notes**:")), figures)
    after = page.read_text()
    assert "It is so." in after and "## My verdict" in after and "## Verdict\n" not in after
    assert "other" in after and after.count("## Results") == 1
    assert after.endswith("## Later\n\n<!-- tomat:begin later -->\nnew\n<!-- tomat:end later -->\n\n**Notes**:\n")
    stamps = [path.stat().st_mtime_ns for path in (page, figures / "losses.svg")]
    update_page(page, report("other", Section("Later", ["new"], "later")), figures)
    assert [path.stat().st_mtime_ns for path in (page, figures / "losses.svg")] == stamps


def test_a_chart_is_the_same_bytes_and_names_its_series():
    points = Series("po$in$ts", [1, 10], [3, 4], "points", "#123456", areas=[0.5, 0.1])
    bars = [Series(f"kind {share} %", [share], mark="bar") for share in (30, 70)]
    line, histogram = Series("line", [1, 10], [3, 4], dotted=True), Series("", [1, 2], mark="histogram")
    for series in ([points, line], bars, [histogram]):
        chart = Chart("c", series, Axis("x", log=series[0] is points), Axis("y"), "said")
        drawn = chart_svg(chart)
        assert drawn == chart_svg(chart) and ElementTree.fromstring(drawn).tag.endswith("svg")
        assert all(one.name in drawn for one in series)
