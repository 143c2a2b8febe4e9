"""Compiles timed kernels for chips that are not here, and keeps what came out.

Processes of one chip each, `python -m tomat.perf.timed_kernels.compile REQUEST.json`, compile row after row: their
imports take 5 s, a kernel 1 to 8 s. What is kept is found again: a calibration that was stopped goes on where it was.
A kernel that takes too long or takes the compiler down costs its own row.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.checked_json import with_checksum
from tomat.base.errors import TomatError
from tomat.base.ports.libtpu import listing_flags
from tomat.base.reporting import first_line, write_json
from tomat.hardware.chips import slice_named
from tomat.perf.cost.llo_listing import LISTED_CHIPS
from tomat.perf.plan.compile.process import (
    LLO_DUMP,
    REFUSED,
    answer,
    child_process,
    dump_flags,
    last_words,
    say,
    stages_of,
)
from tomat.perf.plan.compile.topology import OtherLibtpu, child_environment, compiler_version, topology_devices
from tomat.perf.plan.plan_cache import RESULT_FILE, keep, open_cache, sources_digest, work_folder
from tomat.perf.timed_kernels.timings import KernelTiming

if TYPE_CHECKING:
    import psutil

CHILD_MODULE = "tomat.perf.timed_kernels.compile"
PROGRAM_FILE = "program.hlo.pb.gz"
SCHEDULE_FILE = "schedule.json.gz"
OWN = "tomat_"
"""Operations that begin so are of `own.py`, the others tokamax's (`programs.py`)."""
COMPILING, ANSWERED = "compiling", "answered"
"""What is said of a row: its compile began; its program is kept, or there is a reason why there is none."""
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


CompilerOf = Callable[[str], OtherLibtpu | None]
"""Operation -> the libtpu that compiles it, as a study gives it (`profiling/calibrate_with_libtpu.py`); None: the
installed one."""


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
        how = "install it with `uv sync --extra plan --extra calibrate`"
        raise TomatError(f"tokamax, whose programs the timed kernels are, is not installed; {how}.")
    return f"tokamax {importlib.metadata.version('tokamax')}"


def compile_kernels(
    timings: Iterable[KernelTiming],
    cache: Path,
    *,
    workers: int = 1,
    compiler_of: CompilerOf = lambda op: None,
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

    decided_by = {}
    for op in {timing.op for timing in timings}:
        tokamax = [] if op.startswith(OWN) else [require_tokamax()]
        versions = [compiler_version(compiler_of(op)), *tokamax, f"jax {importlib.metadata.version('jax')}"]
        builder = f"tomat.perf.timed_kernels.{'programs' if tokamax else 'own'}"
        decided_by[op] = versions, sources_digest(builder, "tomat.perf.cost.llo_listing")
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
            missing.setdefault((timing.chip, compiler_of(timing.op)), {})[name] = timing
    for (chip, other), rows in missing.items():
        shares = [dict(list(rows.items())[first::workers]) for first in range(min(workers, len(rows)))]
        stop = threading.Event()
        with ThreadPoolExecutor(len(shares)) as pool:
            running = [
                pool.submit(_compile_share, chip, share, cache, other, add, longest_seconds, stop) for share in shares
            ]
            try:
                for each in as_completed(running):
                    each.result()
            finally:  # an error of one share, or Ctrl-C, ends the others
                stop.set()
    return known


def _compile_share(
    chip: str,
    waiting: dict[str, KernelTiming],
    cache: Path,
    other: OtherLibtpu | None,
    add: Callable[[CompiledKernel], None],
    longest_seconds: float,
    stop: threading.Event,
) -> None:
    """One process after the other, until each row is kept or refused and taken out of `waiting`, or `stop` is set."""
    slice_, kernels = slice_named(SMALLEST_SLICES[chip]), cache / KERNELS
    while waiting and not stop.is_set():
        if other is not None and not other.library.is_file():  # jax 0.11.1 would warn, and take the installed one
            raise TomatError(f"{other.library} is gone; expected {compiler_version(other)} there. Install it again.")
        with work_folder(cache) as work:
            listed = other is None and chip in LISTED_CHIPS
            libtpu_args = listing_flags(work / LLO_DUMP) if listed else dump_flags(work)[0]
            request = {
                "slice": slice_.name,
                "compiler": None if other is None else compiler_version(other),
                "listed": listed,
                "kernels": {name: asdict(timing) for name, timing in waiting.items()},
                "kernels_dir": str(kernels),
            }
            with child_process(CHILD_MODULE, request, work, child_environment(slice_, libtpu_args, [], other)) as child:
                current, ended = _listen(child, waiting, kernels, add, longest_seconds, stop)
            tail = " ".join(last_words(work, 1))[:300] or "no message"
        if not waiting or stop.is_set():
            return
        if current is None:
            raise TomatError(f"the process that compiles kernels for {slice_.name} {ended}: {tail}.")
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
        elif stage["stage"] == ANSWERED:
            folder = None if stage["reason"] else kernels / stage["key"]
            add(CompiledKernel(waiting.pop(stage["key"]), folder, stage["reason"]))
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


def _compile_all(request: dict[str, Any]) -> None:
    say("starting")
    device = topology_devices(slice_named(request["slice"]), request["compiler"])[0]
    for name, row in request["kernels"].items():
        say(COMPILING, key=name)
        reason = ""
        try:
            folder = Path(request["kernels_dir"]) / name
            _compile(KernelTiming(**row), device, Path(request["work_dir"]), folder, request["listed"])
        except TomatError as error:
            reason = str(error)
        say(ANSWERED, key=name, reason=reason)


def _compile(timing: KernelTiming, device: Any, work: Path, folder: Path, listed: bool) -> None:
    """Compile one kernel and keep its program, its schedule and its memory in `folder`; `listed`: the compiler writes
    listings, not the final bundles."""
    from tomat.perf.cost.llo import read_schedules, write_schedules
    from tomat.perf.cost.llo_listing import read_listed_schedules

    if timing.op.startswith(OWN):
        from tomat.perf.timed_kernels.own import lower_own as lower
    else:
        from tomat.perf.timed_kernels.programs import lower_kernel as lower

    dumped, part = work / LLO_DUMP, work / "part"
    for place in (dumped, part):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    began = time.perf_counter()
    lowered: Any = lower(timing, device)
    try:
        compiled = lowered.compile()
    except Exception as error:  # JaxRuntimeError, of which jax exports no stable name
        raise TomatError(f"the compiler refuses it: {first_line(error)[:300]}") from None
    compile_seconds = time.perf_counter() - began
    loaded = compiled.runtime_executable()
    assert loaded is not None
    module = loaded.hlo_modules()[0].as_serialized_hlo_module_proto()
    (part / PROGRAM_FILE).write_bytes(gzip.compress(module, compresslevel=6, mtime=0))
    read = read_listed_schedules if listed else read_schedules
    write_schedules(part / SCHEDULE_FILE, read(dumped))
    # jax 0.11.1: of the program as it is loaded, arguments and outputs included; what tokamax records.
    memory = compiled.memory_analysis()
    assert memory is not None
    result = {"peak_memory_bytes": memory.peak_memory_in_bytes, "compile_seconds": compile_seconds}
    write_json(part / RESULT_FILE, with_checksum(result))
    keep(part, folder)


if __name__ == "__main__":
    sys.exit(answer(sys.argv[1], _compile_all))
