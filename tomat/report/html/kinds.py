"""Finds out what a path holds (a run, a plan, a profile, a sweep, predictions or one density) and makes its page."""

from pathlib import Path

from tomat.base.documents import mapping, read_json
from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE, HTML_FILE
from tomat.base.report.model import Report
from tomat.base.storage import explaining_storage, files_at
from tomat.data.density.rules import ReadRules
from tomat.perf.plan.calibration import RECORD_FILE as CALIBRATION_FILE
from tomat.perf.plan.calibration import Calibration
from tomat.predict.inference.folder import LINES_FILE
from tomat.report.html.density import LOOKED_AT, density_page, predictions_page

PROFILES = (".json", ".json.gz", ".pb", ".pb.gz", ".xplane.pb", ".hlo", ".hlo.pb.gz")
EXPECTED = (
    "a run's folder or URL, a JSON of `tomat plan` or `tomat profile`, a trace or compiled program, a record of "
    "a sweep (docs/tracking/sweeps, docs/tracking/lab), calibration.json, a folder of `tomat predict`, or a density"
)


def is_run(target: str) -> bool:
    with explaining_storage(f"{target} cannot be read", "Give this user the right to read it."):
        files, root = files_at(target)
        return bool(files.exists(f"{root.rstrip('/')}/{CONFIG_FILE}"))


def page_of(
    target: str, *, reference: str | None = None, device_kind: str | None = None, rules: ReadRules | None = None
) -> Report:
    """The page of a path or URL, which may be anything in `EXPECTED`. `reference` is drawn beside predictions and
    densities, `rules` (None: `LOOKED_AT`) say how to read them. `device_kind` is the chip of a compiled program."""
    path = Path(target)
    rules = rules or LOOKED_AT
    if "://" not in target and not path.exists():
        raise TomatError(f"{target} does not exist; expected {EXPECTED}.")
    if (path / LINES_FILE).is_file():
        return predictions_page(path, reference, rules)
    if _is_density(target):
        return density_page(target, reference, rules)
    if reference is not None:
        raise TomatError(f"--reference is for a prediction or a density, and {target} is neither; leave it out.")
    if rules != LOOKED_AT:
        said = f"--species and --accept are for a prediction or a density, and {target} is neither"
        raise TomatError(f"{said}; leave them out.")
    if is_run(target):
        from tomat.report.html.run import run_page

        return run_page(target.rstrip("/"))
    from tomat.perf.profile.load import load_breakdown
    from tomat.report.html.step import breakdown_page, unfit_page

    if path.suffix == ".json" and path.is_file() and not path.name.endswith(".trace.json"):
        record = read_json(path, "Write it again with --json.")
        keys = set(mapping(record))
        if {"rows", "sweep"} <= keys:
            from tomat.report.pages.sweep_pages import lab_report_of, sweep_report_of

            return lab_report_of(path) if "measured_with" in keys else sweep_report_of(path)
        if path.name == CALIBRATION_FILE and "rows" in keys:
            from tomat.report.calibration import calibration_report

            return calibration_report(Calibration.load(path.parent).rows)
        if "program_key" in keys:
            if record.get("breakdown") is None:
                return unfit_page(record, target)
            return breakdown_page(load_breakdown(target), "plan", report=record, origin=target)
        if {"record_format", "run"} <= keys:
            said = f"{target} is the record of a run or plan, which has its figures without their operations"
            raise TomatError(f"{said}; its page is {record['run']}.md, two folders above it or in archive/.")
        if not {"format_version", "ops"} <= keys and "traceEvents" not in keys:
            raise TomatError(f"{target} is a JSON of another kind; expected {EXPECTED}.")
    elif path.is_dir() and not any(path.rglob("*.xplane.pb*")) and not any(path.rglob("*.trace.json*")):
        raise TomatError(f"{target} is a folder of another kind; expected {EXPECTED}.")
    elif path.is_file() and not path.name.endswith(PROFILES):
        raise TomatError(f"{target} has the name of another kind of file; expected {EXPECTED}.")
    return breakdown_page(load_breakdown(target, device_kind=device_kind), "profile")


def _is_density(target: str) -> bool:
    """Whether a file or folder holds a density. The keys of a JSON decide, because plans and records are JSON too."""
    from tomat.data.density.io import format_name

    try:
        form = format_name(target)
    except TomatError:
        return False
    name = target.rstrip("/").rsplit("/", 1)[-1]
    if not name.endswith(".json"):
        return not name.endswith(".trace.json.gz")
    if "://" in target:
        return form != ""
    return "data" in mapping(read_json(Path(target)))


def default_output(target: str) -> Path:
    """Where the page of `target` goes: `index.html` in a folder, `NAME.html` beside a file."""
    if "://" in target:
        raise TomatError(f"{target} is not a local place; give a file with --output.")
    path = Path(target)
    if path.is_dir() and path.suffix not in (".zarr", ".save"):
        return path / HTML_FILE
    name = path.name
    for end in (".gz", ".bz2", ".xz", ".json", ".cube", ".zarr", ".pb", ".xplane", ".hlo"):
        name = name.removesuffix(end)
    return path.with_name(f"{name}.html")
