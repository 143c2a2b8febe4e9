"""Killing a small training run at chosen moments, again and again, and holding what is left against an unbroken run.

The moments are found by watching the run's folder from outside, as a machine that is taken away knows nothing of steps.
"""

import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
import yaml

from tomat.base.errors import TomatError
from tomat.base.layout import CHECKPOINT_FOLDER, METADATA_FILE, METRICS_FILE, STOPPED_STATUS
from tomat.bench.processes import Process, compile_cache, end_of, started, tomat_command
from tomat.runs.checkpoints import array_shapes, newest_whole
from tomat.runs.history import read_events
from tomat.runs.log_lines import parse_metrics
from tomat.runs.record import read_record

RUN_NAME = "soak"
OUTPUT_FILE = "output.log"
WATCH_SECONDS = 0.002
"""Between two looks into the run's folder; a step of the soak's model takes 16 ms."""
COMMITS_SECONDS = 0.03
"""Of three commits, one of which a kill is aimed at."""
START_TIMEOUT_SECONDS = 3600.0
"""A start that takes longer has hung; on an overloaded machine one of 20 s has taken 10 minutes."""

AIMS = (
    "sigterm", "sigkill", "sigkill commit", "sigkill evaluation", "sigkill profile",
    "sigterm commit", "sigterm evaluation", "sigterm profile",
)  # fmt: skip
"""Signal, and the moment it is aimed at; without one, any moment of a run's length."""
UNDISTURBED = "undisturbed"
"""The aim of a start that is left alone."""


@dataclass(frozen=True)
class SoakSettings:
    """The run that is killed."""

    steps: int = 120
    save_every: int = 5
    """Steps between checkpoints, the most that a kill may cost."""
    eval_every: int = 12
    profile_start: int = 90
    profile_steps: int = 4
    """Late, because a run that has been resumed beyond the window makes no profile."""

    def config(self, folder: Path) -> dict[str, Any]:
        """The run's configuration: the demo with a decoder of one layer and few rows.

        Args:
            folder: Holds the cache of compiled programs, which saves each start some seconds.
        """
        return {
            "run_name": RUN_NAME,
            "preset": "demo",
            "tracking_dir": str(folder / "tracking"),
            "data": {"source": "embedded", "layout": "v3-p7", "n_density_tokens": 64, "patches_per_material": 2},
            "model": {"num_layers": 1, "hidden_dim": 32, "intermediate_dim": 64, "num_heads": 2, "num_kv_heads": 2},
            "optimizer": {"type": "muon", "learning_rate": 2e-2, "adam_lr": 3e-3, "warmup": 10},
            "trainer": {
                "train_batch_size": 2,
                "num_train_steps": self.steps,
                "mp": "compute=float32,params=float32,output=float32",
                "steps_per_eval": self.eval_every,
                "max_eval_batches": 2,
                "checkpointer": {"save_interval": "1h", "keep": [{"every": self.save_every, "until": None}]},
                "profiler": {"enabled": True, "start_step": self.profile_start, "num_steps": self.profile_steps},
                "jax_config": compile_cache(folder / "compiled"),
            },
            "evaluation": {"patches_per_material": 0},
        }


@dataclass(frozen=True)
class Unbroken:
    """What a run that nobody kills is measured to take, for aiming."""

    seconds: float
    """From the start of the process to its end."""
    eval_steps: Sequence[int]
    eval_seconds: float
    """Of the first evaluation of a process, which is also the longest."""
    profile_seconds: float
    """Of the steps of the profiled window, with the writing of the trace."""


@dataclass(frozen=True)
class Start:
    """One start of the run."""

    aim: str
    """One of `AIMS`."""
    found: tuple[str, ...]
    """What the run was at when it was killed, judged by its folder at that moment: `commit`, `evaluation`, `profile`,
    else `steps` or `before the first step`. Empty where the run ended before its kill."""
    status: int
    """Of the process; negative: the signal that ended it."""
    steps_again: int | None
    """Steps that this start had to do again: what the kill before it cost; None where it was killed before it knew."""
    steps_allowed: int
    """The save interval, step 0 besides where nothing had been saved, and the steps done while a save was still being
    committed."""
    exit_seconds: float | None
    """From SIGTERM to the end of the process."""


def soak_process(folder: Path, config_path: Path):
    """The run in `folder`, on CPU, as `started` has it; its output goes to `output.log` there."""
    command = tomat_command("train", "--config_path", str(config_path), "--output_dir", str(folder))
    return started(command, folder / OUTPUT_FILE, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def run_unbroken(folder: Path, settings: SoakSettings, warm: bool = True) -> Unbroken:
    """Write the configuration to `folder/soak.yaml`, and run it in `folder/unbroken`.

    Args:
        folder: Of the soak.
        settings: The run.
        warm: Run it in `folder/first` before, which fills the cache of compiled programs, so that the measured run
            takes as long as one that is killed and finds the cache full.

    Raises:
        TomatError: The run fails, or the two differ.
    """
    config_path = folder / "soak.yaml"
    config_path.parent.mkdir(parents=True, exist_ok=True)
    config_path.write_text(yaml.safe_dump(settings.config(folder), sort_keys=False))
    seconds = 0.0
    for name in ("first", "unbroken") if warm else ("unbroken",):
        began = time.monotonic()
        with soak_process(folder / name, config_path) as process:
            status = process.wait(START_TIMEOUT_SECONDS)
        if status != 0:
            raise TomatError(f"the unbroken run failed with status {status}: {end_of(folder / name / OUTPUT_FILE)}")
        seconds = time.monotonic() - began
    if warm:
        # What was compiled and what came out of the cache must compute the same.
        compare_runs(folder / "unbroken" / RUN_NAME, folder / "first" / RUN_NAME)
    rows = read_record(str(folder / "unbroken" / RUN_NAME)).rows
    evaluations = [row for row in rows if "eval/validation/loss" in row]
    window = range(settings.profile_start, settings.profile_start + settings.profile_steps + 1)
    return Unbroken(
        seconds,
        tuple(row["step"] for row in evaluations),
        max(row["eval_seconds"] for row in evaluations),
        sum(row["wall_seconds"] for row in rows if row["step"] in window),
    )


def start_and_kill(
    folder: Path, config_path: Path, aim: str, settings: SoakSettings, unbroken: Unbroken, rng: random.Random
) -> Start:
    """Start the run in `folder` once, and kill it as `aim` says.

    Raises:
        TomatError: The process fails by itself, or SIGTERM does not end it.
    """
    run = folder / RUN_NAME
    logged_before, partial_before = logged_steps(run), newest_partial(run)
    events_before, first_step = len(read_events(run)), int(newest_whole(str(run)) is None)
    moments = partial(moments_of, run, settings, unbroken, events_before)
    number = signal.SIGTERM if aim.startswith("sigterm") else signal.SIGKILL
    exit_seconds, found, expected = None, (), [0]
    with soak_process(folder, config_path) as process:
        if _wait_for_moment(process, aim, moments, unbroken, rng):
            found = moments()
            process.send_signal(number)
            sent = time.monotonic()
            process.wait(START_TIMEOUT_SECONDS)
            expected.append(-number)
            if number == signal.SIGTERM:
                exit_seconds = time.monotonic() - sent
                expected.append(STOPPED_STATUS)
    if process.returncode not in expected:
        said = end_of(folder / OUTPUT_FILE)
        raise TomatError(f"the run failed by itself with status {process.returncode}: {said}")
    resumes = [event for event in read_events(run)[events_before:] if event["event"] == "resume"]
    in_commit = max(0, logged_before - 1 - partial_before) if partial_before is not None else 0
    return Start(
        aim=aim,
        found=found if process.returncode != 0 else (),
        status=process.returncode,
        steps_again=resumes[0]["steps_again"] if resumes else None,
        steps_allowed=settings.save_every + first_step + in_commit,
        exit_seconds=exit_seconds,
    )


def _wait_for_moment(
    process: Process,
    aim: str,
    moments: Callable[[], Sequence[str]],
    unbroken: Unbroken,
    rng: random.Random,
) -> bool:
    """Wait until the run has been at what `aim` names for a time that is drawn; False if the process ends before."""
    moment = aim.partition(" ")[2]
    longest = {
        "": unbroken.seconds,
        "commit": COMMITS_SECONDS,
        "evaluation": unbroken.eval_seconds,
        "profile": unbroken.profile_seconds,
    }
    seconds_left = math.inf if aim == UNDISTURBED else rng.uniform(0, longest[moment])
    began = looked = time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        if now - began > START_TIMEOUT_SECONDS:
            raise subprocess.TimeoutExpired(process.args, START_TIMEOUT_SECONDS)
        if not moment or moment in moments():
            seconds_left -= now - looked
        if seconds_left <= 0:
            return True
        looked = now
        time.sleep(WATCH_SECONDS)
    return False


def moments_of(run: Path, settings: SoakSettings, unbroken: Unbroken, events_before: int) -> tuple[str, ...]:
    """What a run is at, as its folder shows it: a commit goes on beside steps and evaluations, a step beside a profile.

    Args:
        run: Its folder.
        settings: The run.
        unbroken: The same without kills.
        events_before: Events in its history before this start.
    """
    # The log of the start before stands until this one has said that it begins.
    begun = any(event["event"] in ("start", "resume") for event in read_events(run)[events_before:])
    logged = logged_steps(run)
    if not begun or logged == 0:
        return ("before the first step",)
    found = []
    if newest_partial(run) is not None:
        found.append("commit")
    if logged in unbroken.eval_steps:
        found.append("evaluation")
    if settings.profile_start <= logged <= settings.profile_start + settings.profile_steps:
        found.append("profile")
    return tuple(found) or ("steps",)


def logged_steps(run: Path) -> int:
    """Steps in a run's log: one more than the last whole line says; 0 where there is none."""
    path = run / METRICS_FILE
    rows = parse_metrics(path.read_text(errors="replace"))[0] if path.exists() else []
    return rows[-1]["step"] + 1 if rows else 0


def newest_partial(run: Path) -> int | None:
    """The step of the newest checkpoint that is not complete, if it is newer than all that are."""
    steps = {int(path.name[5:]): (path / METADATA_FILE).exists() for path in (run / CHECKPOINT_FOLDER).glob("step-*")}
    return max(steps) if steps and not steps[max(steps)] else None


def compare_runs(run: Path, unbroken: Path) -> dict[str, int]:
    """Hold a finished run against an unbroken one: every array of the last checkpoint bit by bit, every line's losses.

    Returns:
        How many arrays, bytes and lines were compared.

    Raises:
        TomatError: Any difference, a step that is missing from the log or in it twice.
    """
    ours, theirs = newest_whole(str(run)), newest_whole(str(unbroken))
    if ours is None or theirs is None or ours.step != theirs.step:
        raise TomatError(f"{run} ends at {ours and ours.step}, the unbroken run at {theirs and theirs.step}.")
    shapes = array_shapes(ours.path)
    if shapes != array_shapes(theirs.path):
        raise TomatError(f"{ours.path} holds other arrays than {theirs.path}.")
    size = 0
    for name in sorted(shapes):
        one, other = _read_array(ours.path, name), _read_array(theirs.path, name)
        if one.tobytes() != other.tobytes():
            raise TomatError(f"{name} differs between {ours.path} and {theirs.path}.")
        size += one.nbytes
    record, expected = read_record(str(run)), read_record(str(unbroken)).rows
    rows, steps = record.rows, [row["step"] for row in record.rows]
    if record.unreadable_lines:
        raise TomatError(f"{run / METRICS_FILE} has lines that are not whole: {record.unreadable_lines}.")
    if steps != [row["step"] for row in expected]:
        raise TomatError(f"the log of {run} has the steps {steps}: holes, or a step twice.")
    for row, right in zip(rows, expected, strict=True):
        for key in right:
            is_loss = "loss" in key and key.split("/")[0] in ("train", "eval") and "time" not in key
            if is_loss and row[key] != right[key]:
                raise TomatError(
                    f"{key} of step {row['step']} is {row[key]} in {run}, {right[key]} in the unbroken run."
                )
    return {"arrays": len(shapes), "bytes": size, "log_lines": len(rows)}


def _read_array(path: str, name: str) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": f"file://{path}/", "path": f"{name}/"}}
    return ts.open(spec, read=True).result().read().result()
