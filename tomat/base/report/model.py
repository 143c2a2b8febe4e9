"""What a report says, apart from how it looks.

All of it is plain text, whoever wrote it: the renderers (`markdown.py`, `terminal.py`, `report/html`) escape it, each
in one place. In prose they show text between backticks as code.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from tomat.base.report.formats import UNKNOWN


class State(StrEnum):
    GOOD = "good"
    DOUBTFUL = "doubtful"
    BAD = "bad"


@dataclass(frozen=True)
class Verdict:
    text: str
    state: State


@dataclass(frozen=True)
class Code:
    """A name, a path or a value of a program."""

    text: str


@dataclass(frozen=True)
class Link:
    text: str
    address: str


class AtLeast(float):
    """A figure without its unknown parts, shown as "at least"."""


Cell = str | int | float | None | Code | Link | Verdict
"""A value: text letter by letter, a number, or None where nothing is known."""


def words_of(value: Cell, show: Callable[[Any], str] = str) -> str:
    """A value as words, which are not escaped yet."""
    if value is None or isinstance(value, str):
        return UNKNOWN if value is None else value
    if isinstance(value, Code | Link | Verdict):
        return value.text
    return f"at least {show(value)}" if isinstance(value, AtLeast) else show(value)


@dataclass(frozen=True)
class Column:
    heading: str
    show: Callable[[Any], str] = str
    """A number as words, with its unit where the heading has none."""
    right: bool | None = None
    """Whether it is flush right; None: where every value is a number."""
    prose: bool = False
    """Whether its texts are prose, with code between backticks."""


def columns(*headings: str, show: Callable[[Any], str] = str, right: bool | None = None) -> list[Column]:
    return [Column(heading, show, right) for heading in headings]


@dataclass(frozen=True)
class Table:
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    footer: Sequence[Cell] = ()
    """A last row that stays where it is, such as sums."""

    @classmethod
    def of[Thing](
        cls, caption: str, things: Iterable[Thing], cells: Sequence[tuple[Column, Callable[[Thing], Cell]]]
    ) -> "Table":
        """A table with a row for each thing. `cells`: each column, and the function from a thing to its cell."""
        return cls(caption, [column for column, _ in cells], [[show(one) for _, show in cells] for one in things])

    def is_right(self, place: int) -> bool:
        asked = self.columns[place].right
        if asked is not None:
            return asked
        values = [row[place] for row in self.rows]
        return all(value is None or is_number(value) for value in values) and values != []

    def chosen(self, *headings: str) -> "Table":
        """The same table with only the first column of each of these headings, if there is one; without caption."""
        names = [column.heading for column in self.columns]
        places = [names.index(heading) for heading in headings if heading in names]
        rows = [[row[place] for place in places] for row in self.rows]
        footer = [self.footer[place] for place in places] if self.footer else ()
        return Table("", [self.columns[place] for place in places], rows, footer)


def is_number(value: object) -> bool:
    """Whether a value sorts as a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Facts:
    """Names and what they stand for; what is None or empty is left out."""

    rows: Mapping[str, Cell]
    caption: str = ""

    def known(self) -> list[tuple[str, Cell]]:
        return [(name, value) for name, value in self.rows.items() if value is not None and value != ""]


@dataclass(frozen=True)
class Heading:
    """Words above the parts that follow it inside a section."""

    text: str


@dataclass(frozen=True)
class Note:
    """A remark, or a warning."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Items:
    texts: Sequence[str]


@dataclass(frozen=True)
class Lines:
    text: str
    language: str = ""


@dataclass(frozen=True)
class Image:
    caption: str
    file: str


@dataclass(frozen=True)
class Axis:
    label: str
    log: bool = False
    from_zero: bool = False
    ticks: Sequence[float] = ()
    """Values that are labelled; empty: the renderer chooses them."""


@dataclass(frozen=True)
class Series:
    """Values that are drawn alike."""

    name: str
    x: Any
    """A sequence or a NumPy array of numbers."""
    y: Any = ()
    """As `x`. A histogram has none; bars have the rows that they lie in (none: one row). None is a gap."""
    mark: Literal["line", "step", "points", "crosses", "both", "bar", "histogram"] = "line"
    """`step`: held until the next point. `bar`: horizontal, `x` long, stacked on those before."""
    colour: str = ""
    areas: Sequence[float] = ()
    """For points: shares of a whole."""
    texts: Sequence[str] = ()
    """For points: what they are."""
    labels: Sequence[str] = ()
    """For points: what is written beside them."""
    x_ranges: Sequence[tuple[float, float]] = ()
    y_ranges: Sequence[tuple[float, float]] = ()
    """For points: from the least to the greatest value, drawn as bars."""
    dotted: bool = False
    faint: bool = False
    named: bool = True


@dataclass(frozen=True)
class Chart:
    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    summary: str
    """What it shows, as a sentence: a picture is never the only place of what it says."""
    file: str = ""
    """File of its SVG, in the folder of the page's figures. A chart without a file is only in pages for a browser."""
    size: tuple[float, float] = (6.0, 4.0)
    """Inches of the SVG; a page for a browser takes 80 points of its own to an inch."""
    scales: bool = False
    """Whether a page for a browser offers a logarithmic scale of its values."""
    limits: Sequence[float] = ()
    """Values of `x` at which a dashed line stands."""


Part = str | Heading | Note | Items | Lines | Facts | Table | Chart | Image
"""A text is a paragraph of prose."""


@dataclass(frozen=True)
class Section:
    heading: str
    parts: Sequence[Any] = ()
    """Of kind `Part`; in a page for a browser also parts that only `report/html` knows."""
    name: str = ""
    """Name in its markers, in a page that people write in too. A section without a name is theirs alone."""
    by_hand: str = ""
    """Markdown below the markers of a new page: what people are asked for."""
    level: int = 2
    owns_heading: bool = False
    """Whether the heading stands between the markers: then it is tomat's, and is removed if there are no parts."""


def held_against(
    title: str, points: Sequence[tuple[str, float, float]], unit: str, what: str, summary: str, **look: Any
) -> Chart:
    """A chart of planned against measured figures: a point for each (name, planned, measured), and the line on which
    both are equal. `look`: of the points, as in `Series`."""
    planned, measured = [one[1] for one in points], [one[2] for one in points]
    top = 1.1 * max(*planned, *measured)
    equal = Series("equal", [0, top], [0, top], colour="#8a929b", dotted=True)
    texts = [f"{name}: planned {a:,.3f} {unit}, measured {b:,.3f} {unit}" for name, a, b in points]
    x, y = (Axis(f"{which} {what}, {unit}", from_zero=True) for which in ("planned", "measured"))
    both = [equal, Series("rows", planned, measured, "points", texts=texts, **look)]
    return Chart(title, both, x, y, summary, size=(6.0, 5.0))


VERDICT = Section("Verdict", by_hand="<!-- What to do because of it. The text outside tomat's markers is yours. -->")


@dataclass(frozen=True)
class Report:
    title: str
    sections: Sequence[Section]
    kind: str = ""
    """`run`, `plan`, ..."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """For `--json`: the report in figures, with units in the keys."""
