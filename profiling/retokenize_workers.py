"""Two workers against one in the write stage of re-tokenizing."""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenize_speed import show_figures, start_set, write_grids

from tomat.app.cli import main
from tomat.base.arguments import Parser, add_flag, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.reporting import write_report
from tomat.data.tokens.pipeline.config import ShardJob
from tomat.data.tokens.pipeline.stages import WriteUnit, survey_unit

UNIT_MATERIALS = 128
"""Materials written for one unit: two to three seconds on one core. In a large set a unit has up to 256."""
LEAST_MATERIALS = 12
"""Six for each of two workers. A worker keeps the last two in memory, and has up to five chunks and records under way;
with fewer it would write over one that is not finished, or read nothing."""
SEARCHES = 3_200
"""Calls of the compute loop: two to three seconds."""


def build_parser() -> Parser:
    """What the script takes."""
    parser = Parser(
        description="Patches a second that two workers of re-tokenizing write, each on a core of its own, beside one, "
        "and beside what this machine gives to two processes that share nothing."
    )
    add_flag(parser, "--materials", 24, "grids of 100^3", type=positive_int)
    add_flag(parser, "--rounds", 4, "turns of one worker and of two", type=positive_int)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, print and write.

    Raises:
        TomatError: Fewer materials than two workers need, or a single core.
    """
    if args.materials < LEAST_MATERIALS:
        raise TomatError(f"--materials is {args.materials}; expected at least {LEAST_MATERIALS}.")
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        raise TomatError("this process may use one core; two workers are compared with one on two.")
    figures: dict[str, Any] = {"cpus": cores, "load_average_1min": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        config, unit = write_grids(Path(name), args.materials)
        job = ShardJob.of(config)
        survey_unit(job, unit)
        _, units, write_chunks = start_set(job, unit)
        figures |= measure_workers(write_chunks, units, args.rounds)
    show_figures(figures)
    write_report(args.json, figures)
    return 0


def measure_workers(write_chunks: Callable[[WriteUnit], int], units: list[WriteUnit], rounds: int) -> dict[str, Any]:
    """The write stage on one worker process and on two, each worker on one core of its own.

    The materials are halved. Two workers write a half each; one worker writes both halves, so the work is the same and
    the two have equal shares. A half is written over and over, as one unit as long as those of a large set: at the end
    of a unit a worker waits for the disk. Processes are started, and set and codec read, before the clock.

    A worker is held to one core, with all its threads. Left alone with two cores it takes 1.3 to 1.4 of them, since
    TensorStore compresses and writes one chunk and zarr reads a density while the next chunk is made: one worker then
    has much of what two have. `free_worker_*` are the figures of such a one.

    `two_processes_ceiling_ratio` is what this machine gives to two processes on the same two cores that compute in
    their caches and share nothing; below 2 where cores share a clock budget or are two threads of one, or where other
    processes run. Those may disturb the turns of the loop more than those of the workers: a ceiling below the workers'
    ratio says that the machine was not quiet, and neither figure then says much about tomat. All turns alternate, and
    the fastest of each counts, the one that others disturbed least.

    Args:
        write_chunks: writes a unit of the set, whose plan is in place; its rows.
        units: the whole set, at least `LEAST_MATERIALS` materials.
        rounds: how often each takes its turn.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    half = len(units) // 2
    halves = [_long_unit(units[:half]), _long_unit(units[half : 2 * half])]
    write, search = partial(_write, write_chunks), partial(_search, SEARCHES)
    alone, apart = [{cores[0]}], [{core} for core in cores]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:

        def turn(function: Callable[..., Any], *arguments: Iterable[Any]) -> tuple[float, list[Any]]:
            began = time.perf_counter()
            results = list(pool.map(function, *arguments))
            return time.perf_counter() - began, results

        rows = sum(rows for rows, _ in turn(write, apart, [[each] for each in halves])[1])
        one, two, free, one_search, two_searches = [], [], [], [], []
        for _ in range(rounds):
            one.append(turn(write, alone, [halves])[0])
            two.append(turn(write, apart, [[each] for each in halves])[0])
            seconds, [(_, cpu_seconds)] = turn(write, [set(cores)], [halves])
            free.append((seconds, cpu_seconds))
            one_search.append(turn(search, alone)[0])
            two_searches.append(turn(search, apart)[0])
    return {
        "one_worker_patches_per_second": rows / min(one),
        "two_workers_patches_per_second": rows / min(two),
        "two_workers_over_one_ratio": min(one) / min(two),
        "two_processes_ceiling_ratio": 2 * min(one_search) / min(two_searches),
        "free_worker_patches_per_second": rows / min(free)[0],
        "free_worker_cores": min(free)[1] / min(free)[0],
    }


def _long_unit(units: list[WriteUnit]) -> WriteUnit:
    """One unit with the chunks of several, again and again until there are as many materials as a long unit has."""
    materials = tuple(dict.fromkeys(material for unit in units for material in unit.materials))
    chunks = tuple(chunk for unit in units for chunk in unit.chunks)
    return WriteUnit(chunks * -(-UNIT_MATERIALS // len(materials)), materials)


def _write(write_chunks: Callable[[WriteUnit], int], cores: set[int], units: list[WriteUnit]) -> tuple[int, float]:
    """Write units on the given cores: rows, and CPU seconds of all threads."""
    _hold_to(cores)
    began = time.process_time()
    rows = sum(write_chunks(unit) for unit in units)
    return rows, time.process_time() - began


def _search(times: int, cores: set[int]) -> None:
    """Arithmetic and look-ups in 160 kB, which stay in the second-level cache of a core."""
    _hold_to(cores)
    rng = np.random.default_rng(0)
    edges, values = np.sort(rng.random(16_384, dtype=np.float32)), rng.random(8_192, dtype=np.float32)
    for _ in range(times):
        np.searchsorted(edges, values)


def _hold_to(cores: set[int]) -> None:
    """Run every thread of this process on these cores only; threads that they start later inherit it."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # ended since it was listed
            continue


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
