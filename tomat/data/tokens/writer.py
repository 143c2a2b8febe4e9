"""Write a data set of tokens chunk by chunk. Any worker can write any chunk, independently of all others.

`start_shards` puts the plan and the objects beside it in place, `ChunkWriter` writes chunks and after each a record
with its checksum, `finalise` gathers the records into the manifest. A writer that is stopped and started again goes on
with the chunks that have no record, and ends with the same bytes.
"""

import hashlib
import re
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import tensorstore as ts

from tomat.base import storage
from tomat.base.errors import RetryableError, TomatError
from tomat.base.reporting import counted
from tomat.base.storage import Store, explaining_storage
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.files import codec_from_text, codec_text
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule
from tomat.data.tokens.manifest import ShardManifest, parse_manifest
from tomat.data.tokens.patch import encode_rows
from tomat.data.tokens.scattered import encode_scattered
from tomat.data.tokens.structures import Structures

GetGrid = Callable[[str], DensityGrid]
"""Reads the density of a material by name; raises TomatError where that is impossible."""
AGAIN = "Copy or tokenize the set again."


def rows_checksum(rows: np.ndarray) -> str:
    """SHA-256 of rows as little-endian uint16, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(rows, dtype="<u2").tobytes()).hexdigest()


def record_name(chunk: int) -> str:
    """Name, below `PROGRESS_PREFIX`, of the record of a written chunk."""
    return f"{chunk:08d}"


def record_content(checksum: str) -> bytes:
    """The record of a written chunk: its checksum, and a CRC32 of that."""
    return f"{checksum} {zlib.crc32(checksum.encode()):08x}".encode()


def checksum_of_record(content: bytes, source: str) -> str:
    """The checksum in a record. Older ones, without a CRC32, are the checksum alone."""
    found = re.fullmatch(rb"([0-9a-f]{64})( [0-9a-f]{8})?", content)
    checksum = found.group(1).decode() if found else ""
    if found is None or (found.group(2) is not None and record_content(checksum) != content):
        raise TomatError(
            f"{source} is damaged; expected the checksum of a written chunk. Remove this file and run the same command "
            "again; it writes the chunk again."
        )
    return checksum


def start_shards(
    store: Store,
    plan: ShardManifest,
    codec: DensityCodec,
    structures: Structures | None = None,
    promolecule: Promolecule | None = None,
) -> ShardManifest:
    """Put codec, structures and promolecule as planned, the plan and the empty array in place. Returns the plan."""
    found = read_plan(store)
    if found is not None:
        check_same(store, found, plan.identity())
    else:
        # It is not known what an array and records without a manifest belong to.
        if store.names(storage.ARRAY_NAME + "/") or store.names(storage.PROGRESS_PREFIX):
            raise TomatError(f"{store.url} holds a token array but no manifest. Remove it, or choose another place.")
        store.write(storage.CODEC_NAME, codec_text(codec).encode())
        if structures is not None:
            store.write(storage.STRUCTURES_NAME, structures.to_bytes())
        if promolecule is not None:
            store.write(storage.PROMOLECULE_NAME, promolecule.to_text().encode())
        store.write(storage.MANIFEST_NAME, plan.to_text().encode())
    store.create_array(plan.rows, plan.context, plan.block_rows)
    return plan


def read_plan(store: Store) -> ShardManifest | None:
    """The manifest in place, complete or not; None if there is none."""
    content = store.read(storage.MANIFEST_NAME)
    return None if content is None else parse_manifest(content, store.url + storage.MANIFEST_NAME)


def read_part[Part: DensityCodec | Promolecule | Structures](
    store: Store, name: str, stated: str, read: Callable[[bytes, str], Part]
) -> Part:
    """Read an object beside a manifest, which states its hash. Refuses another set's. `read` gets content and place."""
    if (content := store.read(name)) is None:
        raise TomatError(f"The shard set {store.url} has no {name}, but its manifest names one. {AGAIN}")
    found = read(content, store.url + name)
    if found.sha256 != stated:
        hashes = f"it hashes to {found.sha256[:12]}..., the manifest says {stated[:12]}..."
        raise TomatError(f"{store.url}{name} is not the set's: {hashes} {AGAIN}")
    return found


def stored_codec(store: Store, plan: ShardManifest) -> DensityCodec:
    return read_part(store, storage.CODEC_NAME, plan.codec_sha256, codec_from_text)


def stored_promolecule(store: Store, plan: ShardManifest) -> Promolecule | None:
    stated = plan.promolecule_sha256
    return None if stated is None else read_part(store, storage.PROMOLECULE_NAME, stated, Promolecule.from_text)


def check_same(store: Store, found: ShardManifest, wanted: dict[str, Any]) -> None:
    """Refuse a set in place whose `identity` is another than the wanted one."""
    refuse_differing(store, [key for key, value in found.identity().items() if wanted.get(key) != value])


def refuse_differing(store: Store, differing: Sequence[str]) -> None:
    if differing:
        what = f"it differs in {', '.join(differing)}"
        raise TomatError(f"{store.url} holds another data set: {what}. Remove it, or choose another place.")


def chunk_tokens(plan: ShardManifest, chunk: int, get_grid: GetGrid, codec: DensityCodec) -> np.ndarray:
    """The rows of one chunk: uint16 [rows of the chunk, context]."""
    start, stop = plan.chunk_rows(chunk)
    first, last = plan.material_indices(np.array([start, stop - 1]))
    parts = []
    for material in plan.materials[first : last + 1]:
        grid = get_grid(material.material_id)
        if tuple(grid.grid_shape) != material.grid_shape:
            raise TomatError(
                f"{material.material_id} has a grid of {tuple(grid.grid_shape)} voxels, {material.grid_shape} were "
                "planned. Its density has changed since: remove the data set and start again."
            )
        wanted = max(start, material.row_start) - material.row_start, stop - material.row_start
        if plan.layout.is_scattered:
            parts.append(encode_scattered(grid, plan.voxels(material, *wanted), plan.layout, codec))
        else:
            parts.append(encode_rows(grid, plan.anchors(material)[slice(*wanted)], plan.layout, codec))
    return np.concatenate(parts)


def planned(get_grid: GetGrid) -> GetGrid:
    """`get_grid` for materials that have rows, and so can no longer be skipped. Its errors say so."""

    def read(material_id: str) -> DensityGrid:
        try:
            return get_grid(material_id)
        except RetryableError:
            raise
        except TomatError as error:
            raise TomatError(
                f"Material {material_id} could be read when the rows were laid out, and no longer can: {error} Restore "
                "it and run the same command again, or remove the data set and start without it."
            ) from error

    return read


class ChunkWriter:
    """Writes chunks, each followed by its record once it is durable, while the caller makes the next one. Waiting takes
    longer than making (30 ms against 12 ms for 64 rows of 8,192 tokens on a disk that others use), so up to `BEHIND`
    chunks are under way. Leaving the context without an error waits for all of them."""

    BEHIND = 2

    def __init__(self, store: Store, plan: ShardManifest, array: ts.TensorStore | None = None) -> None:
        self.store, self.plan = store, plan
        self.array = array if array is not None else store.open_array()
        self.chunks: deque[tuple[int, str, ts.WriteFutures]] = deque()
        self.records: deque[tuple[int, ts.Future]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._settle(0)

    def write(self, chunk: int, rows: np.ndarray) -> None:
        """Start to write the rows of a chunk; they must not be changed afterwards."""
        future = begin_chunk(self.store, self.array, self.plan, chunk, rows)
        future.commit.force()
        self.chunks.append((chunk, rows_checksum(rows), future))
        self._settle(self.BEHIND)

    def _settle(self, behind: int) -> None:
        """Wait until at most `behind` chunks, and as many records, are under way."""
        while len(self.chunks) > behind:
            chunk, checksum, future = self.chunks.popleft()
            self._wait(chunk, future)
            name = storage.PROGRESS_PREFIX + record_name(chunk)
            self.records.append((chunk, self.store.objects.write(name, record_content(checksum))))
        while len(self.records) > behind:
            self._wait(*self.records.popleft())

    def _wait(self, chunk: int, future: ts.Future | ts.WriteFutures) -> None:
        with explaining_storage(f"Cannot write chunk {chunk} of {self.store.url}{storage.ARRAY_NAME}"):
            future.result()


def begin_chunk(
    store: Store, array: ts.TensorStore, plan: ShardManifest, chunk: int, rows: np.ndarray
) -> ts.WriteFutures:
    """Start to write the rows of a chunk, which must not change; the result raises TensorStore's errors."""
    start, stop = plan.chunk_rows(chunk)
    if stop - start < plan.block_rows:
        # TensorStore first reads the last chunk, which is not full, to keep its other rows. There are none, and a
        # damaged chunk would make it fail.
        store.delete(f"{storage.ARRAY_NAME}/c/{chunk}/")
    return array[start:stop].write(rows)


def chunk_is_written(store: Store, plan: ShardManifest, chunk: int) -> bool:
    """Whether the chunk has a whole record, and its rows the record's checksum; an outage is a RetryableError."""
    name = storage.PROGRESS_PREFIX + record_name(chunk)
    record = store.read(name)
    if record is None:
        return False
    start, stop = plan.chunk_rows(chunk)
    try:
        rows = store.open_array()[start:stop].read().result()
        return rows_checksum(rows) == checksum_of_record(record, store.url + name)
    except RetryableError:
        raise
    except (ValueError, OSError, TomatError):
        return False


def finalise(store: Store) -> ShardManifest:
    """Gather the records of all chunks into the manifest, and mark the set complete."""
    plan = read_plan(store)
    if plan is None:
        raise TomatError(f"{store.url} holds no data set: there is no {storage.MANIFEST_NAME}.")
    if not plan.complete:
        records = set(store.names(storage.PROGRESS_PREFIX))
        missing = [chunk for chunk in range(plan.n_chunks) if record_name(chunk) not in records]
        if missing:
            what = f"{len(missing)} of {counted(plan.n_chunks, 'chunk')} not written, the first is {missing[0]}"
            raise TomatError(f"{store.url} is not finished: {what}. Write them, then finalise.")
        names = [storage.PROGRESS_PREFIX + record_name(chunk) for chunk in range(plan.n_chunks)]
        reads = [store.objects.read(name) for name in names]
        with explaining_storage(f"Cannot read {store.url}{storage.PROGRESS_PREFIX}"):
            found = [read.result().value for read in reads]
        pairs = zip(names, found, strict=True)
        checksums = tuple(checksum_of_record(record, store.url + name) for name, record in pairs)
        plan = replace(plan, chunk_checksums=checksums, complete=True, has_checksum=True)
        store.write(storage.MANIFEST_NAME, plan.to_text().encode())
    store.delete(storage.PROGRESS_PREFIX)
    return plan
