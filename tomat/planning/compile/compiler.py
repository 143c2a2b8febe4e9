"""Compiles a training step for a TPU slice in a process of its own, with limits and a cache.

The cache is a folder. `requests/` maps a configuration, before it is lowered, to a program; `programs/` holds what was
found, by the hash of the lowered module, the slice, the compiler and its flags. Two configurations that lower to the
same module share the compile. A request counts for the sources and packages that it was lowered with (`sources.py`).
The compiling process has an environment of its own: nothing that is set where it was started decides an answer.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import write_json
from tomat.hardware.chips import Slice, slice_named
from tomat.planning.compile.child import (
    EXECUTABLE_FILE,
    LLO_DUMP,
    MEMORY_SUFFIX,
    PROGRAM_FILE,
    SCHEDULE_FILE,
    XLA_DUMP,
    dump_flags,
    needed_files,
)
from tomat.planning.compile.topology import child_environment, compiler_version
from tomat.planning.cost.memory import MemoryReport
from tomat.planning.plan_cache import CACHE_GIB, GIB, evict, open_result, remove_abandoned, work_folder
from tomat.planning.sources import installed_packages, sources_digest
from tomat.planning.stages import DONE

if TYPE_CHECKING:
    from tomat.planning.cost.llo import OpSchedule
    from tomat.profile.hlo import HloProgram
    from tomat.training.config import TrainConfig

POLL_SECONDS = 0.2

IRRELEVANT_KEYS = (
    "run_name", "output_dir", "purpose", "trackers", "evaluation", "tracking_dir", "baseline", "slice",
    "data.train", "data.validation", "data.shuffle", "data.verify_checksums", "data.patches_per_material",
    "data.codec_objective", "trainer.checkpointer", "trainer.profiler", "trainer.seed", "trainer.steps_per_eval",
    "trainer.max_eval_batches", "trainer.progress_watchdog",
)  # fmt: skip
"""Keys that do not reach the compiled step. A key that is missing here costs a lowering (10 s), not a wrong answer."""

CHILD_MODULE = "tomat.planning.compile.child"
"""What lowers and compiles; its imports are what decides an answer."""


@dataclass(frozen=True)
class Limits:
    """What one compile may take. On two cores the reference 200M step takes 2 minutes and 4 GB, the 1B step as much;
    the fast 200M step, whose layers are not scanned, took 393 s."""

    seconds: float = 1800.0
    memory_bytes: int = 16 * GIB
    cache_bytes: int = round(CACHE_GIB * GIB)
    """What the cache may hold when it is done."""


@dataclass(frozen=True)
class CompiledStep:
    """One training step compiled for one slice, as the cache holds it."""

    folder: Path
    result: dict[str, Any]
    cached: bool
    """The answer was there already."""
    lock: IO[bytes] | None = field(default=None, repr=False, compare=False)
    """Keeps the folder from being evicted as long as this object lives."""

    @property
    def key(self) -> str:
        """Names the program: module, slice, compiler and flags."""
        return self.folder.name

    @property
    def slice_(self) -> Slice:
        """What it was compiled for."""
        return slice_named(self.result["slice"])

    @property
    def fits(self) -> bool:
        """Whether the program fits the memory of a device."""
        return self.result["status"] == "fits"

    @property
    def compiler(self) -> str:
        """`libtpu 0.0.46`."""
        return self.result["compiler"]

    @cached_property
    def memory(self) -> MemoryReport:
        """Where the bytes are, of one device."""
        return MemoryReport.from_dict(self.result["memory"])

    @cached_property
    def program(self) -> HloProgram:
        """The optimised module; only of a step that fits."""
        from tomat.profile.hlo_files import load_program

        return load_program(self.folder / PROGRAM_FILE)

    @cached_property
    def schedules(self) -> dict[str, OpSchedule]:
        """The final schedule of each operation, by the name of its HLO instruction; only of a step that fits.

        Raises:
            TomatError: The cache's file is damaged.
        """
        from tomat.planning.cost.llo import OpSchedule

        path = self.folder / SCHEDULE_FILE
        try:
            values = json.loads(gzip.decompress(path.read_bytes()))
            return {name: OpSchedule.from_dict(value) for name, value in values.items()}
        except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
            raise TomatError(f"{path} is damaged ({error}); delete {self.folder} and plan again.") from None

    @property
    def executable_file(self) -> Path:
        """The serialised executable, where it was asked for."""
        return self.folder / EXECUTABLE_FILE


def default_cache_dir() -> Path:
    """`~/.cache/tomat/plan`."""
    return Path.home() / ".cache" / "tomat" / "plan"


def compile_step(
    config: TrainConfig,
    slice_: Slice,
    *,
    cache_dir: Path | None = None,
    limits: Limits | None = None,
    value_table: np.ndarray | None = None,
    executable: bool = False,
    memory_only: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> CompiledStep:
    """Compile the step of `config` for `slice_`, or find it in the cache.

    Args:
        config: The run.
        slice_: What to compile for.
        cache_dir: Default: `default_cache_dir()`.
        limits: Time and memory of the compiling process.
        value_table: Densities of the bins, as the run's codec has them; default: a stand-in, which changes no
            operation.
        executable: Keep the serialised executable too.
        memory_only: Stop when the memory in HBM is known, before the code is made: a tenth of the time, and without
            `program` and `schedules`. Whether the kernels' tiles fit the memory on the chip is not known then.
        on_stage: Told `starting`, `lowering`, then `compiling` and `reading`, or `cached`; what was removed from a full
            cache; and last `done`. Nothing of what is found before a process is started.

    Raises:
        TomatError: No compiler, a batch that does not divide, a step that cannot be lowered or compiled, or a limit
            that was passed. A program that needs too much memory is an answer, not an error.
    """
    compiler = compiler_version()
    limits = limits or Limits()
    check_batch(config, slice_)
    cache = cache_dir or default_cache_dir()
    programs = cache / "programs"
    try:
        programs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TomatError(f"the plan cache {cache} cannot be made ({error}); give another --cache_dir.") from error
    request = {
        "config": config.to_dict(),
        "slice": slice_.name,
        "compiler": compiler,
        "libtpu_args": list(config.compiler.libtpu_args),
        "xla_flags": list(config.compiler.xla_flags),
    }
    remove_abandoned(cache)
    request_key = _request_key(request, value_table)
    request_file = cache / "requests" / f"{request_key}.json"
    found = _from_cache(request_file, programs, executable)
    if found is None and memory_only:
        request_file = cache / "requests" / f"{request_key}{MEMORY_SUFFIX}.json"
        found = _from_cache(request_file, programs, False)
    if found is not None:
        return found
    with work_folder(cache) as work:
        table_file = None
        if value_table is not None:
            table_file = str(work / "table.npy")
            np.save(table_file, value_table)
        whole = request | {
            "value_table": table_file,
            "programs_dir": str(programs),
            "work_dir": str(work),
            "executable": executable,
            "memory_only": memory_only,
        }
        write_json(work / "request.json", whole)
        key = _run_child(work, slice_, request, limits, on_stage)
    opened = open_result(programs / key, needed_files(programs / key, executable))
    if opened is None:
        raise TomatError(
            f"{programs / key} was removed, or damaged, as soon as it was made. If other plans fill the same cache, "
            "raise --cache_gib; else give another --cache_dir."
        )
    write_json(request_file, {"program": key})
    evicted = evict(cache, limits.cache_bytes)
    if evicted is not None:
        on_stage(str(evicted))
    on_stage(DONE)
    return CompiledStep(programs / key, opened[1], cached=False, lock=opened[0])


def check_batch(config: TrainConfig, slice_: Slice) -> None:
    """Refuse a batch that the slice's devices cannot share evenly.

    Raises:
        TomatError: With the unit of which the batch must be a multiple.
    """
    from tomat.planning.compile.topology import data_axis_size

    data_axis = data_axis_size(config, slice_.n_devices)
    per_device = config.trainer.per_device_parallelism
    unit = data_axis * max(per_device, 1)
    if config.batch_size < 1 or config.batch_size % unit:
        raise TomatError(
            f"trainer.train_batch_size is {config.batch_size}; expected a multiple of {unit} on {slice_.name}, which "
            f"is {data_axis} device(s) on the data axis times a microbatch of {max(per_device, 1)} per device. Change "
            "the batch, trainer.per_device_parallelism or --slice."
        )


def _from_cache(request_file: Path, programs: Path, executable: bool) -> CompiledStep | None:
    try:
        folder = programs / json.loads(request_file.read_text(encoding="utf-8"))["program"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    opened = open_result(folder, needed_files(folder, executable))
    return CompiledStep(folder, opened[1], cached=True, lock=opened[0]) if opened is not None else None


def _request_key(request: dict[str, Any], value_table: np.ndarray | None) -> str:
    """Names a request before it is lowered."""
    config = json.loads(json.dumps(request["config"], default=str))
    for key in IRRELEVANT_KEYS:
        node = config
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.get(parent) or {}
        node.pop(leaf, None)
    table = hashlib.sha256(value_table.tobytes()).hexdigest() if value_table is not None else None
    found = [installed_packages(), sources_digest(CHILD_MODULE), table]
    words = json.dumps([request | {"config": config}, *found], sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:24]


def _run_child(
    work: Path, slice_: Slice, request: dict[str, Any], limits: Limits, on_stage: Callable[[str], None]
) -> str:
    """Run `compile_child` to its end; the key of the program it left in the cache."""
    libtpu_dump, xla_dump = dump_flags(work)
    for name in (LLO_DUMP, XLA_DUMP):
        (work / name).mkdir()
    environment = child_environment(slice_, request["libtpu_args"] + libtpu_dump, request["xla_flags"] + xla_dump)
    command = [sys.executable, "-m", CHILD_MODULE, str(work / "request.json")]
    last: dict[str, Any] = {"stage": "starting"}
    with (work / "stderr.txt").open("wb") as errors:
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=work)

        def listen() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                # libraries may print too; a stage is a JSON object of ours
                if line.startswith('{"stage"'):
                    last.clear()
                    last.update(json.loads(line))
                    if last["stage"] not in (DONE, "refused"):
                        on_stage(last["stage"])

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            _watch(child, limits, last)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
            listener.join(timeout=5)
    if child.returncode == 2 and last["stage"] == "refused":
        raise TomatError(last["message"])
    if child.returncode != 0 or "key" not in last:
        tail = (work / "stderr.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-6:]
        raise TomatError(
            f"the compiling process ended with status {child.returncode} while {last['stage']}; the end of what it "
            "said:\n  " + "\n  ".join(line[:300] for line in tail)
        )
    return last["key"]


def _watch(child: subprocess.Popen[str], limits: Limits, last: dict[str, Any]) -> None:
    """Wait for the child, and end it when it passes a limit."""
    import psutil

    began = time.monotonic()
    process = psutil.Process(child.pid)
    while child.poll() is None:
        time.sleep(POLL_SECONDS)
        try:
            used_bytes = process.memory_info().rss
        except psutil.Error:
            continue
        if used_bytes > limits.memory_bytes:
            child.kill()
            raise TomatError(
                f"the compile used {used_bytes / GIB:.1f} GiB of this machine's memory, above the limit of "
                f"{limits.memory_bytes / GIB:.1f} GiB, while {last['stage']}; raise --memory_limit_gib."
            )
        if time.monotonic() - began > limits.seconds:
            child.kill()
            raise TomatError(
                f"the compile took longer than {limits.seconds:.0f} s (it was {last['stage']}); raise "
                "--time_limit_seconds."
            )
