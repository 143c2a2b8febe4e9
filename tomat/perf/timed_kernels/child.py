"""The process that compiles timed kernels for one chip: `python -m tomat.perf.timed_kernels.child REQUEST.json`.

Started by `compile.py`. Many programs in one process: imports take 5 s, a kernel 1 to 8 s.
"""

from __future__ import annotations

import gzip
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from tomat.base.checked_json import with_checksum
from tomat.base.errors import TomatError
from tomat.base.reporting import first_line, write_json
from tomat.perf.plan.compile.process import LLO_DUMP, answer, say
from tomat.perf.plan.plan_cache import RESULT_FILE, keep
from tomat.perf.timed_kernels.timings import KernelTiming

PROGRAM_FILE = "program.hlo.pb.gz"
SCHEDULE_FILE = "schedule.json.gz"
OWN = "tomat_"
"""Operations that begin so are of `own.py`, the others tokamax's (`programs.py`)."""
COMPILING, KEPT, REFUSED_KERNEL = "compiling", "kept", "refused kernel"
"""What is said of a row: its compile began, its answer is kept, it cannot be compiled."""


def _compile_all(request: dict[str, Any]) -> None:
    from tomat.hardware.chips import slice_named
    from tomat.perf.plan.compile.topology import topology_devices

    say("starting")
    device = topology_devices(slice_named(request["slice"]), request["compiler"])[0]
    for name, row in request["kernels"].items():
        say(COMPILING, key=name)
        try:
            folder = Path(request["kernels_dir"]) / name
            _compile(KernelTiming(**row), device, Path(request["work_dir"]), folder, request["listed"])
        except TomatError as error:
            say(REFUSED_KERNEL, key=name, message=str(error))
        else:
            say(KEPT, key=name)


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
