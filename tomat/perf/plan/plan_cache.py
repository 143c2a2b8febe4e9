"""A cache of plans: keys of answers, working folders that end with their process, answers that appear whole.

- An answer is a folder below `programs/` or a JSON file. It appears by one rename and is never replaced, so a reader
  that has opened it can read the files of one compile to the end. A reader holds a shared lock (`flock`) on the
  folder's result; a locked answer is not evicted. A process holds the cache's lock to add or remove an answer.
- A working folder, `.work-*`, belongs to the process that holds the lock beside it. It is removed if its lock is free.
- An answer depends on tomat's files behind a module and on the installed packages. These are found, not listed: a list
  would go stale with the next import, and would then answer for a program that has changed.
"""

import ast
import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from tomat.base.documents import parse_checked, with_checksum
from tomat.base.errors import TomatError
from tomat.base.reporting import counted, to_jsonable, write_json
from tomat.base.shipped import source_hash

if TYPE_CHECKING:
    from tomat.perf.cost.llo import OpSchedule
    from tomat.perf.profile.hlo import HloProgram

PACKAGE = Path(__file__).parents[2]


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "tomat" / "plan"


def module_files(*modules: str, package: Path = PACKAGE) -> list[Path]:
    """The files of `package` that `modules` (dotted names) import, also in functions, and those that these import;
    sorted.

    A data file counts if a module names it in a string, by its path from the module's folder. Imports for types only
    count as well: they cost a needless lowering now and then, but never a wrong answer.
    """
    waiting = [path for name in modules for path in _files_of(name, package)]
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        if path.suffix != ".py":
            continue
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                # `from a import b` counts as both `a` and `a.b`, since `b` may be a module. No module of tomat uses
                # relative imports (`tests/test_architecture.py` checks it).
                names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Constant) and isinstance(text := node.value, str):
                plain = "." in text and len(text) < 100 and text.isprintable() and not text.startswith(("/", ".."))
                if plain and (path.parent / text).is_file():
                    waiting.append(path.parent / text)
        waiting += [file for name in names for file in _files_of(name, package)]
    return sorted(found)


def _files_of(name: str, package: Path) -> list[Path]:
    """The file of a module of the package, and each `__init__.py` that Python runs before it; none for other names."""
    parts = name.split(".")
    if parts[0] != package.name:
        return []
    folders = [package.joinpath(*parts[1:end]) for end in range(1, len(parts) + 1)]
    files = [folder / "__init__.py" for folder in folders] + [folders[-1].with_suffix(".py")]
    return [path for path in files if path.is_file()]


def sources_digest(*modules: str, package: Path = PACKAGE) -> str:
    """SHA-256 over the names and bytes of `module_files`. They are read anew each time, because files change."""
    digest = hashlib.sha256()
    for path in module_files(*modules, package=package):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def question_key(question: Mapping[str, Any]) -> str:
    """The key of a question to all of tomat, from its text, so that no import is needed to look for its answer.
    `question` is all that the answer depends on, besides tomat's own files and the installed packages."""
    whole = {**question, "sources": source_hash(), "packages": installed_packages()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:24]


def installed_packages() -> list[str]:
    """Every installed distribution with its version, as `name-version`, sorted.

    All of them, because no list of those that take part in tracing a step could be kept up to date. They are read from
    the names of their folders, since parsing their metadata takes a second.
    """
    folders = {Path(entry or ".") for entry in sys.path}
    found = {path.stem for folder in folders for kind in ("dist-info", "egg-info") for path in folder.glob(f"*.{kind}")}
    return sorted(found)


RESULT_FILE = "result.json"
"""Result file in each folder below `programs/`. Its modification time is that of the last use."""

PROGRAM_FILES = PROGRAM_FILE, SCHEDULE_FILE = "program.hlo.pb.gz", "schedule.json.gz"
"""Files beside the result of a program that fits: the optimised module, and the schedule of each of its operations."""

PROGRAMS, ANSWERS = "programs", "answers"
"""Folders of a cache: a folder for each compile, and a JSON file for each whole report."""

GIB = 2**30
CACHE_GIB = 2.0
"""Default limit of a cache. A plan of the 200M step with scanned layers takes 0.24 MB, and its answer as much, so there
is room for thousands of plans. (A choice.)"""

WORK, LOCK = ".work-", ".lock"


def open_cache(cache: Path) -> Path:
    """Prepare a cache for a compile: make its folders, and remove what killed compiles left. Returns the folder of
    programs."""
    programs = cache / PROGRAMS
    try:
        programs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TomatError(f"the plan cache {cache} cannot be made ({error}); give another --cache_dir.") from error
    remove_abandoned(cache)
    return programs


@contextlib.contextmanager
def work_folder(cache: Path) -> Iterator[Path]:
    """A folder in `cache` for one compile, which is removed with it.

    The lock is made and held before the folder is made, so that no folder looks abandoned in the meantime.
    """
    handle, name = tempfile.mkstemp(dir=cache, prefix=WORK, suffix=LOCK)
    lock = Path(name)
    folder = lock.with_suffix("")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        _remove_work(lock)
        os.close(handle)


def _remove_work(lock: Path) -> None:
    folder = lock.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():  # a folder that a child still writes into keeps its lock, and is removed next time
        lock.unlink(missing_ok=True)


def remove_abandoned(cache: Path) -> None:
    for lock in cache.glob(f"{WORK}*{LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+b") as file:  # NFS needs a writable file for exclusive locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_work(lock)


@contextlib.contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Hold the cache's lock, so that no other process adds or removes answers meanwhile."""
    with (cache / LOCK).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def keep(part: Path, folder: Path) -> None:
    """Make `part` the answer `folder`, in one step. An existing answer stays, and gets the files that it lacks."""
    with _alone(folder.parent.parent):
        kept = open_result(folder)
        if kept is None:
            if folder.exists():  # damaged
                _remove(folder)
            os.rename(part, folder)
            return
        with kept.lock:
            for path in part.iterdir():
                if not (folder / path.name).exists():
                    os.replace(path, folder / path.name)


class Kept(NamedTuple):
    lock: IO[bytes]
    """While it is open, the folder is not evicted."""
    result: dict[str, Any]
    folder: Path


def open_result(folder: Path, needed: Sequence[str] = ()) -> Kept | None:
    """The answer in a folder of the cache, locked. None if there is none, if it is damaged, if its step fits but one of
    the `needed` files is missing, or if it is being evicted."""
    path = folder / RESULT_FILE
    try:
        file = path.open("rb")
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        result, has_checksum = parse_checked(file.read(), str(path), "an answer", "")
        # The folder may have been removed before the lock was held. The name is then free, or of another answer.
        if not has_checksum or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise ValueError("not this folder's")
        if result.get("status") == "fits" and not all((folder / name).exists() for name in needed):
            raise ValueError("files are missing")
        os.utime(path)
    except (OSError, ValueError, TomatError):
        file.close()
        return None
    return Kept(file, result, folder)


def keep_program(part: Path, module: bytes, llo_dump: Path) -> None:
    """Write a serialised `HloModuleProto`, and the schedules that the compiler dumped, into `part`."""
    from tomat.perf.cost.llo import read_schedules, write_schedules

    # Level 6 takes 0.1 s for the 2 MB of a 200M step, and reduces them to a fifth.
    (part / PROGRAM_FILE).write_bytes(gzip.compress(module, compresslevel=6, mtime=0))
    write_schedules(part / SCHEDULE_FILE, read_schedules(llo_dump))


def kept_program(folder: Path, again: str = "plan") -> tuple["HloProgram", dict[str, "OpSchedule"]]:
    """The program in a folder of the cache, and the schedules of its operations by the names of their HLO
    instructions. `again` names what to do again if either is damaged."""
    from tomat.perf.cost.llo import kept_schedules
    from tomat.perf.profile.hlo_files import load_program

    remedy = f"Delete {folder} and {again} again."
    schedules = kept_schedules(folder / SCHEDULE_FILE, remedy)
    try:
        return load_program(folder / PROGRAM_FILE), schedules
    except TomatError as error:
        raise TomatError(f"{error} The file is in a cache. {remedy}") from None


def keep_report(cache: Path, key: str, report: Mapping[str, Any]) -> None:
    """Keep the whole report of a question (`question_key`), so that it is found without a compile and without JAX."""
    write_json(cache / ANSWERS / f"{key}.json", with_checksum(to_jsonable(report)))


def find_report(cache: Path, key: str) -> dict[str, Any] | None:
    """The report of a question; None if there is none, or if it is damaged."""
    path = cache / ANSWERS / f"{key}.json"
    try:
        answer, has_checksum = parse_checked(path.read_bytes(), str(path), "an answer", "")
        os.utime(path)  # eviction starts with the least recently used
    except (OSError, TomatError):
        return None
    return answer if has_checksum else None


def evict(cache: Path, limit_bytes: int) -> str:
    """Remove the least recently used answers, except those being read, until at most `limit_bytes` are held. Returns
    what was removed, in words; "" if nothing was."""
    entries = []
    count = removed = 0
    with _alone(cache):
        for path in (*(cache / PROGRAMS).glob("*"), *(cache / ANSWERS).glob("*.json")):
            with contextlib.suppress(OSError):
                used = path / RESULT_FILE if path.is_dir() else path
                files = path.iterdir() if path.is_dir() else (path,)
                size = sum(file.stat().st_size for file in files)
                entries.append((used.stat().st_mtime if used.exists() else 0.0, path.name, size, path))
        held = sum(size for _, _, size, _ in entries)
        for _, _, size, path in sorted(entries):
            if held - removed > limit_bytes and _remove(path):
                count, removed = count + 1, removed + size
    if count == 0:
        return ""
    for request in (cache / "requests").glob("*.json"):  # remove requests whose program is gone
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if not (cache / PROGRAMS / json.loads(request.read_text(encoding="utf-8"))["program"]).exists():
                request.unlink()
    return (
        f"removed {counted(count, 'answer')} ({removed / GIB:.2f} GiB), the least recently used, "
        f"from the cache: it may hold {limit_bytes / GIB:.2f} GiB"
    )


def _remove(path: Path) -> bool:
    """Remove an answer unless it is being read."""
    try:
        if path.is_file():  # reports are read in one go, which works even if the file is unlinked meanwhile
            path.unlink()
            return True
        result = path / RESULT_FILE
        with result.open("r+b") if result.exists() else contextlib.nullcontext() as file:
            if file is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        return True
    except OSError:  # a reader holds it
        return False
