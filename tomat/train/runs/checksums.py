"""A checksum for every file of a checkpoint, written when all data are there and before the checkpoint is complete.

Neither OCDBT nor zarr3 as Levanter 0.2.227 writes them holds one: a bit that flips after the save, a page or a file
that a loss of power leaves as zeros, all load as other numbers. CRC32C because a bucket computes and keeps it for each
of its objects: there nothing is read back, neither to write the file nor to check it.
"""

import base64
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import fsspec
import google_crc32c

from tomat.base.errors import TomatError
from tomat.base.layout import CHECKSUM_FILE, METADATA_FILE, UNMARKED_FILE
from tomat.base.records import typed_text
from tomat.base.storage import Store

UNHASHED = (CHECKSUM_FILE, METADATA_FILE, UNMARKED_FILE)
"""What is written after the checksums, or renamed later."""

READ_BYTES = 8 * 1024**2
READERS = 4
"""Files hashed at a time; `google_crc32c` does 7 GB/s on one core and lets go of the interpreter meanwhile."""


@dataclass(frozen=True)
class _Entry:
    size: int
    crc32c: str
    """As buckets write it: big-endian, base64."""


@dataclass(frozen=True)
class _Checksums:
    algorithm: Literal["crc32c"]
    files: dict[str, _Entry]


def write_checksums(path: str) -> None:
    """Write the checksums of every file that lies in the folder or URL `path` now.

    Raises:
        OSError: A file cannot be read.
    """
    files, root = fsspec.core.url_to_fs(path)
    files.invalidate_cache()
    found = {name: info for name, info in listing(files, root).items() if name not in UNHASHED}
    with ThreadPoolExecutor(READERS) as pool:
        sums = pool.map(lambda item: _checksum(files, root, *item), found.items())
        entries = {name: {"size": found[name]["size"], "crc32c": crc} for name, crc in zip(found, sums, strict=True)}
    content = json.dumps({"algorithm": "crc32c", "files": entries}, indent=1, sort_keys=True).encode()
    # Synced to disk, as the data are: or a loss of power could leave all but the checksums.
    Store(path).write(CHECKSUM_FILE, content)


def damage(path: str, found: Mapping[str, Mapping[str, Any]], content: bytes, read_data: bool) -> str:
    """What differs from the checksums, naming the file; empty if nothing does.

    Raises:
        OSError: A file cannot be read just now.
    """
    try:
        entries = typed_text(content, _Checksums, path, "").files
    except TomatError:
        return f"{CHECKSUM_FILE} is damaged"
    for name, entry in sorted(entries.items()):
        if name not in found:
            return f"{name} is missing"
        if found[name]["size"] != entry.size:
            return f"{name} has {found[name]['size']} of {entry.size} bytes"
    # A file beyond these, such as a file system's `.nfs...`, is none that the checkpoint's database points into.
    files, root = fsspec.core.url_to_fs(path)
    names = [name for name in sorted(entries) if read_data or "crc32c" in found[name]]
    with ThreadPoolExecutor(READERS) as pool:
        sums = pool.map(lambda name: _checksum(files, root, name, found[name]), names)
        for name, crc in zip(names, sums, strict=True):
            if crc != entries[name].crc32c:
                return f"{name} is damaged (its checksum differs)"
    return ""


def listing(files: Any, root: str) -> dict[str, dict[str, Any]]:
    """What the file system says of each file below `root`, by its name from there."""
    prefix = root.rstrip("/") + "/"
    return {name[len(prefix) :]: info for name, info in files.find(root, detail=True).items()}


def _checksum(files: Any, root: str, name: str, info: Mapping[str, Any]) -> str:
    if "crc32c" in info:
        return info["crc32c"]
    crc = google_crc32c.Checksum()
    with files.open(f"{root.rstrip('/')}/{name}", "rb", cache_type="none") as file:
        while block := file.read(READ_BYTES):
            crc.update(block)
    return base64.b64encode(crc.digest()).decode()
