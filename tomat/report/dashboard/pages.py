"""The two pages of the dashboard: every run as a row, and one run with its curves."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from tomat import __version__
from tomat.report.dashboard.listing import PLAN_FILE, RunRow
from tomat.report.html.document import paragraph, text
from tomat.report.html.metrics import Metrics
from tomat.report.html.tables import Column, facts, number, percent, significant, table

LIVE_SECONDS = 5
"""Between two questions of a page."""
FIRST = ("train/loss", "eval/validation/loss", "tokens_per_second", "step_seconds", "mfu_full")
"""Metrics that are drawn above the others."""


def runs_page(place: str, rows: Iterable[RunRow]) -> str:
    """Every run of a place."""
    heads = (
        Column("run", link=run_address),
        Column("state"),
        Column("since, or why", _shortened),
        Column("step", number(0)),
        Column("of", number(0)),
        Column("loss", number(4)),
        Column("validation", number(4)),
        Column("tokens/s", number(0)),
        Column("step, s", significant()),
        Column("planned, s", significant()),
        Column("step / plan", number(2)),
        Column("MFU", percent),
        Column("ran on"),
        Column("interruptions", number(0)),
    )
    body = [_cells(row) for row in rows]
    lead = (
        "Losses are means of the last ten steps; speeds and MFU medians of the last 50. Interruptions are those that a "
        f"run went on after. Planned is the estimate of a {PLAN_FILE} in the run's folder: "
        "`tomat plan --like RUN --json RUN/plan.json`; a step is held against it where the run ran on its "
        "slice."
    )
    return _document(place, "runs", "runs", paragraph(lead, "note") + table(f"Runs of {place}", heads, body))


def _cells(row: RunRow) -> tuple[object, ...]:
    one = row.summary
    if one is None:
        return (row.name, row.state, row.detail, *[None] * 11)
    ratio = None
    if row.ran_as_planned and row.step_seconds is not None and row.planned_step_seconds:
        ratio = row.step_seconds / row.planned_step_seconds
    return (
        row.name,
        row.state,
        row.detail,
        one.steps_done,
        one.steps_total,
        one.last_loss,
        one.validation_loss,
        row.tokens_per_second,
        row.step_seconds,
        row.planned_step_seconds,
        ratio,
        one.mfu,
        one.devices,
        one.survived,
    )


def _shortened(detail: str) -> str:
    """The run's own page has all of it."""
    return textwrap.shorten(detail, 40, placeholder=" ...")


def run_address(name: str) -> str:
    """The page of a run."""
    return f"/run/{quote(name, safe='')}"


def run_page(row: RunRow, files: Sequence[str]) -> str:
    """One run: what there is to say, its own files, its curves, which the page asks for.

    Args:
        row: The run.
        files: Names of its files that can be opened.
    """
    links = " ".join(f'<a href="{run_address(row.name)}/{quote(name)}">{text(name)}</a>' for name in files)
    body = [
        '<p><a href="/">All runs</a></p>',
        f'<p class="note">Its own pages: {links}</p>' if links else "",
        f'<div id="shown" aria-live="off">{facts(shown_of(row))}</div>',
        '<p id="told" class="note" role="status">reading the log, which takes a while of a long one</p>',
        '<h2>Curves</h2><div id="curves" class="grid"></div>',
        "<noscript>The curves need JavaScript.</noscript>",
    ]
    return _document(row.name, "run", "run", "".join(body), address=run_address(row.name))


def shown_of(row: RunRow) -> Mapping[str, object]:
    """The figures of a run, in words."""
    shown: dict[str, object] = {"state": f"{row.state}: {row.detail}" if row.detail else row.state, "place": row.url}
    one = row.summary
    if one is None:
        return shown
    total = "" if one.steps_total is None else f" of {one.steps_total:,}"
    shown["steps"] = f"{one.steps_done:,}{total}"
    if one.last_whole_step is not None:
        shown["newest whole checkpoint"] = f"step {one.last_whole_step:,}"
    shown["ran on"] = one.devices
    planned = "planned step, s" + (f" ({row.planned_slice})" if row.planned_slice else "")
    for label, value, show in (
        ("training loss", one.last_loss, number(4)),
        ("validation loss", one.validation_loss, number(4)),
        ("tokens a second", row.tokens_per_second, number(0)),
        ("step, s", row.step_seconds, significant()),
        (planned, row.planned_step_seconds, significant()),
        ("MFU", one.mfu, percent),
        ("interruptions", one.survived, number(0)),
    ):
        if value is not None:
            shown[label] = show(value)
    return shown


def order_of(metrics: Metrics) -> list[str]:
    """Names of the metrics in the order in which they are drawn."""
    return [name for name in FIRST if name in metrics.curves] + [n for n in metrics.curves if n not in FIRST]


def _document(title: str, kind: str, page: str, body: str, *, address: str = "/") -> str:
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{text(title)} - tomat {text(kind)}</title>",
            '<link rel="stylesheet" href="/assets/page.css">',
            '<link rel="icon" href="data:,">',
            "</head>",
            f'<body data-page="{page}" data-api="/api{text(address)}" data-seconds="{LIVE_SECONDS}">',
            '<a class="skip" href="#content">Skip to the content</a>',
            f'<header><div><p class="kind">tomat {text(kind)}</p><h1>{text(title)}</h1></div>',
            '<button type="button" id="theme" aria-live="polite">Dark</button></header>',
            f'<main id="content">{body}</main>',
            f"<footer><p>tomat {text(__version__)}. Read only.</p></footer>",
            # `page.js` looks for plotly's program in the page; here it is a file of its own, read before.
            '<script type="text/plain" id="plotly-program"></script>',
            *(f'<script defer src="/assets/{name}"></script>' for name in ("plotly.js", "page.js", "live.js")),
            "</body>",
            "</html>",
            "",
        ]
    )
