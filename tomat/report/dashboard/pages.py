"""The two pages of the dashboard: every run as a row, and one run with its curves."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from tomat import __version__
from tomat.base.report.formats import number, share, significant
from tomat.base.report.model import Cell, Column, Facts, Link, Note, Table, columns
from tomat.report.dashboard.listing import PLAN_FILE, RunRow
from tomat.report.html.document import facts_html, parts_html, rendered
from tomat.report.html.metrics import Metrics

LIVE_SECONDS = 5
"""Between two questions of a page."""
FIRST = ("train/loss", "eval/validation/loss", "tokens_per_second", "step_seconds", "mfu_full")
"""Metrics that are drawn above the others."""
RUN_BODY = """<p><a href="/">All runs</a></p>
{links}
<div id="shown" aria-live="off">{facts}</div>
<p id="told" class="note" role="status">reading the log, which takes a while of a long one</p>
<h2>Curves</h2><div id="curves" class="grid"></div>
<noscript>The curves need JavaScript.</noscript>"""


def runs_page(place: str, rows: Iterable[RunRow]) -> str:
    heads = [*columns("run", "state", "since, or why"), *columns("step", "of", show=number(0))]
    heads += [*columns("loss", "validation", show=number(4)), Column("tokens/s", number(0))]
    heads += [*columns("step, s", "planned, s", show=significant()), Column("step / plan", number(2))]
    heads += [Column("MFU", share), Column("ran on"), Column("interruptions", number(0))]
    lead = (
        "Losses are means of the last ten steps; speeds and MFU medians of the last 50. Interruptions are those that a "
        f"run went on after. Planned is the estimate of a {PLAN_FILE} in the run's folder: "
        "`tomat plan --like RUN --json RUN/plan.json`; a step is held against it where the run ran on its slice."
    )
    body: list[tuple[Cell, ...]] = []
    for row in rows:
        # The run's own page has all of why it ended.
        first = Link(row.name, run_address(row.name)), row.state, textwrap.shorten(row.detail, 40, placeholder=" ...")
        if (one := row.summary) is None:
            body.append((*first, *[None] * 11))
        else:
            steps = one.steps_done, one.steps_total, one.last_loss, one.validation_loss
            speeds = row.tokens_per_second, row.step_seconds, row.planned_step_seconds, row.measured_over_planned
            body.append((*first, *steps, *speeds, one.mfu, one.devices, one.survived))
    return _document(place, "runs", parts_html([Note(lead), Table(f"Runs of {place}", heads, body)]))


def run_address(name: str) -> str:
    return f"/run/{quote(name, safe='')}"


def run_page(row: RunRow, files: Sequence[str]) -> str:
    """One run: what there is to say, its own files that can be opened, its curves, which the page asks for."""
    address = run_address(row.name)
    link = Markup(' <a href="{}/{}">{}</a>')
    links = Markup("").join(link.format(address, quote(name), name) for name in files)
    own = Markup('<p class="note">Its own pages:{}</p>').format(links) if links else ""
    body = Markup(RUN_BODY).format(links=own, facts=facts_html(facts_of(row)))
    return _document(row.name, "run", body, address)


def facts_of(row: RunRow) -> Facts:
    """The figures of a run, in words."""
    one = row.summary
    state = f"{row.state}: {row.detail}" if row.detail else row.state
    if one is None:
        return Facts({"state": state, "place": row.url})

    def words(value: float | None, show: Callable[[Any], str]) -> str | None:
        return None if value is None else show(value)

    total = "" if one.steps_total is None else f" of {one.steps_total:,}"
    planned = "planned step, s" + (f" ({row.planned_slice})" if row.planned_slice else "")
    return Facts(
        {
            "state": state,
            "place": row.url,
            "steps": f"{one.steps_done:,}{total}",
            "newest whole checkpoint": words(one.last_whole_step, "step {:,}".format),
            "ran on": one.devices,
            "training loss": words(one.last_loss, number(4)),
            "validation loss": words(one.validation_loss, number(4)),
            "tokens a second": words(row.tokens_per_second, number(0)),
            "step, s": words(row.step_seconds, significant()),
            planned: words(row.planned_step_seconds, significant()),
            "MFU": words(one.mfu, share),
            "interruptions": words(one.survived, number(0)),
        }
    )


def order_of(metrics: Metrics) -> list[str]:
    """Names of the metrics in the order in which they are drawn."""
    return [name for name in FIRST if name in metrics.curves] + [n for n in metrics.curves if n not in FIRST]


def _document(title: str, kind: str, body: Markup, address: str = "/") -> str:
    return rendered(
        "live.html", title=title, kind=kind, body=body, api=f"/api{address}", seconds=LIVE_SECONDS, version=__version__
    )
