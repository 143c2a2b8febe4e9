"""`tomat bench preemption`: a run killed again and again, at random and at chosen moments, against an unbroken one."""

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from tomat.base.errors import TomatError
from tomat.base.layout import STOPPED_STATUS
from tomat.base.reporting import console, progress, write_json, write_report
from tomat.bench.soak import (
    AIMS,
    RUN_NAME,
    UNDISTURBED,
    SoakSettings,
    Unbroken,
    compare_runs,
    logged_steps,
    run_unbroken,
    start_and_kill,
)

STATE_FILE = "soak.json"
MAX_STARTS_PER_KILL = 4
"""Starts that end before their kill count none; more than this many of them a kill would not end."""


def run(args: argparse.Namespace) -> int:
    """Carry out `tomat bench preemption`."""
    place = tempfile.TemporaryDirectory(prefix="tomat-soak-") if args.folder is None else nullcontext(args.folder)
    with place as folder:
        report = soak(Path(folder), args.kills, args.seed, SoakSettings())
    console.print(report_table(report))
    write_report(args.json, report)
    return 0


def soak(
    folder: Path, kills: int, seed: int, settings: SoakSettings, aims: Sequence[str] = (), warm: bool = True
) -> dict[str, Any]:
    """Kill the run until `kills` kills have hit, each round to its end; compare every round with the unbroken run.

    Args:
        folder: Holds the runs and `soak.json`, what has been done; a folder with one is gone on with.
        kills: Kills that must hit.
        seed: Of the moments.
        settings: The run.
        aims: What the kills are aimed at, in turn; empty: everything in `AIMS`.
        warm: As for `run_unbroken`.

    Raises:
        TomatError: A round that does not end as the unbroken run did, or a kill that costs more than the save interval.
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
            if start.steps_again is not None and start.steps_again > start.steps_allowed:
                raise TomatError(
                    f"a kill cost {start.steps_again} steps, and at most {start.steps_allowed} were allowed: "
                    f"{state['starts'][-2:]}."
                )
            if start.status == 0:
                compared.append(compare_runs(place / RUN_NAME, folder / "unbroken" / RUN_NAME))
            save()
            bar.update(task, completed=min(hits(state), kills))
    return _report(state)


def hits(state: dict[str, Any]) -> int:
    """Kills that ended a process that was at work."""
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


def _aim(run: Path, number: int, settings: SoakSettings, aims: Sequence[str]) -> str:
    """The next aim in turn; a profile only where the run has not passed it."""
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
