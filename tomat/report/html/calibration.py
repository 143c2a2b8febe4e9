"""The page of the calibration: what plans said of steps that pods have taken, beside what they took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tomat.base.report.formats import number
from tomat.base.report.formats import share as percent
from tomat.base.report.model import Column, Report, Section, Table
from tomat.perf.plan.calibration import SHARES, Calibration, CalibrationRow
from tomat.report.html.document import Figure, equality, label, paragraph

Pair = tuple[str, float, float, float]
"""Name, planned, measured, and the fraction by which the plan may be off."""


def calibration_page(path: Path) -> Report:
    """The page of a `calibration.json`.

    Raises:
        TomatError: The record is damaged, or holds figures that cannot be.
    """
    rows = Calibration.load(path.parent).rows
    lead = paragraph(
        f"{len(rows)} measurements beside the plans of the same steps. No estimate is fitted to them: they judge "
        f"the plans."
    )
    steps = [
        (row.name, row.predicted["model_seconds"], row.measured["step_seconds"], row.predicted.get("error", 0.0))
        for row in rows
        if row.step_ratio is not None
    ]
    memory = [
        (row.name, row.predicted["hbm_required_gib"], row.measured["hbm_required_gib"], 0.0)
        for row in rows
        if row.predicted.get("hbm_required_gib") and row.measured.get("hbm_required_gib")
    ]
    sections = (
        Section("Step times", tuple(_compared(steps, "step", "s"))),
        Section("Memory", tuple(_compared(memory, "HBM of a device", "GiB"))),
        Section("All figures", (_table(rows),)),
    )
    figures = {"rows": len(rows), "steps": len(steps)}
    return Report("Plans and measurements", (Section("", (lead,)), *sections), "calibration", figures)


def _compared(pairs: Sequence[Pair], what: str, unit: str) -> Iterator[Any]:
    if not pairs:
        yield paragraph("No row has both.")
        return
    top = 1.1 * max(max(pair[1:3]) for pair in pairs)
    traces = [
        equality(top),
        {
            "type": "scatter",
            "mode": "markers",
            "name": "measured",
            "x": [pair[1] for pair in pairs],
            "y": [pair[2] for pair in pairs],
            "text": [label(pair[0]) for pair in pairs],
            "marker": {"size": 9},
            "error_x": {
                "type": "data",
                "array": [pair[1] * pair[3] for pair in pairs],
                "color": "#8a929b",
                "thickness": 1,
            },
            "hovertemplate": f"%{{text}}<br>planned %{{x:.3f}} {unit}, measured %{{y:.3f}} {unit}<extra></extra>",
        },
    ]
    bars = " (bars: the range expected)" if any(pair[3] for pair in pairs) else ""
    layout = {
        "xaxis": {"title": {"text": f"planned {what}, {unit}{bars}"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": f"measured {what}, {unit}"}, "rangemode": "tozero"},
        "showlegend": False,
    }
    ratios = [pair[2] / pair[1] for pair in pairs]
    said = (
        f"{len(pairs)} rows; measured over planned from {min(ratios):.3f} to {max(ratios):.3f}. The line is equality."
    )
    yield Figure(f"Planned against measured: {what}", traces, layout, said, 400)


def _table(rows: Sequence[CalibrationRow]) -> Table:
    columns = [
        Column("measured"),
        Column("slice"),
        Column("planned step, s", number(3)),
        Column("measured, s", number(3)),
        Column("measured / planned", number(3)),
        Column("planned GiB", number(2)),
        Column("measured GiB", number(2)),
        Column("fits: plan, pod"),
    ]
    columns += [Column(f"{key.removesuffix('_share')}, {who}", percent) for key in SHARES for who in ("plan", "pod")]
    body = []
    for row in rows:
        plan, pod = row.predicted, row.measured
        shares = [side.get(key) for key in SHARES for side in (plan, pod)]
        verdicts = ", ".join("yes" if side.get("fits") else "no" for side in (plan, pod))
        body.append(
            (
                row.name,
                row.slice,
                plan.get("model_seconds"),
                pod.get("step_seconds"),
                row.step_ratio,
                plan.get("hbm_required_gib"),
                pod.get("hbm_required_gib"),
                verdicts,
                *shares,
                row.source,
                "; ".join(f"{key}: {why}" for key, why in row.doubted.items()),
            )
        )
    return Table("Measurements on record, and their plans", [*columns, Column("source"), Column("doubted")], body)
