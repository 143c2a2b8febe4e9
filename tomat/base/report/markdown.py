"""A report as Markdown, and as a page that people write in too."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from tomat.base.report import model
from tomat.base.report.document import empty_section, find_sections, read_document, replace_sections, write_if_changed
from tomat.base.report.svg import chart_svg
from tomat.base.report.text import code, fenced, inline, plain, prose


def update_page(page: Path, report: model.Report, figures: Path | None = None) -> Path:
    """Write or update the page of a report. What people wrote between its named sections stays; sections that the page
    lacks come at its end. The charts' SVGs go into `figures`, the page's folder or one below it; None: the page's
    folder. Nothing is written if the page's markers are broken."""
    folder = page.parent if figures is None else figures
    prefix = "" if folder == page.parent else f"{folder.relative_to(page.parent).as_posix()}/"
    is_new = not page.is_file()
    text = f"# {plain(report.title)}\n" if is_new else read_document(page)
    known = find_sections(text, str(page))
    # A section that would be empty, with its heading, is only taken to empty one that the page has.
    sections = [one for one in report.sections if one.parts or not one.owns_heading or one.name in known]
    for section in sections:
        if section.name not in known if section.name else is_new:
            text = f"{text.rstrip()}\n\n{_template(section)}\n"
    contents = {section.name: section_markdown(section, prefix) for section in sections if section.name}
    text = replace_sections(text, contents, str(page))
    for part in (part for section in sections for part in section.parts):
        if isinstance(part, model.Chart) and part.file:
            write_if_changed(folder / part.file, chart_svg(part))
    write_if_changed(page, text)
    return page


def _template(section: model.Section) -> str:
    """A section of a new page, with nothing between its markers. One without markers is people's from then on."""
    heading = "" if section.owns_heading else _heading(section)
    marked = empty_section(section.name) if section.name else markdown(section.parts)
    return "\n\n".join(one for one in (heading, marked, section.by_hand) if one)


def _heading(section: model.Section) -> str:
    return f"{'#' * section.level} {plain(section.heading)}" if section.heading else ""


def section_markdown(section: model.Section, figures: str = "") -> str:
    """What stands between the markers of a section; `figures` comes before the file of a chart in its link."""
    heading = _heading(section) if section.owns_heading and section.parts else ""
    return "\n\n".join(one for one in (heading, markdown(section.parts, figures)) if one)


def markdown(parts: Sequence[model.Part], figures: str = "") -> str:
    return "\n\n".join(one for one in (_part(part, figures) for part in parts) if one)


def _part(part: model.Part, figures: str) -> str:
    match part:
        case str():
            return prose(part)
        case model.Image(caption, file):
            return f"![{inline(caption)}]({_address(file)})"
        case model.Heading(text):
            return f"### {prose(text)}"
        case model.Note(text, warning):
            return f"**Warning**: {prose(text)}" if warning else f"Note: {prose(text)}"
        case model.Items(texts):
            return "\n".join(f"- {prose(text)}" for text in texts)
        case model.Lines(text, language):
            return fenced(text, language)
        case model.Chart():
            return f"![{inline(part.title)}]({_address(figures + part.file)})" if part.file else ""
        case model.Facts():
            rows = [(inline(name), _cell(value, model.Column(""))) for name, value in part.known()]
            return _captioned(part.caption, markdown_table(("", ""), rows, "ll")) if rows else ""
        case model.Table():
            return _captioned(part.caption, _table(part))


def _captioned(caption: str, table: str) -> str:
    return f"{prose(caption)}:\n\n{table}" if caption else table


def _table(table: model.Table) -> str:
    align = "".join("r" if table.is_right(place) else "l" for place in range(len(table.columns)))
    rows = [[_cell(value, column) for value, column in zip(row, table.columns, strict=True)] for row in table.rows]
    if table.footer:
        footer = [_cell(value, column) for value, column in zip(table.footer, table.columns, strict=True)]
        rows.append([f"**{footer[0]}**", *footer[1:]])
    return markdown_table([inline(column.heading) for column in table.columns], rows, align)


def _cell(value: model.Cell, column: model.Column) -> str:
    words = model.words_of(value, column.show)
    if isinstance(value, model.Code):
        return code(words)
    if column.prose:
        return prose(words)
    return f"[{inline(words)}]({_address(value.address)})" if isinstance(value, model.Link) else inline(words)


def _address(place: str) -> str:
    return quote(place, "/:?=&#%")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str | None = None) -> str:
    """A table; `align` has one of `l`, `r` per column, default left for the first and right for the others."""
    alignment = align or "l" + "r" * (len(header) - 1)
    rule = ["---:" if a == "r" else "---" for a in alignment]
    lines = [header, rule, *rows]
    # A cell is one line.
    cells = ([" ".join(cell.splitlines()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
