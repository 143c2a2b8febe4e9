"""Plans and MFU for `import tomat`. `tomat mfu` prints the figures that `mfu` computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE, METRICS_FILE
from tomat.base.shipped import named_configuration, none_of_that_name

if TYPE_CHECKING:
    from tomat.hardware.chips import Slice
    from tomat.hardware.mfu import StepWork
    from tomat.perf.plan.plan import Plan
    from tomat.train.settings.config import TrainConfig


def plan(
    config: TrainConfig | str | os.PathLike[str],
    slice: str | None = None,  # as `tomat plan --slice`
    *,
    overrides: Sequence[str] = (),
    cache_dir: str | os.PathLike[str] | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Plan:
    """The plan of a training step, compiled for a TPU slice that need not be present, or found in the cache.

    Args:
        config: Configuration of the run: a file, the name of a packaged configuration, or a result of `load_config`.
        slice: Accelerator type, such as `v6e-16`; None: the configuration's.
        overrides: Settings that replace those of a file, as words: `["--model.num_layers", "2"]`.
        cache_dir: Folder of compiled programs; None: the one of `tomat plan`.
        on_stage: Called with the current stage in words.

    Raises:
        TomatError: No such configuration or slice, no compiler (`uv sync --extra plan`), or a step that cannot be
            built. A step that does not fit is not an error.
    """
    from tomat.perf.plan.compile.topology import planned_slice
    from tomat.perf.plan.plan import make_plan

    run = _config(config, overrides)
    run.check_step()
    folder = None if cache_dir is None else Path(cache_dir)
    return make_plan(run, planned_slice(run, slice), cache_dir=folder, on_stage=on_stage)


def mfu(
    config_or_run: TrainConfig | str | os.PathLike[str],
    slice: str | None = None,  # as `tomat mfu --slice`
    step_seconds: float | None = None,
    *,
    overrides: Sequence[str] = (),
    atoms: int | None = None,
) -> dict[str, Any]:
    """The share of the chips' peak that a step reaches, by every convention: the figures of `tomat mfu --json`.

    Args:
        config_or_run: A configuration as for `plan`, with `step_seconds`; or the folder of a run, whose log has the
            times of its steps.
        slice: Accelerator type, such as `v6e-16` or `h100x8`; None: the configuration's, or for a run the devices that
            it ran on. A given slice must not contradict these devices.
        step_seconds: Duration of a step.
        overrides: As for `plan`.
        atoms: Number of atoms of a typical material, for the count of useful tokens; None: 12.

    Returns:
        Figures with their units in the names; MFUs are fractions.

    Raises:
        TomatError: No such configuration, run or slice, unknown FLOPs, or a step time that is shorter than the useful
            work takes at the chips' peak.
    """
    is_run = isinstance(config_or_run, (str, os.PathLike)) and Path(config_or_run).is_dir()
    if is_run != (step_seconds is None):
        raise TomatError("give step_seconds with a configuration, and leave it out for a run, whose log has them.")
    if step_seconds is None:
        return _mfu_of_run(Path(str(config_or_run)), slice, overrides, atoms)
    from tomat.hardware.chips import slice_named
    from tomat.hardware.mfu import step_report

    config = _config(config_or_run, overrides)
    name = slice or config.slice
    if name is None:
        raise TomatError(f"the configuration of {config.run_name} names no slice; give --slice, such as v6e-16.")
    found = slice_named(name)
    result = step_report(_work(config, _platform(found), atoms), found, step_seconds)
    _refuse_impossible(result, f"--step_seconds is {step_seconds}", "Give the measured seconds, and their slice.")
    return result


def _config(config: TrainConfig | str | os.PathLike[str], overrides: Sequence[str]) -> TrainConfig:
    from tomat.train.settings.config import load_config

    if not isinstance(config, (str, os.PathLike)):
        return config
    path = named_configuration(os.fspath(config), "train")
    if path is None:
        raise TomatError(f"{none_of_that_name(os.fspath(config), 'train')}.")
    return load_config(path, overrides)


def _work(config: TrainConfig, platform: str, atoms: int | None) -> StepWork:
    from tomat.model.devices import ignore_absent_tpu
    from tomat.train.mfu import TYPICAL_ATOMS, step_work

    ignore_absent_tpu(say=False)  # JAX only computes shapes here
    # A layout refuses a number of atoms that leaves no place for a voxel, but some layouts cut the sequence instead.
    layout = config.data.sequence_layout
    if atoms is not None and layout.preamble_tokens(atoms, layout.default_shape) >= config.seq_len:
        raise TomatError(f"--atoms is {atoms}, whose tokens alone fill a sequence of {config.seq_len:,}; give fewer.")
    return step_work(config, platform, atoms or TYPICAL_ATOMS)


def _platform(found: Slice | None) -> str:
    return "cpu" if found is None else "tpu" if found.libtpu_topology is not None else "gpu"


def _mfu_of_run(run_dir: Path, slice_name: str | None, overrides: Sequence[str], atoms: int | None) -> dict[str, Any]:
    from tomat.hardware.chips import slice_named
    from tomat.hardware.mfu import RunTimes, run_report
    from tomat.train.runs.devices import NOT_ON_RECORD, asked_but_not_found, ran_steps
    from tomat.train.runs.history import read_events, read_metrics
    from tomat.train.settings.config import recorded_config

    metrics_path = run_dir / METRICS_FILE
    if not metrics_path.is_file():
        raise TomatError(f"{metrics_path} does not exist; expected the folder of a run that `tomat train` made.")
    config = recorded_config(run_dir / CONFIG_FILE, overrides)
    ran = ran_steps(read_metrics(metrics_path), read_events(run_dir), config.slice)
    notes = list(ran.notes)
    if ran.devices is not None:
        if slice_name is not None and asked_but_not_found(ran.devices, slice_name):
            raise TomatError(f"--slice says {slice_name}, but {run_dir} ran on {ran.devices}; leave --slice out.")
        found, platform = ran.devices.as_slice(slice_name or config.slice), ran.devices.platform
    else:
        found = None if slice_name is None else slice_named(slice_name)
        platform = _platform(found)
        if slice_name is not None:
            notes = [f"{NOT_ON_RECORD}: {slice_name} is assumed, as --slice says", *notes]
    result = run_report(_work(config, platform, atoms), RunTimes.from_rows(ran.rows, metrics_path), found)
    devices = None if ran.devices is None else str(ran.devices)
    result |= {"devices_that_ran": devices, "asked_slice": config.slice, "notes": notes}
    said = f"the median step of {metrics_path} is {result['step_seconds']:.3g} s"
    _refuse_impossible(result, said, f"Give the slice, batch and sequence that {run_dir} ran with.")
    return result


def _refuse_impossible(result: dict[str, Any], said: str, advice: str) -> None:
    """Raise an error if a step is shorter than its useful work takes at the chips' peak (only for a known slice)."""
    if result["slice"] is not None and result["mfu_useful"] > 1:
        least = f"{result['slice']} at least {result['mfu_useful'] * result['step_seconds']:.3g} s at its peak"
        raise TomatError(f"{said}: the useful work of the step alone takes {least}. {advice}")
