"""What the tunings of kernels with the TPU compiler share: candidates compiled with progress, the end of a report."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tomat.base.progress import progress
from tomat.base.reporting import console, write_report
from tomat.perf.plan.compile.process import Limits
from tomat.perf.plan.plan_cache import GIB

Rows = list[dict[str, Any]]


def compiled(
    args: argparse.Namespace, n_candidates: int, tune: Callable[[Path, Callable[[str], None], Limits], Rows]
) -> Rows:
    """Every candidate planned, with a bar that names the one under way.

    Args:
        args: Of the verb: its name, cache and limits.
        n_candidates: To come.
        tune: Of the cache, of what is to be told the name of a candidate before it is compiled, and of the limits.
    """
    cache_dir = args.cache_dir or Path.home() / ".cache" / "tomat" / args.benchmark
    limits = Limits(args.time_limit_seconds, int(args.memory_limit_gib * GIB), int(args.cache_gib * GIB))
    with progress() as bar:
        task = bar.add_task("compiling", total=n_candidates)
        started = 0

        def on_candidate(name: str) -> None:
            nonlocal started
            bar.update(task, description=name, completed=started)
            started += 1

        rows = tune(cache_dir, on_candidate, limits)
        bar.update(task, completed=started)
    return rows


def report(
    args: argparse.Namespace,
    table: Table,
    shape: object,
    rows: Sequence[Mapping[str, Any]],
    entry: dict[str, Any] | None,
    write_entry: Callable[[dict[str, Any]], None],
) -> None:
    """Print the table and why candidates were refused, write `--json`, and with `--write` the best one's `entry`."""
    console.print(table)
    for reason in sorted({row["refused"] for row in rows if "refused" in row}):
        console.print(reason, style="dim", soft_wrap=True)
    write_report(args.json, {"shape": vars(shape), "candidates": rows})
    if args.write and entry is not None:
        write_entry(entry)
        console.print(f"The table of {args.benchmark.replace('-', ' ')} has the shortest.")
