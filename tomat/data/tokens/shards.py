"""A data set of tokens on disk or in a bucket: `tokens.zarr`, `manifest.json`, `codec.json`, in newer sets also
`structures.npz` and, if one was fitted or given, `promolecule.json`. The array is Zarr v3, uint16 [rows, context], with
a chunk for each block of rows. Opening reads no tokens; a block is checked when it is read."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import tensorstore as ts

from tomat.base.errors import TomatError
from tomat.base.reporting import counted, dump_json
from tomat.base.storage import ARRAY_NAME, MANIFEST_NAME, PROGRESS_PREFIX, STRUCTURES_NAME, Store, explaining_storage
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.relative import RelativeCodec, check_promolecule, wrapped
from tomat.data.density.promolecule import Promolecule
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.manifest import MaterialRows, ShardManifest, parse_manifest
from tomat.data.tokens.structures import PreambleStructures, Structures
from tomat.data.tokens.vocabulary import BOS, DENSITY_START
from tomat.data.tokens.writer import AGAIN, read_part, rows_checksum, stored_codec, stored_promolecule


@dataclass(frozen=True, eq=False)
class ShardSet:
    """An open, complete data set; made by `open_shards`."""

    url: str
    """Where it lies, with a final slash."""
    manifest: ShardManifest
    codec: DensityCodec
    array: ts.TensorStore
    """uint16 [rows, context]."""
    promolecule: Promolecule | None = None

    @property
    def layout(self) -> SequenceLayout:
        return self.manifest.layout

    @property
    def rows(self) -> int:
        return self.manifest.rows

    @property
    def context(self) -> int:
        return self.manifest.context

    @property
    def block_rows(self) -> int:
        """Rows of a block (a chunk); the last block may have fewer."""
        return self.manifest.block_rows

    @property
    def n_blocks(self) -> int:
        return self.manifest.n_chunks

    @property
    def uncompressed_bytes(self) -> int:
        return self.rows * self.context * np.dtype(np.uint16).itemsize

    @property
    def content_sha256(self) -> str:
        """Hash of all that decides which tokens stand in which row: layout, vocabulary, codec, and the checksums of the
        rows. It does not cover the objects beside them, so that older sets keep their hash."""
        manifest = self.manifest
        content = {
            "layout": manifest.layout.to_dict(),
            "vocabulary_version": manifest.vocabulary_version,
            "codec_sha256": manifest.codec_sha256,
            "rows": manifest.rows,
            "block_rows": manifest.block_rows,
            "chunk_checksums": manifest.chunk_checksums,
        }
        return hashlib.sha256(dump_json(content).encode()).hexdigest()

    @cached_property
    def crystals(self) -> Structures | PreambleStructures:
        """The structures of `manifest.materials`, by the same index. Without exact structures, those of the rows."""
        manifest = self.manifest
        if manifest.structures_sha256 is None:
            return PreambleStructures(self.url, manifest, self.codec, self.read_rows)
        names = [each.material_id for each in manifest.materials]
        read = partial(Structures.from_bytes, names=names, remedy=AGAIN)
        return read_part(Store(self.url), STRUCTURES_NAME, manifest.structures_sha256, read)

    def read_block(self, block: int, *, verify: bool = False) -> ts.Future:
        """Start reading a block: a future of uint16 [rows of the block, context]. Its result raises a TomatError that
        names a missing or damaged chunk, found by its crc32c and by rows that do not begin with BOS (scattered voxels:
        with density); with `verify` also by the manifest's checksum."""
        if not 0 <= block < self.n_blocks:
            raise TomatError(f"Block {block} was asked for; {self.url} has blocks 0 to {self.n_blocks - 1}.")
        start, stop = self.manifest.chunk_rows(block)
        promise, future = ts.Promise.new()

        def on_read(read: ts.Future) -> None:
            try:
                promise.set_result(self._checked(block, read.result, verify))
            # Anything that goes wrong belongs to whoever waits for the block: an exception lost in TensorStore's thread
            # would leave the future open for ever.
            except BaseException as error:
                promise.set_exception(error)

        self.array[start:stop].read().add_done_callback(on_read)
        return future

    def _checked(self, block: int, result: Callable[[], np.ndarray], verify: bool) -> np.ndarray:
        where = f"Chunk {block} of {self.url}{ARRAY_NAME} (object c/{block}/0)"
        repair = "Copy this chunk again from where the set came from, or tokenize the set again."
        with explaining_storage(f"{where} cannot be read", repair):
            rows = result()
        expected = self.manifest.chunk_checksums[block]
        state = ""
        # TensorStore reads a missing chunk as zeros, and no row begins with a zero.
        scattered = self.layout.is_scattered
        if not np.all(rows[:, 0] >= DENSITY_START if scattered else rows[:, 0] == BOS):
            first = "a density token" if scattered else "BOS"
            state = f"damaged: a row does not begin with {first}." if rows.any() else "missing."
        elif verify and (found := rows_checksum(rows)) != expected:
            state = f"damaged: its checksum is {found[:12]}..., expected {expected[:12]}..."
        if state:
            raise TomatError(f"{where} is {state} {repair}")
        return rows

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop - 1: uint16 [stop - start, context]."""
        if not 0 <= start <= stop <= self.rows:
            asked = f"Row {start} was" if stop == start + 1 else f"Rows {start} to {stop - 1} were"
            raise TomatError(f"{asked} asked for; {self.url} has {counted(self.rows, 'row')}, numbered from 0.")
        if start == stop:
            return np.empty((0, self.context), dtype=np.uint16)
        blocks = range(start // self.block_rows, -(-stop // self.block_rows))
        futures = [self.read_block(block) for block in blocks]
        first = blocks[0] * self.block_rows
        return np.concatenate([future.result() for future in futures])[start - first : stop - first]

    def material_of_row(self, row: int) -> MaterialRows:
        return self.manifest.materials[int(self.manifest.material_indices(np.array(row)))]

    def anchor_of_row(self, row: int) -> tuple[int, int, int]:
        """First voxel, in the cell, of the row's patch."""
        material = self.material_of_row(row)
        x, y, z = self.manifest.anchors(material)[row - material.row_start].tolist()
        return x, y, z

    def scale_of_row(self, row: int) -> np.ndarray | None:
        """Scale of a relative codec at the voxels of a row's patch, float32 [px, py, pz]; None for other codecs."""
        if not isinstance(self.codec, RelativeCodec):
            return None
        crystal = self.crystals[int(self.manifest.material_indices(np.array(row)))]
        scale = self.codec.scale(crystal, self.material_of_row(row).grid_shape)
        return wrapped(scale, np.array(self.anchor_of_row(row)), self.layout.patch_shape(len(crystal.atomic_numbers)))

    def voxels_of_row(self, row: int) -> np.ndarray:
        material = self.material_of_row(row)
        start = row - material.row_start
        return self.manifest.voxels(material, start, start + 1)[0]


def open_shards(place: str | Path) -> ShardSet:
    store = Store(place)
    content = store.read(MANIFEST_NAME)
    if content is None:
        raise TomatError(f"{store.url} holds no shard set (no {MANIFEST_NAME}). Write one with `tomat tokenize`.")
    manifest = parse_manifest(content, store.url + MANIFEST_NAME)
    if not manifest.complete:
        written = len(store.names(PROGRESS_PREFIX))
        raise TomatError(
            f"The shard set {store.url} is not complete: {written} of {counted(manifest.n_chunks, 'chunk')} written. "
            "Run the command that writes it again; it goes on where it stopped."
        )
    if manifest.layout.is_scattered and manifest.structures_sha256 is None:
        said = f"The shard set {store.url} of scattered voxels has no {STRUCTURES_NAME}, and its rows name no atoms"
        raise TomatError(f"{said}. {AGAIN}")
    codec = stored_codec(store, manifest)
    array = store.open_array()
    expected = ((manifest.rows, manifest.context), "uint16", (manifest.block_rows, manifest.context))
    found = (tuple(array.shape), array.dtype.name, tuple(array.chunk_layout.read_chunk.shape or ()))
    if found != expected:
        words = [f"{dtype} {shape} in chunks of {chunk}" for shape, dtype, chunk in (found, expected)]
        raise TomatError(f"The array {store.url}{ARRAY_NAME} is {words[0]}; the manifest says {words[1]}. {AGAIN}")
    promolecule = stored_promolecule(store, manifest)
    check_promolecule(codec, promolecule, store.url)
    return ShardSet(store.url, manifest, codec, array, promolecule)
