"""Compiles in a separate process: how the parent asks, watches and ends it, and how it answers.

The process is separate because libtpu reads its flags once per process, may abort it, and needs gigabytes that only the
end of a process gives back. It has its own environment (`topology.py`), so no variable of the parent decides an answer.
It reads its request from a file, and writes its stages as JSON lines to standard output, which is another file. Its
result goes to a folder of the plan cache that appears whole or not at all. `ask` is the parent's side; `answer` and
`keep_answer` are the child's.
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
"""Folders in a request's working directory that the compiler dumps into."""

REFUSED = "refused"
"""Last stage of a child whose request cannot be answered."""

POLL_SECONDS = 0.2
SAID_FILE, ERRORS_FILE = "stdout.txt", "stderr.txt"


@dataclass(frozen=True)
class Limits:
    """Limits of one compile. On two cores the reference 200M step takes 2 minutes and 4 GB, and so does the 1B step;
    the fast 200M step, whose layers are not scanned, took 393 s."""

    seconds: float = 1800.0
    memory_bytes: int = 16 * GIB
    cache_bytes: int = round(CACHE_GIB * GIB)
    """Most bytes in the cache after the compile."""


class RequestRefused(TomatError):
    """A child ended with `REFUSED`. Other errors of `ask` are about limits, or about how the child ended."""


def request_key(request: Any, module: str) -> str:
    """The key of a request, which includes the sources of the child `module` and the installed packages."""
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

    The child also gets `programs_dir`, `work_dir` and `asked_by`, the waiting process. `libtpu_args` and `xla_flags` of
    the request are the compiler's flags. `open_cache` must have prepared `cache`. `on_stage` is called with each stage
    but the last, `on_removed` with what was removed from the cache to make room for the answer. `library` is the path
    of a libtpu to use instead of the installed one.
    """
    with work_folder(cache) as work:
        for name in (LLO_DUMP, XLA_DUMP):
            (work / name).mkdir()
        # The child has another working directory, so the path must be absolute.
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
            raise TomatError(f"{found}; the end of its output:\n  {end}")
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
    """End the children that a pool's threads started for `module`, and drop waiting work. Deep in the compiler, a child
    does not notice an interrupt for minutes."""
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
    """Watch a child within its limits, and return its last stage. Stages are among other lines in the file `said`."""
    import psutil

    last: dict[str, Any] = {"stage": "starting"}
    n_known = 0
    began = time.monotonic()
    process = psutil.Process(child.pid)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)
        ended = child.returncode is not None
        lines = said.read_bytes().split(b"\n")[:-1]  # the last line may not be complete yet
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
    """(libtpu, XLA) flags that make the compiler dump the files that are read here. They do not change the program."""
    xla = [f"--xla_dump_to={work / XLA_DUMP}", "--xla_dump_hlo_as_proto", "--xla_dump_hlo_module_re=train_step|decode_"]
    return final_bundles_flags(work / LLO_DUMP), xla


def answer(request_file: str, carry_out: Callable[[dict[str, Any]], None]) -> None:
    """The whole work of a child: carry out the request. `carry_out` ends with `keep_answer`, or says which answer the
    cache had. A TomatError is a refusal."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    threading.Thread(target=_end_with_parent, args=(request["asked_by"],), daemon=True).start()
    try:
        carry_out(request)
    except TomatError as error:
        say(REFUSED, message=str(error))


def _end_with_parent(parent: int) -> None:
    """End this process when its parent, which the request names, is gone, because a compile takes all cores."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def keep_answer(result: Mapping[str, Any], part: Path, folder: Path) -> None:
    """Write `result` into `part`, a folder below the working one (made if missing), make `part` the answer `folder`,
    and say so. The folder's name is the answer's key."""
    write_json(part / RESULT_FILE, with_checksum(to_jsonable(result)))
    keep(part, folder)
    say(DONE, key=folder.name)


def say(stage: str, **details: Any) -> None:
    print(json.dumps({"stage": stage, **details}), flush=True)
