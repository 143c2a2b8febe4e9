"""The pages of sweeps, planned or measured, just made or on record, and the page of the plans of runs that others
published."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tomat.base.documents import mapping, read_json
from tomat.base.layout import FIGURES_DIR, INDEX_FILE, SWEEPS_DIR
from tomat.base.records import typed
from tomat.base.report.document import find_sections, read_document
from tomat.base.report.markdown import update_page
from tomat.base.report.model import Report
from tomat.measure.lab.record import LAB_DIR, LabRow
from tomat.measure.lab.record import record_path as lab_path
from tomat.perf.cost import chip_model
from tomat.perf.plan.calibration import Calibration
from tomat.perf.tuning.published_runs import NAME, kept_runs
from tomat.perf.tuning.sweep import record_path as plans_path
from tomat.perf.tuning.sweep_record import REMEDY, SweepRecord, read_record, rows_on_record
from tomat.perf.tuning.sweep_rows import RowRecord
from tomat.report.pages.report import write_index
from tomat.report.published_runs import published_report
from tomat.report.sweep import measured_report, planned_report


def write_sweep_page(record: Mapping[str, Any], tracking_dir: Path) -> Path:
    """Write or update the page of a sweep of plans, its figures and the index. If the markers of the page or the index
    are broken, nothing is written."""
    index = tracking_dir / INDEX_FILE
    if index.exists():
        find_sections(read_document(index), str(index))
    measured = rows_on_record(lab_path(tracking_dir, record["sweep"]), LabRow)
    page = _own_page(tracking_dir, record["sweep"], "-planned", others="epochs")
    record = {**record, "sweep": page.stem}  # names the figures
    report = planned_report(typed(record, SweepRecord[RowRecord], "the record", REMEDY), measured)
    update_page(page, report, tracking_dir / FIGURES_DIR)
    write_index(tracking_dir)
    return page


def write_lab_page(record: Mapping[str, Any], tracking_dir: Path, epoch_rows: int | None = None) -> Path:
    """Write or update the page of a measured sweep and its figures. `epoch_rows`: see `measured_report`."""
    plans = rows_on_record(plans_path(tracking_dir, record["sweep"]), RowRecord)
    page = _own_page(tracking_dir, record["sweep"], "-measured", others="shares")
    record = {**record, "sweep": page.stem}
    report = measured_report(typed(record, SweepRecord[LabRow], "the record", REMEDY), plans, epoch_rows)
    return update_page(page, report, tracking_dir / FIGURES_DIR)


def _own_page(tracking_dir: Path, name: str, suffix: str, others: str) -> Path:
    """The path of a sweep's page. If the page has the section `others`, it belongs to the other kind of sweep (planned
    or measured), and the path gets `suffix`, so that neither kind overwrites the ranking and figure of the other."""
    page = tracking_dir / f"{name}.md"
    taken = page.is_file() and others in find_sections(read_document(page), str(page))
    return page.with_name(f"{name}{suffix}.md") if taken else page


def lab_report_of(path: Path) -> Report:
    """The report on a lab's record, beside the plans in its tracking folder."""
    record = read_record(path, SweepRecord[LabRow])
    plans = plans_path(path.parents[1], record["sweep"])
    return measured_report(record, rows_on_record(plans, RowRecord) if path.parent.name == LAB_DIR else {})


def sweep_report_of(path: Path) -> Report:
    """The report on the record of a sweep of plans, beside the measurements in its tracking folder."""
    record = read_record(path, SweepRecord[RowRecord])
    measured = lab_path(path.parents[1], record["sweep"])
    return planned_report(record, rows_on_record(measured, LabRow) if path.parent.name == SWEEPS_DIR else {})


def write_published_page(tracking_dir: Path) -> tuple[Path, Report]:
    """Write or update the page of the published runs on record in `tracking_dir`, with its pods and kernels."""
    kernels = tracking_dir / chip_model.RECORD_FILE
    chips = mapping(read_json(kernels, "Restore it.")).get("chips") if kernels.is_file() else None
    rows = rows_on_record(plans_path(tracking_dir, NAME), RowRecord)
    report = published_report(kept_runs(tracking_dir), rows, Calibration.load(tracking_dir).rows, mapping(chips))
    page = update_page(tracking_dir / f"{NAME}.md", report, tracking_dir / FIGURES_DIR)
    write_index(tracking_dir)
    return page, report
