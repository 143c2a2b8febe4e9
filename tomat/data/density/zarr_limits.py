"""A Zarr store that refuses a chunk that would decompress to more than a chunk of its array."""

import contextlib
import gzip
import io
import math
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

from zarr.abc.store import Store
from zarr.storage import FsspecStore, LocalStore, WrapperStore

from tomat.base.errors import TomatError
from tomat.base.retries import first_contact
from tomat.data.density.limits import COMPRESSION_ERRORS, MOST_VOXELS, check_grid_shape

MOST_METADATA_BYTES = 2**26
"""Largest `zarr.json`: a structure of 10,000 atoms takes 3 MB."""

MOST_CHUNKS = 2**18
"""Most chunks of an array: 1,024^3 voxels in chunks of 16^3."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE_MAGIC = tuple(bytes([0x50 + k]) + b"\x2a\x4d\x18" for k in range(16))
_BLOSC_HEADER = struct.Struct("<4B3I")
_PIECE_BYTES = 2**20


class BoundedStore(WrapperStore[Store]):
    """A store for reading that checks what it returns."""

    def __init__(self, store: Store, location: str = "") -> None:
        """`location`: what errors call it."""
        super().__init__(store)
        self.location = location
        self.chunk_bytes = 0
        """Uncompressed size of a chunk, set once the array is known."""

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        return self._checked(key, await self._store.get(key, prototype, byte_range))

    def get_sync(self, key: str, *, prototype: Any = None, byte_range: Any = None) -> Any:
        return self._checked(key, super().get_sync(key, prototype=prototype, byte_range=byte_range))

    async def get_ranges(
        self, key: str, byte_ranges: Sequence[Any], *, prototype: Any, **limits: Any
    ) -> AsyncIterator[Sequence[tuple[int, Any]]]:
        async for group in super().get_ranges(key, byte_ranges, prototype=prototype, **limits):
            for _, buffer in group:
                self._checked(key, buffer)
            yield group

    async def _get_many(self, requests: Any) -> Any:
        async for key, buffer in super()._get_many(requests):
            yield key, self._checked(key, buffer)

    def _checked(self, key: str, buffer: Any) -> Any:
        if buffer is None:
            return None
        metadata = key.rsplit("/", 1)[-1] in ("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata")
        if metadata and len(buffer) > MOST_METADATA_BYTES:
            said = f"{self.location}: {key} has {len(buffer):,} bytes"
            raise TomatError(f"{said}; expected at most {MOST_METADATA_BYTES:,} of metadata.")
        if not metadata and (found := decompressed_bytes(buffer.to_bytes(), self.chunk_bytes)) > self.chunk_bytes:
            said = f"{self.location}: the chunk {key} decompresses to {found:,} bytes or more"
            raise TomatError(f"{said}; expected {self.chunk_bytes:,}.")
        return buffer


def read_only_store(location: str) -> BoundedStore:
    if "://" in location:
        first_contact(location)
        return BoundedStore(FsspecStore.from_url(location, read_only=True), location)
    return BoundedStore(LocalStore(Path(location), read_only=True), location)


def check_array(array: Any, source: str) -> None:
    """Refuse the shape and the chunks of an array before a chunk is read."""
    check_grid_shape(array.shape, source)
    n_chunks = math.prod(-(-n // side) for n, side in zip(array.shape, array.chunks, strict=True))
    if min(array.chunks) < 1 or math.prod(array.chunks) > MOST_VOXELS or n_chunks > MOST_CHUNKS:
        raise TomatError(
            f"{source}: the array of {array.shape} has {n_chunks:,} chunks of {array.chunks}; expected at most "
            f"{MOST_CHUNKS:,} of at most {MOST_VOXELS:,} voxels. The metadata is damaged."
        )


def decompressed_bytes(content: bytes, enough: int) -> int:
    """Size of a chunk after decompression: as its format states, else counted up to `enough` by decompressing it."""
    if content[:4] in (_ZSTD_MAGIC, *_ZSTD_SKIPPABLE_MAGIC):
        stated = _stated_zstd_bytes(content)
        return _counted_bytes(content, "zstd", enough) if stated is None else stated
    if content[:2] == b"\x1f\x8b":
        return _counted_bytes(content, "gzip", enough)
    if len(content) >= _BLOSC_HEADER.size:
        # c-blosc 1.21, README_CHUNK_FORMAT: version 2, versionlz, flags, typesize, nbytes, blocksize, cbytes.
        version, *_, size, _, compressed_size = _BLOSC_HEADER.unpack_from(content)
        if version == 2 and compressed_size == len(content):
            return size
    return len(content)


def _stated_zstd_bytes(content: bytes) -> int | None:
    """The sum of the sizes that the headers of all frames state, which is what numcodecs allocates; None where one
    states none. RFC 8878, 3.1.1: descriptor, window, dictionary, content size; blocks; checksum."""
    total = at = 0
    while (magic := content[at : at + 4]) in (_ZSTD_MAGIC, *_ZSTD_SKIPPABLE_MAGIC) and at + 8 < len(content):
        if magic != _ZSTD_MAGIC:
            at += 8 + int.from_bytes(content[at + 4 : at + 8], "little")
            continue
        descriptor = content[at + 4]
        single_segment = descriptor >> 5 & 1
        size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
        if not size_bytes:
            return None
        at += 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3]
        total += int.from_bytes(content[at : at + size_bytes], "little") + (256 if size_bytes == 2 else 0)
        at += size_bytes
        last = False
        while not last and at + 3 <= len(content):
            block = int.from_bytes(content[at : at + 3], "little")
            last, kind = bool(block & 1), block >> 1 & 3
            at += 3 + (1 if kind == 1 else block >> 3)  # a run of one byte is stored as that byte
        at += 4 * (descriptor >> 2 & 1)
    return total


def _counted_bytes(content: bytes, compression: Literal["gzip", "zstd"], enough: int) -> int:
    """Decompressed size of all frames or members, counted piece by piece until it exceeds `enough`. A bound from zstd's
    blocks would not do: a block has up to 128 KiB, and a whole chunk of 16^3 voxels has 16 KiB."""
    import pyarrow as pa

    size = 0
    with contextlib.suppress(ValueError, *COMPRESSION_ERRORS):  # damaged: the decoder says so
        packed = io.BytesIO(content)
        with gzip.open(packed) if compression == "gzip" else pa.input_stream(packed, compression=compression) as stream:
            while size <= enough and (piece := stream.read(_PIECE_BYTES)):
                size += len(piece)
    return size
