"""Killing a small training run at chosen moments, again and again, and holding what is left against an unbroken run.

The moments are found by watching the run's folder from outside, as a machine that is taken away knows nothing of steps.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
import yaml

from tomat.base.errors import TomatError
from tomat.base.layout import CHECKPOINT_FOLDER, METADATA_FILE, METRICS_FILE, STOPPED_STATUS
from tomat.runs.checkpoints import array_shapes, newest_whole
from tomat.runs.history import read_events

RUN_NAME = "soak"
WATCH_SECONDS = 0.002
"""Between two looks into the run's folder; a step of the soak's model takes 16 ms, a commit about 10 ms."""
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
                "jax_config": {
                    "jax_compilation_cache_dir": str(folder / "compiled"),
                    "jax_persistent_cache_min_compile_time_secs": 0,
                    "jax_persistent_cache_min_entry_size_bytes": -1,
                },
            },
            "evaluation": {"patches_per_material": 0},
        }


@dataclass(frozen=True)
class Unbroken:
    """What a run that nobody kills is measured to take, for aiming."""

    seconds: float
    """From the start of the process to its end."""
    eval_steps: tuple[int, ...]
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
    resumed_at: int | None
    """First step of this start; None where it was killed before it knew."""
    steps_again: int | None
    """Steps that this start had to do again: what the kill before it cost."""
    steps_allowed: int
    """The save interval, and the steps done while a save was still being committed."""
    logged: int
    """Steps in the log when it ended."""
    exit_seconds: float | None
    """From SIGTERM to the end of the process."""


def run_soak_process(folder: Path, config_path: Path) -> "subprocess.Popen[str]":
    """Start the run in `folder`, on CPU; its output goes to `output.log` there."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tomat.app.cli", "train"]
    command += ["--config_path", str(config_path), "--output_dir", str(folder)]
    with (folder / "output.log").open("w") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
        )


@contextlib.contextmanager
def _ended_with(process: "subprocess.Popen[str]") -> Iterator[None]:
    """End the process when the context is left by an exception, such as Ctrl-C."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


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
        process = run_soak_process(folder / name, config_path)
        with _ended_with(process):
            process.wait(START_TIMEOUT_SECONDS)
        if process.returncode != 0:
            raise TomatError(f"the unbroken run failed with status {process.returncode}: {_tail(folder / name)}")
        seconds = time.monotonic() - began
    if warm:
        # What was compiled and what came out of the cache must compute the same.
        compare_runs(folder / "unbroken" / RUN_NAME, folder / "first" / RUN_NAME)
    rows = read_rows(folder / "unbroken" / RUN_NAME)
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
    events_before = len(read_events(run))
    process = run_soak_process(folder, config_path)
    number = signal.SIGTERM if aim.startswith("sigterm") else signal.SIGKILL
    exit_seconds, found = None, ()
    with _ended_with(process):
        hit = _wait_for_moment(process, run, aim, settings, unbroken, rng)
        if hit:
            found = _found(run, settings, unbroken, events_before)
            process.send_signal(number)
            sent = time.monotonic()
            try:
                process.wait(START_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise TomatError(f"the run did not end on {aim}: {_tail(folder)}") from error
            exit_seconds = time.monotonic() - sent if number == signal.SIGTERM else None
    expected = (0, STOPPED_STATUS, -signal.SIGTERM) if number == signal.SIGTERM else (0, -signal.SIGKILL)
    if process.returncode not in (expected if hit else (0,)):
        raise TomatError(f"the run failed by itself with status {process.returncode}: {_tail(folder)}")
    resumes = [event for event in read_events(run)[events_before:] if event["event"] == "resume"]
    in_commit = max(0, logged_before - 1 - partial_before) if partial_before is not None else 0
    return Start(
        aim=aim,
        found=found if process.returncode != 0 else (),
        status=process.returncode,
        resumed_at=resumes[0]["step"] if resumes else None,
        steps_again=resumes[0]["steps_again"] if resumes else None,
        steps_allowed=settings.save_every + in_commit,
        logged=logged_steps(run),
        exit_seconds=exit_seconds,
    )


def _wait_for_moment(
    process: "subprocess.Popen[str]",
    run: Path,
    aim: str,
    settings: SoakSettings,
    unbroken: Unbroken,
    rng: random.Random,
) -> bool:
    """Wait until the kill is due; False if the process ends before."""
    if aim == UNDISTURBED:
        process.wait(START_TIMEOUT_SECONDS)
        return False
    moment = aim.partition(" ")[2]
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    if not moment:
        return _still_runs(process, rng.uniform(0, unbroken.seconds))
    known = {path.name for path in (run / CHECKPOINT_FOLDER).glob("step-*")}
    commits_left = rng.randint(1, 3)
    begun_at = logged_steps(run)
    began = False
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise TomatError(f"a start of the soak took more than {START_TIMEOUT_SECONDS:.0f} s: {_tail(run.parent)}")
        logged = logged_steps(run)
        began = began or logged != begun_at  # a resumed run cuts the log back first, or adds to it
        if moment == "commit":
            fresh = {path.name for path in (run / CHECKPOINT_FOLDER).glob("step-*")} - known
            known |= fresh
            commits_left -= len(fresh)
            if commits_left <= 0:
                return _still_runs(process, rng.uniform(0, 0.02))
        elif moment == "evaluation" and began and logged in unbroken.eval_steps:
            return _still_runs(process, rng.uniform(0, unbroken.eval_seconds))
        elif moment == "profile" and began and logged >= settings.profile_start:
            return _still_runs(process, rng.uniform(0, unbroken.profile_seconds))
        time.sleep(WATCH_SECONDS)
    return False


def _still_runs(process: "subprocess.Popen[str]", seconds: float) -> bool:
    """Whether the process still runs after so many seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _found(run: Path, settings: SoakSettings, unbroken: Unbroken, events_before: int) -> tuple[str, ...]:
    """What the run is at: a commit goes on beside steps and evaluations, a step beside a profile."""
    if len(read_events(run)) == events_before or (logged := logged_steps(run)) == 0:
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
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, IndexError), path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 16_384))
        return int(json.loads(file.read().rpartition(b"\n")[0].rpartition(b"\n")[2])["step"]) + 1
    return 0


def newest_partial(run: Path) -> int | None:
    """The step of the newest checkpoint that is not complete, if it is newer than all that are."""
    steps = {int(path.name[5:]): (path / METADATA_FILE).exists() for path in (run / CHECKPOINT_FOLDER).glob("step-*")}
    return max(steps) if steps and not steps[max(steps)] else None


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log as they stand, not sorted.

    Raises:
        TomatError: A line that is not whole.
    """
    try:
        return [json.loads(line) for line in (run / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise TomatError(f"{run / METRICS_FILE} has a line that is not JSON: {error}.") from error


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
    rows, expected = read_rows(run), read_rows(unbroken)
    if [row["step"] for row in rows] != [row["step"] for row in expected]:
        raise TomatError(f"the log of {run} has the steps {[row['step'] for row in rows]}: holes, or a step twice.")
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


def _tail(folder: Path) -> str:
    output = folder / "output.log"
    return output.read_text(errors="replace")[-1500:] if output.exists() else "no output"
