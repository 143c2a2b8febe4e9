"""Compiles a timed kernel for a chip that is not here, in a process of its own.

`python -m tomat.perf.timed_kernels.compile REQUEST.json` is that process (`perf/plan/compile/process.py` says why
apart); `programs.py` asks it.
"""

import gzip
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.reporting import first_line
from tomat.hardware.chips import slice_named
from tomat.perf.plan.compile.process import LLO_DUMP, answer, answer_or_refusal, say
from tomat.perf.plan.compile.topology import topology_devices
from tomat.perf.timed_kernels.timings import KernelTiming

CHILD_MODULE = "tomat.perf.timed_kernels.compile"
PROGRAM_FILE = "program.hlo.pb.gz"
SCHEDULE_FILE = "schedule.json.gz"


def compile_kernel(request: dict[str, Any], lower: Callable[[KernelTiming, Any], Any]) -> None:
    """Keep the program of a timing, its schedules and its memory, or why it has none. `lower` gives the lowered program
    (`jax.stages.Lowered`) for a described device."""
    say("starting")
    device = topology_devices(slice_named(request["slice"]), request["compiler"])[0]

    def found(part: Path) -> dict[str, Any]:
        from tomat.perf.cost.llo import read_schedules, write_schedules

        lowered = lower(KernelTiming(**request["timing"]), device)
        say("compiling")
        began = time.perf_counter()
        try:
            compiled = lowered.compile()
        except Exception as error:  # JaxRuntimeError, of which jax exports no stable name
            raise TomatError(f"the compiler refuses it: {first_line(error)[:300]}") from None
        compile_seconds = time.perf_counter() - began
        module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
        (part / PROGRAM_FILE).write_bytes(gzip.compress(module, compresslevel=6, mtime=0))
        write_schedules(part / SCHEDULE_FILE, read_schedules(Path(request["work_dir"]) / LLO_DUMP))
        # jax 0.11.1: of the program as it is loaded, arguments and outputs included; what tokamax records.
        memory = compiled.memory_analysis().peak_memory_in_bytes
        return {"status": "fits", "peak_memory_bytes": memory, "compile_seconds": compile_seconds}

    answer_or_refusal(request, found)


if __name__ == "__main__":
    from tomat.perf.timed_kernels.own import lower_own

    sys.exit(answer(sys.argv[1], partial(compile_kernel, lower=lower_own)))
