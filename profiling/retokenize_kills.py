"""Kills the driver or a worker of re-tokenizing at random moments, and compares the result with an unbroken run."""

import argparse
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from tokenize_speed import scratch, show_figures

from tomat.app.cli import main
from tomat.base.arguments import Parser, add_flag, count, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.reporting import write_report
from tomat.measure.bench.processes import tomat_command

ARGUMENTS = ("--source", "embedded", "--split", "validation", "--layout", "v2-p14", "--patches_per_material", "96")
"""A set that takes some seconds, with a codec that needs no fit. It has 96 patches of each of 10 materials: of its 15
chunks of 64 rows, ten begin inside a material."""


def build_parser() -> Parser:
    """The argument parser of this script."""
    parser = Parser(description="Whether re-tokenizing that is killed at random moments ends with the same bytes.")
    add_flag(parser, "--kill_runs", 20, "runs killed at random moments", type=positive_int, metavar="N")
    add_flag(parser, "--seed", 0, "of the moments", type=count)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Kill runs, compare their results, print and write the figures."""
    with scratch(args.folder) as folder:
        figures = kill_test(folder, args.kill_runs, args.seed)
    show_figures(figures)
    write_report(args.json, figures)
    return 0


def set_files(folder: Path) -> dict[str, bytes]:
    """Every file of a set and its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def retokenize_command(output: Path) -> list[str]:
    """The command line that writes the set with two workers."""
    return tomat_command("retokenize", *ARGUMENTS, "--output", str(output), "--workers", "2")


def workers_of(driver: psutil.Process) -> list[psutil.Process]:
    """The processes of its pool, without the one that keeps account of Python's semaphores, which nothing waits for."""
    described = ((each, each.as_dict(["cmdline"])["cmdline"]) for each in driver.children())
    return [each for each, words in described if "--multiprocessing-fork" in (words or ())]


def run_with_kills(command: list[str], rng: random.Random, horizon_seconds: float, kills: int) -> Counter[str]:
    """Run a command repeatedly until it ends by itself, and kill its driver or one of its workers in the meantime.

    Args:
        command: the command.
        rng: chooses moment and victim.
        horizon_seconds: a kill comes at a random time up to this.
        kills: the largest number of starts that are killed.

    Returns:
        How many kills hit the driver, how many a worker, and how many starts ended before their kill.

    Raises:
        TomatError: if the command fails by itself.
    """
    hits: Counter[str] = Counter()
    while True:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            if sum(hits.values()) < kills:
                try:
                    process.wait(rng.uniform(0, horizon_seconds))
                    hits["ended before the kill"] += 1
                except subprocess.TimeoutExpired:
                    driver = psutil.Process(process.pid)
                    workers = workers_of(driver)
                    if workers and rng.random() < 0.5:
                        rng.choice(workers).kill()
                        hits["worker"] += 1
                    else:
                        driver.kill()
                        hits["driver"] += 1
            output, _ = process.communicate()
        if process.returncode == 0:
            return hits
        if process.returncode != -signal.SIGKILL:
            raise TomatError(f"The command failed by itself with status {process.returncode}: {output[-2000:]}")


def kill_test(folder: Path, runs: int, seed: int) -> dict[str, Any]:
    """Kill runs at random moments, and compare their final files with those of an unbroken run.

    Raises:
        TomatError: if a run ends with other bytes, or the unbroken one fails.
    """
    began = time.monotonic()
    if status := subprocess.run(retokenize_command(folder / "unbroken"), stdout=subprocess.DEVNULL).returncode:
        raise TomatError(f"the unbroken run failed with status {status}, as is said above.")
    horizon = time.monotonic() - began
    expected = set_files(folder / "unbroken")
    rng = random.Random(seed)
    total: Counter[str] = Counter()
    for run in range(runs):
        place = folder / f"killed{run}"
        total += run_with_kills(retokenize_command(place), rng, horizon, rng.randint(1, 4))
        if set_files(place) != expected:
            raise TomatError(f"Run {run} of the kill test ended with other bytes than the unbroken run: {place}.")
    return {
        "kill_runs": runs,
        "kill_runs_byte_identical": runs,
        "kills_of_the_driver": total["driver"],
        "kills_of_a_worker": total["worker"],
        "starts_that_ended_before_their_kill": total["ended before the kill"],
        "unbroken_run_seconds": horizon,
    }


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
