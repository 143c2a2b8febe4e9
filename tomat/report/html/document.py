"""One self-contained HTML file with text, tables, figures, plotly's program and the data. A table can be sorted by any
column and filtered by words. Every text is escaped once, in this module.

The page's content security policy forbids all network access, so that nothing in it, plotly included, can load
anything. Figures are drawn as they come into view, in the page's light or dark colours.
"""

import base64
import html
import importlib.resources
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from tomat import __version__
from tomat.base.errors import TomatError
from tomat.base.report import model
from tomat.base.reporting import readable_bytes, to_jsonable, write_text
from tomat.report.html.plotly_program import ALWAYS, plotly_program

MOST_BYTES = 8_000_000
"""Largest size of a page. plotly's program takes 1.0 to 1.7 MB of it."""

POLICY = "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; img-src data: blob:"
"""The page may load only what it contains and what it makes from that (plotly's program as a blob, its pictures)."""

DENSITY_PROGRAMS = ("cell_geometry.js", "density.js")
"""Files of `assets/` for a page that shows a density. A file may need those before it."""

DENSITY_KINDS = ("heatmap", "mesh3d", "scatter3d")

_DTYPES = {"float32": "f4", "float64": "f8", "int32": "i4", "uint8": "u1"}
"""NumPy's names of dtypes -> plotly's names for typed arrays."""

MOST_ROWS = 2_000
"""Most rows that a table shows: with 10 columns they take 1 MB."""
FILTER_FROM = 8
"""A table of at least this many rows has a field to filter them by."""
LONG = 60
"""A table of at least this many rows is laid out only as it comes into view."""
FLUSH_RIGHT = Markup(' class="n"')


@dataclass(frozen=True)
class Figure:
    """A drawing that only plotly has."""

    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    """plotly's layout. The page sets the colours that depend on light and dark."""
    summary: str
    """What the figure shows, as a sentence: nothing is said by a picture alone."""
    height: int
    scales: bool = False
    """Whether the page offers a logarithmic scale for the values."""


def asset(name: str) -> str:
    """A file of `assets/`: a page's template, its style or one of its own programs."""
    return (importlib.resources.files("tomat.report.html") / "assets" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    loader = PackageLoader("tomat.report.html", "assets")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def prose(words: object) -> Markup:
    """Plain text as HTML. Text between backticks becomes code."""
    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(words)))


def rendered(name: str, **values: Any) -> Markup:
    """A template filled with its values. A value that is not `Markup` is escaped as text."""
    return Markup(_environment().get_template(name).render(values))


def table_html(table: model.Table) -> Markup:
    """A table. Of more than `MOST_ROWS` rows it shows the first ones and says so in its caption."""
    sides = [FLUSH_RIGHT if table.is_right(place) else Markup("") for place in range(len(table.columns))]
    said = f" The first {MOST_ROWS:,} of {len(table.rows):,} rows." if len(table.rows) > MOST_ROWS else ""
    return rendered(
        "table.html",
        caption=table.caption + said,
        heads=[(column.heading, side) for column, side in zip(table.columns, sides, strict=True)],
        rows=[_cells(table.columns, row, sides) for row in table.rows[:MOST_ROWS]],
        footer=_cells(table.columns, table.footer, sides) if table.footer else "",
        filter_from=FILTER_FROM,
        long=LONG,
    )


def facts_html(facts: model.Facts) -> Markup:
    """A table of names and values without a heading; empty where no value is known."""
    row = Markup('<tr><th scope="row">{}</th><td>{}</td></tr>')
    lines = Markup("").join(row.format(name, cell_html(value)) for name, value in facts.known())
    return Markup('<table class="facts"><tbody>{}</tbody></table>').format(lines) if lines else lines


def cell_html(value: model.Cell, column: model.Column | None = None) -> Markup:
    words = model.words_of(value, str if column is None else column.show)
    match value:
        case model.Code():
            return Markup("<code>{}</code>").format(words)
        case model.Link(_, address):
            return Markup('<a href="{}">{}</a>').format(address, words)
        case model.Verdict(_, state):
            return Markup('<b class="{}">{}</b>').format(state, words)
    return prose(words) if column is not None and column.prose else Markup.escape(words)


def _cells(columns: Sequence[model.Column], row: Sequence[model.Cell], sides: Sequence[Markup]) -> Markup:
    keys = (Markup(' data-v="{}"').format(value) if model.is_number(value) else "" for value in row)
    cells = zip(sides, keys, map(cell_html, row, columns), strict=True)
    return Markup("").join(Markup("<td{}{}>{}</td>").format(*cell) for cell in cells)


def label(value: object) -> str:
    """Text for a label in a figure. plotly interprets some HTML in labels, so the text is escaped."""
    return html.escape(str(value), quote=False)


def paragraph(words: str, kind: str = "") -> Markup:
    """A paragraph of plain text; empty where there is no text. `kind`: `note` or `warning`."""
    css = Markup(' class="{}"').format(kind) if kind else ""
    return Markup("<p{}>{}</p>").format(css, prose(words)) if words else Markup("")


def details(summary: str, *parts: Any) -> Markup:
    return Markup("<details><summary>{}</summary>{}</details>").format(summary, parts_html(parts))


def typed(values: np.ndarray | Sequence[float]) -> dict[str, Any]:
    """An array as plotly reads it from JSON: its little-endian bytes in base 64, bit for bit (int64 becomes int32)."""
    array = np.ascontiguousarray(values)
    if array.dtype == np.int64:
        array = array.astype(np.int32)
    little = array.astype(array.dtype.newbyteorder("<")).tobytes()
    found = {"dtype": _DTYPES[array.dtype.name], "bdata": base64.b64encode(little).decode("ascii")}
    return found if array.ndim == 1 else found | {"shape": ", ".join(map(str, array.shape))}


def json_script(name: str, value: Any) -> Markup:
    """Data in the page, which scripts find by its name. `<` is escaped, so no text in the data can end the element."""
    body = json.dumps(to_jsonable(value), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Markup('<script type="application/json" id="{}">{}</script>').format(name, Markup(body))


def parts_html(parts: Sequence[Any]) -> Markup:
    """Parts of a report as HTML. A part that is `Markup` already stays as it is."""
    return Markup("\n").join(map(_part_html, parts))


def _part_html(part: Any) -> Markup:
    match part:
        case Markup():
            return part
        case str():
            return paragraph(part)
        case model.Heading(text):
            return Markup("<h3>{}</h3>").format(prose(text))
        case model.Note(text, warning):
            return paragraph(text, "warning" if warning else "note")
        case model.Items(texts):
            return Markup("<ul>{}</ul>").format(Markup("").join(Markup("<li>{}</li>").format(prose(t)) for t in texts))
        case model.Lines(text):
            return Markup("<pre>{}</pre>").format(text)
        case model.Facts():
            return facts_html(part)
        case model.Table():
            return table_html(part)
    raise TypeError(f"a page cannot show a {type(part).__name__}")


def page_html(report: model.Report) -> str:
    sections, n_figures, kinds = [], 0, {ALWAYS}
    # A section without parts is left out: it would be a heading alone. (In Markdown, people write such a section.)
    for place, section in enumerate((one for one in report.sections if one.parts), 1):
        parts: list[Any] = []
        for before, part in zip([None, *section.parts], section.parts, strict=False):
            # In Markdown a chart's summary follows as a text of its own. Here the summary is below the figure already.
            if not (isinstance(before, model.Chart) and part == before.summary):
                parts.append(plotly_figure(part) if isinstance(part, model.Chart) else part)
        for at, part in enumerate(parts):
            if isinstance(part, Figure):
                n_figures += 1
                kinds |= {trace.get("type", ALWAYS) for trace in part.data}
                name = f"figure-{n_figures}"
                data = json_script(f"{name}-data", {"data": part.data, "layout": part.layout})
                parts[at] = rendered("figure.html", place=name, figure=part, summary=prose(part.summary), data=data)
        sections.append({"place": place, "heading": section.heading, "html": parts_html(parts)})
    density = any("data-density" in section["html"] for section in sections)
    kinds |= set(DENSITY_KINDS if density else ())
    written = rendered(
        "standalone.html",
        title=report.title,
        kind=report.kind,
        sections=sections,
        policy=POLICY,
        style=Markup(asset("page.css")),
        version=__version__,
        programs=[Markup(asset(name)) for name in ("page.js", *(DENSITY_PROGRAMS if density else ()))],
        plotly=Markup(plotly_program(frozenset(kinds))),
    )
    if (size := len(written.encode("utf-8", errors="backslashreplace"))) > MOST_BYTES:
        most = f"more than the {readable_bytes(MOST_BYTES)} that a browser opens at once"
        raise TomatError(f"the page of {report.title} would have {readable_bytes(size)}, {most}; give less of it.")
    return str(written)


def write_page(path: Path, report: model.Report) -> int:
    """Write the document in one step and return its size in bytes."""
    write_text(path, page_html(report))
    return path.stat().st_size


def plotly_figure(chart: model.Chart) -> Figure:
    height = round(80 * chart.size[1])
    layout: dict[str, Any] = {"xaxis": _axis(chart.x), "yaxis": _axis(chart.y)}
    layout["showlegend"] = sum(series.named for series in chart.series) > 1
    layout["legend"] = {"orientation": "h", "y": -90 / height, "yanchor": "top", "traceorder": "normal"}
    if bars := [series for series in chart.series if series.mark == "bar"]:
        rows = {"autorange": "reversed", "automargin": True} if bars[0].y else {"visible": False}
        layout |= {"barmode": "stack", "yaxis": rows}
    line = {"type": "line", "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dash", "color": "#8a929b"}}
    layout["shapes"] = [line | {"x0": limit, "x1": limit} for limit in chart.limits]
    return Figure(chart.title, [_trace(one) for one in chart.series], layout, chart.summary, height, chart.scales)


def _axis(axis: model.Axis) -> dict[str, Any]:
    found: dict[str, Any] = {"title": {"text": label(axis.label)}}
    found |= {"type": "log", "exponentformat": "power"} if axis.log else {}
    found |= {"rangemode": "tozero"} if axis.from_zero else {}
    return found | ({"tickvals": list(axis.ticks)} if axis.ticks else {})


def _trace(series: model.Series) -> dict[str, Any]:
    common: dict[str, Any] = {"name": label(series.name), "showlegend": series.named}
    colour = {"color": series.colour} if series.colour else {}
    if series.mark == "histogram":
        return common | {"type": "histogram", "x": list(series.x), "nbinsx": 40, "marker": colour}
    if series.mark == "bar":
        rows = [label(one) for one in series.y] or [""]
        hover = f"{label(series.name)}: %{{x:.2f}}<extra></extra>"
        return common | {"type": "bar", "orientation": "h", "x": list(series.x), "y": rows, "marker": colour,
                         "hovertemplate": f"%{{y}}<br>{hover}" if series.y else hover}  # fmt: skip
    marker = colour | {"size": 5} | ({"symbol": "x"} if series.mark == "crosses" else {})
    if series.areas:
        # The area shows the share. The smallest point is still large enough for a pointer to hit.
        marker |= {"size": [max(5.0, 90 * math.sqrt(area)) for area in series.areas], "opacity": 0.75,
                   "line": {"width": 0.5}}  # fmt: skip
    line = colour | {"width": 1 if series.faint else 1.6} | ({"dash": "dot"} if series.dotted else {})
    line |= {"shape": "hv"} if series.mark == "step" else {}
    is_line, has_points = series.mark in ("line", "step", "both"), series.mark in ("points", "crosses", "both")
    modes = (("lines", is_line), ("markers", has_points), ("text", series.labels))
    mode = "+".join(name for name, there in modes if there)
    # An array is written as its bytes, which are shorter.
    x, y = (typed(one) if isinstance(one, np.ndarray) else list(one) for one in (series.x, series.y))
    trace = common | {"type": "scatter", "mode": mode, "x": x, "y": y}
    trace |= {"marker": marker} if has_points else {}
    trace |= {"line": line} if is_line else {}
    trace |= {"opacity": 0.3} if series.faint else {}
    for axis, at, ranges in (("x", series.x, series.x_ranges), ("y", series.y, series.y_ranges)):
        if ranges:
            above = [high - one for one, (_, high) in zip(at, ranges, strict=True)]
            below = [one - low for one, (low, _) in zip(at, ranges, strict=True)]
            trace[f"error_{axis}"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below,
                                      "color": "#8a929b", "thickness": 1}  # fmt: skip
    if series.labels:
        trace |= {"text": [label(text) for text in series.labels], "textposition": "top right"}
    if series.texts:
        trace |= {"hovertext": [label(text) for text in series.texts], "hovertemplate": "%{hovertext}<extra></extra>"}
    return trace
