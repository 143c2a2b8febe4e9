"""Tables that sort by any column and show the rows that hold the words one types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tomat.base.report.formats import UNKNOWN
from tomat.report.html.document import text

MOST_ROWS = 2_000
"""Of a table: 10 columns of them are 1 MB."""
FILTER_FROM = 8
"""Rows from which a table has a field to filter by."""

LONG = 60
"""Rows from which a table is laid out only as it comes into view."""

Cell = object
"""Text, or a number: `show` of the column says how it is written, and it sorts by its value."""


@dataclass(frozen=True)
class Column:
    """One column."""

    heading: str
    show: Callable[[Any], str] = str
    """A value as words; None is written as a dash and sorts last."""
    link: Callable[[Any], str] | None = None
    """Where a value leads to; None: nowhere."""


def number(digits: int = 3, factor: float = 1.0, unit: str = "") -> Callable[[Any], str]:
    """Writes a number times `factor` with so many decimals and thousands separators."""

    def show(value: Any) -> str:
        return f"{factor * value:,.{digits}f}{unit}" if math.isfinite(value) else str(value)

    return show


def significant(digits: int = 4, factor: float = 1.0) -> Callable[[Any], str]:
    """Writes a number times `factor` with so many figures."""
    return lambda value: f"{factor * value:,.{digits}g}"


percent = number(2, 100.0, " %")


def table(
    caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, footer: Sequence[str] = ()
) -> str:
    """A table as HTML.

    Args:
        caption: What it is of.
        columns: Left to right.
        rows: Each a value a column: text, a number, or None where nothing is known.
        footer: Cells of a last line that stays where it is, such as medians.

    Returns:
        HTML. Of more than `MOST_ROWS` rows the first, which is said.
    """
    shown, left_out = rows[:MOST_ROWS], max(0, len(rows) - MOST_ROWS)
    numeric = [all(_is_number(row[i]) or row[i] is None for row in shown) for i in range(len(columns))]
    head = "".join(
        f'<th scope="col" aria-sort="none"{_side(numeric[i])}><button '
        f'type="button">{text(column.heading)}</button></th>'
        for i, column in enumerate(columns)
    )
    body = "".join(
        "<tr>"
        + "".join(_cell(column, value, numeric[i]) for i, (column, value) in enumerate(zip(columns, row, strict=True)))
        + "</tr>"
        for row in shown
    )
    foot = "".join(f"<td{_side(numeric[i])}>{text(cell)}</td>" for i, cell in enumerate(footer))
    tools = ""
    if len(shown) >= FILTER_FROM:
        tools = (
            '<p class="tools"><label>Filter <input type="search" placeholder="words, all of them" '
            f'autocomplete="off"></label> <output aria-live="polite">{len(shown):,} rows</output></p>'
        )
    long = " long" if len(shown) >= LONG else ""
    said = f" The first {MOST_ROWS:,} of {len(rows):,} rows." if left_out else ""
    return (
        f'<div class="table">{tools}<div class="scroll{long}" tabindex="0" role="region" aria-label="{text(caption)}">'
        f"<table><caption>{text(caption + said)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        + (f"<tfoot><tr>{foot}</tr></tfoot>" if footer else "")
        + "</table></div></div>"
    )


def facts(rows: Mapping[str, object]) -> str:
    """Names and values without a heading; what is None is left out."""
    lines = "".join(
        f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>'
        for name, value in rows.items()
        if value is not None and value != ""
    )
    return f'<table class="facts"><tbody>{lines}</tbody></table>' if lines else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _side(numeric: bool) -> str:
    return ' class="n"' if numeric else ""


def _cell(column: Column, value: Cell, numeric: bool) -> str:
    if value is None:
        return f"<td{_side(numeric)}>{UNKNOWN}</td>"
    sort = f' data-v="{value}"' if _is_number(value) else ""
    words = text(column.show(value))
    if column.link is not None:
        words = f'<a href="{text(column.link(value))}">{words}</a>'
    return f"<td{_side(numeric)}{sort}>{words}</td>"
