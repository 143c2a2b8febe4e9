"""Compiles a training step or a decoder for a TPU slice in a separate process, with limits and a cache.

That process is `python -m tomat.perf.plan.compile.compiler REQUEST.json`; `process.py` says why it is separate. The
cache is a folder. `requests/` maps a configuration, before it is lowered, to a program. `programs/` holds the results,
by the hash of the lowered module, the slice, the compiler and its flags. Two configurations that lower to the same
module share the compile. A request is valid for the sources and packages that it was lowered with (`plan_cache.py`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tomat.base.documents import take_out
from tomat.base.errors import TomatError
from tomat.base.progress import DONE
from tomat.base.reporting import first_line, write_json
from tomat.hardware.chips import Slice, slice_named
from tomat.perf.cost.memory import MemoryReport, memory_of_compiled, memory_of_oom, read_memory
from tomat.perf.plan.compile.process import LLO_DUMP, XLA_DUMP, Limits, answer, ask, keep_answer, request_key, say
from tomat.perf.plan.compile.topology import compiler_version, data_axis_size, slice_mesh, topology_devices
from tomat.perf.plan.plan_cache import (
    PROGRAM_FILES,
    RESULT_FILE,
    default_cache_dir,
    keep_program,
    kept_program,
    open_cache,
    open_result,
    sources_digest,
)

if TYPE_CHECKING:
    from tomat.perf.cost.llo import OpSchedule
    from tomat.perf.plan.compile.lowering import DecoderBatch  # imports JAX
    from tomat.perf.profile.hlo import HloProgram
    from tomat.train.settings.config import TrainConfig

CHILD_MODULE = "tomat.perf.plan.compile.compiler"
"""The module that lowers and compiles. The sources that it imports are part of a request's key."""
CACHE_FORMAT = 1
"""Format of the cached results. A new number makes old entries invisible."""

EXECUTABLE_FILE = "executable.bin"

MEMORY_SUFFIX = "-memory"
"""Ends the key of a compile that was stopped when its memory was known."""


@dataclass(frozen=True)
class CompiledStep:
    """One training step compiled for one slice, as the cache holds it."""

    folder: Path
    result: dict[str, Any]
    cached: bool
    lock: IO[bytes] | None = field(default=None, repr=False, compare=False)
    """While this object lives, the folder is not evicted."""

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
        of = self.folder / RESULT_FILE
        return read_memory(self.result["memory"], of, f"Delete {self.folder} and plan again.")

    @cached_property
    def made(self) -> tuple[HloProgram, dict[str, OpSchedule]]:
        """The optimised module, and the final schedule of each operation; only for a step that fits."""
        return kept_program(self.folder)


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

    `decode` compiles that decoder of the model instead. `value_table` holds the densities of the bins in the run's
    codec (default: a stand-in, which changes no operation). `executable` keeps the serialised executable too.
    `memory_only` stops when the memory in HBM is known, before code generation. It takes a tenth of the time, gives no
    program and no schedules, and does not tell whether the kernels' tiles fit into VMEM. `on_stage` is called with
    `starting`, `lowering`, then `compiling` and `reading`, or `cached`; with what was removed from a full cache; and
    with `done` at the end. It is not called for an answer that is found before a process is started.
    """
    from tomat.train.settings.meanings import keys_beside_step

    if decode is None:
        config.check_step()
        config.check_batch(data_axis_size(config, slice_.n_devices), f" on {slice_.name}")
    compiler = compiler_version()
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
    of_step = json.loads(json.dumps(request["config"], default=str))
    for key in keys_beside_step():
        take_out(of_step, key)
    digest = hashlib.sha256(value_table.tobytes()).hexdigest() if value_table is not None else None
    name = request_key([request | {"config": of_step}, digest], CHILD_MODULE)
    request_file = cache / "requests" / f"{name}.json"
    found = _from_cache(request_file, programs, executable)
    if found is None and memory_only:
        request_file = cache / "requests" / f"{name}{MEMORY_SUFFIX}.json"
        found = _from_cache(request_file, programs, False)
    if found is not None:
        return found
    table = {"values": value_table.tolist(), "dtype": str(value_table.dtype)} if value_table is not None else None
    whole = request | {"value_table": table, "executable": executable, "memory_only": memory_only}
    made = ask(CHILD_MODULE, whole, slice_, cache, limits or Limits(), on_stage=on_stage, on_removed=on_stage)
    write_json(request_file, {"program": made.folder.name})
    on_stage(DONE)
    return CompiledStep(made.folder, made.result, cached=False, lock=made.lock)


def _from_cache(request_file: Path, programs: Path, executable: bool) -> CompiledStep | None:
    try:
        folder = programs / json.loads(request_file.read_text(encoding="utf-8"))["program"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    kept = open_result(folder, needed_files(folder, executable))
    return CompiledStep(folder, kept.result, cached=True, lock=kept.lock) if kept is not None else None


def needed_files(folder: Path, executable: bool) -> list[str]:
    """Files that the answer in `folder` has beside its result if the step fits."""
    if folder.name.endswith(MEMORY_SUFFIX):
        return []
    return [*PROGRAM_FILES, *([EXECUTABLE_FILE] if executable else [])]


def is_kept(folder: Path, executable: bool) -> bool:
    """Whether the cache holds an answer in `folder` that the asking process will accept."""
    kept = open_result(folder, needed_files(folder, executable))
    if kept is not None:
        kept.lock.close()
    return kept is not None


def _compile(request: dict[str, Any]) -> None:
    import jax

    from tomat.perf.plan.compile.lowering import DecoderBatch, lower_decoder, lower_step, stand_in_table
    from tomat.train.settings.config import config_from_dict

    say("starting")
    slice_ = slice_named(request["slice"])
    # Levanter asks JAX how many devices there are (`lowering.py`).
    jax.config.update("jax_num_cpu_devices", slice_.n_devices)
    # A Pallas kernel carries the source lines of its operations into the module. Without this, another checkout of the
    # same tomat would compile everything again.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", "^.*/(?=tomat/)")
    config = config_from_dict(request["config"], source="the configuration to plan")
    set_jax_options(config.trainer.jax_config)
    mesh = slice_mesh(config, topology_devices(slice_))
    stated = request["value_table"]
    table = np.asarray(stated["values"], stated["dtype"]) if stated else stand_in_table(config)
    say("lowering")
    began = time.perf_counter()
    try:
        if request.get("decode") is None:
            lowered = lower_step(config, mesh, table)
        else:
            lowered = lower_decoder(config, mesh, DecoderBatch(**request["decode"]), table)
    except TomatError:
        raise
    except Exception as error:  # whatever the model, the loss or JAX raise while tracing
        raise TomatError(f"the program cannot be lowered for {slice_.name}: {first_line(error)}") from error
    lower_seconds = time.perf_counter() - began
    text_sha256 = hashlib.sha256(lowered.as_text().encode()).hexdigest()
    key = program_key(text_sha256, request)
    folder = Path(request["programs_dir"]) / key
    memory_folder = folder.with_name(key + MEMORY_SUFFIX)
    for kept in (folder, memory_folder) if request["memory_only"] else (folder,):
        if is_kept(kept, request["executable"]):
            say("cached", key=kept.name)
            return
    say("compiling", key=key)
    result = {"compiler": request["compiler"], "lowered_sha256": text_sha256, "lower_seconds": lower_seconds}
    work = Path(request["work_dir"])
    part = work / "part"
    part.mkdir()
    began = time.perf_counter()
    chip: Any = slice_.chip  # a TPU, so its memory is known
    capacity = chip.hbm_bytes_usable // chip.jax_devices_per_chip
    if request["memory_only"]:
        watch = (result, work, memory_folder, capacity, began)
        threading.Thread(target=_answer_when_code_begins, args=watch, daemon=True).start()
    compiled, error = None, ""
    try:
        compiled = lowered.compile()
    except Exception as raised:  # JaxRuntimeError, for which jax exports no stable name
        error = str(raised)
        if "RESOURCE_EXHAUSTED" not in error:
            what = f"cannot compile the program for {slice_.name}: {first_line(raised)}"
            raise TomatError(f"{request['compiler']} {what}") from raised
    result |= {"compile_seconds": time.perf_counter() - began, "status": "oom" if compiled is None else "fits"}
    say("reading")
    assignment = _buffer_assignment(work)
    if compiled is None:
        memory = memory_of_oom(error, assignment)
        if memory is None:
            raise TomatError(f"{request['compiler']} says RESOURCE_EXHAUSTED, but not of what: {error[:500]}")
    else:
        made: Any = compiled.runtime_executable()
        module = made.hlo_modules()[0].as_serialized_hlo_module_proto()
        analysis: Any = compiled.memory_analysis()
        memory = memory_of_compiled(assignment or b"", capacity, analysis.generated_code_size_in_bytes)
        keep_program(part, module, work / LLO_DUMP)
        if request["executable"]:
            (part / EXECUTABLE_FILE).write_bytes(made.serialize())
    result["memory"] = memory.to_dict()
    keep_answer(result, part, folder)


PLACE_OPTIONS = ("jax_platforms", "jax_num_cpu_devices", "jax_compilation_cache", "jax_persistent_cache", "jax_cpu")
"""Prefixes of JAX's options that say where a program runs and is cached, and do not change the program."""


def set_jax_options(options: Mapping[str, Any]) -> None:
    """Set JAX's options as a run does before it traces the step (`trainer.jax_config`, `TrainerConfig.initialize`)."""
    import jax

    for name, value in options.items():
        if not name.startswith(PLACE_OPTIONS):
            try:
                jax.config.update(name, value)
            except (AttributeError, ValueError, TypeError) as error:
                raise TomatError(
                    f"trainer.jax_config.{name} is {value!r}, which jax {jax.__version__} refuses ({error})."
                ) from None


def _answer_when_code_begins(result: dict[str, Any], work: Path, folder: Path, capacity: int, began: float) -> None:
    """Keep the memory of a step that fits, and end this process, as soon as the compiler writes the first schedule.

    libtpu 0.0.46 assigns the buffers, then refuses or continues, and only then generates code, so a step that does not
    fit leaves no schedule. Code generation takes nine tenths of the time: for the 200M step on a v6e-16 (two cores) the
    buffers are assigned 3 s after the compile began, and the code is ready 80 s later.
    """
    while not any((work / LLO_DUMP).glob("*final_*")):
        time.sleep(0.1)
    seconds = time.perf_counter() - began
    assignment = _buffer_assignment(work)
    if assignment is None:
        return  # this compiler works in another way, so the whole compile answers
    memory = memory_of_compiled(assignment, capacity).to_dict()
    known = {"compile_seconds": seconds, "status": "fits", "memory": memory}
    keep_answer(result | known, work / "memory", folder)
    os._exit(0)


def _buffer_assignment(work: Path) -> bytes | None:
    """The module with its buffer assignment, which the compiler dumps even for a program that does not fit."""
    found = sorted((work / XLA_DUMP).glob("*.after_optimizations.hlo.pb"), key=lambda path: path.stat().st_size)
    return found[-1].read_bytes() if found else None


def program_key(lowered_sha256: str, request: Mapping[str, Any]) -> str:
    """The key of a compile: the StableHLO, the slice, the compiler and its flags, JAX, and the readers' sources."""
    asked = [request[key] for key in ("slice", "compiler", "libtpu_args", "xla_flags")]
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    readers = sources_digest("tomat.perf.cost.llo", "tomat.perf.cost.memory")
    words = json.dumps([CACHE_FORMAT, lowered_sha256, *asked, versions, readers])
    return hashlib.sha256(words.encode()).hexdigest()[:24]


if __name__ == "__main__":
    answer(sys.argv[1], _compile)
