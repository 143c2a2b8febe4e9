"""Which checkpoints of a run are whole, and the checksums by which that is known.

Levanter 0.2.227 writes a checkpoint as `manifest.json` (every array it will hold), then the arrays into one OCDBT
database (`manifest.ocdbt` and `d/`), then, once every process has committed, `metadata.json`, which a removal that was
cut short may leave without the data. Here a checkpoint counts as whole if every array of the manifest is in the
database, every file the database points into is there and long enough, and every file is what its checksum says.
Contents are compared before a checkpoint is loaded, and by `tomat runs verify`; elsewhere sizes are.

Neither OCDBT nor zarr3 as Levanter writes them holds a checksum: a bit that flips after the save, or a page that a loss
of power leaves as zeros, would load as other numbers. So every file has a checksum, written before the checkpoint is
complete: CRC32C, which a bucket computes and keeps for each of its objects, so that nothing is read back there.
"""

import base64
import contextlib
import datetime
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import google_crc32c
import tensorstore as ts

from tomat.base.errors import RetryableError, TomatError
from tomat.base.layout import CHECKPOINT_FOLDER, CHECKSUM_FILE, MANIFEST_FILE, METADATA_FILE, UNMARKED_FILE
from tomat.base.records import Count, typed, typed_text
from tomat.base.reporting import warn
from tomat.base.storage import (
    READ_REMEDY,
    Store,
    explaining_storage,
    files_at,
    local_target,
    short_message,
    storage_error,
)

_REMOVAL_TRIES = 3
"""How often a removal is tried; the file system tries each request in it as often as it sees fit."""

_ABSENT = ("NOT_FOUND", "DATA_LOSS", "FAILED_PRECONDITION", "OUT_OF_RANGE", "INVALID_ARGUMENT")
"""TensorStore's status codes for a database with a part that is missing, cut short or garbled. Any other error, such as
UNAVAILABLE, says nothing about the checkpoint."""

UNHASHED = (CHECKSUM_FILE, METADATA_FILE, UNMARKED_FILE)
"""Files that are written after the checksums, or renamed later."""

_READ_BYTES = 8 * 1024**2
_READERS = 4
"""Files hashed at a time; `google_crc32c` does 7 GB/s on one core and releases the interpreter lock meanwhile."""


@dataclass(frozen=True)
class Checkpoint:
    """One folder below a run's `checkpoints`."""

    path: str
    step: int
    """The last step it includes, from 0."""
    whole: bool
    reason: str
    seconds_utc: float | None = None
    """When it was completed, seconds since 1970 (`tomat runs show --json`); None where it never was, or that is not
    known."""
    temporary: bool = False
    """Saved by the clock, and removed once a later one is complete."""
    completed: bool = True
    """False for a save that was cut short, or that is being written or removed; True for one that was damaged later."""
    has_checksums: bool = True
    """False for one that an earlier version saved: whether its data are what was saved is not known."""


NO_CHECKSUMS = f"saved without {CHECKSUM_FILE}, by an earlier version: whether its data are intact is not known"


def list_checkpoints(run_url: str, temporary_url: str | None = None, *, read_data: bool = False) -> list[Checkpoint]:
    """Every checkpoint of a run, whole or not, sorted by step; `temporary_url` is where
    `trainer.checkpointer.temporary_base_path` sends its temporary ones, if it is set."""
    folders = _folders(run_url, temporary_url)
    with ThreadPoolExecutor(8) as pool:  # each waits for a few small reads
        found = pool.map(lambda folder: examine(folder[0], folder[1], read_data), folders)
        return sorted(found, key=lambda one: (one.step, one.path))


def newest_whole(run_url: str, temporary_url: str | None = None) -> Checkpoint | None:
    return survey(run_url, temporary_url)[0]


def with_data_read(found: list[Checkpoint]) -> list[Checkpoint]:
    """`found`, sorted by step, after reading the data of as many as it takes to know the newest whole one."""
    checked = list(found)
    for index, one in reversed(list(enumerate(found))):
        if one.whole:
            checked[index] = examine(one.path, one.step, read_data=True)
            if checked[index].whole:
                break
    return checked


def survey(run_url: str, temporary_url: str | None = None) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """The newest whole checkpoint, and all newer ones that are not whole; looks no further back than it must."""
    partial = []
    for path, step in sorted(_folders(run_url, temporary_url), key=lambda item: item[1], reverse=True):
        found = examine(path, step)
        if found.whole:
            return found, partial
        partial.append(found)
    return None, partial


def find_checkpoint(place: str, step: int | None = None, temporary_url: str | None = None) -> Checkpoint:
    """The whole checkpoint that `place` names: itself or, if it is a run, that run's newest or the one of `step`. Its
    data are compared with their checksums; a newer one that is damaged is passed over with a warning."""
    place = place.rstrip("/")
    if (named := _step_of(place)) is not None:
        found = examine(place, named, read_data=True)
    elif step is not None:
        found = examine(f"{place}/{CHECKPOINT_FOLDER}/step-{step}", step, read_data=True)
        if not found.whole and temporary_url is not None:
            other = examine(f"{temporary_url.rstrip('/')}/step-{step}", step, read_data=True)
            # Of two that are not whole the one that was once complete is what the user means.
            if other.whole or (not found.completed and other.completed):
                found = other
    else:
        every = with_data_read(list_checkpoints(place, temporary_url))
        whole = [item for item in every if item.whole]
        if not whole:
            raise TomatError(
                f"{place} holds no whole checkpoint; name a run that has trained, or a checkpoint of one."
                + "".join(f" {item.path} is damaged: {item.reason}." for item in every if item.completed)
            )
        found = whole[-1]
        for item in every:
            if item.step > found.step and item.completed:  # a save cut short was never complete
                warn(f"{item.path} is passed over: {item.reason}.")
    if not found.whole:
        raise TomatError(f"{found.path} is not a whole checkpoint: {found.reason}. Name another one.")
    say_if_unchecked(found)
    return found


def run_of(place: str) -> str:
    """The run that a folder or URL names: itself, or by one of its checkpoints, `<run>/checkpoints/step-N`."""
    place = place.rstrip("/")
    return place if _step_of(place) is None else place.rsplit("/", 2)[0]


def say_if_unchecked(found: Checkpoint) -> None:
    """Print that the data of a checkpoint could not be compared with anything, where that is so."""
    if not found.has_checksums:
        warn(f"{found.path} was {NO_CHECKSUMS}.")


def examine(path: str, step: int, read_data: bool = False) -> Checkpoint:
    """Whether the checkpoint at `path` is whole. With `read_data` every file is compared with its checksum; without,
    its size is, and its checksum where the listing of a bucket holds it."""
    files, root = files_at(path)
    files.invalidate_cache()
    root = root.rstrip("/")
    with explaining_storage(f"{path} cannot be read", READ_REMEDY):
        try:
            listed = _listing(files, root)
            sizes = {name: info["size"] for name, info in listed.items()}
            metadata = _json(files, f"{root}/{METADATA_FILE}") if METADATA_FILE in sizes else None
            manifest = _json(files, f"{root}/{MANIFEST_FILE}") if MANIFEST_FILE in sizes else None
            if metadata is None and sizes.get(METADATA_FILE):  # an empty one is what a kill leaves
                return Checkpoint(path, step, False, f"its {METADATA_FILE} is damaged")
            if metadata is None:
                why = "it was never completed" if sizes else "it does not exist"
                return Checkpoint(path, step, False, f"{why} (no {METADATA_FILE})", completed=False)
            reason = "" if metadata.get("step") == step else f"{METADATA_FILE} says step {metadata.get('step')}"
            if not reason and CHECKSUM_FILE in sizes:  # before the database, whose damaged file could say anything
                reason = _damage(path, listed, files.cat_file(f"{root}/{CHECKSUM_FILE}"), read_data)
        except FileNotFoundError:  # removed while it is looked at
            return Checkpoint(path, step, False, "it is being removed", completed=False)
    seconds, temporary = None, bool(metadata.get("is_temporary", False))
    with contextlib.suppress(TypeError, ValueError):
        seconds = datetime.datetime.fromisoformat(metadata.get("timestamp", "")).timestamp()
    reason = reason or _missing(path, sizes, manifest)
    return Checkpoint(path, step, not reason, reason, seconds, temporary, has_checksums=CHECKSUM_FILE in sizes)


def write_checksums(path: str) -> None:
    """Write the checksums of every file that lies in the folder or URL `path` now; OSError if one cannot be read."""
    files, root = files_at(path)
    files.invalidate_cache()
    found = {name: info for name, info in _listing(files, root).items() if name not in UNHASHED}
    with ThreadPoolExecutor(_READERS) as pool:
        sums = pool.map(lambda item: _checksum(files, root, *item), found.items())
        entries = {name: {"size": found[name]["size"], "crc32c": crc} for name, crc in zip(found, sums, strict=True)}
    content = json.dumps({"algorithm": "crc32c", "files": entries}, indent=1, sort_keys=True).encode()
    # Synced to disk, as the data are: otherwise a loss of power could leave all but the checksums.
    Store(path).write(CHECKSUM_FILE, content)


def unmark(checkpoint: Checkpoint) -> None:
    """Rename the `metadata.json` of a checkpoint that is not whole: Levanter would count it among the temporary ones to
    keep, and remove a whole one in its place."""
    files, root = files_at(checkpoint.path)
    if not checkpoint.whole and files.exists(f"{root}/{METADATA_FILE}"):
        files.mv(f"{root}/{METADATA_FILE}", f"{root}/{UNMARKED_FILE}")


def remove(path: str) -> None:
    """Remove a checkpoint, its `metadata.json` first: if that is cut short, the rest is recognised as partial."""
    files, root = files_at(path)
    for name, recursive in ((f"{root}/{METADATA_FILE}", False), (root, True)):
        for _ in range(_REMOVAL_TRIES):
            files.invalidate_cache()
            if not files.exists(name):
                break
            # A request that was carried out but not answered is sent again, and finds nothing.
            with contextlib.suppress(FileNotFoundError):
                files.rm(name, recursive=recursive)


def copy(checkpoint: Checkpoint, destination: str) -> Checkpoint:
    """Copy a whole checkpoint as a permanent one, its `metadata.json` last; return the copy, examined."""
    source, source_root = files_at(checkpoint.path)
    target, target_root = files_at(destination)
    names = list(_listing(source, source_root))
    if "file" in target.protocol:
        for name in names:
            local_target(Path(target_root), name, checkpoint.path)
    with explaining_storage(f"{checkpoint.path} cannot be copied to {destination}", "Make room there."):
        remove(destination)
        for name in (name for name in names if name != METADATA_FILE):
            read_from, to = f"{source_root.rstrip('/')}/{name}", f"{target_root}/{name}"
            target.makedirs(to.rsplit("/", 1)[0], exist_ok=True)
            if type(source) is type(target):
                target.cp_file(read_from, to)  # in a bucket, by the server
            else:
                with source.open(read_from, "rb") as read, target.open(to, "wb") as write:
                    while block := read.read(64 * 1024**2):
                        write.write(block)
        mark_permanent(destination, checkpoint.path)
    copied = examine(destination, checkpoint.step, read_data=True)
    if not copied.whole:
        said = f"the copy of {checkpoint.path} to {destination} is not whole: {copied.reason}. Try again."
        raise RetryableError(said)
    return copied


def mark_permanent(path: str, source: str | None = None) -> None:
    """Write the `metadata.json` of a permanent checkpoint in one step, from its own or, for a copy, from `source`'s."""
    files, root = files_at(source or path)
    metadata = {**(_json(files, f"{root}/{METADATA_FILE}") or {}), "is_temporary": False}
    Store(path).write(METADATA_FILE, json.dumps(metadata).encode())


def array_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Shape of every array in a checkpoint, by its name with slashes, from its `manifest.json`."""
    files, root = files_at(path)
    arrays = (_json(files, f"{root}/{MANIFEST_FILE}") or {"arrays": []}).get("arrays")
    found = typed(arrays, list[_Array], f"{path}/{MANIFEST_FILE}", "Use another checkpoint.")
    return {entry.path: entry.shape for entry in found}


AVERAGED, LAST = "averaged", "of the last step"
"""Kinds of weights: `trainer.model_averaging` keeps an average beside those of the last step."""


def weights_kind(path: str) -> str:
    """Which weights of a checkpoint are used for anything but training on: `AVERAGED` where it has them, or `LAST`."""
    return AVERAGED if any(name.startswith("model_averaging/model/") for name in array_shapes(path)) else LAST


def _step_of(place: str) -> int | None:
    """The step of a place that has a checkpoint's name, `step-N`; None for any other."""
    match = re.fullmatch(r"step-(\d+)", place.rsplit("/", 1)[-1])
    return None if match is None else int(match[1])


def _folders(run_url: str, temporary_url: str | None) -> list[tuple[str, int]]:
    found = []
    for root in (f"{run_url.rstrip('/')}/{CHECKPOINT_FOLDER}", temporary_url):
        if root is None:
            continue
        files, plain = files_at(root)
        files.invalidate_cache()
        with explaining_storage(f"{root} cannot be read", READ_REMEDY):
            try:
                entries = files.ls(plain, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                continue
        names = [entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory"]
        found += [(f"{root.rstrip('/')}/{name}", step) for name in names if (step := _step_of(name)) is not None]
    return found


def _json(files: Any, path: str) -> dict[str, Any] | None:
    """The object at `path`; None where it is cut short or garbled."""
    try:
        value = json.loads(files.cat_file(path))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class _Array:
    path: str
    shape: tuple[Count, ...]


def _missing(path: str, sizes: dict[str, int], manifest: dict[str, Any] | None) -> str:
    """What a completed checkpoint lacks; empty if it is whole."""
    if manifest is None:
        return f"no readable {MANIFEST_FILE}"
    try:
        arrays = typed(manifest.get("arrays"), list[_Array], path, "")
    except TomatError:
        return f"its {MANIFEST_FILE} is damaged"
    try:
        keys, extents = _database(path)
    except (ValueError, OSError) as error:
        message = short_message(error)
        if isinstance(error, ValueError) and any(code in message for code in _ABSENT):
            return f"its database is damaged ({message})"
        raise storage_error(f"{path} cannot be read", error, READ_REMEDY) from error
    for name, end in sorted(extents.items()):
        if sizes.get(name, 0) < end:
            return f"{name} has {sizes.get(name, 0)} of {end} bytes"
    lacking = [entry.path for entry in arrays if f"{entry.path}/zarr.json" not in keys]
    return f"{len(lacking)} of {len(arrays)} arrays are missing" if lacking else ""


@dataclass(frozen=True)
class _Entry:
    size: int
    crc32c: str
    """As buckets write it: big-endian, base64."""


class _Checksums(TypedDict):
    algorithm: Literal["crc32c"]
    files: dict[str, _Entry]


def _damage(path: str, found: Mapping[str, Mapping[str, Any]], content: bytes, read_data: bool) -> str:
    """What differs from the checksums, naming the file; empty if nothing does."""
    try:
        entries = typed_text(content, _Checksums, path, "")["files"]
    except TomatError:
        return f"{CHECKSUM_FILE} is damaged"
    for name, entry in sorted(entries.items()):
        if name not in found:
            return f"{name} is missing"
        if found[name]["size"] != entry.size:
            return f"{name} has {found[name]['size']} of {entry.size} bytes"
    # The checkpoint's database points into no file beyond these, such as a file system's `.nfs...`.
    files, root = files_at(path)
    names = [name for name in sorted(entries) if read_data or "crc32c" in found[name]]
    with ThreadPoolExecutor(_READERS) as pool:
        sums = pool.map(lambda name: _checksum(files, root, name, found[name]), names)
        for name, crc in zip(names, sums, strict=True):
            if crc != entries[name].crc32c:
                return f"{name} is damaged (its checksum differs)"
    return ""


def _listing(files: Any, root: str) -> dict[str, dict[str, Any]]:
    prefix = root.rstrip("/") + "/"
    return {name[len(prefix) :]: info for name, info in files.find(root, detail=True).items()}


def _checksum(files: Any, root: str, name: str, info: Mapping[str, Any]) -> str:
    if "crc32c" in info:
        return info["crc32c"]
    crc = google_crc32c.Checksum()
    with files.open(f"{root.rstrip('/')}/{name}", "rb", cache_type="none") as file:
        while block := file.read(_READ_BYTES):
            crc.update(block)
    return base64.b64encode(crc.digest()).decode()


def _database(path: str) -> tuple[set[str], dict[str, int]]:
    """Keys of a checkpoint's OCDBT database, and for each file it points into the length that must be there."""
    store = Store(path).objects
    manifest = ts.ocdbt.dump(store).result()
    keys: set[str] = set()
    extents: dict[str, int] = {}

    def need(location: str) -> None:
        # `value::d/<file>:<offset>:<length>`, as tensorstore.ocdbt.dump writes it
        name, offset, length = location.split("::", 1)[1].rsplit(":", 2)
        extents[name] = max(extents.get(name, 0), int(offset) + int(length))

    def walk(location: str, prefix: str) -> None:
        need(location)
        for entry in ts.ocdbt.dump(store, location).result()["entries"]:
            if "location" in entry:  # an inner node of the tree; keys below it lack the prefix they share
                walk(entry["location"], prefix + entry["subtree_common_prefix"].decode())
                continue
            keys.add(prefix + entry["key"].decode())
            if "indirect_value" in entry:
                need(entry["indirect_value"])

    if manifest["versions"] and "location" in manifest["versions"][-1]["root"]:
        walk(manifest["versions"][-1]["root"]["location"], "")
    return keys, extents
