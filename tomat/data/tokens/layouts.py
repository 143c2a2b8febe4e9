"""Sequence layouts: how many voxels and atoms a sequence of a given length holds. A patch is a cube of P^3 voxels, or,
in a layout that fills the context, the near-cubic box with the most voxels that fits beside the atoms. A row of
scattered voxels (`scattered.py`) has no patch and no preamble. The settings of how a set's rows are shuffled
(`shuffle.py`) are here too, since they need no NumPy.

Version 3 writes `BOS GRID nx ny nz /GRID LATTICE qa qb qc qalpha qbeta qgamma /LATTICE ATOMS Z... /ATOMS POS xyz...
/POS [SHAPE px py pz /SHAPE] DENS d... /DENS EOS PAD...`; version 2 always writes SHAPE, then OFFSET and HI.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

from tomat.base.config_keys import check_range
from tomat.base.errors import TomatError
from tomat.base.reporting import counted
from tomat.data.tokens.vocabulary import TOKENS_PER_COORDINATE

TOKENS_PER_ATOM = 1 + 3 * TOKENS_PER_COORDINATE
"""Tokens of the element and of three coordinates."""
BLOCK_OF_THREE = 5
"""Tokens of a block of three integers: start, three, end."""
FIXED_TOKENS = 1 + BLOCK_OF_THREE + 8 + 2 + 2 + 2 + 1
"""Tokens of BOS, GRID, LATTICE, the brackets of ATOMS, POS and DENS, and EOS."""
LARGEST_SIDE = 1023
"""The vocabulary's largest integer: a longer side could not be written in SHAPE."""
FILLING_SIDE_DIFFERENCE = 1
"""Voxels by which sides may differ in the layouts that fill the context: the least that is not a cube. Of 8,192 tokens
less the preamble (mean over 1 to 131 atoms), cubes leave 6.7 % empty, a difference of 1 voxel 2.4 %, of 2 2.2 %, of 4
1.5 %, of 8 0.3 %. But the two longer sides decide how far apart in the sequence neighbouring voxels are, and a model
must know this to find them. A difference of 1 gives 3 such pairs of sides, one of which serves up to 56 atoms;
differences of 2, 4 and 8 give 5, 9 and 25."""

PatchShape = tuple[int, int, int]


@dataclass(frozen=True)
class SequenceLayout:
    """One patch of a density, or as many of its voxels, in `context` tokens."""

    name: str
    """Name the layout is known by, `v3-p19`."""
    version: Literal["v3", "v2", "scattered"]
    """v3: atoms relative to the patch; v2: atoms relative to the cell, with the patch's offset and last voxel;
    scattered: density tokens alone, of voxels drawn over the cell."""
    patch_size: int
    """P, the voxels along each side of the default patch, whose SHAPE version 3 leaves out. Cubes are never larger, and
    are smaller where the atoms leave no room; a box is as large as the context allows. 0: no patches (scattered)."""
    context: int
    """Tokens of a sequence, padding included."""
    tokens_per_voxel: int = 1
    """Density tokens of a voxel: 1, or 2 for the 9 + 12 bit codec."""
    max_side_difference: int = 0
    """Voxels by which the longest side of a patch may exceed the shortest; 0: cubes. Above 0 the patch is the box with
    the most voxels that fits beside the atoms. Its shortest side comes first: the other two decide how far apart in the
    sequence neighbouring voxels are, and they change more seldom from material to material."""

    def __post_init__(self) -> None:
        if self.version not in ("v3", "v2", "scattered"):
            found = f"Layout {self.name} has version {self.version!r}"
            raise TomatError(f"{found}; expected 'v3', 'v2' or 'scattered'.")
        if self.is_scattered:
            found = self.patch_size, self.tokens_per_voxel, self.max_side_difference
            if found != (0, 1, 0) or self.context < 1:
                raise TomatError(
                    f"Layout {self.name} of scattered voxels has patch_size, tokens_per_voxel and max_side_difference "
                    f"{found} and a context of {self.context}; expected (0, 1, 0) and at least 1."
                )
            return
        if not 1 <= self.patch_size <= LARGEST_SIDE or self.tokens_per_voxel not in (1, 2):
            raise TomatError(
                f"Layout {self.name} has patch_size {self.patch_size} and tokens_per_voxel {self.tokens_per_voxel}; "
                f"expected 1 to {LARGEST_SIDE}, where the vocabulary's integers end, and 1 or 2."
            )
        if not 0 <= self.max_side_difference <= self.patch_size:
            expected = f"expected 0 (cubes) to its patch_size of {self.patch_size}"
            raise TomatError(f"Layout {self.name} has max_side_difference {self.max_side_difference}; {expected}.")
        least = self.preamble_tokens(1, self.default_shape) + self.tokens_per_voxel
        if least > self.context:
            takes = f"one atom and one voxel take {least}. Use a longer context"
            raise TomatError(f"Layout {self.name} has a context of {self.context} tokens; {takes}.")

    @property
    def default_shape(self) -> PatchShape:
        """The cube of P^3 voxels, the patch that needs no SHAPE in version 3."""
        return (self.patch_size, self.patch_size, self.patch_size)

    @property
    def is_scattered(self) -> bool:
        """Whether rows are density tokens alone, of voxels drawn over the cell."""
        return self.version == "scattered"

    @property
    def fills_context(self) -> bool:
        """Whether patches are boxes that fill the context, not cubes of at most P^3."""
        return self.max_side_difference > 0

    @property
    def n_voxels(self) -> int:
        """Voxels of the largest patch: P^3 for cubes, the box beside no atoms for boxes; or of a scattered row."""
        if self.is_scattered:
            return self.context
        return prod(self.patch_shape(0)) if self.fills_context else self.patch_size**3

    def preamble_tokens(self, n_atoms: int, patch_shape: PatchShape) -> int:
        """All tokens but density and padding, for `n_atoms` atoms and a patch of that shape."""
        return self._preamble(n_atoms, says_shape=patch_shape != self.default_shape)

    def _preamble(self, n_atoms: int, says_shape: bool) -> int:
        if self.is_scattered:
            return 0
        blocks = 3 if self.version == "v2" else int(says_shape)
        return FIXED_TOKENS + TOKENS_PER_ATOM * n_atoms + BLOCK_OF_THREE * blocks

    def used_tokens(self, n_atoms: int, patch_shape: PatchShape) -> int:
        return self.preamble_tokens(n_atoms, patch_shape) + self.tokens_per_voxel * prod(patch_shape)

    def row_tokens(self, n_atoms: int) -> tuple[int, int]:
        """Tokens of preamble and closing brackets, and of density, in a row of a cell of `n_atoms` atoms."""
        if self.is_scattered:
            return 0, self.context
        shape = self.patch_shape(n_atoms)
        return self.preamble_tokens(n_atoms, shape), self.tokens_per_voxel * prod(shape)

    def material_rows(self, asked: int, grid_shape: Sequence[int]) -> int:
        """Rows of a material when `asked` are asked for: with scattered voxels no more than hold the whole cell."""
        return min(asked, -(-prod(grid_shape) // self.context)) if self.is_scattered else asked

    def patch_shape(self, n_atoms: int) -> PatchShape:
        """The patch with most voxels beside `n_atoms` atoms; of equally large boxes the most compact. Sides ascend."""
        if self.is_scattered:
            patches = ", ".join(name for name, each in LAYOUTS.items() if not each.is_scattered)
            said = f"Layout {self.name} has scattered voxels, and this needs patches"
            raise TomatError(f"{said}. Use a layout of patches ({patches}).")
        if self.used_tokens(n_atoms, self.default_shape) <= self.context and not self.fills_context:
            return self.default_shape
        room = (self.context - self._preamble(n_atoms, says_shape=True)) // self.tokens_per_voxel
        if self.fills_context:
            shapes = boxes(room, self.max_side_difference)
            if self.used_tokens(n_atoms, self.default_shape) <= self.context:
                shapes.append(self.default_shape)
        else:
            shapes = [(side, side, side) for side in range(1, self.patch_size) if side**3 <= room]
        if shapes:
            return max(shapes, key=lambda shape: (prod(shape), -sum(prod(shape) // side for side in shape), shape))
        preamble, whole = self._preamble(n_atoms, says_shape=True), self.used_tokens(n_atoms, self.default_shape)
        raise TomatError(
            f"The context of layout {self.name}, {self.context:,} tokens, is too short for {counted(n_atoms, 'atom')} "
            f"({preamble:,}) and density. Use a longer one ({whole:,} hold the full patch), or leave this material out."
        )

    def padding_share(self, n_atoms: int) -> float:
        """Part of the context that is padding for a material of `n_atoms` atoms, 0 to 1."""
        return 1 - sum(self.row_tokens(n_atoms)) / self.context

    def to_dict(self) -> dict[str, Any]:
        """For JSON. A layout of cubes leaves out `max_side_difference`, and so reads as before there were boxes."""
        content = asdict(self)
        if not self.fills_context:
            del content["max_side_difference"]
        return content


def boxes(room_voxels: int, max_side_difference: int) -> list[PatchShape]:
    """For each pair of shorter sides, the longest box of at most `room_voxels` voxels; sides ascend."""
    found = []
    shortest = 1
    while shortest**3 <= room_voxels and shortest <= LARGEST_SIDE:
        longest = min(shortest + max_side_difference, LARGEST_SIDE)
        for middle in range(shortest, longest + 1):
            last = min(longest, room_voxels // (shortest * middle))
            if last >= middle:
                found.append((shortest, middle, last))
        shortest += 1
    return found


LAYOUTS: dict[str, SequenceLayout] = {
    layout.name: layout
    for layout in (
        # Largest number of atoms beside the full patch: 131, 17, 121, 29, 18, 14 and 266. The Materials Project set has
        # a median of 12 atoms and a 99th percentile of 88.
        SequenceLayout("v3-p19", "v3", 19, 8192),
        SequenceLayout("v3-p20", "v3", 20, 8192),
        SequenceLayout("v3-p15", "v3", 15, 4608),
        SequenceLayout("v3-p12", "v3", 12, 2048),
        # 1,536 = 12 x 128, the first multiple of the TPU's 128 lanes that holds the patch and the median material.
        SequenceLayout("v3-p11", "v3", 11, 1536),
        SequenceLayout("v3-p7", "v3", 7, 512),
        SequenceLayout("v2-p14", "v2", 14, 8192, tokens_per_voxel=2),
        SequenceLayout("v3-fill8k", "v3", 20, 8192, max_side_difference=FILLING_SIDE_DIFFERENCE),
        SequenceLayout("v3-fill512", "v3", 7, 512, max_side_difference=FILLING_SIDE_DIFFERENCE),
        SequenceLayout("scattered-256", "scattered", 0, 256),
        SequenceLayout("scattered-512", "scattered", 0, 512),
        SequenceLayout("scattered-2048", "scattered", 0, 2048),
        SequenceLayout("scattered-8192", "scattered", 0, 8192),
    )
}
"""The named layouts. The demonstration uses `v3-p7`; `v3-fill512` fills the same context. Scattered layouts are named
by their voxels per row."""


def layout_named(name: str) -> SequenceLayout:
    if name not in LAYOUTS:
        raise TomatError(f"There is no layout {name!r}; expected one of {', '.join(LAYOUTS)}.")
    return LAYOUTS[name]


@dataclass(frozen=True)
class BlockShuffleConfig:
    io_block_size: int = 64
    """Rows that are read together: the rows of a chunk of the shard set, or a multiple of them."""
    window_blocks: int = 1024
    """Blocks whose rows are permuted together. The loader holds two windows: 1,024 blocks of 64 rows of 8,192 tokens
    are 1 GiB, so 2 GiB on every host."""
    perm_type: Literal["feistel", "none", "full"] = "feistel"
    """`feistel`: blocks permuted over the epoch, rows within each window. `none`: rows in the order of the disk.
    `full`: one permutation of all rows; each row then costs the reading of its block, unless the set fits the cache."""

    def __post_init__(self) -> None:
        check_range("shuffle.", self, io_block_size=1, window_blocks=1)
        if self.perm_type not in ("feistel", "none", "full"):
            raise TomatError(f"shuffle.perm_type is '{self.perm_type}'; expected feistel, none or full.")
