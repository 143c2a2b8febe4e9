"""The page of a sweep: of plans (`tomat plan --sweep`), of measurements (`tomat lab run`), or of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tomat.base.report.formats import number
from tomat.base.report.model import Column, Report, Section, Table
from tomat.measure.lab.record import ShownRecord, order, read_lab, rows_of_record
from tomat.measure.lab.record import record_path as lab_record_path
from tomat.perf.tuning.sweep import SweepRecord, read_sweep, rows_on_record
from tomat.perf.tuning.sweep import record_path as plan_record_path
from tomat.perf.tuning.sweep_rows import FITS, RowRecord, ranked
from tomat.report.html.document import Figure, equality, label, paragraph
from tomat.report.pages.sweep_tables import (
    COMPARED,
    NOT_COMPARED,
    Pareto,
    compared_table,
    measured_pareto,
    measured_table,
    planned_pareto,
    planned_table,
)


def lab_page(path: Path) -> Report:
    """The page of a lab's record."""
    record = read_lab(path, ShownRecord)
    rows = order(record["rows"])
    how = record.get("measured_with", {})
    lead = [
        paragraph(record["introduction"]),
        paragraph(
            f"Measured on {record.get('devices') or 'no device'}, {record.get('n_processors')} processors: "
            f"{how.get('repeats')} windows in each of {how.get('rounds')} rounds, each beside one of the row's base. "
            f"{record.get('n_measured')} of {record.get('n_rows')} rows have an answer."
        ),
    ]
    pareto = measured_pareto(rows)
    plans = rows_on_record(plan_record_path(path.parents[1], record["sweep"])) if path.parent.name == "lab" else {}
    sections = [
        Section("Speed against memory", (_pareto(pareto),)),
        Section("Ranking", (measured_table(rows),)),
        Section("Predicted and measured", tuple(_compared(compared_table(plans, rows)))),
    ]
    front = [one.name for one in pareto.front]
    figures = {"sweep": record["sweep"], "rows": len(rows), "with_an_answer": len(pareto.points), "front": front}
    return Report(record["title"], [Section("", lead), *sections], "measured sweep", figures)


def sweep_page(path: Path) -> Report:
    """The page of a sweep of plans."""
    record = read_sweep(path, SweepRecord)
    named = {row.name: row for row in record["rows"]}
    rows = ranked(list(named.values()))
    pareto = planned_pareto(rows)
    measured = rows_of_record(lab_record_path(path.parents[1], record["sweep"])) if path.parent.name == "sweeps" else {}
    notes = dict.fromkeys(note for row in rows for note in row.notes)
    lead = [
        paragraph(record["introduction"]),
        paragraph(f"Planned, not measured. {record['n_fitting']} of {record['n_rows']} rows fit."),
        *(paragraph(f"{note[:1].upper()}{note[1:]}.", "note") for note in notes),
    ]
    sections = [
        Section("MFU against memory", (_pareto(pareto),)),
        Section("Ranking", (planned_table(rows),)),
        Section("Where the time goes", tuple(_categories(rows))),
        Section("Predicted and measured", tuple(_compared(compared_table(named, list(measured.values()))))),
    ]
    front = [one.name for one in pareto.front]
    figures = {"sweep": record["sweep"], "rows": len(rows), "fitting": len(pareto.points), "front": front}
    return Report(record["title"], [Section("", lead), *sections], "sweep of plans", figures)


def _pareto(pareto: Pareto) -> Figure | str:
    if not pareto.points:
        return paragraph("No row has an answer yet.")
    points, on_front, shown = pareto.points, pareto.front, pareto.limits_near
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
    layout = {
        "xaxis": {"title": {"text": pareto.x + (" (dashed: limit)" if shown else "")}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": pareto.y}, "rangemode": "tozero"},
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
    return Figure(f"{pareto.y} against {pareto.x}", traces, layout, pareto.summary.replace("`", ""), 460)


def _categories(rows: Sequence[RowRecord]) -> Iterator[Any]:
    shown = [row for row in rows if row.status == FITS and row.categories]
    if not shown:
        yield paragraph("No row fits.")
        return
    from tomat.report.step import COLOURS

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
    yield Table(
        "Time of a step by kind of operation",
        heads,
        [(row.name, *(one.get(name) for name in kept)) for row, one in zip(shown, mine, strict=True)],
    )


def _compared(made: Table) -> Iterator[Any]:
    """Rows that were planned and measured with the same settings."""
    both: Sequence[Any] = made.rows
    if not both:
        yield paragraph(NOT_COMPARED)
        return
    top = 1e3 * max(max(one[2:4]) for one in both)
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
    yield Figure("Planned against measured", traces, layout, COMPARED, 420)
    yield (made)
