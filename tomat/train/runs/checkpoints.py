"""Which checkpoints of a run are whole.

Levanter 0.2.227 writes a checkpoint as `manifest.json` (every array it will hold), then the arrays into one OCDBT
database (`manifest.ocdbt` and `d/`), then, once every process has committed, `metadata.json`. Its own reader takes
whatever has a `metadata.json` for whole. That holds for a save that was cut short, but not for a removal that was: the
files go in any order, so that `metadata.json` may outlive the data. Here a checkpoint counts as whole if every array of
the manifest is in the database, every file the database points into is there and long enough, and every file is what
its checksum says (`checksums.py`). Reading a whole checkpoint takes its time: contents are compared where one is to be
loaded, and by `tomat runs verify`; elsewhere sizes are.
"""

import contextlib
import datetime
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import tensorstore as ts

from tomat.base.errors import RetryableError, TomatError
from tomat.base.layout import CHECKPOINT_FOLDER, CHECKSUM_FILE, MANIFEST_FILE, METADATA_FILE, UNMARKED_FILE
from tomat.base.records import Count, typed
from tomat.base.reporting import warn
from tomat.base.storage import (
    READ_REMEDY,
    STORAGE_TRIES,
    Store,
    explaining_storage,
    local_target,
    retry_context,
    short_message,
    storage_error,
    store_url,
)
from tomat.train.runs.checksums import damage, listing

_REMOVAL_TRIES = 3
"""How often a removal is tried; each request in it is tried by the file system as often as that sees fit."""

_ABSENT = ("NOT_FOUND", "DATA_LOSS", "FAILED_PRECONDITION", "OUT_OF_RANGE", "INVALID_ARGUMENT")
"""TensorStore's status codes for a database with a part that is missing, cut short or garbled. Any other error, such as
UNAVAILABLE, says nothing about the checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """One folder below a run's `checkpoints`."""

    path: str
    """Folder or URL."""
    step: int
    """The last step it includes, from 0."""
    whole: bool
    """It can be resumed from."""
    reason: str
    """Why it is not whole; empty where it is."""
    seconds_utc: float | None
    """When it was completed, seconds since 1970; None where it never was, or that is not known."""
    temporary: bool = False
    """Saved by the clock, and removed once a later one is complete."""
    completed: bool = True
    """False for a save that was cut short, or that is being written or removed; True for one that was damaged later."""
    has_checksums: bool = True
    """False for one that an earlier version saved: whether its data are what was saved is not known."""


NO_CHECKSUMS = f"saved without {CHECKSUM_FILE}, by an earlier version: whether its data are intact is not known"


def list_checkpoints(run_url: str, temporary_url: str | None = None, *, read_data: bool = False) -> list[Checkpoint]:
    """Every checkpoint of a run, whole or not, sorted by step.

    `temporary_url`: where `trainer.checkpointer.temporary_base_path` sends its temporary ones, if it is set.
    """
    folders = _folders(run_url, temporary_url)
    with ThreadPoolExecutor(8) as pool:  # each waits for a few small reads
        return sorted(pool.map(lambda found: examine(found[0], found[1], read_data), folders), key=_order)


def newest_whole(run_url: str, temporary_url: str | None = None) -> Checkpoint | None:
    return survey(run_url, temporary_url)[0]


def with_data_read(found: list[Checkpoint]) -> list[Checkpoint]:
    """`found`, sorted by step, with the data read of as many as it takes to know the newest whole one."""
    checked = list(found)
    for index, one in reversed(list(enumerate(found))):
        if one.whole:
            checked[index] = examine(one.path, one.step, read_data=True)
            if checked[index].whole:
                break
    return checked


def survey(run_url: str, temporary_url: str | None = None) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """The newest whole checkpoint, and all that are newer but not whole; looks no further back than it must."""
    partial = []
    for path, step in sorted(_folders(run_url, temporary_url), key=lambda item: item[1], reverse=True):
        found = examine(path, step)
        if found.whole:
            return found, partial
        partial.append(found)
    return None, partial


def find_checkpoint(place: str, step: int | None = None, temporary_url: str | None = None) -> Checkpoint:
    """The whole checkpoint that `place` names: a checkpoint itself, or a run, of which the newest or `step`.

    Its data are read and compared with their checksums; a newer one that is damaged is passed over with a warning.
    """
    place = place.rstrip("/")
    if _is_checkpoint(place):
        found = examine(place, int(place.rsplit("-", 1)[-1]), read_data=True)
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
    return place.rsplit("/", 2)[0] if _is_checkpoint(place) else place


def say_if_unchecked(found: Checkpoint) -> None:
    """Print that the data of a checkpoint could not be compared with anything, where that is so."""
    if not found.has_checksums:
        warn(f"{found.path} was {NO_CHECKSUMS}.")


def examine(path: str, step: int, read_data: bool = False) -> Checkpoint:
    """Whether the checkpoint at `path` is whole.

    Args:
        read_data: Read every file and compare it with its checksum; False: compare its size, and the checksum where
            the listing of a bucket holds it.
    """
    files, root = fsspec.core.url_to_fs(path)
    files.invalidate_cache()
    root = root.rstrip("/")
    with explaining_storage(f"{path} cannot be read", READ_REMEDY):
        try:
            listed = listing(files, root)
            sizes = {name: info["size"] for name, info in listed.items()}
            metadata = _json(files, f"{root}/{METADATA_FILE}") if METADATA_FILE in sizes else None
            manifest = _json(files, f"{root}/{MANIFEST_FILE}") if MANIFEST_FILE in sizes else None
        except FileNotFoundError:  # removed while it is looked at
            return Checkpoint(path, step, False, "it is being removed", None, completed=False)
    if metadata is None and sizes.get(METADATA_FILE):  # an empty one is what a kill leaves
        return Checkpoint(path, step, False, f"its {METADATA_FILE} is damaged", None)
    if metadata is None:
        why = "it was never completed" if sizes else "it does not exist"
        return Checkpoint(path, step, False, f"{why} (no {METADATA_FILE})", None, completed=False)
    seconds = _seconds(metadata.get("timestamp"))
    temporary = bool(metadata.get("is_temporary", False))
    reason = "" if metadata.get("step") == step else f"{METADATA_FILE} says step {metadata.get('step')}"
    if not reason and CHECKSUM_FILE in sizes:  # before the database, of which a damaged file could say anything
        with explaining_storage(f"{path} cannot be read", READ_REMEDY):
            try:
                reason = damage(path, listed, files.cat_file(f"{root}/{CHECKSUM_FILE}"), read_data)
            except FileNotFoundError:
                reason = "it is being removed"
    reason = reason or _missing(path, sizes, manifest)
    return Checkpoint(path, step, not reason, reason, seconds, temporary, has_checksums=CHECKSUM_FILE in sizes)


def unmark(checkpoint: Checkpoint) -> None:
    """Rename the `metadata.json` of a checkpoint that is not whole, so that no other reader takes it for one.

    Levanter would count it among the temporary checkpoints to keep, and remove a whole one for it.
    """
    files, root = fsspec.core.url_to_fs(checkpoint.path)
    if not checkpoint.whole and files.exists(f"{root}/{METADATA_FILE}"):
        files.mv(f"{root}/{METADATA_FILE}", f"{root}/{UNMARKED_FILE}")


def remove(path: str) -> None:
    """Remove a checkpoint, its `metadata.json` first: cut short at any point, what is left is recognised as partial."""
    files, root = fsspec.core.url_to_fs(path)
    for name, recursive in ((f"{root}/{METADATA_FILE}", False), (root, True)):
        for _ in range(_REMOVAL_TRIES):
            files.invalidate_cache()
            if not files.exists(name):
                break
            # A request that was carried out but not answered is sent again, and finds nothing.
            with contextlib.suppress(FileNotFoundError):
                files.rm(name, recursive=recursive)


def copy(checkpoint: Checkpoint, destination: str) -> None:
    """Copy a whole checkpoint, its `metadata.json` last and as a permanent one."""
    source, source_root = fsspec.core.url_to_fs(checkpoint.path)
    target, target_root = fsspec.core.url_to_fs(destination)
    names = {name: name[len(source_root.rstrip("/")) + 1 :] for name in source.find(source_root)}
    if "file" in target.protocol:
        for relative in names.values():
            local_target(Path(target_root), relative, checkpoint.path)
    with explaining_storage(f"{checkpoint.path} cannot be copied to {destination}", "Make room there."):
        remove(destination)
        for name, relative in names.items():
            if relative == METADATA_FILE:
                continue
            to = f"{target_root}/{relative}"
            target.makedirs(to.rsplit("/", 1)[0], exist_ok=True)
            if type(source) is type(target):
                target.cp_file(name, to)  # in a bucket, by the server
            else:
                with source.open(name, "rb") as read, target.open(to, "wb") as write:
                    while block := read.read(64 * 1024**2):
                        write.write(block)
        mark_permanent(destination, checkpoint.path)
    copied = examine(destination, checkpoint.step, read_data=True)
    if not copied.whole:
        raise RetryableError(
            f"the copy of {checkpoint.path} to {destination} is not whole: {copied.reason}. Try again."
        )


def mark_permanent(path: str, source: str | None = None) -> None:
    """Write the `metadata.json` of a permanent checkpoint in one step, from its own or, of a copy, from `source`'s."""
    files, root = fsspec.core.url_to_fs(source or path)
    metadata = {**(_json(files, f"{root}/{METADATA_FILE}") or {}), "is_temporary": False}
    Store(path).write(METADATA_FILE, json.dumps(metadata).encode())


def array_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Shape of every array in a checkpoint, by its name with slashes, from its `manifest.json`."""
    files, root = fsspec.core.url_to_fs(path)
    manifest = _json(files, f"{root}/{MANIFEST_FILE}") or {"arrays": []}
    arrays = typed(manifest, _Arrays, f"{path}/{MANIFEST_FILE}", "Use another checkpoint.").arrays
    return {entry.path: entry.shape for entry in arrays}


AVERAGED, LAST = "averaged", "of the last step"
"""Kinds of weights: `trainer.model_averaging` keeps an average beside those of the last step."""


def weights_kind(path: str) -> str:
    """Which weights of a checkpoint are used for anything but training on: `AVERAGED` where it has them, or `LAST`."""
    return AVERAGED if any(name.startswith("model_averaging/model/") for name in array_shapes(path)) else LAST


def _is_checkpoint(place: str) -> bool:
    """Whether a place is named as a checkpoint is, `step-N`, and not as a run."""
    return re.fullmatch(r"step-\d+", place.rstrip("/").rsplit("/", 1)[-1]) is not None


def _order(found: Checkpoint) -> tuple[int, str]:
    return found.step, found.path


def _folders(run_url: str, temporary_url: str | None) -> list[tuple[str, int]]:
    """Path and step of every folder that is named like a checkpoint."""
    found = []
    for root in (f"{run_url.rstrip('/')}/{CHECKPOINT_FOLDER}", temporary_url):
        if root is None:
            continue
        files, plain = fsspec.core.url_to_fs(root)
        files.invalidate_cache()
        with explaining_storage(f"{root} cannot be read", READ_REMEDY):
            try:
                entries = files.ls(plain, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                continue
        for name in (entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"):
            if (match := re.fullmatch(r"step-(\d+)", name.rsplit("/", 1)[-1])) is not None:
                found.append((f"{root.rstrip('/')}/{match.group(0)}", int(match.group(1))))
    return found


def _json(files: Any, path: str) -> dict[str, Any] | None:
    """The object at `path`; None where it is cut short or garbled."""
    try:
        value = json.loads(files.cat_file(path))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _seconds(timestamp: Any) -> float | None:
    try:
        return datetime.datetime.fromisoformat(timestamp).timestamp()
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class _Array:
    path: str
    shape: tuple[Count, ...]


@dataclass(frozen=True)
class _Arrays:
    arrays: list[_Array]


def _missing(path: str, sizes: dict[str, int], manifest: dict[str, Any] | None) -> str:
    """What a completed checkpoint lacks; empty if it is whole."""
    if manifest is None:
        return f"no readable {MANIFEST_FILE}"
    try:
        arrays = typed(manifest, _Arrays, f"{path}/{MANIFEST_FILE}", "").arrays
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


def _database(path: str) -> tuple[set[str], dict[str, int]]:
    """Keys of a checkpoint's OCDBT database, and for each file it points into the length that must be there."""
    store = ts.KvStore.open(store_url(path), context=retry_context(STORAGE_TRIES)).result()
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
