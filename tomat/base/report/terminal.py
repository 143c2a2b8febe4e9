"""A report on the terminal."""

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.text import Text

from tomat.base.report import model
from tomat.base.reporting import console, warn

if TYPE_CHECKING:
    from rich.table import Table as RichTable

STYLES = {model.State.GOOD: "green", model.State.DOUBTFUL: "yellow", model.State.BAD: "bold red"}


def show(*parts: model.Part | model.Verdict) -> None:
    """Print parts of a report; charts and pictures are for pages."""
    for part in parts:
        match part:
            case str() | model.Heading() | model.Lines():
                text = part if isinstance(part, str) else part.text
                console.print(text, soft_wrap=True, highlight=False)
            case model.Verdict():
                console.print(styled(part))
            case model.Note(text, warning):
                warn(text) if warning else console.print(f"note: {text}", highlight=False)
            case model.Items(texts):
                for text in texts:
                    console.print(f"  {text}", highlight=False)
            case model.Facts() | model.Table():
                console.print(rich_table(part))


def styled(value: model.Cell, column: model.Column | None = None) -> Text:
    """A value as Rich shows it: no letter of it is markup."""
    style = STYLES[value.state] if isinstance(value, model.Verdict) else ""
    return Text(model.words_of(value, str if column is None else column.show), style)


def rich_table(part: model.Table | model.Facts) -> "RichTable":
    """A table that fits 80 columns: words are folded, headings wrap, figures are whole."""
    from rich.table import Table as RichTable

    made = RichTable(title=Text(part.caption) if part.caption else None, box=SIMPLE_HEAD, pad_edge=False,
                     padding=(0, 1, 0, 0), title_justify="left", show_header=isinstance(part, model.Table))  # fmt: skip
    if isinstance(part, model.Facts):
        for name, value in part.known():
            made.add_row(Text(name), styled(value))
        return made
    # A cell may have several lines.
    columns = []
    for place, column in enumerate(part.columns):
        words = [model.words_of(row[place], column.show) for row in (*part.rows, part.footer) if row]
        columns.append([line for one in words for line in one.splitlines()])
    widest = [max(map(len, [column.heading, *words])) for column, words in zip(part.columns, columns, strict=True)]
    fits = sum(widest) + len(widest) <= console.width
    for place, (column, words) in enumerate(zip(part.columns, columns, strict=True)):
        right = part.is_right(place)
        width = max(map(len, [*column.heading.split(), *words]), default=1) if right and not fits else None
        justify = "right" if right else "left"
        made.add_column(Text(column.heading), justify=justify, no_wrap=right and fits, width=width, overflow="fold")
    for row in part.rows:
        made.add_row(*(styled(value, column) for value, column in zip(row, part.columns, strict=True)))
    if part.footer:
        made.add_section()
        made.add_row(*(styled(value, column) for value, column in zip(part.footer, part.columns, strict=True)))
    return made
