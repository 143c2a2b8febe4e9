"""Compiling in a process of its own: how it is asked, watched and ended, and how it answers.

Apart from its parent because libtpu reads its flags once a process, may abort it, and needs gigabytes that only the end
of a process gives back. The environment of that process is its own (`topology.py`): nothing that is set where it was
started decides an answer. It reads its request from a file and says its stages on standard output, another file, as
JSON lines. What it finds goes to a folder of the plan cache that appears whole or not at all. `ask` is the parent's
side, `answer` and `keep_answer` are the child's.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tomat.base.documents import with_checksum
from tomat.base.errors import TomatError
from tomat.base.ports.libtpu import final_bundles_flags
from tomat.base.progress import DONE
from tomat.base.reporting import to_jsonable, write_json
from tomat.hardware.chips import Slice
from tomat.perf.plan.compile.topology import child_environment
from tomat.perf.plan.plan_cache import (
    CACHE_GIB,
    GIB,
    PROGRAMS,
    RESULT_FILE,
    Kept,
    evict,
    installed_packages,
    keep,
    open_result,
    sources_digest,
    work_folder,
)

XLA_DUMP, LLO_DUMP = "xla", "llo"
"""Folders of a request's working directory that the compiler dumps into."""

REFUSED = "refused"
"""The last thing that a child says whose request cannot be answered."""

POLL_SECONDS = 0.2
SAID_FILE, ERRORS_FILE = "stdout.txt", "stderr.txt"


@dataclass(frozen=True)
class Limits:
    """What one compile may take. On two cores the reference 200M step takes 2 minutes and 4 GB, the 1B step as much;
    the fast 200M step, whose layers are not scanned, took 393 s."""

    seconds: float = 1800.0
    memory_bytes: int = 16 * GIB
    cache_bytes: int = round(CACHE_GIB * GIB)
    """What the cache may hold when it is done."""


class RequestRefused(TomatError):
    """A child said `REFUSED`; other errors of `ask` are of its limits and of its end."""


def request_key(request: Any, module: str) -> str:
    """Names a request for the sources of the child `module`, and for the packages that are installed."""
    words = json.dumps([request, installed_packages(), sources_digest(module)], sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:24]


def ask(
    module: str,
    request: Mapping[str, Any],
    slice_: Slice,
    cache: Path,
    limits: Limits,
    *,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_removed: Callable[[str], None] = lambda removed: None,
    library: Path | None = None,
) -> Kept:
    """Run `python -m MODULE REQUEST.json` to its end, and open the answer that it left.

    The child also gets `programs_dir`, `work_dir` and `asked_by`, the process that waits; `libtpu_args` and `xla_flags`
    of the request are the compiler's flags. `cache` is one that `open_cache` has made ready. `on_stage` is told each
    stage but the last, `on_removed` what was removed from the cache to make room for the answer. `library` is
    another libtpu than the installed one.
    """
    with work_folder(cache) as work:
        for name in (LLO_DUMP, XLA_DUMP):
            (work / name).mkdir()
        # The child works elsewhere.
        places = {"programs_dir": str((cache / PROGRAMS).absolute()), "work_dir": str(work)}
        write_json(work / "request.json", {**request, **places, "asked_by": os.getpid()})
        libtpu_dump, xla_dump = dump_flags(work)
        libtpu_args = [*request.get("libtpu_args", ()), *libtpu_dump]
        environment = child_environment(slice_, libtpu_args, [*request.get("xla_flags", ()), *xla_dump], library)
        command = [sys.executable, "-m", module, str(work / "request.json")]
        with (work / SAID_FILE).open("wb") as said, (work / ERRORS_FILE).open("wb") as errors:
            child = subprocess.Popen(command, env=environment, stdout=said, stderr=errors, cwd=work)
            try:
                last = _watched(child, work / SAID_FILE, limits, on_stage)
            finally:
                child.kill()
                child.wait()
        if last["stage"] == REFUSED:
            raise RequestRefused(last["message"])
        if child.returncode != 0 or "key" not in last:
            written = (work / ERRORS_FILE).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            end = "\n  ".join(line[:300] for line in written[-6:])
            found = f"the compiling process ended with status {child.returncode} while {last['stage']}"
            raise TomatError(f"{found}; the end of what it said:\n  {end}")
    folder = cache / PROGRAMS / last["key"]
    opened = open_result(folder)
    if opened is None:
        raise TomatError(
            f"{folder} was removed, or damaged, as soon as it was made. If other plans fill the same cache, "
            "raise --cache_gib; else give another --cache_dir."
        )
    if removed := evict(cache, limits.cache_bytes):
        on_removed(removed)
    return opened


def end_pool(pool: Executor, futures: Sequence[Future[Any]], module: str) -> None:
    """End what a pool's threads ask of `module`, and drop what waits: deep in the compiler a child does not notice an
    interrupt for minutes."""
    import psutil

    pool.shutdown(wait=False, cancel_futures=True)
    while any(future.running() for future in futures):
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if module in child.cmdline():
                    child.kill()
        time.sleep(0.2)


def _watched(
    child: subprocess.Popen[bytes], said: Path, limits: Limits, on_stage: Callable[[str], None]
) -> dict[str, Any]:
    """What a child said last, in the file `said` among other lines, within its limits."""
    import psutil

    last: dict[str, Any] = {"stage": "starting"}
    n_known = 0
    began = time.monotonic()
    process = psutil.Process(child.pid)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)
        ended = child.returncode is not None
        lines = said.read_bytes().split(b"\n")[:-1]  # the last one may not be whole yet
        for stage in [json.loads(line) for line in lines[n_known:] if line.startswith(b'{"stage"')]:
            last = stage
            if stage["stage"] not in (DONE, REFUSED):
                on_stage(stage["stage"])
        n_known = len(lines)
        if ended:
            return last
        try:
            used = process.memory_info().rss
        except psutil.Error:  # it has ended
            continue
        seconds = time.monotonic() - began
        if used > limits.memory_bytes:
            raise TomatError(
                f"the compile used {used / GIB:.1f} GiB of this machine's memory while {last['stage']}, above the "
                f"limit of {limits.memory_bytes / GIB:.1f} GiB; raise --memory_limit_gib."
            )
        if seconds > limits.seconds:
            raise TomatError(
                f"the compile took longer than {limits.seconds:.0f} s while {last['stage']}; raise "
                "--time_limit_seconds."
            )


def dump_flags(work: Path) -> tuple[list[str], list[str]]:
    """(libtpu, XLA) flags that make the compiler leave what is read here, and change nothing in the program."""
    xla = [f"--xla_dump_to={work / XLA_DUMP}", "--xla_dump_hlo_as_proto", "--xla_dump_hlo_module_re=train_step|decode_"]
    return final_bundles_flags(work / LLO_DUMP), xla


def answer(request_file: str, carry_out: Callable[[dict[str, Any]], None]) -> None:
    """All of a child: carry out the request. It ends with `keep_answer`, or says which answer the cache had; a
    TomatError is a refusal."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    threading.Thread(target=_end_with_parent, args=(request["asked_by"],), daemon=True).start()
    try:
        carry_out(request)
    except TomatError as error:
        say(REFUSED, message=str(error))


def _end_with_parent(parent: int) -> None:
    """End this process when its parent, which the request names, is gone: a compile takes all cores."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def keep_answer(result: Mapping[str, Any], part: Path, folder: Path) -> None:
    """Make `part`, a folder below the working one, made if missing, with `result` in it, the answer `folder`, whose
    name is the answer's key, and say so."""
    write_json(part / RESULT_FILE, with_checksum(to_jsonable(result)))
    keep(part, folder)
    say(DONE, key=folder.name)


def say(stage: str, **details: Any) -> None:
    print(json.dumps({"stage": stage, **details}), flush=True)
