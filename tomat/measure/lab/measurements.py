"""Converts rows of the lab to measurements that plans are compared with (`tomat plan --record`)."""

from pathlib import Path

from tomat.base.errors import TomatError
from tomat.base.reporting import counted
from tomat.hardware.chips import FoundDevices
from tomat.measure.lab.record import LabRow
from tomat.perf.plan.calibration import CalibrationRow, tpu_slice
from tomat.perf.tuning.changes import override_words
from tomat.perf.tuning.sweep_record import SweepRecord, read_record
from tomat.train.runs.devices import NOT_ON_RECORD
from tomat.train.settings.config import config_hash, load_config


def measured_steps(path: Path) -> tuple[list[CalibrationRow], dict[str, str]]:
    """The measurements in a record of the lab: one for each row that ran on a TPU slice, under that slice (its
    configuration may name another); and for every other row, by name, why there is none."""
    record = read_record(path, SweepRecord[LabRow]) if path.exists() else None
    if record is None or not record["rows"]:
        what = "does not exist" if record is None else "has no rows"
        raise TomatError(f"{path} {what}; expected the record of `tomat lab run`.")
    steps, refused = [], {}
    for row in record["rows"]:
        try:
            steps.append(_measured(row, record["sweep"]).checked(str(path)))
        except TomatError as error:
            refused[row.name] = str(error)
    if not steps:
        name, why = next(iter(refused.items()))
        raise TomatError(f"{path}: none of {counted(len(refused), 'row')} is a step of a TPU slice; {name!r}: {why}")
    return steps, refused


def _measured(row: LabRow, sweep: str) -> CalibrationRow:
    if row.step_seconds is None:
        raise TomatError(f"it has no step time ({row.status or 'not finished'})")
    config = load_config(row.config_file, override_words(dict(sorted(row.overrides.items()))), f"row {row.name!r}")
    # The record has only the name of the configuration file, and the file of that name here may be another one.
    if row.setup.get("config_hash", now := config_hash(config)) != now:
        said = f"{row.config_file} with its settings is not the configuration that was measured"
        raise TomatError(f"{said}; start where the measured file lies, or restore it")
    found = FoundDevices.from_words(row.setup.get("devices"), row.setup.get("hosts"))
    if found is None:
        raise TomatError(NOT_ON_RECORD)
    slice_ = tpu_slice(found, config.slice)
    meant = f"; slice {config.slice} was asked for, and {found} ran" if config.slice not in (None, slice_.name) else ""
    return CalibrationRow(
        name=f"{sweep}: {row.name}",
        slice=slice_.name,
        source=f"tomat lab run of {sweep}, median of {counted(len(row.windows), 'window')}{meant}",
        measured={"fits": True, "step_seconds": row.step_seconds},
        config=config.to_dict(),
    )
