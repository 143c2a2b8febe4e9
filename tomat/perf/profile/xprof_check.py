"""The same trace through xprof's own converters: per-operation self time and occurrences beside tomat's."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.ports.xprof import hlo_stats
from tomat.perf.profile.hlo_files import XPLANE_SUFFIX
from tomat.perf.profile.timeline import attribute
from tomat.perf.profile.trace import load_trace
from tomat.perf.profile.trace_data import Trace


def require_xprof() -> None:
    if importlib.util.find_spec("xprof") is None:
        raise TomatError("xprof is not installed; install it with `uv sync --extra xprof`.")


def check_against_xprof(path: Path) -> dict[str, float]:
    """A local xplane file or profile directory beside xprof's `hlo_stats` of it, for a JSON report.

    Over the whole trace, all devices; an operation that only one side has counts 0 on the other. Of single operations,
    `largest_difference_seconds` is of their self time, and `occurrences_differ` counts those of other executions.
    """
    require_xprof()
    files = [path] if path.is_file() else sorted(path.rglob(f"*{XPLANE_SUFFIX}"))
    if not files:
        raise TomatError(f"{path}: no *{XPLANE_SUFFIX} file; xprof reads nothing else.")
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
    """(Self time in seconds, executions) of every operation; one window from the first event to the last."""
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
    """The same by xprof's `hlo_stats`, made on a copy: it writes its caches beside the trace."""
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
