"""Compiles a single kernel for a chip that is not present, in a separate process.

`python -m tomat.perf.timed_kernels.compile REQUEST.json` is that process for a timed kernel; `programs.py` starts it.
`perf/plan/compile/process.py` says why it is separate.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.reporting import first_line
from tomat.hardware.chips import slice_named
from tomat.perf.plan.compile.process import LLO_DUMP, answer, keep_answer, say
from tomat.perf.plan.compile.topology import topology_devices
from tomat.perf.plan.plan_cache import keep_program
from tomat.perf.timed_kernels.timings import KernelTiming

CHILD_MODULE = "tomat.perf.timed_kernels.compile"


def compile_kernel(request: dict[str, Any], lower: Callable[[KernelTiming, Any], Any]) -> None:
    """`compile_alone` for a timing."""
    compile_alone(request, partial(lower, KernelTiming(**request["timing"])))


def compile_alone(request: dict[str, Any], lower: Callable[[Any], Any]) -> None:
    """Keep a program, its schedules and its memory, or the reason for a refusal. `lower` gives the lowered program
    (`jax.stages.Lowered`) for a described device. The request has `slice`, `compiler` and the answer's `key`."""
    say("starting")
    device = topology_devices(slice_named(request["slice"]), request["compiler"])[0]
    part = Path(request["work_dir"]) / "part"
    part.mkdir()
    try:
        result = _compiled(lower(device), part, Path(request["work_dir"]) / LLO_DUMP)
    except TomatError as error:  # a refusal is an answer too
        result = {"refused": str(error)}
    keep_answer(result, part, Path(request["programs_dir"]) / request["key"])


def _compiled(lowered: Any, part: Path, llo_dump: Path) -> dict[str, Any]:
    """Compile a program, and leave it in `part`. Returns memory and compile time."""
    say("compiling")
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except Exception as error:  # JaxRuntimeError, for which jax exports no stable name
        raise TomatError(f"the compiler refuses it: {first_line(error)[:300]}") from None
    compile_seconds = time.perf_counter() - began
    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    keep_program(part, module, llo_dump)
    # jax 0.11.1: the memory of the loaded program, with arguments and outputs. tokamax records the same.
    memory = compiled.memory_analysis()
    return {
        "status": "fits",
        "peak_memory_bytes": memory.peak_memory_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "compile_seconds": compile_seconds,
    }


if __name__ == "__main__":
    from tomat.perf.timed_kernels.own import lower_own

    sys.exit(answer(sys.argv[1], partial(compile_kernel, lower=lower_own)))
