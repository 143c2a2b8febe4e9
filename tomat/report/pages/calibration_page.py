"""`docs/tracking/calibration.md`: the plan beside every measured pod, and how far off it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from tomat.base.report.document import empty_section, update_document
from tomat.base.report.formats import UNKNOWN, percent, seconds
from tomat.base.report.markdown import markdown_table
from tomat.base.reporting import console
from tomat.perf.cost.chip_model import MODELS
from tomat.perf.plan.calibration import SHARES, Calibration, CalibrationRow, read_measurements
from tomat.perf.plan.compile.process import Limits
from tomat.perf.plan.compile.topology import planned_slice
from tomat.perf.plan.plan import Plan, make_plan

PAGE = "calibration.md"
TEMPLATE = f"""# Calibration: the plan beside the pod

What `tomat plan` says of steps that pods have run. `tomat plan --calibrate` plans every row again and rewrites what is
between the markers; `tomat plan --record RUN` adds a run of yours. Text outside the markers is yours.

## Step time

{empty_section("steps")}

## Memory

{empty_section("memory")}

## Shares of the step

{empty_section("shares")}

## The cycle models

{empty_section("models")}

## What differs

{empty_section("notes")}
"""


def calibrate(
    tracking_dir: Path,
    *,
    added: Sequence[CalibrationRow] = (),
    only_new: bool = False,
    cache_dir: Path | None = None,
    limits: Limits | None = None,
    on_stage: Callable[[str, str], None] = lambda what, stage: None,
) -> dict[str, Any]:
    """Plan what was measured and write the record and the page.

    Args:
        tracking_dir: Where `calibration.yaml` is and the page goes.
        added: Measurements to add, in the place of those with their names.
        only_new: Plan only what has no prediction yet.
        cache_dir, limits: As for `compile_step`.
        on_stage: Told the row and what the compile is doing.

    Returns:
        The record, for a JSON report.

    Raises:
        TomatError: Measurements or a configuration that cannot be read, or a compile that failed. Rows planned before
            are then on record already.
    """
    kept, notes = read_measurements(tracking_dir)
    recorded = {row.name: row for row in Calibration.load(tracking_dir).rows}
    rows = {row.name: row for row in (*kept, *(row for row in recorded.values() if row.config is not None))}
    for row in added:
        rows.pop(row.name, None)  # it goes to the end
        rows[row.name] = row
    tables: dict[str, dict[str, dict[str, float]]] = {}
    done: dict[str, CalibrationRow] = {}
    for name, row in rows.items():
        config = replace(row.training_config(), tracking_dir=str(tracking_dir))
        slice_ = planned_slice(config, row.slice or None)
        old = recorded.get(name)
        if only_new and old is not None and old.measured == row.measured and old.predicted:
            done[name] = replace(old, source=row.source, doubted=row.doubted)
            continue
        plan = make_plan(config, slice_, cache_dir=cache_dir, limits=limits, on_stage=partial(on_stage, name))
        done[name] = row_with_plan(row, plan)
        if plan.step is not None:
            tables[name] = plan.step.model_table()
        # A calibration that is stopped keeps what it has planned.
        left = {other: recorded[other] for other in rows if other in recorded and other not in done}
        Calibration((*done.values(), *left.values())).save(tracking_dir)
    record = Calibration(tuple(done.values()))
    record.save(tracking_dir)
    contents = {
        "steps": steps_section(record),
        "memory": memory_section(record.rows),
        "shares": shares_section(record.rows),
        "notes": "\n".join(f"- {note}" for note in notes),
    }
    if tables:
        contents["models"] = models_section(record.rows, tables)
    update_document(tracking_dir / PAGE, contents, TEMPLATE)
    console.print(f"wrote {tracking_dir / PAGE}", highlight=False)
    return {"rows": [asdict(row) for row in record.rows]}


def row_with_plan(row: CalibrationRow, plan: Plan) -> CalibrationRow:
    """A measurement beside what `plan` says of it."""
    predicted: dict[str, Any] = {
        "fits": plan.compiled.fits,
        "hbm_required_gib": plan.compiled.memory.required_bytes / 2**30,
    }
    if plan.step is not None:
        predicted["model_seconds"] = plan.step.model_seconds
        predicted["error"] = plan.step.error
        shares = {group.name: group.share for group in plan.step.breakdown.categories}
        for key, categories in SHARES.items():
            predicted[key] = sum(shares.get(str(category), 0.0) for category in categories)
    planned = replace(row, predicted=predicted, compiler=plan.compiled.compiler, slice=plan.slice_.name)
    return planned.checked("the plan beside the measurement")


def steps_section(record: Calibration) -> str:
    """Measured and planned step times."""
    rows = []
    for row in record.rows:
        measured, modelled = row.measured.get("step_seconds"), row.predicted.get("model_seconds")
        if measured is None:
            continue
        error = row.predicted.get("error")
        planned = (UNKNOWN,) * 3
        if modelled is not None:
            planned = (
                seconds(modelled),
                percent(modelled / measured - 1),
                UNKNOWN if error is None else f"± {percent(error, 0)}",
            )
        rows.append((row.name, seconds(measured), *planned))
    header = ("run", "measured", "planned", "error", "range of the plan")
    said = (
        "No step of a pod is in the fit: the model is that of [timed kernels](kernels.md). The start of a collective, "
        "20 µs, is from the profiles of the first two."
    )
    return f"{markdown_table(header, rows)}\n\n{said}"


def memory_section(rows: Sequence[CalibrationRow]) -> str:
    """Needed memory and whether it fits."""
    header = ("run", "the pod", "needed, GiB", "planned", "needed, GiB", "error")
    table = []
    for row in rows:
        measured, predicted = row.measured, row.predicted
        needed, planned = measured.get("hbm_required_gib"), predicted.get("hbm_required_gib")
        table.append(
            (
                row.name,
                "ran" if measured.get("fits") else "out of memory",
                UNKNOWN if needed is None else f"{needed:.2f}",
                "fits" if predicted.get("fits") else "does not fit",
                UNKNOWN if planned is None else f"{planned:.2f}",
                percent(planned / needed - 1 if needed and planned else None, 2),
            )
        )
    return markdown_table(header, table, "llrlrr")


def shares_section(rows: Sequence[CalibrationRow]) -> str:
    """Shares of the step that a profile gave."""
    header = ("run", "share", "profile", "planned", "difference, points")
    table, doubts = [], []
    for row in rows:
        for key, measured in row.measured.items():
            if not key.endswith("_share"):
                continue
            planned = row.predicted.get(key)
            doubted = row.doubted.get(key)
            difference = UNKNOWN if planned is None else f"{100 * (planned - measured):+.1f}"
            if doubted is not None:
                difference += " (doubted)"
                doubts.append(f"The profile's {key.removesuffix('_share')} of {row.name} cannot be: {doubted}")
            table.append((row.name, key.removesuffix("_share"), percent(measured), percent(planned), difference))
    if not table:
        return "No profile is on record."
    return "\n\n".join([markdown_table(header, table, "llrrr"), *doubts])


def models_section(rows: Sequence[CalibrationRow], tables: dict[str, dict[str, dict[str, float]]]) -> str:
    """Each model's seconds by category; a model leaves out what it does not know."""
    parts = []
    for row in rows:
        if row.name not in tables:
            continue
        categories = sorted(tables[row.name].items(), key=lambda item: -item[1]["estimate"])
        shown = [
            (name, *(seconds(values[model]) if values[model] else UNKNOWN for model in MODELS))
            for name, values in categories
            if max(values.values()) > 1e-3
        ]
        sums = (seconds(sum(values[model] for _, values in categories)) for model in MODELS)
        measured = row.measured.get("step_seconds")
        parts += [
            f"### {row.name}" + (f": measured {seconds(measured)}" if measured else ""),
            markdown_table(
                ("category", "XLA's cycles", "roofline", "VLIW schedule", "estimate"), [*shown, ("**sum**", *sums)]
            ),
        ]
    parts.append(
        "XLA's own cycles and the roofline say nothing of Pallas kernels; the schedule alone says nothing of waiting "
        "for memory."
    )
    return "\n\n".join(parts)
