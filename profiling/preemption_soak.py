"""Kills a run repeatedly, at random and at chosen moments, and compares it with an unbroken run.

The moments are found by watching the run's folder from outside, because a real preemption does not know of steps.
"""

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
import yaml
from rich.table import Table

from tomat.app.cli import main
from tomat.base.arguments import Parser, add_flag, count, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.layout import CHECKPOINT_FOLDER, METADATA_FILE, METRICS_FILE, STOPPED_STATUS
from tomat.base.progress import progress
from tomat.base.reporting import console, write_json, write_report
from tomat.measure.bench.processes import Process, compile_cache, end_of, started, tomat_command
from tomat.train.runs.checkpoints import array_shapes, newest_whole
from tomat.train.runs.history import parse_metrics, read_events
from tomat.train.runs.record import read_record

RUN_NAME = "soak"
OUTPUT_FILE = "output.log"
WATCH_SECONDS = 0.002
"""Time between two looks into the run's folder. A step of the soak's model takes 16 ms."""
COMMITS_SECONDS = 0.03
"""Time of three commits; a kill is aimed at one of them."""
START_TIMEOUT_SECONDS = 3600.0
"""A start that takes longer has hung. On an overloaded machine a start of 20 s has taken 10 minutes."""

AIMS = (
    "sigterm", "sigkill", "sigkill commit", "sigkill evaluation", "sigkill profile",
    "sigterm commit", "sigterm evaluation", "sigterm profile",
)  # fmt: skip
"""Signal and the moment it is aimed at; without a moment, any time within a run's length."""
UNDISTURBED = "undisturbed"
"""The aim of a start that is not killed."""
STATE_FILE = "soak.json"
MAX_STARTS_PER_KILL = 4
"""Most starts for each kill that must hit, because starts that end before their kill do not count."""


@dataclass(frozen=True)
class SoakSettings:
    """The run that is killed."""

    steps: int = 120
    save_every: int = 5
    """Steps between checkpoints: the most steps that a kill may cost."""
    eval_every: int = 12
    profile_start: int = 90
    profile_steps: int = 4
    """The window is late, because a run that resumes after the window makes no profile."""

    def config(self, folder: Path) -> dict[str, Any]:
        """The run's configuration: the demo with a decoder of one layer and few rows.

        Args:
            folder: Folder with the cache of compiled programs, which saves some seconds in each start.
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
            "evaluation": {"patches_per_material": 0, "free_running": False},
        }


@dataclass(frozen=True)
class Unbroken:
    """Measured times of a run that is not killed, for aiming the kills."""

    seconds: float
    """Time from the start of the process to its end."""
    eval_steps: Sequence[int]
    eval_seconds: float
    """Time of the longest evaluation, which is the first one of a process."""
    profile_seconds: float
    """Time of the steps in the profiled window, including writing the trace."""


@dataclass(frozen=True)
class Start:
    """One start of the run."""

    aim: str
    """One of `AIMS`."""
    found: tuple[str, ...]
    """What the run was doing when it was killed, judged by its folder: `commit`, `evaluation`, `profile`, else `steps`
    or `before the first step`. Empty if the run ended before its kill."""
    status: int
    """Exit status of the process; if negative, the signal that ended it."""
    steps_again: int | None
    """Steps that this start repeated: the cost of the kill before it. None if it was killed before that was known."""
    steps_allowed: int
    """Most steps it may repeat: the save interval, step 0 if nothing had been saved, and steps done while a save was
    being committed."""
    exit_seconds: float | None
    """Time from SIGTERM to the end of the process."""


def build_parser() -> Parser:
    """The argument parser of this script."""
    parser = Parser(
        description="Kill a small run at random and at chosen moments, start it again each time, and compare weights "
        "and log of every round with those of a run that nothing interrupted.",
    )
    add_flag(parser, "--kills", 30, "kills that must hit", type=positive_int)
    add_flag(parser, "--seed", 0, "of the moments", type=count)
    parser.add_argument("--folder", type=Path, help="keep everything here; the same command goes on where it stopped")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the soak, print and write the figures."""
    place = tempfile.TemporaryDirectory(prefix="tomat-soak-") if args.folder is None else nullcontext(args.folder)
    with place as folder:
        report = soak(Path(folder), args.kills, args.seed, SoakSettings())
    console.print(report_table(report))
    write_report(args.json, report)
    return 0


def soak(
    folder: Path, kills: int, seed: int, settings: SoakSettings, aims: Sequence[str] = (), warm: bool = True
) -> dict[str, Any]:
    """Kill and restart the run until `kills` kills have hit, and compare each run that ends with the unbroken run.

    Args:
        folder: Folder of the runs and of `soak.json`, the state. If it has a state, the soak continues.
        kills: Number of kills that must hit.
        seed: Seed of the moments.
        settings: The run.
        aims: What the kills are aimed at, in turn; empty: everything in `AIMS`.
        warm: As for `run_unbroken`.

    Raises:
        TomatError: A round does not end like the unbroken run, or a kill costs more than is allowed.
    """
    folder = folder.resolve()
    state = _read_state(folder / STATE_FILE, seed, asdict(settings))

    def save() -> None:
        write_json(folder / STATE_FILE, state)

    if state["unbroken"] is None:
        state["unbroken"] = asdict(run_unbroken(folder, settings, warm))
        save()
    unbroken = Unbroken(**state["unbroken"])
    config_path = folder / "soak.yaml"
    compared = state["compared"]
    _check_costs(state["starts"])
    with progress() as bar:
        task = bar.add_task("kills", total=kills, completed=hits(state))
        while hits(state) < kills or state["in_round"]:
            number = len(state["starts"])
            if number > MAX_STARTS_PER_KILL * kills + len(AIMS):
                raise TomatError(f"{number} starts and only {hits(state)} kills that hit; lengthen the run.")
            place = folder / f"round-{len(compared)}"
            rng = random.Random(f"{seed}-{number}")
            enough = hits(state) >= kills
            aim = UNDISTURBED if enough else _aim(place / RUN_NAME, number, settings, aims or AIMS)
            start = start_and_kill(place, config_path, aim, settings, unbroken, rng)
            state["starts"].append(asdict(start))
            state["in_round"] = start.status != 0
            if start.status == 0:
                compared.append(compare_runs(place / RUN_NAME, folder / "unbroken" / RUN_NAME))
            save()
            _check_costs(state["starts"])
            bar.update(task, completed=min(hits(state), kills))
    return _report(state)


def hits(state: dict[str, Any]) -> int:
    """Number of kills that ended a working process."""
    return sum(bool(start["found"]) for start in state["starts"])


def _read_state(path: Path, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    if not path.exists():
        return {"seed": seed, "settings": settings, "unbroken": None, "starts": [], "compared": [], "in_round": False}
    state = json.loads(path.read_text())
    if (state["seed"], state["settings"]) != (seed, settings):
        raise TomatError(
            f"{path} belongs to another soak (seed {state['seed']}, {state['settings']}); name a new folder."
        )
    return state


def _check_costs(starts: Sequence[dict[str, Any]]) -> None:
    """Refuse a kill that cost too much, one of an earlier command too."""
    for number, start in enumerate(starts):
        if start["steps_again"] is not None and start["steps_again"] > start["steps_allowed"]:
            raise TomatError(
                f"a kill cost {start['steps_again']} steps, and at most {start['steps_allowed']} were allowed: "
                f"{starts[max(0, number - 1) : number + 1]}."
            )


def _aim(run: Path, number: int, settings: SoakSettings, aims: Sequence[str]) -> str:
    """The next aim in turn. A profile is replaced by an evaluation if the run has passed its profile."""
    aim = aims[number % len(aims)]
    passed = logged_steps(run) > settings.profile_start
    return aim.replace("profile", "evaluation") if passed else aim


def _report(state: dict[str, Any]) -> dict[str, Any]:
    starts = state["starts"]
    hit = [start for start in starts if start["found"]]
    costs = [start["steps_again"] for start in starts if start["steps_again"] is not None]
    orderly = [
        later["steps_again"]
        for earlier, later in zip(starts, starts[1:], strict=False)
        if earlier["status"] == STOPPED_STATUS and later["steps_again"] is not None
    ]
    exits = [start["exit_seconds"] for start in hit if start["status"] == STOPPED_STATUS]
    return {
        "kills": len(hit),
        "kills_by_signal": dict(Counter(start["aim"].split()[0] for start in hit)),
        "kills_by_aim": dict(Counter(start["aim"] for start in hit)),
        "kills_by_moment_found": dict(Counter(moment for start in hit for moment in start["found"])),
        "starts": len(starts),
        "starts_that_ended_before_their_kill": len(starts) - len(hit),
        "runs": len(state["compared"]),
        "runs_bit_identical": len(state["compared"]),
        "arrays_compared": sum(item["arrays"] for item in state["compared"]),
        "array_bytes_compared": sum(item["bytes"] for item in state["compared"]),
        "log_lines_compared": sum(item["log_lines"] for item in state["compared"]),
        "save_interval_steps": state["settings"]["save_every"],
        "steps_lost_max": max(costs, default=0),
        "steps_lost_mean": sum(costs) / len(costs) if costs else 0.0,
        "steps_lost_after_sigterm_max": max(orderly, default=0),
        "sigterm_to_exit_seconds_max": max(exits, default=None),
        "unbroken_run_seconds": state["unbroken"]["seconds"],
        "unbroken_run_steps": state["settings"]["steps"],
    }


def report_table(report: dict[str, Any]) -> Table:
    """The figures as a table."""
    table = Table(title="a run killed again and again, against one unbroken run", show_header=False)
    moments = ", ".join(f"{count} {name}" for name, count in sorted(report["kills_by_moment_found"].items()))
    signals = ", ".join(f"{count} {name.upper()}" for name, count in sorted(report["kills_by_signal"].items()))
    table.add_row("kills", f"{report['kills']}: {signals}")
    table.add_row("found by what they left", moments)
    table.add_row("runs to the end", f"{report['runs']}, of {report['unbroken_run_steps']} steps each")
    size = f"{report['arrays_compared']} arrays, {report['array_bytes_compared']:,} bytes"
    table.add_row("bit-identical", f"{report['runs_bit_identical']} ({size})")
    table.add_row("log", f"{report['log_lines_compared']} lines, no hole, no step twice, equal losses")
    table.add_row(
        "steps lost a kill",
        f"at most {report['steps_lost_max']}, mean {report['steps_lost_mean']:.1f}; saved every "
        f"{report['save_interval_steps']}",
    )
    table.add_row("steps lost after SIGTERM", f"at most {report['steps_lost_after_sigterm_max']}")
    if report["sigterm_to_exit_seconds_max"] is not None:
        table.add_row("SIGTERM to exit", f"at most {report['sigterm_to_exit_seconds_max']:.1f} s")
    return table


def soak_process(folder: Path, config_path: Path):
    """The process of the run in `folder`, on CPU, as a context of `started`. Its output goes to `output.log` there."""
    command = tomat_command("train", "--config_path", str(config_path), "--output_dir", str(folder))
    return started(command, folder / OUTPUT_FILE, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def run_unbroken(folder: Path, settings: SoakSettings, warm: bool = True) -> Unbroken:
    """Write the configuration to `folder/soak.yaml` and run it in `folder/unbroken`.

    Args:
        folder: Folder of the soak.
        settings: The run.
        warm: First run it in `folder/first`, which fills the cache of compiled programs. Then the measured run is as
            fast as the runs that are killed, which find the cache full.

    Raises:
        TomatError: A run fails, or the two differ.
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
        # Compiled programs and programs from the cache must compute the same.
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
    """Wait until the run has spent a random time in the moment that `aim` names. False if the process ends before."""
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
    """What a run is doing, judged by its folder. A commit runs beside steps and evaluations, a profile beside steps.

    Args:
        run: Folder of the run.
        settings: The run.
        unbroken: The measured times of the run without kills.
        events_before: Number of events in its history before this start.
    """
    # Until this start has recorded that it begins, the log is that of the previous start.
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
    """Number of steps in a run's log: one more than in its last whole line; 0 without a line."""
    path = run / METRICS_FILE
    rows = parse_metrics(path.read_text(errors="replace"))[0] if path.exists() else []
    return rows[-1]["step"] + 1 if rows else 0


def newest_partial(run: Path) -> int | None:
    """The step of an incomplete checkpoint that is newer than all complete ones; None if there is none."""
    steps = {int(path.name[5:]): (path / METADATA_FILE).exists() for path in (run / CHECKPOINT_FOLDER).glob("step-*")}
    return max(steps) if steps and not steps[max(steps)] else None


def compare_runs(run: Path, unbroken: Path) -> dict[str, int]:
    """Compare a finished run with an unbroken one: each array of the last checkpoint bit by bit, each line's losses.

    Returns:
        How many arrays, bytes and lines were compared.

    Raises:
        TomatError: There is any difference, or a step is missing from the log or in it twice.
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


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
