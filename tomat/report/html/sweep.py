"""The page of a sweep: of plans (`tomat plan --sweep`), of measurements (`tomat lab run`), or of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tomat.hardware.mfu import TABLE_UTILISATIONS
from tomat.measure.lab.record import LabRow, ShownRecord, order, read_lab, rows_of_record
from tomat.measure.lab.record import record_path as lab_record_path
from tomat.perf.tuning.changes import override_words
from tomat.perf.tuning.sweep import SweepRecord, read_sweep, rows_on_record
from tomat.perf.tuning.sweep import record_path as plan_record_path
from tomat.perf.tuning.sweep_rows import FITS, RowRecord, base_of, ranked, verdict
from tomat.report.html.document import Figure, Page, Section, equality, label, paragraph
from tomat.report.html.tables import Column, number, percent, table
from tomat.report.pages.lab_page import pareto_front as measured_front
from tomat.report.pages.lab_page import ratio_text
from tomat.report.pages.lab_page import verdict as measured_verdict
from tomat.report.pages.sweep_page import pareto_front as planned_front

MIB = 2**20


@dataclass(frozen=True)
class Point:
    """A row in the Pareto figure."""

    name: str
    place: int
    """In the ranking."""
    memory_mib: float
    speed: float
    low: float
    high: float


def lab_page(path: Path) -> Page:
    """The page of a lab's record.

    Raises:
        TomatError: The record, or that of the plans of the same sweep, is damaged.
    """
    record = read_lab(path, ShownRecord)
    rows = order(record["rows"])
    limits = sorted({row.memory_limit_bytes / MIB for row in rows if row.memory_limit_bytes})
    how = record.get("measured_with", {})
    lead = [
        paragraph(record["introduction"]),
        paragraph(
            f"Measured on {record.get('devices') or 'no device'}, {record.get('n_processors')} processors: "
            f"{how.get('repeats')} windows in each of {how.get('rounds')} rounds, each beside one of the row's base. "
            f"{record.get('n_measured')} of {record.get('n_rows')} rows have an answer."
        ),
    ]
    places = {row.name: place for place, row in enumerate(rows, 1)}
    points = [
        Point(
            row.name,
            places[row.name],
            (row.peak_memory_bytes or 0) / MIB,
            row.tokens_per_second or 0.0,
            min(one.tokens_per_second for one in row.windows),
            max(one.tokens_per_second for one in row.windows),
        )
        for row in rows
        if row.measured and row.windows
    ]
    front = [row.name for row in measured_front(rows)]
    pareto = _pareto(points, front, "peak memory, MiB", "tokens a second", limits, "the smallest and largest window")
    plans = rows_on_record(plan_record_path(path.parents[1], record["sweep"])) if path.parent.name == "lab" else {}
    sections = [
        Section("Speed against memory", (pareto,)),
        Section("Ranking", (_lab_table(rows),)),
        Section("Predicted and measured", tuple(_compared(plans, rows))),
    ]
    figures = {"sweep": record["sweep"], "rows": len(rows), "with_an_answer": len(points), "front": front}
    return Page(record["title"], "measured sweep", tuple(lead), tuple(sections), figures)


def sweep_page(path: Path) -> Page:
    """The page of a sweep of plans.

    Raises:
        TomatError: The record, or that of the measurements of the same sweep, is damaged.
    """
    record = read_sweep(path, SweepRecord)
    named = {row.name: row for row in record["rows"]}
    rows = ranked(list(named.values()))
    places = {row.name: place for place, row in enumerate(rows, 1)}
    points = [
        Point(
            row.name,
            places[row.name],
            row.hbm_required_bytes / MIB,
            *(100 * row.mfu_full[key] for key in ("estimate", "low", "high")),
        )
        for row in rows
        if row.status == FITS and row.mfu_full
    ]
    limits = sorted({row.hbm_capacity_bytes / MIB for row in rows if row.status == FITS})
    front = [row.name for row in planned_front(rows)]
    pareto = _pareto(points, front, "HBM required by a chip, MiB", "MFU full, %", limits, "the intervals of the plans")
    measured = rows_of_record(lab_record_path(path.parents[1], record["sweep"])) if path.parent.name == "sweeps" else {}
    said = f"Planned, not measured. {record['n_fitting']} of {record['n_rows']} rows fit."
    notes = dict.fromkeys(note for row in rows for note in row.notes)
    lead = [
        paragraph(record["introduction"]),
        paragraph(said),
        *(paragraph(f"{note[:1].upper()}{note[1:]}.", "note") for note in notes),
    ]
    sections = [
        Section("MFU against memory", (pareto,)),
        Section("Ranking", (_plan_table(rows),)),
        Section("Where the time goes", tuple(_categories(rows))),
        Section("Predicted and measured", tuple(_compared(named, order(list(measured.values()))))),
    ]
    figures = {"sweep": record["sweep"], "rows": len(rows), "fitting": len(points), "front": front}
    return Page(record["title"], "sweep of plans", tuple(lead), tuple(sections), figures)


def _pareto(
    points: Sequence[Point], front: Sequence[str], x: str, y: str, limits: Sequence[float], bars: str
) -> Figure | str:
    if not points:
        return paragraph("No row has an answer yet.")
    on_front = sorted((one for one in points if one.name in front), key=lambda one: one.memory_mib)
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "faster rows need more memory",
            "line": {"shape": "hv", "color": "#3f9d67"},
            "x": [one.memory_mib for one in on_front],
            "y": [one.speed for one in on_front],
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": "rows",
            "x": [one.memory_mib for one in points],
            "y": [one.speed for one in points],
            "text": [str(one.place) for one in points],
            "textposition": "top right",
            "customdata": [[label(one.name), one.low, one.high] for one in points],
            "marker": {"size": 8, "color": "#3b82c4"},
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [one.high - one.speed for one in points],
                "arrayminus": [one.speed - one.low for one in points],
                "thickness": 1,
                "color": "#8a929b",
            },
            "hovertemplate": "%{customdata[0]}<br>%{y:,.4g} (%{customdata[1]:,.4g} to "
            "%{customdata[2]:,.4g})<br>%{x:,.1f} MiB<extra></extra>",
        },
    ]
    widest = max(one.memory_mib for one in points)
    # A limit far to the right would press all rows into one corner.
    shown = [limit for limit in limits if limit < 2 * widest]
    layout = {
        "xaxis": {"title": {"text": x + (" (dashed: limit)" if shown else "")}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": y}, "rangemode": "tozero"},
        "shapes": [
            {
                "type": "line",
                "x0": limit,
                "x1": limit,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": {"dash": "dash", "color": "#8a929b"},
            }
            for limit in shown
        ],
        "legend": {"orientation": "h", "y": -0.2},
    }
    said = (
        f"Numbers are places in the ranking, bars {bars}. Least memory for the speed: "
        f"{', '.join(one.name for one in on_front)}."
    )
    return Figure(f"{y} against {x}", traces, layout, said, 460)


def _settings(overrides: Mapping[str, Any]) -> str:
    return " ".join(word.removeprefix("--") for word in override_words(dict(sorted(overrides.items()))))


def _lab_table(rows: Sequence[LabRow]) -> str:
    shares = [one for one in TABLE_UTILISATIONS if any(row.mfu for row in rows)]
    heads = (
        Column("place", number(0)),
        Column("row"),
        Column("batch", number(0)),
        Column("tokens/s", number(0)),
        Column("least", number(0)),
        Column("largest", number(0)),
        Column("step, ms", number(1, 1e3)),
        Column("compile, s", number(1)),
        Column("cached, s", number(1)),
        Column("peak MiB", number(0, 1 / MIB)),
        *(Column(one.short, percent) for one in shares),
        Column("loss", number(4)),
        Column("against base"),
        Column("verdict"),
        Column("settings"),
    )
    body = []
    for place, row in enumerate(rows, 1):
        rates = [one.tokens_per_second for one in row.windows]
        body.append(
            (
                place,
                row.name,
                row.setup.get("batch_sequences"),
                row.tokens_per_second,
                min(rates, default=None),
                max(rates, default=None),
                row.step_seconds,
                row.compile_cold_seconds,
                row.compile_cached_seconds,
                row.peak_memory_bytes,
                *(row.mfu.get(one.key) for one in shares),
                row.setup.get("warm_loss"),
                ratio_text(row),
                measured_verdict(row).replace("`", ""),
                _settings(row.overrides),
            )
        )
    return table("Rows of the sweep, the most tokens a second first; medians of the windows", heads, body)


def _plan_table(rows: Sequence[RowRecord]) -> str:
    heads = (
        Column("place", number(0)),
        Column("row"),
        Column("slice"),
        Column("batch", number(0)),
        Column("tokens", number(0)),
        Column("step, ms", number(1, 1e3)),
        Column("from", number(1, 1e3)),
        Column("to", number(1, 1e3)),
        *(Column(one.short, percent) for one in TABLE_UTILISATIONS),
        Column("without timings", percent),
        Column("tokens/s/chip", number(0)),
        Column("HBM MiB", number(0, 1 / MIB)),
        Column("verdict"),
        Column("settings"),
    )
    body = []
    for place, row in enumerate(rows, 1):
        span, rate = row.step_seconds or {}, row.tokens_per_second_per_chip or {}
        body.append(
            (
                place,
                row.name,
                row.slice,
                row.batch_sequences,
                row.sequence_tokens,
                *(span.get(key) for key in ("estimate", "low", "high")),
                *((row.utilisation(one.key) or {}).get("estimate") for one in TABLE_UTILISATIONS),
                row.untimed_step_share,
                rate.get("estimate"),
                row.hbm_required_bytes or None,
                verdict(row, base_of(row, rows)).replace("`", ""),
                _settings(row.overrides),
            )
        )
    return table("Rows of the sweep, the best MFU first", heads, body)


def _categories(rows: Sequence[RowRecord]) -> Iterator[str | Figure]:
    shown = [row for row in rows if row.status == FITS and row.categories]
    if not shown:
        yield paragraph("No row fits.")
        return
    from tomat.report.pages.figures import COLOURS

    names: dict[str, float] = {}
    for row in shown:
        for group in row.categories:
            names[group["name"]] = max(names.get(group["name"], 0.0), group["seconds"])
    kept = sorted(names, key=lambda name: -names[name])
    mine = [{group["name"]: group["seconds"] for group in row.categories} for row in shown]
    labels = [label(row.name) for row in shown]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": labels,
            "x": [1e3 * one.get(name, 0.0) for one in mine],
            "marker": {"color": COLOURS.get(name, "#8a929b")},
            "hovertemplate": f"%{{y}}<br>{name}: %{{x:.2f}} ms<extra></extra>",
        }
        for name in kept
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "ms of a step"}},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "legend": {"orientation": "h", "y": -70 / (100 + 26 * len(shown)), "yanchor": "top"},
    }
    said = (
        "Milliseconds of a step by kind of operation, the rows in the order of the ranking; the table has the figures."
    )
    yield Figure("The step by kind of operation", traces, layout, said, 200 + 26 * len(shown))
    heads = (Column("row"), *(Column(f"{name}, ms", number(2, 1e3)) for name in kept))
    yield table(
        "Time of a step by kind of operation",
        heads,
        [(row.name, *(one.get(name) for name in kept)) for row, one in zip(shown, mine, strict=True)],
    )


def _compared(plans: Mapping[str, RowRecord], rows: Sequence[LabRow]) -> Iterator[str | Figure]:
    """Rows that were planned and measured with the same settings."""
    both = []
    for row in rows:
        plan = plans.get(row.name)
        if (
            plan is None
            or not plan.step_seconds
            or row.step_seconds is None
            or dict(plan.overrides) != dict(row.overrides)
        ):
            continue
        both.append((row.name, str(plan.slice), plan.step_seconds["estimate"], row.step_seconds))
    if not both:
        yield paragraph(
            "No row is on record both as a plan and as a measurement: `tomat plan --sweep` and `tomat lab run` "
            "of one file, into one tracking folder, make such."
        )
        return
    top = 1e3 * max(max(one[2:]) for one in both)
    traces = [
        equality(top),
        {
            "type": "scatter",
            "mode": "markers",
            "name": "rows",
            "x": [1e3 * one[2] for one in both],
            "y": [1e3 * one[3] for one in both],
            "text": [label(one[0]) for one in both],
            "marker": {"size": 9},
            "hovertemplate": "%{text}<br>planned %{x:.1f} ms, measured %{y:.1f} ms<extra></extra>",
        },
    ]
    layout = {"xaxis": {"title": {"text": "planned step, ms"}}, "yaxis": {"title": {"text": "measured step, ms"}}}
    said = (
        "Plans are for the slice named in the table; on another device, a CPU above all, not even their order "
        "has to hold."
    )
    yield Figure("Planned against measured", traces, layout, said, 420)
    heads = (
        Column("row"),
        Column("planned for"),
        Column("planned, ms", number(1, 1e3)),
        Column("measured, ms", number(1, 1e3)),
        Column("measured / planned", number(2)),
    )
    yield table("Steps planned and measured", heads, [(*one, one[3] / one[2]) for one in both])
