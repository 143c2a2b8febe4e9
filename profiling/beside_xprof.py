"""Compares tomat's reading of a trace with xprof's own converters: self time and occurrences of each operation."""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tomat.app.cli import main
from tomat.base.arguments import Parser, report_file
from tomat.base.errors import TomatError
from tomat.base.reporting import console, write_report
from tomat.perf.profile.hlo_files import XPLANE_SUFFIX
from tomat.perf.profile.load import profile_place
from tomat.perf.profile.timeline import attribute
from tomat.perf.profile.trace import load_trace, natural_order
from tomat.perf.profile.trace_data import Trace

VERSION = "2.24.2"
"""Version of xprof whose functions are called here: its documentation describes only the pages in the browser."""


def hlo_stats(files: list[str]) -> list[dict[str, Any]]:
    """Rows of xprof's table of operations, by column id; empty if xprof finds no device operations.

    The columns include `hlo_op_name` (`IDLE` means no operation), `total_self_time` (us) and `occurrences`.

    Args:
        files: xplane files of one session. xprof writes its caches beside them.
    """
    from xprof.convert import raw_to_tool_data

    with _quiet():
        data, _ = raw_to_tool_data.xspace_to_tool_data(files, "hlo_stats", {"use_saved_result": False})
    if not data:
        return []
    table = json.loads(data)
    table = table[0] if isinstance(table, list) else table
    names = [column["id"] for column in table["cols"]]
    return [dict(zip(names, (cell["v"] for cell in row["c"]), strict=True)) for row in table["rows"]]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence file descriptor 2, because xprof's C++ code logs to it at any log level."""
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)


def check_against_xprof(path: Path) -> dict[str, float]:
    """Compare a local xplane file or profile directory with xprof's `hlo_stats`.

    It covers the whole trace and all devices. An operation that only one side has counts 0 on the other. The largest
    difference is in the self time of one operation; `occurrences_differ` counts operations whose executions differ.
    """
    if importlib.util.find_spec("xprof") is None:
        raise TomatError("xprof is not installed; install it with `uv sync --extra xprof`.")
    files = [path] if path.is_file() else sorted(path.rglob(f"*{XPLANE_SUFFIX}"))
    if not files:
        raise TomatError(f"{path}: no *{XPLANE_SUFFIX} file; xprof reads nothing else.")
    # Of several sessions the newest, as tomat reads it.
    newest = max(
        (file.parent for file in files), key=lambda place: (natural_order(place.name), natural_order(str(place)))
    )
    files = [file for file in files if file.parent == newest]
    theirs = _xprof_ops(files)
    if not theirs:
        raise TomatError(f"{path}: xprof finds no device operations in it. Its tables need a TPU or GPU plane.")
    mine = _tomat_ops(load_trace(path))
    names = {*mine, *theirs}
    return {
        "n_operations": len(names),
        "tomat_self_seconds": sum(seconds for seconds, _ in mine.values()),
        "xprof_self_seconds": sum(seconds for seconds, _ in theirs.values()),
        "largest_difference_seconds": max(abs(mine[name][0] - theirs[name][0]) for name in names),
        "occurrences_differ": sum(mine[name][1] != theirs[name][1] for name in names),
    }


def _tomat_ops(trace: Trace) -> defaultdict[str, list[float]]:
    """(Self time in seconds, executions) of every operation, in one window from the first to the last event."""
    totals: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for device in trace.devices:
        ends = device.ops.start_ps + device.ops.duration_ps
        window = np.array([[device.ops.start_ps.min(), ends.max() + 1]])
        none = np.zeros(len(device.kinds), dtype=bool)
        result = attribute(device.ops, device.async_ops, none, window, np.empty((0, 2), np.int64))
        for kind, ps, n in zip(device.kinds, result.exclusive_ps, result.occurrences, strict=True):
            totals[kind.name][0] += float(ps) / 1e12
            totals[kind.name][1] += int(n)
    return totals


def _xprof_ops(files: list[Path]) -> defaultdict[str, list[float]]:
    """The same from xprof's `hlo_stats`. It runs on a copy, because xprof writes its caches beside the trace."""
    with tempfile.TemporaryDirectory(prefix="tomat-xprof-") as scratch:
        session = Path(scratch) / "plugins" / "profile" / "session"
        session.mkdir(parents=True)
        copies = [str(shutil.copy(file, session / file.name)) for file in files]
        rows = hlo_stats(copies)
    totals: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for row in rows:
        if row["hlo_op_name"] != "IDLE":
            totals[row["hlo_op_name"]][0] += float(row["total_self_time"]) / 1e6
            totals[row["hlo_op_name"]][1] += int(row["occurrences"])
    return totals


def build_parser() -> Parser:
    parser = Parser(
        prog="python profiling/beside_xprof.py",
        description="Compare the self time of every operation of a trace with xprof's own (uv sync --extra xprof).",
    )
    parser.add_argument("--profile", type=Path, metavar="PROFILE", required=True, help="an xplane file, or a folder")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the comparison")
    parser.set_defaults(run=run)
    parser.examples = (f"{parser.prog} --profile runs/demo",)
    return parser


def run(args: argparse.Namespace) -> int:
    """Compare a profile with xprof and report the differences."""
    check = check_against_xprof(Path(profile_place(str(args.profile))))
    console.print(
        f"xprof: self time {check['xprof_self_seconds']:.9f} s over {check['n_operations']} operations, tomat "
        f"{check['tomat_self_seconds']:.9f} s; largest difference of one operation "
        f"{check['largest_difference_seconds']:.3g} s"
    )
    write_report(args.json, check)
    return 0


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
