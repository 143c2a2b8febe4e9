"""The pages of the dashboard: a table of all runs, one run with its curves, the curves of several runs together."""

import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import quote

from markupsafe import Markup

from tomat import __version__
from tomat.base.report.formats import loss, number, share, significant
from tomat.base.report.model import Cell, Column, Facts, Link, Note, State, Table, Verdict, words_of
from tomat.report.dashboard.listing import PLAN_FILE, UNREAD, RunRow
from tomat.report.html.document import facts_html, parts_html, rendered
from tomat.train.runs.summary import ago

LIVE_SECONDS = 5
"""Time between two requests of an open page for new data."""
FIRST = ("train/loss", "eval/validation/loss", "tokens_per_second", "step_seconds", "mfu_full")
"""Metrics that are drawn above the others."""
FIGURES: tuple[tuple[Column, Callable[[RunRow], Cell]], ...] = (
    (Column("training loss", loss), lambda row: row.summary and row.summary.last_loss),
    (Column("validation loss", loss), lambda row: row.summary and row.summary.validation_loss),
    (Column("tokens/s", number(0)), lambda row: row.tokens_per_second),
    (Column("step, s", significant()), lambda row: row.step_seconds),
    (Column("planned step, s", significant()), lambda row: row.planned_step_seconds),
    (Column("step / plan", number(2)), lambda row: row.measured_over_planned),
    (Column("MFU", share), lambda row: row.summary and row.summary.mfu),
    (Column("ran on"), lambda row: row.summary and row.summary.devices),
    (Column("interruptions", number(0)), lambda row: row.summary and row.summary.survived),
)


def runs_page(place: str, rows: Iterable[RunRow]) -> str:
    lead = (
        "Losses are means of the last ten steps; speeds and MFU medians of the last 50. Interruptions are those after "
        f"which a run went on. Planned is the estimate of a {PLAN_FILE} in the run's folder: "
        "`tomat plan --like RUN --json RUN/plan.json`; a step is compared with it if the run ran on its slice. Runs "
        "that are marked are drawn together."
    )
    shown: list[tuple[Column, Callable[[RunRow], Cell]]] = [
        (Column("run"), lambda row: Link(row.name, run_address(row.name))),
        (Column("state"), _state),
        (Column("last written", ago), _age),
        # The run's own page shows the whole reason.
        (Column("since, or why"), lambda row: textwrap.shorten(row.detail, 40, placeholder=" ...")),
        (Column("step", number(0)), lambda row: row.summary and row.summary.steps_done),
        (Column("of", number(0)), lambda row: row.summary and row.summary.steps_total),
        *FIGURES,
    ]
    return _document(place, "runs", parts_html([Note(lead), Table.of(f"Runs of {place}", rows, shown)]))


SHADES = {"finished": State.GOOD, "stopped": State.DOUBTFUL, "preempted": State.DOUBTFUL}
"""State of a run -> shade. Open and unread runs have no shade; all other states (ended by a guard, damaged) are bad."""


def _state(row: RunRow) -> Cell:
    return row.state if row.state in ("open", UNREAD) else Verdict(row.state, SHADES.get(row.state, State.BAD))


def _age(row: RunRow) -> float | None:
    """Seconds since the run last wrote its log; None where that is not known."""
    written = None if row.summary is None else row.summary.written_utc
    return None if written is None else max(0.0, time.time() - written)


def compare_page(names: Sequence[str]) -> str:
    runs = [{"address": run_address(name), "name": name} for name in names]
    return _document("runs over one another", "compare", rendered("compare.html", runs=runs))


def run_address(name: str) -> str:
    return f"/run/{quote(name, safe='')}"


def run_page(row: RunRow, files: Sequence[str]) -> str:
    address = run_address(row.name)
    body = rendered("run.html", address=address, files=files, facts=facts_html(facts_of(row)))
    return _document(row.name, "run", body, address)


def facts_of(row: RunRow) -> Facts:
    one, known = row.summary, [(column, show(row)) for column, show in FIGURES]
    facts: dict[str, Cell] = {"state": f"{row.state}: {row.detail}" if row.detail else row.state, "place": row.url}
    if one is not None:
        facts["steps"] = f"{one.steps_done:,}" + ("" if one.steps_total is None else f" of {one.steps_total:,}")
        facts["newest whole checkpoint"] = None if one.last_whole_step is None else f"step {one.last_whole_step:,}"
    facts |= {column.heading: words_of(value, column.show) for column, value in known if value is not None}
    return Facts(facts | {"planned for": row.planned_slice})


def _document(title: str, kind: str, body: Markup, address: str = "/") -> str:
    shown = {"title": title, "kind": kind, "body": body, "api": f"/api{address}"}
    return rendered("live.html", **shown, seconds=LIVE_SECONDS, version=__version__)
