"""The pages of sweeps, planned or measured, of what was just made or is on record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tomat.base.layout import FIGURES_DIR, INDEX_FILE, SWEEPS_DIR
from tomat.base.records import typed
from tomat.base.report.document import find_sections, read_document
from tomat.base.report.markdown import update_page
from tomat.base.report.model import Report
from tomat.measure.lab.record import LAB_DIR, LabRow, read_lab, rows_of_record
from tomat.measure.lab.record import REMEDY as LAB_REMEDY
from tomat.measure.lab.record import record_path as lab_path
from tomat.perf.tuning.sweep import REMEDY, rows_on_record
from tomat.perf.tuning.sweep import record_path as plans_path
from tomat.perf.tuning.sweep_record import SweepRecord, read_record
from tomat.perf.tuning.sweep_rows import RowRecord
from tomat.report.pages.report import write_index
from tomat.report.sweep import measured_report, planned_report


def write_sweep_page(record: Mapping[str, Any], tracking_dir: Path, epoch_rows: int | None = None) -> Path:
    """Write (or bring up to date) the page of a sweep of plans, its figures and the index, or of a measured sweep
    (`epoch_rows`: see `measured_report`); nothing where the markers of one of them are broken."""
    name, index, measured = record["sweep"], tracking_dir / INDEX_FILE, "measured_with" in record
    if measured:
        plans = rows_on_record(plans_path(tracking_dir, name))
        report = measured_report(typed(record, SweepRecord[LabRow], "the record", LAB_REMEDY), plans, epoch_rows)
    else:
        if index.exists():
            find_sections(read_document(index), str(index))
        beside = rows_of_record(lab_path(tracking_dir, name))
        report = planned_report(typed(record, SweepRecord[RowRecord], "the record", REMEDY), beside)
    page = update_page(tracking_dir / f"{name}.md", report, tracking_dir / FIGURES_DIR)
    if not measured:
        write_index(tracking_dir)
    return page


def sweep_report_of(path: Path, measured: bool) -> Report:
    """What a record says, of plans or of measurements, with those of the other kind in its tracking folder beside."""
    in_place = path.parent.name == (LAB_DIR if measured else SWEEPS_DIR)
    if measured:
        record = read_lab(path, SweepRecord[LabRow])
        plans = plans_path(path.parent.parent, record["sweep"])
        return measured_report(record, rows_on_record(plans) if in_place else {})
    record = read_record(path, SweepRecord[RowRecord], REMEDY)
    measurements = lab_path(path.parent.parent, record["sweep"])
    return planned_report(record, rows_of_record(measurements) if in_place else {})
