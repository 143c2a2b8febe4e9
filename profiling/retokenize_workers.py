"""Compares two workers with one in the write stage of re-tokenizing."""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenize_speed import scratch, show_figures, start_set, write_grids

from tomat.app.cli import main
from tomat.base.arguments import Parser, add_flag, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.reporting import write_report
from tomat.data.tokens.pipeline.config import ShardJob
from tomat.data.tokens.pipeline.stages import WriteUnit, survey_unit

UNIT_MATERIALS = 128
"""Materials written in one unit: two to three seconds on one core. In a large set a unit has up to 256."""
LEAST_MATERIALS = 12
"""Six for each of two workers. A worker keeps the last two materials in memory and has up to five chunks and records in
progress; with fewer materials it would overwrite an unfinished one, or read nothing."""
SEARCHES = 3_200
"""Iterations of the compute loop: two to three seconds."""


def build_parser() -> Parser:
    """The argument parser of this script."""
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
    """Measure, print and write the figures.

    Raises:
        TomatError: There are fewer materials than two workers need, or only one core.
    """
    if args.materials < LEAST_MATERIALS:
        raise TomatError(f"--materials is {args.materials}; expected at least {LEAST_MATERIALS}.")
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        raise TomatError("this process may use one core; two workers are compared with one on two.")
    figures: dict[str, Any] = {"cpus": cores, "load_average_1min": os.getloadavg()[0]}
    with scratch(args.folder) as folder:
        config, unit = write_grids(folder, args.materials)
        job = ShardJob.of(config)
        survey_unit(job, unit)
        _, units, write_chunks = start_set(job, unit)
        figures |= measure_workers(write_chunks, units, args.rounds)
    show_figures(figures)
    write_report(args.json, figures)
    return 0


def measure_workers(write_chunks: Callable[[WriteUnit], int], units: list[WriteUnit], rounds: int) -> dict[str, Any]:
    """Measure the write stage with one worker process and with two, each worker on its own core.

    The materials are halved. Two workers write one half each; one worker writes both halves, so the work is the same.
    Each half is written repeatedly, as one unit as long as those of a large set, because a worker waits for the disk at
    the end of a unit. Processes are started, and set and codec read, before the clock starts.

    A worker is restricted to one core, with all its threads. Free on two cores, it uses 1.3 to 1.4 of them, because
    TensorStore compresses and writes one chunk and zarr reads a density while the next chunk is made. Such a worker
    already has much of what two workers have. `free_worker_*` are its figures.

    `two_processes_ceiling_ratio` is the speed-up on this machine for two processes on the same two cores that compute
    in their caches and share nothing. It is below 2 if the cores share a clock budget or are two threads of one core,
    or if other processes run. Other processes may disturb the turns of this loop more than those of the workers: if the
    ceiling is below the workers' ratio, the machine was not quiet, and neither figure says much about tomat. All turns
    alternate, and the fastest of each counts, which was disturbed least.

    Args:
        write_chunks: writes a unit of the set, whose plan exists already; returns its rows.
        units: the whole set, at least `LEAST_MATERIALS` materials.
        rounds: number of turns of each.
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
    """One unit with the chunks of several units, repeated until it has as many materials as a long unit."""
    materials = tuple(dict.fromkeys(material for unit in units for material in unit.materials))
    chunks = tuple(chunk for unit in units for chunk in unit.chunks)
    return WriteUnit(chunks * -(-UNIT_MATERIALS // len(materials)), materials)


def _write(write_chunks: Callable[[WriteUnit], int], cores: set[int], units: list[WriteUnit]) -> tuple[int, float]:
    """Write units on the given cores. Returns the rows and the CPU seconds of all threads."""
    _hold_to(cores)
    began = time.process_time()
    rows = sum(write_chunks(unit) for unit in units)
    return rows, time.process_time() - began


def _search(times: int, cores: set[int]) -> None:
    """Arithmetic and look-ups in 160 kB, which fit into the second-level cache of a core."""
    _hold_to(cores)
    rng = np.random.default_rng(0)
    edges, values = np.sort(rng.random(16_384, dtype=np.float32)), rng.random(8_192, dtype=np.float32)
    for _ in range(times):
        np.searchsorted(edges, values)


def _hold_to(cores: set[int]) -> None:
    """Restrict every thread of this process to these cores. Threads that they start later inherit that."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # the thread has ended since it was listed
            continue


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
