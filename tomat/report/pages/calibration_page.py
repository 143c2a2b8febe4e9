"""`docs/tracking/calibration.md`: the plan beside every measured pod, and how far off it was."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from tomat.base.report.markdown import update_page
from tomat.base.reporting import console
from tomat.perf.plan.calibration import SHARES, Calibration, CalibrationRow, read_measurements
from tomat.perf.plan.compile.topology import planned_slice
from tomat.perf.plan.plan import make_plan
from tomat.report.calibration import calibration_report

PAGE = "calibration.md"


def calibrate(
    tracking_dir: Path,
    *,
    added: Sequence[CalibrationRow] = (),
    only_new: bool = False,
    on_stage: Callable[[str, str], None] = lambda what, stage: None,
    **how: Any,
) -> dict[str, Any]:
    """Plan what was measured (`only_new`: what has no prediction yet) and write the record and the page into the folder
    of `calibration.yaml`; rows planned before an error are then on record. Gives the record, for a JSON report.

    `added` are measurements to add, in the place of those with their names; `on_stage` is told the row and what the
    compile is doing; `how` is as for `compile_step`.
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
        plan = make_plan(config, slice_, on_stage=partial(on_stage, name), **how)
        memory = plan.compiled.memory
        predicted: dict[str, Any] = {"fits": plan.compiled.fits, "hbm_required_gib": memory.required_bytes / 2**30}
        if plan.step is not None:
            predicted |= {"model_seconds": plan.step.breakdown.step_seconds, "error": plan.step.error}
            shares = {group.name: group.share for group in plan.step.breakdown.categories}
            for key, categories in SHARES.items():
                predicted[key] = sum(shares.get(str(category), 0.0) for category in categories)
            tables[name] = plan.step.model_table()
        planned = replace(row, predicted=predicted, compiler=plan.compiled.compiler, slice=plan.slice_.name)
        done[name] = planned.checked("the plan beside the measurement")
        # A calibration that is stopped keeps what it has planned.
        left = {other: recorded[other] for other in rows if other in recorded and other not in done}
        Calibration((*done.values(), *left.values())).save(tracking_dir)
    record = Calibration(tuple(done.values()))
    record.save(tracking_dir)
    page = update_page(tracking_dir / PAGE, calibration_report(record.rows, notes, tables))
    console.print(f"wrote {page}", highlight=False)
    return {"rows": [asdict(row) for row in record.rows]}
