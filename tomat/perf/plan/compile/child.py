"""The process that compiles a training step or a decoder for a TPU slice.

`python -m tomat.perf.plan.compile.child REQUEST.json`, started by `compiler.py`; `process.py` says why apart from it.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.reporting import first_line
from tomat.perf.plan.compile.process import LLO_DUMP, XLA_DUMP, answer, keep_answer, say
from tomat.perf.plan.plan_cache import open_result, sources_digest

CACHE_FORMAT = 1
"""Of what is kept of a compile; a new one makes old entries invisible."""

READERS = ("tomat.perf.cost.llo", "tomat.perf.cost.memory")
"""Modules that read what the compiler leaves into what is kept."""

PROGRAM_FILE = "program.hlo.pb.gz"
SCHEDULE_FILE = "schedule.json.gz"
EXECUTABLE_FILE = "executable.bin"

MEMORY_SUFFIX = "-memory"
"""Of the key of a compile that was ended when its memory was known."""


def _compile(request: dict[str, Any]) -> None:
    """Compile what the request asks for and keep the answer, which may be that it does not fit."""
    import jax
    import numpy as np

    from tomat.hardware.chips import slice_named
    from tomat.perf.plan.compile.lowering import DecoderBatch, lower_decoder, lower_step, stand_in_table
    from tomat.perf.plan.compile.topology import slice_mesh, topology_devices
    from tomat.train.settings.config import config_from_dict

    say("starting")
    slice_ = slice_named(request["slice"])
    # Levanter asks JAX how many devices there are (`lowering.py`).
    jax.config.update("jax_num_cpu_devices", slice_.n_devices)
    # A Pallas kernel carries the source lines of its operations into the module: without this another checkout of the
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
    if request["memory_only"]:
        watch = (result, work, memory_folder, slice_, began)
        threading.Thread(target=_answer_when_code_begins, args=watch, daemon=True).start()
    compiled, error = None, ""
    try:
        compiled = lowered.compile()
    except Exception as raised:  # JaxRuntimeError, of which jax exports no stable name
        error = str(raised)
        if "RESOURCE_EXHAUSTED" not in error:
            raise TomatError(
                f"{request['compiler']} cannot compile the program for {slice_.name}: {first_line(raised)}"
            ) from raised
    result["compile_seconds"] = time.perf_counter() - began
    say("reading")
    if compiled is None:
        _write_oom(result, error, work)
    else:
        _write_program(result, compiled, work, part, slice_, request["executable"])
    keep_answer(result, part, folder)


def needed_files(folder: Path, executable: bool) -> list[str]:
    """Files that the answer in `folder` has beside its result where the step fits."""
    if folder.name.endswith(MEMORY_SUFFIX):
        return []
    return [PROGRAM_FILE, SCHEDULE_FILE, *([EXECUTABLE_FILE] if executable else [])]


def is_kept(folder: Path, executable: bool) -> bool:
    """Whether the cache holds an answer in `folder` that the process that asked for it will take."""
    kept = open_result(folder, needed_files(folder, executable))
    if kept is not None:
        kept.lock.close()
    return kept is not None


PLACE_OPTIONS = ("jax_platforms", "jax_num_cpu_devices", "jax_compilation_cache", "jax_persistent_cache", "jax_cpu")
"""Beginnings of JAX's options that say where a program runs and is kept, and not what it is."""


def set_jax_options(options: Mapping[str, Any]) -> None:
    """Set what a run sets of JAX before it traces the step (`trainer.jax_config`, in `TrainerConfig.initialize`)."""
    import jax

    for name, value in options.items():
        if not name.startswith(PLACE_OPTIONS):
            try:
                jax.config.update(name, value)
            except (AttributeError, ValueError, TypeError) as error:
                raise TomatError(
                    f"trainer.jax_config.{name} is {value!r}, which jax {jax.__version__} refuses ({error})."
                ) from None


def _answer_when_code_begins(result: dict[str, Any], work: Path, folder: Path, slice_: Any, began: float) -> None:
    """Keep the memory of a step that fits, and end this process, as soon as the compiler writes the first schedule.

    libtpu 0.0.46 assigns the buffers, refuses or goes on, and only then makes code: a step that does not fit leaves no
    file of a schedule. The code takes nine tenths of the time: of the 200M step on a v6e-16 (two cores) the buffers
    stand 3 s after the compile began, the code 80 s later.
    """
    from tomat.perf.cost.memory import memory_of_compiled

    while not any((work / LLO_DUMP).glob("*final_*")):
        time.sleep(0.1)
    result["compile_seconds"] = time.perf_counter() - began
    assignment = _buffer_assignment(work)
    if assignment is None:
        return  # not this compiler's way any more: the whole compile answers
    result["status"] = "fits"
    result["memory"] = memory_of_compiled(assignment, _capacity_bytes(slice_)).to_dict()
    keep_answer(result, work / "memory", folder)
    os._exit(0)


def _write_oom(result: dict[str, Any], message: str, work: Path) -> None:
    from tomat.perf.cost.memory import memory_of_oom

    result["status"] = "oom"
    memory = memory_of_oom(message, _buffer_assignment(work))
    if memory is None:
        raise TomatError(f"{result['compiler']} says RESOURCE_EXHAUSTED, but not of what: {message[:500]}")
    result["memory"] = memory.to_dict()


def _write_program(
    result: dict[str, Any], compiled: Any, work: Path, part: Path, slice_: Any, with_executable: bool
) -> None:
    from tomat.perf.cost.llo import read_schedules, write_schedules
    from tomat.perf.cost.memory import memory_of_compiled

    result["status"] = "fits"
    executable = compiled.runtime_executable()
    module = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    # Level 6 costs 0.1 s for the 2 MB of a 200M step and leaves a fifth.
    (part / PROGRAM_FILE).write_bytes(gzip.compress(module, compresslevel=6, mtime=0))
    code_bytes = compiled.memory_analysis().generated_code_size_in_bytes
    assignment = _buffer_assignment(work) or b""
    result["memory"] = memory_of_compiled(assignment, _capacity_bytes(slice_), code_bytes).to_dict()
    write_schedules(part / SCHEDULE_FILE, read_schedules(work / LLO_DUMP))
    if with_executable:
        (part / EXECUTABLE_FILE).write_bytes(executable.serialize())


def _capacity_bytes(slice_: Any) -> int:
    return slice_.chip.hbm_bytes_usable // slice_.chip.jax_devices_per_chip


def _buffer_assignment(work: Path) -> bytes | None:
    """The module with its buffer assignment, which the compiler dumps even of a program that does not fit."""
    found = sorted((work / XLA_DUMP).glob("*.after_optimizations.hlo.pb"), key=lambda path: path.stat().st_size)
    return found[-1].read_bytes() if found else None


def program_key(lowered_sha256: str, request: Mapping[str, Any]) -> str:
    """What names a compile: the StableHLO, the slice, the compiler and its flags, what calls it and what reads it."""
    asked = [request[key] for key in ("slice", "compiler", "libtpu_args", "xla_flags")]
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    words = json.dumps([CACHE_FORMAT, lowered_sha256, *asked, versions, sources_digest(*READERS)])
    return hashlib.sha256(words.encode()).hexdigest()[:24]


if __name__ == "__main__":
    answer(sys.argv[1], _compile)
