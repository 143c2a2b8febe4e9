"""Compiles a training step for a TPU slice in a process of its own, with limits and a cache.

The cache is a folder. `requests/` maps a configuration, before it is lowered, to a program; `programs/` holds what was
found, by the hash of the lowered module, the slice, the compiler and its flags. Two configurations that lower to the
same module share the compile. A request counts for the sources and packages that it was lowered with (`plan_cache.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tomat.base.documents import take_out
from tomat.base.progress import DONE
from tomat.base.reporting import write_json
from tomat.hardware.chips import Slice
from tomat.perf.cost.memory import MemoryReport, read_memory
from tomat.perf.plan.compile.child import MEMORY_SUFFIX, PROGRAM_FILE, SCHEDULE_FILE, needed_files
from tomat.perf.plan.compile.process import Limits, ask, request_key
from tomat.perf.plan.compile.topology import compiler_version, data_axis_size
from tomat.perf.plan.plan_cache import default_cache_dir, open_cache, open_result

if TYPE_CHECKING:
    from tomat.perf.cost.llo import OpSchedule
    from tomat.perf.plan.compile.lowering import DecoderBatch  # imports JAX
    from tomat.perf.profile.hlo import HloProgram
    from tomat.train.settings.config import TrainConfig

CHILD_MODULE = "tomat.perf.plan.compile.child"
"""What lowers and compiles; its imports are what decides an answer."""


@dataclass(frozen=True)
class CompiledStep:
    """One training step compiled for one slice, as the cache holds it."""

    folder: Path
    result: dict[str, Any]
    cached: bool
    lock: IO[bytes] | None = field(default=None, repr=False, compare=False)
    """Keeps the folder from being evicted as long as this object lives."""

    @property
    def key(self) -> str:
        return self.folder.name

    @property
    def fits(self) -> bool:
        return self.result["status"] == "fits"

    @property
    def compiler(self) -> str:
        return self.result["compiler"]

    @cached_property
    def memory(self) -> MemoryReport:
        return read_memory(self.result["memory"])

    @cached_property
    def program(self) -> HloProgram:
        """The optimised module; only of a step that fits."""
        from tomat.perf.profile.hlo_files import load_program

        return load_program(self.folder / PROGRAM_FILE)

    @cached_property
    def schedules(self) -> dict[str, OpSchedule]:
        """The final schedule of each operation, by the name of its HLO instruction; only of a step that fits."""
        from tomat.perf.cost.llo import kept_schedules

        return kept_schedules(self.folder / SCHEDULE_FILE, f"Delete {self.folder} and plan again.")


def compile_step(
    config: TrainConfig,
    slice_: Slice,
    *,
    cache_dir: Path | None = None,
    limits: Limits | None = None,
    decode: DecoderBatch | None = None,
    value_table: np.ndarray | None = None,
    executable: bool = False,
    memory_only: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> CompiledStep:
    """Compile the step of `config` for `slice_`, or find it in the cache. A program that needs too much memory is an
    answer, not an error.

    Args:
        decode: Compile this decoder of its model instead.
        value_table: Densities of the bins, as the run's codec has them; default: a stand-in, which changes no
            operation.
        executable: Keep the serialised executable too.
        memory_only: Stop when the memory in HBM is known, before the code is made: a tenth of the time, and without
            `program` and `schedules`. Whether the kernels' tiles fit the memory on the chip is not known then.
        on_stage: Told `starting`, `lowering`, then `compiling` and `reading`, or `cached`; what was removed from a full
            cache; and last `done`. Nothing of what is found before a process is started.
    """
    if decode is None:
        config.check_step()
    compiler = compiler_version()
    limits = limits or Limits()
    devices = data_axis_size(config, slice_.n_devices)
    if decode is None:
        config.check_batch(devices, f" on {slice_.name}")
    cache = cache_dir or default_cache_dir()
    programs = open_cache(cache)
    request = {
        "config": config.to_dict(),
        "slice": slice_.name,
        "compiler": compiler,
        "libtpu_args": list(config.compiler.libtpu_args),
        "xla_flags": list(config.compiler.xla_flags),
    }
    if decode is not None:
        request["decode"] = asdict(decode)
    name = _request_key(request, value_table)
    request_file = cache / "requests" / f"{name}.json"
    found = _from_cache(request_file, programs, executable)
    if found is None and memory_only:
        request_file = cache / "requests" / f"{name}{MEMORY_SUFFIX}.json"
        found = _from_cache(request_file, programs, False)
    if found is not None:
        return found
    table = {"values": value_table.tolist(), "dtype": str(value_table.dtype)} if value_table is not None else None
    whole = request | {"value_table": table, "executable": executable, "memory_only": memory_only}
    answer = ask(CHILD_MODULE, whole, slice_, cache, limits, on_stage=on_stage, on_removed=on_stage)
    write_json(request_file, {"program": answer.folder.name})
    on_stage(DONE)
    return CompiledStep(answer.folder, answer.result, cached=False, lock=answer.lock)


def _from_cache(request_file: Path, programs: Path, executable: bool) -> CompiledStep | None:
    try:
        folder = programs / json.loads(request_file.read_text(encoding="utf-8"))["program"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    kept = open_result(folder, needed_files(folder, executable))
    return CompiledStep(folder, kept.result, cached=True, lock=kept.lock) if kept is not None else None


def _request_key(request: dict[str, Any], value_table: np.ndarray | None) -> str:
    from tomat.train.settings.meanings import keys_beside_step

    config = json.loads(json.dumps(request["config"], default=str))
    for key in keys_beside_step():
        take_out(config, key)
    table = hashlib.sha256(value_table.tobytes()).hexdigest() if value_table is not None else None
    return request_key([request | {"config": config}, table], CHILD_MODULE)
