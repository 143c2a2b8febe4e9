"""The contents of a data set of tokens: which row holds which patch, or which voxels, of which material. Patches and
voxels follow from the data set's seed and a material's name alone, so any worker can write any rows."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from tomat.base.documents import parse_checked, refuse_unknown_keys, with_checksum
from tomat.base.errors import TomatError
from tomat.base.records import Count, Positive, Sha256, typed
from tomat.base.reporting import counted
from tomat.data.codec.base import check_unit
from tomat.data.density.rules import ReadRules
from tomat.data.tokens.clipping import ClippedMaterial
from tomat.data.tokens.layouts import LAYOUTS, SequenceLayout
from tomat.data.tokens.scattered import draw_voxels
from tomat.data.tokens.vocabulary import VOCABULARY_VERSION

SHARD_FORMAT_VERSION = 1
DEFAULT_BLOCK_ROWS = 64

IMPORTED_ANCHORS = "imported"
"""Stands in place of a key for anchors that another program drew, and that are not known."""

CHECKSUM = "sha256 of the chunk's rows as little-endian uint16, without the padding of the last chunk"
"""It is of the decoded rows, and so the same with any compressor. A crc32c guards each stored object."""


@dataclass(frozen=True)
class MaterialRows:
    material_id: str
    row_start: Count
    row_end: Count
    anchors_seed: str
    """Philox key of the anchors, or of the order of scattered voxels, 32 hexadecimal digits; or `IMPORTED_ANCHORS`."""
    grid_shape: tuple[Positive, Positive, Positive]


@dataclass(frozen=True)
class SkippedMaterial:
    material_id: str
    reason: str


def check_material_id(material_id: str) -> None:
    """Refuse a name that is not a plain file name: a file of a material with that name would lie elsewhere."""
    if material_id in ("", ".", "..") or not material_id.isprintable() or re.search(r"[/\\]", material_id):
        expected = "expected a name of printable characters without '/' and '\\'. Rename it where it comes from"
        raise TomatError(f"A material is called {material_id!r}; {expected}.")


def anchors_seed(seed: int, material_id: str) -> str:
    """Philox key (128 bits, 32 hexadecimal digits) of a material's anchors."""
    return hashlib.sha256(f"{seed}:{material_id}".encode()).hexdigest()[:32]


def draw_anchors(key: str, grid_shape: Sequence[int], count: int) -> np.ndarray:
    """The anchors of a material, in random order; all different where the grid has `count` voxels or more. Returns
    int64 [count, 3].

    Philox's raw 64-bit stream is fixed by its definition (Salmon et al., 2011, "Parallel random numbers: as easy as
    1, 2, 3"), whatever the NumPy version. The draws from it are made here, to be fixed too. A voxel is
    floor(53 random bits x voxels / 2^53): uneven by less than 2^-22 even for 2^31 voxels.
    """
    n_voxels = int(np.prod(grid_shape, dtype=np.int64))
    philox = np.random.Philox(key=int(key, 16))
    if n_voxels <= 4 * count:
        # Whole random permutations, one after another: each voxel is used once before any is used twice.
        rounds = -(-count // n_voxels)
        order = [np.argsort(philox.random_raw(n_voxels), kind="stable") for _ in range(rounds)]
        flat = np.concatenate(order)[:count]
    else:
        flat = np.empty(0, dtype=np.int64)
        while len(flat) < count:
            fraction = (philox.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
            flat = np.concatenate([flat, np.floor(fraction * n_voxels).astype(np.int64)])
            _, first = np.unique(flat, return_index=True)
            flat = flat[np.sort(first)]
        flat = flat[:count]
    return np.stack(np.unravel_index(flat, tuple(grid_shape)), axis=1).astype(np.int64)


@dataclass(frozen=True)
class ShardManifest:
    """The contents of a data set. Without checksums, and not complete, it is the plan of a data set."""

    split: str
    """Name of the split the set is, such as `train`; may be empty."""
    layout: SequenceLayout
    rows: Count
    """Rows in all; those that pad the last chunk do not count."""
    block_rows: Positive
    """Rows of a chunk, the block of a shuffle."""
    codec_sha256: str
    n_density_tokens: Count
    unit: str
    patches_per_material: Positive
    """Rows of each material, M. With scattered voxels, a cell that has not enough voxels has fewer rows."""
    seed: int
    materials: tuple[MaterialRows, ...]
    skipped: tuple[SkippedMaterial, ...] = ()
    clipped: tuple[ClippedMaterial, ...] | None = None
    """The materials with voxels outside the codec; None: not counted (imported, or planned before they were)."""
    max_clipped_share: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of its electrons that a material may lose outside the codec before it is skipped; None: not counted."""
    read_rules: Mapping[str, tuple[str, ...]] | None = None
    """What was assumed of the densities: `species` and `accept`, by name. None: not recorded (imported, embedded,
    written by `tomat retokenize`, whose request has them, or planned before they were)."""
    structures_sha256: Sha256 | None = None
    """Hash of the exact structures beside the manifest; None: there are none (imported, or an older plan)."""
    promolecule_sha256: Sha256 | None = None
    """Hash of the promolecule beside the manifest; None: there is none."""
    chunk_checksums: tuple[Sha256, ...] = ()
    """One for each chunk, as `CHECKSUM` says; empty in a plan."""
    complete: bool = False
    format_version: int = field(default=SHARD_FORMAT_VERSION)
    vocabulary_version: int = field(default=VOCABULARY_VERSION)
    has_checksum: bool = field(default=True, compare=False)
    """False for a manifest from an older file, without a checksum of its own. Not in the file."""

    def __post_init__(self) -> None:
        check_unit(self.unit, "The shard set")
        expected = 0
        for entry in (*self.materials, *self.skipped):
            check_material_id(entry.material_id)
        for material in self.materials:
            if material.row_start != expected or material.row_end <= material.row_start:
                rows = f"{material.row_start} to {material.row_end}"
                raise _damaged(f"the rows of {material.material_id} are {rows}, expected to begin at {expected}")
            expected = material.row_end
        if expected != self.rows:
            raise _damaged(f"it says {counted(self.rows, 'row')}, its materials have {expected}")
        n = len(self.chunk_checksums)
        if self.complete and n != self.n_chunks:
            raise _damaged(f"it has {counted(n, 'checksum')} for {counted(self.n_chunks, 'chunk')}")

    @property
    def context(self) -> int:
        return self.layout.context

    @property
    def n_chunks(self) -> int:
        """Chunks of the array, the last one padded."""
        return -(-self.rows // self.block_rows)

    def chunk_rows(self, chunk: int) -> tuple[int, int]:
        return chunk * self.block_rows, min((chunk + 1) * self.block_rows, self.rows)

    @cached_property
    def row_ends(self) -> np.ndarray:
        """int64 [materials]: one past the last row of each material."""
        return np.array([material.row_end for material in self.materials], dtype=np.int64)

    def material_indices(self, rows: np.ndarray) -> np.ndarray:
        """Index into `materials` of each row; int64, the shape of `rows`."""
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and not 0 <= rows.min() <= rows.max() < self.rows:
            raise TomatError(f"Rows {rows.min()} to {rows.max()} were asked for; the set has 0 to {self.rows - 1}.")
        return np.searchsorted(self.row_ends, rows, side="right")

    def anchors(self, material: MaterialRows) -> np.ndarray:
        """int64 [rows of the material, 3]: the anchor of each of its rows."""
        if self.layout.is_scattered:
            raise TomatError(f"Layout {self.layout.name} has scattered voxels and no patches; ask for its voxels.")
        if material.anchors_seed == IMPORTED_ANCHORS:
            unknown = f"The rows of {material.material_id} were imported, so the places of their patches are not known"
            raise TomatError(f"{unknown}. Tokenize the densities to have them.")
        return draw_anchors(material.anchors_seed, material.grid_shape, material.row_end - material.row_start)

    def voxels(self, material: MaterialRows, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The scattered voxels of a material's rows `start` to `stop` - 1 (None: all): int64 [rows, context], flat
        indices of its grid in C order; -1 where a row is padded."""
        if not self.layout.is_scattered:
            raise TomatError(f"Layout {self.layout.name} has patches, whose voxels follow from their anchors.")
        rows = material.row_end - material.row_start
        stop = rows if stop is None else min(stop, rows)
        return draw_voxels(material.anchors_seed, material.grid_shape, self.context, start, stop)

    @property
    def short_materials(self) -> int:
        """Materials with fewer than `patches_per_material` rows, which hold the whole of their cells."""
        return sum(each.row_end - each.row_start < self.patches_per_material for each in self.materials)

    @property
    def scattered_voxels(self) -> int:
        """Scattered voxels in all rows, without padding."""
        rows = ((each, (each.row_end - each.row_start) * self.context) for each in self.materials)
        return sum(min(room, math.prod(each.grid_shape)) for each, room in rows)

    def identity(self) -> dict[str, Any]:
        """All that decides the tokens, except for the order of the materials, and the promolecule. Plans that agree
        here are of the same set."""
        # An older set, which did not count or record these, lacks them, and goes on as it began.
        later = {"max_clipped_share": self.max_clipped_share, "promolecule": self.promolecule_sha256}
        later |= {key: list(names) for key, names in sorted((self.read_rules or {}).items())}
        return {
            "layout": self.layout.to_dict(),
            "codec": self.codec_sha256,
            "patches_per_material": self.patches_per_material,
            "seed": self.seed,
            "split": self.split,
            "block_rows": self.block_rows,
            "materials": sorted(entry.material_id for entry in (*self.materials, *self.skipped)),
            **{key: value for key, value in later.items() if value is not None},
        }

    def to_text(self) -> str:
        """JSON text, the same for the same manifest, one material or checksum a line."""
        content = asdict(self) | {"layout": self.layout.to_dict(), "context": self.context, "checksum": CHECKSUM}
        del content["has_checksum"]
        return lined_json(content)


def _damaged(words: str) -> TomatError:
    return TomatError(f"The manifest is damaged: {words}.")


def lined_json(content: Mapping[str, Any]) -> str:
    """JSON text with its checksum, the same for the same content, one item of a tuple a line."""
    content = with_checksum(content)
    parts = []
    for key in sorted(content):
        value = content[key]
        if isinstance(value, tuple) and value:
            items = ",\n  ".join(json.dumps(item, sort_keys=True) for item in value)
            parts.append(f' "{key}": [\n  {items}\n ]')
        else:
            parts.append(f' "{key}": {json.dumps(value, sort_keys=True)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


KEYS = frozenset(field.name for field in fields(ShardManifest)) - {"has_checksum"}
LATER_KEYS = {"clipped", "max_clipped_share", "read_rules", "structures_sha256", "promolecule_sha256"}
"""Keys that older manifests lack."""


def parse_manifest(text: str | bytes, source: str) -> ShardManifest:
    again = "Copy or tokenize the set again."
    content, checked = parse_checked(text, source, "a manifest of a shard set", again)
    if missing := sorted(KEYS - LATER_KEYS - content.keys()):
        raise TomatError(f"{source} is not a manifest of a shard set: it has no '{missing[0]}'. {again}")
    version = content["format_version"], content["vocabulary_version"]
    if version != (SHARD_FORMAT_VERSION, VOCABULARY_VERSION):
        raise TomatError(
            f"{source} has format version {version[0]} and vocabulary version {version[1]}; expected "
            f"{SHARD_FORMAT_VERSION} and {VOCABULARY_VERSION}. Tokenize again, or use the tomat that wrote it."
        )
    if not checked:
        refuse_unknown_keys(content, KEYS | {"context", "checksum"}, source, again)
    values = {key: content[key] for key in KEYS if key in content}
    try:
        manifest = replace(typed(values, ShardManifest, source, again, extra_keys=False), has_checksum=checked)
        _check_derived(manifest, content)
    except TomatError as error:
        # Errors that the manifest itself raises do not name its file.
        raise error if str(error).startswith(source) else TomatError(f"{source}: {error} {again}") from error
    return manifest


def _check_derived(manifest: ShardManifest, content: Mapping[str, Any]) -> None:
    """Refuse a manifest that contradicts itself. This is the only guard of a manifest without a checksum."""
    rules = manifest.read_rules
    if rules is not None:
        if set(rules) != {"species", "accept"}:
            raise _damaged(f"its read_rules are {rules!r:.80}")
        ReadRules(rules["species"], rules["accept"])  # refuses unknown names
    layout = manifest.layout
    expected = LAYOUTS.get(layout.name)
    if expected is not None and layout != expected:
        raise _damaged(f"its layout {layout.name} is {layout.to_dict()}, expected {expected.to_dict()}")
    alike = [each.name for each in LAYOUTS.values() if replace(each, name=layout.name) == layout]
    if expected is None and alike:
        raise _damaged(f"its layout is called {layout.name}, and is {alike[0]} in all but its name")
    if content.get("context", layout.context) != layout.context:
        raise _damaged(f"it says a context of {content['context']}, its layout has {layout.context}")
    for material in manifest.materials:
        rows, due = material.row_end - material.row_start, manifest.patches_per_material
        if layout.is_scattered and rows != (due := layout.material_rows(due, material.grid_shape)):
            raise _damaged(f"{material.material_id} has {counted(rows, 'row')}, expected {due}")
        key = anchors_seed(manifest.seed, material.material_id)
        if material.anchors_seed not in (key, IMPORTED_ANCHORS):
            made = f"its name and the seed {manifest.seed} make {key}"
            raise _damaged(f"the anchors of {material.material_id} have the key {material.anchors_seed}; {made}")
