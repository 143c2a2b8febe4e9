"""`docs/tracking/levanter-runs.md`: runs that others published, beside the plans of their steps."""

from pathlib import Path

from tomat.base.documents import mapping, read_json
from tomat.base.layout import FIGURES_DIR
from tomat.base.report.markdown import update_page
from tomat.base.report.model import Report
from tomat.perf.cost import chip_model
from tomat.perf.plan.calibration import Calibration
from tomat.perf.tuning.published_runs import NAME, kept_runs
from tomat.perf.tuning.sweep import record_path
from tomat.perf.tuning.sweep_record import rows_on_record
from tomat.perf.tuning.sweep_rows import RowRecord
from tomat.report.pages.report import write_index
from tomat.report.published_runs import published_report


def write_published_page(tracking_dir: Path) -> tuple[Path, Report]:
    """Write (or bring up to date) the page of what is on record in `tracking_dir`, with its pods and kernels."""
    kernels = tracking_dir / chip_model.RECORD_FILE
    chips = mapping(read_json(kernels, "Restore it.")).get("chips") if kernels.is_file() else None
    rows = rows_on_record(record_path(tracking_dir, NAME), RowRecord)
    report = published_report(kept_runs(tracking_dir), rows, Calibration.load(tracking_dir).rows, mapping(chips))
    page = update_page(tracking_dir / f"{NAME}.md", report, tracking_dir / FIGURES_DIR)
    write_index(tracking_dir)
    return page, report
