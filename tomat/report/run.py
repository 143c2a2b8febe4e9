"""Tables of a run's figures and of its history, for every place that shows them."""

from collections.abc import Mapping, Sequence
from typing import Any

from tomat.base.report.formats import count, loss, number, percent
from tomat.base.report.model import Column, Table

NOT_DETAILS = ("time", "event", "step")
"""Keys of an event that have columns of their own, so that the details leave them out."""


def result_rows(figures: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """(Name, formatted value) of each figure of a run (`train/runs/summary.py`); the value is None if not known."""
    done, total, first, last = map(figures.get, ("steps_done", "steps_total", "first_loss", "last_loss"))
    improvement = f"{loss(first - last)} ({percent(1 - last / first, 0)})" if first and last is not None else None

    def shown(name: str, digits: int, unit: str = "", scale: float = 1.0) -> str | None:
        value = figures.get(name)
        return None if value is None else number(digits, scale, unit)(value)

    def shown_loss(name: str) -> str | None:
        return None if figures.get(name) is None else loss(figures[name])

    return [
        ("steps", None if done is None else f"{done:,} of {total:,}" if total is not None else f"{done:,}"),
        ("initial loss", shown_loss("first_loss")),
        ("final loss (mean of 10 steps)", shown_loss("last_loss")),
        ("improvement", improvement),
        ("validation loss, newest", shown_loss("validation_loss")),
        ("validation loss, best", shown_loss("validation_loss_best")),
        ("NMAE held out, from structures alone", shown("free_running_nmae", 2, " %", 100)),
        ("NMAE held out, teacher-forced", shown("held_out_nmae_median", 2, " %", 100)),
        ("step, median", shown("step_seconds_median", 1, " ms", 1e3)),
        ("tokens/s, median", shown("tokens_per_second_median", 0)),
        ("MFU, median", shown("mfu_full_median", 1, " %", 100)),
        ("tokens", None if figures.get("tokens") is None else count(figures["tokens"])),
        ("time of the steps, with what came between", _duration(figures.get("wall_seconds"))),
    ]


def results_table(figures: Mapping[str, Any], more: Sequence[tuple[str, str | None]] = ()) -> Table | None:
    """A table of the known figures of a run; None where no figure is known."""
    rows = [(name, value) for name, value in (*result_rows(figures), *more) if value is not None]
    return Table("", (Column("figure"), Column("value", right=True)), rows) if rows else None


def history_table(events: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for event in events:
        rest = {key: value for key, value in event.items() if key not in NOT_DETAILS}
        words = ", ".join(f"{key}: {value}" for key, value in rest.items() if value not in (None, {}, ""))
        step = event.get("step")
        rows.append((str(event.get("time", ""))[:19], event["event"], "" if step is None else str(step), words))
    columns = (Column("time (UTC)"), Column("event"), Column("step", right=True), Column("details"))
    return Table("What happened to the run", columns, rows)


def _duration(value: float | None) -> str | None:
    if value is None:
        return None
    if value < 120:
        return f"{value:.0f} s"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
