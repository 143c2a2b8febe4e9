"""Imports a data set of the first generation: Parquet files of `task_id` and `input_ids`, and a `meta.json`.

Its sequences have this vocabulary (version 3 or 2 of the layout) and no padding, and stand one material after another.
Its values are density times cell volume, which must also be its codec's unit. Its anchors were drawn in another way, so
an imported set does not know them and cannot be compared with its densities.
"""

import argparse
import json
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tomat.app.cli import main
from tomat.base.arguments import Parser, report_file
from tomat.base.errors import TomatError
from tomat.base.progress import progress
from tomat.base.reporting import console, counted, write_report
from tomat.base.storage import PROGRESS_PREFIX, Store
from tomat.data.codec.base import UNIT_RHO_TIMES_VOLUME, DensityCodec, require_unit
from tomat.data.codec.files import load_codec
from tomat.data.codec.two_token import TwoTokenCodec
from tomat.data.tokens import vocabulary as v
from tomat.data.tokens.layouts import SequenceLayout, layout_named
from tomat.data.tokens.manifest import DEFAULT_BLOCK_ROWS, IMPORTED_ANCHORS, MaterialRows, ShardManifest
from tomat.data.tokens.patch import decode_sequence
from tomat.data.tokens.vocabulary import Vocabulary
from tomat.data.tokens.writer import (
    ChunkWriter,
    checksum_of_record,
    chunk_is_written,
    finalise,
    read_plan,
    record_name,
    rows_checksum,
    start_shards,
)

TWO_TOKEN_NAME = "two_token_9_12"
"""`density_codec_name` in `meta.json` for the 9 + 12 bit codec. Its range is in `meta.json` too."""


@dataclass(frozen=True)
class FirstGeneration:
    """A data set of the first generation."""

    folder: Path
    files: tuple[Path, ...]
    meta: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> "FirstGeneration":
        """Read `meta.json` and list the Parquet files.

        Raises:
            TomatError: if either is missing or `meta.json` lacks what is needed.
        """
        files = tuple(sorted(folder.glob("*.parquet")))
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            for key in ("patch_size", "patches_per_material", "seed"):
                if type(meta[key]) is not int:
                    raise TypeError(f"{key} is {meta[key]!r:.80}")
            if not isinstance(meta["split"], str) or not isinstance(meta["vocab"], dict):
                raise TypeError(f"split is {meta['split']!r:.80} and vocab {meta['vocab']!r:.80}")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TomatError(
                f"{folder} is no data set of the first generation ({type(error).__name__}: {error}); expected "
                "*.parquet files and a meta.json with split, patch_size, patches_per_material, seed and vocab."
            ) from error
        if not files:
            raise TomatError(f"{folder} has a meta.json but no *.parquet.")
        return cls(folder, files, meta)

    def codec(self, given: DensityCodec | None) -> DensityCodec:
        """The codec of the set: the one given, or the two-token one that `meta.json` describes.

        Raises:
            TomatError: if there is none, its unit is another one, or its vocabulary is not the set's.
        """
        codec = given
        if codec is None:
            if self.meta.get("density_codec_name") != TWO_TOKEN_NAME:
                raise TomatError(
                    f"{self.folder} was written with the codec {self.meta.get('density_codec_name')!r}, which "
                    "meta.json does not hold; give it with --codec FILE."
                )
            try:
                found = self.meta["vocab"]["density_codec"]
                low, high = float(found["log_min"]), float(found["log_max"])
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise TomatError(
                    f"{self.folder}/meta.json does not say the range of its codec ({type(error).__name__}: {error}); "
                    "expected vocab.density_codec with log_min and log_max. Fetch it again."
                ) from error
            codec = TwoTokenCodec(UNIT_RHO_TIMES_VOLUME, low, high)
        require_unit(codec, UNIT_RHO_TIMES_VOLUME, str(self.folder))
        size, expected = Vocabulary(codec.n_density_tokens).size, self.meta["vocab"].get("total_size")
        if size != expected:
            raise TomatError(
                f"{self.folder} has a vocabulary of {expected} ids, the codec makes one of {size}. Give the codec the "
                "set was written with."
            )
        return codec

    def rows(self, batch_rows: int) -> Iterator[tuple[list[str], list[np.ndarray]]]:
        """Names of the materials and ids of each row, `batch_rows` at a time, in order.

        Raises:
            TomatError: if a file cannot be read, lacks a column, or has one of another type.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        for path in self.files:
            try:
                with pq.ParquetFile(path) as file:
                    _check_columns(file.schema_arrow, path)
                    for batch in file.iter_batches(batch_rows, columns=["task_id", "input_ids"]):
                        lists = batch.column(1)
                        if batch.column(0).null_count or lists.null_count or lists.values.null_count:
                            raise TomatError(f"{path} has rows without a name or without ids; fetch it again.")
                        flat = lists.values.to_numpy(zero_copy_only=False)
                        offsets = lists.offsets.to_numpy()
                        yield (
                            batch.column(0).to_pylist(),
                            [flat[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)],
                        )
            # Arrow's errors are also OSError, ValueError, KeyError, IndexError, TypeError or MemoryError. A name that
            # is not UTF-8 is a UnicodeDecodeError.
            except (OSError, pa.ArrowException, LookupError, ValueError, TypeError) as error:
                said = " ".join(str(error).split())  # Arrow's reasons have several lines
                raise TomatError(f"{path} cannot be read ({type(error).__name__}: {said}); fetch it again.") from error


def _check_columns(schema: Any, path: Path) -> None:
    """Raise an error unless the columns are names and lists of integers."""
    import pyarrow as pa

    names, ids = schema.field("task_id").type, schema.field("input_ids").type
    is_list = pa.types.is_list(ids) or pa.types.is_large_list(ids)
    if not (pa.types.is_string(names) or pa.types.is_large_string(names)) or not (
        is_list and pa.types.is_integer(ids.value_type)
    ):
        raise TomatError(
            f"{path} has task_id of type {names} and input_ids of type {ids}; expected names and lists of integers. "
            "Fetch it again."
        )


def import_first_generation(
    folder: Path,
    place: str | Path,
    layout: SequenceLayout,
    codec: DensityCodec | None = None,
    block_rows: int = DEFAULT_BLOCK_ROWS,
) -> ShardManifest:
    """Write a data set of the first generation as a shard set. A stopped import continues where it was.

    Args:
        folder: with the Parquet files and `meta.json`.
        place: folder or `gs://` URL of the shard set.
        layout: the layout its sequences are in.
        codec: the codec it was written with; None for the two-token codec that `meta.json` describes.
        block_rows: rows of a chunk.

    Raises:
        TomatError: if the set cannot be read, is not in that layout, its rows are shuffled over the materials, or the
            place has other rows.
    """
    source = FirstGeneration.open(folder)
    if layout.fills_context:
        raise TomatError(
            f"{folder} has cubes, as all sets of the first generation; layout {layout.name} has boxes. Name the layout "
            "it was written in with --layout."
        )
    if source.meta["patch_size"] != layout.patch_size:
        raise TomatError(
            f"{folder} has patches of {source.meta['patch_size']} voxels a side, layout {layout.name} of "
            f"{layout.patch_size}. Name the layout it was written in with --layout."
        )
    codec = source.codec(codec)
    store = Store(place)
    with progress() as bar:
        task = bar.add_task("Reading names", total=None)
        plan = _plan(source, layout, codec, block_rows)
        bar.remove_task(task)
        start_shards(store, plan, codec)
        before = read_plan(store)
        finished = before.chunk_checksums if before is not None and before.complete else ()
        records = set(store.names(PROGRESS_PREFIX))
        task = bar.add_task("Importing rows", total=plan.rows)
        with ChunkWriter(store, plan) as writer:
            for chunk, rows in enumerate(_chunks(source, plan)):
                there = finished[chunk] if finished else _recorded(store, plan, chunk, records)
                if there not in (None, rows_checksum(rows)):
                    raise TomatError(
                        f"{store.url} has other rows in chunk {chunk} than {folder}; import it into another place."
                    )
                if there is None or finished:  # which mends what is damaged of a finished set
                    writer.write(chunk, rows)
                bar.advance(task, len(rows))
    return finalise(store)


def _recorded(store: Store, plan: ShardManifest, chunk: int, records: Collection[str]) -> str | None:
    """The checksum of a chunk's rows that an import which was stopped has written; None where they are not whole."""
    if record_name(chunk) not in records or not chunk_is_written(store, plan, chunk):
        return None
    name = PROGRESS_PREFIX + record_name(chunk)
    return checksum_of_record(store.read(name) or b"", store.url + name)


def _plan(source: FirstGeneration, layout: SequenceLayout, codec: DensityCodec, block_rows: int) -> ShardManifest:
    """The manifest with the rows of each material. The first sequence of each material is read back completely."""
    entries: list[MaterialRows] = []
    seen: set[str] = set()
    row = 0
    for names, sequences in source.rows(1024):
        for name, ids in zip(names, sequences, strict=True):
            if entries and entries[-1].material_id == name:
                last = entries[-1]
                entries[-1] = MaterialRows(name, last.row_start, row + 1, last.anchors_seed, last.grid_shape)
            elif name in seen:
                raise TomatError(
                    f"The rows of {name} are not together in {source.folder}: it was shuffled. Import the set as it "
                    "was before; the loader shuffles."
                )
            else:
                seen.add(name)
                shape = decode_sequence(_checked(ids, layout, codec.n_density_tokens, name), layout, codec).grid_shape
                entries.append(MaterialRows(name, row, row + 1, IMPORTED_ANCHORS, shape))
            row += 1
    if not entries:
        raise TomatError(f"{source.folder} has no rows.")
    return ShardManifest(
        split=str(source.meta["split"]),
        layout=layout,
        rows=row,
        block_rows=block_rows,
        codec_sha256=codec.sha256,
        n_density_tokens=codec.n_density_tokens,
        unit=codec.unit,
        patches_per_material=int(source.meta["patches_per_material"]),
        seed=int(source.meta["seed"]),
        materials=tuple(entries),
    )


def _checked(ids: np.ndarray, layout: SequenceLayout, n_density_tokens: int, name: str) -> np.ndarray:
    """The sequence, unless it is too long, has an id outside the vocabulary, or does not run from BOS to EOS."""
    size = Vocabulary(n_density_tokens).size
    good = 2 <= len(ids) <= layout.context and 0 <= ids.min() <= ids.max() < size
    used = ids[ids != v.PAD] if good else ids
    if not good or not used.size or used[0] != v.BOS or used[-1] != v.EOS:
        raise TomatError(
            f"A sequence of {name} has {len(ids)} tokens with ids from {ids.min() if len(ids) else '-'} to "
            f"{ids.max() if len(ids) else '-'}; expected BOS to EOS in at most {layout.context} tokens, ids below "
            f"{size}. Name the layout and codec the set was written with."
        )
    return ids


def _chunks(source: FirstGeneration, plan: ShardManifest) -> Iterator[np.ndarray]:
    """The rows of each chunk, padded to the context."""
    rows = np.full((plan.block_rows, plan.context), v.PAD, dtype=np.uint16)
    filled = 0
    for names, sequences in source.rows(plan.block_rows):
        for name, ids in zip(names, sequences, strict=True):
            checked = _checked(ids, plan.layout, plan.n_density_tokens, name)
            rows[filled, : len(checked)] = checked
            filled += 1
            if filled == plan.block_rows:
                yield rows
                rows = np.full((plan.block_rows, plan.context), v.PAD, dtype=np.uint16)
                filled = 0
    if filled:
        yield rows[:filled]


def build_parser() -> Parser:
    """The flags of this script."""
    parser = Parser(
        prog="python profiling/import_first_generation.py",
        description="Write the rows of first-generation Parquet files as a shard set, without changing a token.",
    )
    parser.add_argument("folder", type=Path, help="the Parquet files and meta.json")
    parser.add_argument("--output", required=True, metavar="PLACE", help="folder or gs:// URL of the shard set")
    parser.add_argument("--layout", required=True, help="layout of its sequences, such as v3-p19")
    parser.add_argument("--codec", type=Path, metavar="FILE", help="codec it was written with (default: of meta.json)")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    parser.set_defaults(run=run)
    parser.examples = (f"{parser.prog} old_rows --layout v2-p14 --output imported",)
    return parser


def run(args: argparse.Namespace) -> int:
    """Import the data set and print what the shard set contains."""
    codec = None if args.codec is None else load_codec(args.codec)
    manifest = import_first_generation(args.folder, args.output, layout_named(args.layout), codec)
    rows, materials = counted(manifest.rows, "row"), counted(len(manifest.materials), "material")
    console.print(f"{args.output}: {rows} of {materials} imported")
    figures = {"output": args.output, "rows": manifest.rows, "materials": len(manifest.materials)}
    write_report(args.json, figures | {"codec_sha256": manifest.codec_sha256})
    return 0


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
