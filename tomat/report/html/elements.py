"""Elements of a page: its templates, of which every text is escaped, once and here; tables that sort by any column and
show the rows that hold the words one types."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from tomat.base.report.model import Cell, Code, Column, Facts, Link, Table, Verdict, is_number, words_of

MOST_ROWS = 2_000
"""Of a table: 10 columns of them are 1 MB."""
FILTER_FROM = 8
"""Rows from which a table has a field to filter by."""
LONG = 60
"""Rows from which a table is laid out only as it comes into view."""
FLUSH_RIGHT = Markup(' class="n"')


def asset(name: str) -> str:
    """A file of `assets/`: a page's template, its style or one of its own programs."""
    return (importlib.resources.files("tomat.report.html") / "assets" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    loader = PackageLoader("tomat.report.html", "assets")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def prose(words: object) -> Markup:
    """Plain text; what stands between backticks is code."""
    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(words)))


def rendered(name: str, **values: Any) -> Markup:
    """A template with its values; what is no `Markup` is text."""
    return Markup(_environment().get_template(name).render(values))


def table_html(table: Table) -> Markup:
    """A table; of more than `MOST_ROWS` rows the first, which is said."""
    rows, left_out = table.rows[:MOST_ROWS], max(0, len(table.rows) - MOST_ROWS)
    sides = [FLUSH_RIGHT if table.is_right(place) else Markup("") for place in range(len(table.columns))]
    said = f" The first {MOST_ROWS:,} of {len(table.rows):,} rows." if left_out else ""
    return rendered(
        "table.html",
        caption=table.caption + said,
        heads=[(column.heading, side) for column, side in zip(table.columns, sides, strict=True)],
        rows=[_cells(table.columns, row, sides) for row in rows],
        footer=_cells(table.columns, table.footer, sides) if table.footer else "",
        filter_from=FILTER_FROM,
        long=LONG,
    )


def facts_html(facts: Facts) -> Markup:
    """Names and values without a heading; nothing where none is known."""
    row = Markup('<tr><th scope="row">{}</th><td>{}</td></tr>')
    lines = Markup("").join(row.format(name, cell_html(value)) for name, value in facts.known())
    return Markup('<table class="facts"><tbody>{}</tbody></table>').format(lines) if lines else lines


def cell_html(value: Cell, column: Column | None = None) -> Markup:
    """A value, escaped."""
    words = words_of(value, str if column is None else column.show)
    match value:
        case Code():
            return Markup("<code>{}</code>").format(words)
        case Link(_, address):
            return Markup('<a href="{}">{}</a>').format(address, words)
        case Verdict(_, state):
            return Markup('<b class="{}">{}</b>').format(state, words)
    return prose(words) if column is not None and column.prose else Markup.escape(words)


def _cells(columns: Sequence[Column], row: Sequence[Cell], sides: Sequence[Markup]) -> Markup:
    cells = []
    for column, value, side in zip(columns, row, sides, strict=True):
        key = Markup(' data-v="{}"').format(value) if is_number(value) else ""
        cells.append(Markup("<td{}{}>{}</td>").format(side, key, cell_html(value, column)))
    return Markup("").join(cells)
