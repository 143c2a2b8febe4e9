"""Timed kernels with their compiled programs, from the plan cache or by compiling them, and the work of one run.

Compiled programs are found again, so a calibration that was stopped continues where it was. A kernel that compiles too
long, or crashes the compiler, loses only its own row.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from tomat.base.errors import TomatError
from tomat.hardware.chips import TPU_SLICES, Slice
from tomat.perf.cost.chip_model import ChipModel, KernelWork, Parameters
from tomat.perf.cost.estimate import PALLAS_TARGET, estimate_step
from tomat.perf.plan.compile.process import Limits, RequestRefused, ask, end_pool
from tomat.perf.plan.compile.topology import compiler_version
from tomat.perf.plan.plan_cache import PROGRAM_FILES, kept_program, open_cache, open_result, sources_digest
from tomat.perf.timed_kernels.compile import CHILD_MODULE
from tomat.perf.timed_kernels.timings import OWN, KernelTiming, RefusedRow

SOURCES = ("tomat.perf.timed_kernels.own", "tomat.perf.cost.llo")
"""The modules that build tomat's own programs and read their schedules."""


class Compiler(NamedTuple):
    name: str
    """Such as `libtpu 0.0.46`."""
    library: Path | None = None
    """The library of a compiler that is not the installed one (`profiling/calibrate_with_libtpu.py`)."""


CompilerOf = Callable[[str], Compiler]
"""Operation -> the compiler that compiles it."""


def installed_compiler(op: str) -> Compiler:
    return Compiler(compiler_version())


@dataclass(frozen=True)
class ProgramWork:
    kernels: tuple[tuple[KernelWork, float], ...]
    """Each kernel, and how often it runs."""
    unscheduled_pallas: tuple[str, ...]
    """Names of the Pallas kernels for which no schedule was found."""


@dataclass(frozen=True)
class TimedProgram:
    timing: KernelTiming
    work: ProgramWork
    peak_memory_bytes: int
    compile_seconds: float

    @property
    def memory_error(self) -> float | None:
        """Planned peak memory divided by the recorded one, minus one; None if the file has none."""
        recorded = self.timing.peak_memory_bytes
        return self.peak_memory_bytes / recorded - 1.0 if recorded else None


def kept_work(folder: Path, slice_: Slice) -> ProgramWork:
    program, schedules = kept_program(folder, "calibrate")
    # Only the work is read, which needs no parameters of the chip; there may be none yet.
    model = ChipModel(slice_.chip.name, Parameters(), borrowed=True)
    step = estimate_step(program, schedules, slice_, title="kernel", model=model)
    ops = step.ops.values()
    pallas = (op for op in ops if program.by_name[op.name].custom_call_target == PALLAS_TARGET)
    return ProgramWork(
        kernels=tuple((op.work, op.executions) for op in ops if op.work is not None and op.executions),
        unscheduled_pallas=tuple(op.name for op in pallas if op.schedule is None),
    )


def timed_programs(
    timings: Sequence[KernelTiming],
    cache: Path,
    *,
    workers: int = 1,
    limits: Limits | None = None,
    child: str = CHILD_MODULE,
    decided_by: str = "",
    compiler_of: CompilerOf = installed_compiler,
) -> Iterator[TimedProgram | RefusedRow]:
    """Each timing with its program, or the reason why it has none, in order. `workers` programs are compiled at once.

    `child` is the module that compiles a program. `decided_by` names what its programs depend on beside the compiler
    and tomat's own sources. `limits` apply to one compile.
    """
    programs = open_cache(cache)
    versions = [f"jax {importlib.metadata.version('jax')}", sources_digest(*SOURCES), decided_by]

    def program(timing: KernelTiming) -> TimedProgram | RefusedRow:
        if child == CHILD_MODULE and not timing.op.startswith(OWN):
            how = "profiling/calibrate_with_libtpu.py of a checkout compiles tokamax's"
            return RefusedRow(timing.line, f"{timing.op} is no operation of tomat's own; {how}")
        compiler, library = compiler_of(timing.op)
        words = json.dumps([timing.key, compiler, *versions])
        key = hashlib.sha256(words.encode()).hexdigest()[:24]
        # The first slice is the smallest that libtpu 0.0.46 describes. A kernel is compiled for its first device.
        slice_ = next(one for one in TPU_SLICES.values() if one.chip.name == timing.chip)
        kept = open_result(programs / key, PROGRAM_FILES)
        if kept is None:
            if library is not None and not library.is_file():  # jax 0.11.1 would warn, and take the installed one
                raise TomatError(f"{library} is gone; expected {compiler} there. Install it again.")
            request = {"key": key, "slice": slice_.name, "compiler": compiler, "timing": asdict(timing)}
            try:
                kept = ask(child, request, slice_, cache, limits or Limits(), library=library)
            except RequestRefused:  # the chip cannot be described, so none of its rows can be compiled
                raise
            except TomatError as error:
                return RefusedRow(timing.line, " ".join(str(error).split())[:300])
        with kept.lock:
            if "refused" in kept.result:
                return RefusedRow(timing.line, kept.result["refused"])
            work = kept_work(kept.folder, slice_)
            return TimedProgram(timing, work, kept.result["peak_memory_bytes"], kept.result["compile_seconds"])

    pool = ThreadPoolExecutor(workers)
    futures = [pool.submit(program, timing) for timing in timings]
    try:
        for future in futures:
            yield future.result()
    finally:
        end_pool(pool, futures, child)
