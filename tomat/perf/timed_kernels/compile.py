"""Compiles timed kernels for chips that are not here, and keeps what came out.

Processes of one chip each compile row after row (`child.py`). What is kept is found again: a calibration that was
stopped goes on where it was. A kernel that takes too long or takes the compiler down costs its own row.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.errors import TomatError
from tomat.base.ports.libtpu import listing_flags
from tomat.hardware.chips import Slice, slice_named
from tomat.perf.cost.llo_listing import LISTED_CHIPS
from tomat.perf.plan.compile.process import LLO_DUMP, REFUSED, child_process, dump_flags, last_words, stages_of
from tomat.perf.plan.compile.topology import OtherLibtpu, child_environment, compiler_version
from tomat.perf.plan.plan_cache import RESULT_FILE, open_cache, sources_digest, work_folder
from tomat.perf.timed_kernels.child import COMPILING, KEPT, OWN, PROGRAM_FILE, REFUSED_KERNEL, SCHEDULE_FILE
from tomat.perf.timed_kernels.timings import KernelTiming

if TYPE_CHECKING:
    import psutil

CHILD_MODULE = "tomat.perf.timed_kernels.child"
KERNELS = "kernels"
"""Folder of a plan cache that holds them; nothing is evicted there: 1,948 of them take 0.2 GB."""
LONGEST_SECONDS = 300.0
"""CPU time that one kernel may take: by the clock, whatever else runs on the machine would decide which rows count. (At
the lowest priority beside two busy processes a kernel of 10 s took 580.) On quiet cores half take under 5 s."""
LONGEST_WAIT = 30.0
"""Times that, by the clock, a compile is waited for that uses no CPU time at all."""
POLL_SECONDS = 1.0

SMALLEST_SLICES = {"v4": "v4-8", "v5e": "v5e-1", "v5p": "v5p-8", "v6e": "v6e-1", "tpu7x": "tpu7x-8"}
"""The smallest slice of each chip that libtpu 0.0.46 describes; a kernel is compiled for its first device."""


@dataclass(frozen=True)
class Compilers:
    """Which libtpu compiles which timed operation: the installed one, or those that a study is given
    (`profiling/calibrate_with_libtpu.py`)."""

    other: OtherLibtpu | None = None
    """Of every operation that `by_op` does not name; None: the installed one."""
    by_op: Mapping[str, OtherLibtpu] = field(default_factory=dict)

    def of(self, op: str) -> OtherLibtpu | None:
        """What compiles an operation; None: the installed libtpu."""
        return self.by_op.get(op, self.other)

    def name_of(self, op: str) -> str:
        other = self.of(op)
        return compiler_version() if other is None else other.compiler

    def require(self, ops: Iterable[str]) -> None:
        """Refuse a compiler of an operation that there is not."""
        there = sorted(set(ops))
        unknown = [op for op in self.by_op if op not in there]
        if unknown:
            raise TomatError(f"--libtpu names the operation {unknown[0]}; the rows are of {', '.join(there)}.")


@dataclass(frozen=True)
class CompiledKernel:
    """A timed kernel whose program is there, or the reason why not."""

    timing: KernelTiming
    folder: Path | None
    reason: str = ""
    """Why there is no program; "" where there is one."""


def require_tokamax() -> str:
    """`tokamax 0.0.12`, as installed."""
    if importlib.util.find_spec("tokamax") is None:
        raise TomatError(
            "tokamax, whose programs the timed kernels are, is not installed; install it with "
            "`uv sync --extra plan --extra calibrate`."
        )
    return f"tokamax {importlib.metadata.version('tokamax')}"


def compile_kernels(
    timings: Iterable[KernelTiming],
    cache: Path,
    *,
    workers: int = 1,
    compilers: Compilers | None = None,
    on_kernel: Callable[[CompiledKernel], None] = lambda kernel: None,
    longest_seconds: float = LONGEST_SECONDS,
) -> list[CompiledKernel]:
    """Compile the kernels that the cache does not hold.

    Args:
        workers: Processes that compile at once; each keeps a core busy.
        on_kernel: Told each kernel as soon as it is known.
        longest_seconds: CPU time that one kernel may take.
    """
    timings = list(timings)
    cache = cache.absolute()  # a child works in a folder of its own
    open_cache(cache)
    kernels = cache / KERNELS
    kernels.mkdir(exist_ok=True)
    from tomat.perf.timed_kernels.programs import no_program  # imports JAX

    compilers = compilers or Compilers()
    decided_by = {op: _decided_by(op, compilers.name_of(op)) for op in {timing.op for timing in timings}}
    known: list[CompiledKernel] = []
    missing: dict[tuple[str, OtherLibtpu | None], dict[str, KernelTiming]] = {}

    lock = threading.Lock()

    def add(kernel: CompiledKernel) -> None:
        with lock:
            known.append(kernel)
            on_kernel(kernel)

    for timing in timings:
        reason = None if timing.op.startswith(OWN) else no_program(timing)
        if reason is not None:
            add(CompiledKernel(timing, None, reason))
            continue
        words = json.dumps([timing.key, *decided_by[timing.op]])
        name = hashlib.sha256(words.encode()).hexdigest()[:24]
        if all((kernels / name / file).exists() for file in (RESULT_FILE, PROGRAM_FILE, SCHEDULE_FILE)):
            add(CompiledKernel(timing, kernels / name))
        else:
            missing.setdefault((timing.chip, compilers.of(timing.op)), {})[name] = timing
    for (chip, other), rows in missing.items():
        slice_ = slice_named(SMALLEST_SLICES[chip])
        shares = [dict(list(rows.items())[first::workers]) for first in range(min(workers, len(rows)))]
        stop = threading.Event()
        with ThreadPoolExecutor(len(shares)) as pool:
            running = [
                pool.submit(_compile_share, slice_, share, cache, kernels, other, add, longest_seconds, stop)
                for share in shares
            ]
            try:
                for each in as_completed(running):
                    each.result()
            finally:  # an error of one share, or Ctrl-C, ends the others
                stop.set()
    return known


def _decided_by(op: str, compiler: str) -> tuple[list[str], str]:
    """What decides a program besides its row: versions, and the digest of what builds and reads it."""
    own = op.startswith(OWN)
    tokamax = [] if own else [require_tokamax()]
    versions = [compiler, *tokamax, f"jax {importlib.metadata.version('jax')}"]
    return versions, sources_digest(
        f"tomat.perf.timed_kernels.{'own' if own else 'programs'}", "tomat.perf.cost.llo_listing"
    )


def _compile_share(
    slice_: Slice,
    rows: dict[str, KernelTiming],
    cache: Path,
    kernels: Path,
    other: OtherLibtpu | None,
    add: Callable[[CompiledKernel], None],
    longest_seconds: float,
    stop: threading.Event,
) -> None:
    """One process after the other, until each row is kept or refused, or `stop` is set."""
    waiting = dict(rows)
    while waiting and not stop.is_set():
        if other is not None and not other.library.is_file():  # jax 0.11.1 would warn, and take the installed one
            raise TomatError(f"{other.library} is gone; expected {other.compiler} there. Install it again.")
        with work_folder(cache) as work:
            listed = other is None and slice_.chip.name in LISTED_CHIPS
            libtpu_args = listing_flags(work / LLO_DUMP) if listed else dump_flags(work)[0]
            request = {
                "slice": slice_.name,
                "compiler": None if other is None else other.compiler,
                "listed": listed,
                "kernels": {name: _fields(timing) for name, timing in waiting.items()},
                "kernels_dir": str(kernels),
            }
            with child_process(CHILD_MODULE, request, work, child_environment(slice_, libtpu_args, [], other)) as child:
                current, ended = _listen(child, waiting, kernels, add, longest_seconds, stop)
            if not waiting or stop.is_set():
                return
            tail = last_words(work, 1)
        if current is None:
            raise TomatError(
                f"the process that compiles kernels for {slice_.name} {ended}: {' '.join(tail)[:300] or 'no message'}."
            )
        add(CompiledKernel(waiting.pop(current), None, f"the compiling process {ended}"))


def _listen(
    child: subprocess.Popen[str],
    waiting: dict[str, KernelTiming],
    kernels: Path,
    add: Callable[[CompiledKernel], None],
    longest_seconds: float,
    stop: threading.Event,
) -> tuple[str | None, str]:
    """Take rows out of `waiting` as the child says them; (the row it was at, how it ended) where rows are left."""
    import psutil

    current = None
    process = psutil.Process(child.pid)
    spent, began = _cpu_seconds(process), time.monotonic()
    for stage in stages_of(child, min(POLL_SECONDS, longest_seconds)):
        if stop.is_set():
            return None, ""
        if stage is None:
            if _cpu_seconds(process) - spent > longest_seconds:
                return current, f"took longer than {longest_seconds:.0f} s of CPU time"
            if time.monotonic() - began > LONGEST_WAIT * longest_seconds:
                return current, f"took longer than {LONGEST_WAIT * longest_seconds:.0f} s"
            continue
        spent, began = _cpu_seconds(process), time.monotonic()
        if stage["stage"] == REFUSED:
            raise TomatError(stage["message"])
        if stage["stage"] == COMPILING:
            current = stage["key"]
        elif stage["stage"] == KEPT:
            add(CompiledKernel(waiting.pop(stage["key"]), kernels / stage["key"]))
        elif stage["stage"] == REFUSED_KERNEL:
            add(CompiledKernel(waiting.pop(stage["key"]), None, stage["message"]))
        if not waiting:
            return None, ""
    return current, f"ended with status {child.wait()}"


def _cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a process so far; 0 of one that is gone, which its closed output says."""
    import psutil

    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


def _fields(timing: KernelTiming) -> Mapping[str, Any]:
    return {name: value for name, value in asdict(timing).items() if name not in ("key", "shape_key")}
