"""Sequence layouts: how many voxels and atoms a sequence of a given length holds.

Version 3 writes `BOS GRID nx ny nz /GRID LATTICE qa qb qc qalpha qbeta qgamma /LATTICE ATOMS Z... /ATOMS POS xyz...
/POS [SHAPE px py pz /SHAPE] DENS d... /DENS EOS PAD...`; version 2 always writes SHAPE, then OFFSET and HI.
"""

from dataclasses import dataclass
from typing import Literal

from tomat.codec.position import TOKENS_PER_COORDINATE
from tomat.errors import TomatError

TOKENS_PER_ATOM = 1 + 3 * TOKENS_PER_COORDINATE
"""The element, and three coordinates."""
BLOCK_OF_THREE = 5
"""Tokens of a block of three integers: start, three, end."""
FIXED_TOKENS = 1 + BLOCK_OF_THREE + 8 + 2 + 2 + 2 + 1
"""BOS, GRID, LATTICE, the brackets of ATOMS, POS and DENS, EOS."""


@dataclass(frozen=True)
class SequenceLayout:
    """One cubic patch of a density in `context` tokens.

    Raises:
        TomatError: if not even one voxel fits, or version 3 is asked for two tokens a voxel.
    """

    name: str
    """Name the layout is known by, `v3-p19`."""
    version: Literal["v3", "v2"]
    """v3: atoms relative to the patch; v2: atoms relative to the cell, with the patch's offset and last voxel."""
    patch_size: int
    """Voxels along each side of the patch, P; fewer where the atoms leave no room."""
    context: int
    """Tokens of a sequence, padding included."""
    tokens_per_voxel: int = 1
    """Density tokens of a voxel: 1, or 2 for the 9 + 12 bit codec."""

    def __post_init__(self) -> None:
        if self.version not in ("v3", "v2"):
            raise TomatError(f"Layout {self.name} has version {self.version!r}; expected 'v3' or 'v2'.")
        if self.patch_size < 1 or self.tokens_per_voxel not in (1, 2):
            raise TomatError(
                f"Layout {self.name} has patch_size {self.patch_size} and tokens_per_voxel {self.tokens_per_voxel}; "
                "expected a patch_size of at least 1 and 1 or 2 tokens a voxel."
            )
        if self.patch_size > 1023:
            raise TomatError(
                f"Layout {self.name} has patch_size {self.patch_size}; the vocabulary's integers end at 1023."
            )
        if self.preamble_tokens(1, self.patch_size) + self.tokens_per_voxel > self.context:
            raise TomatError(
                f"Layout {self.name} has a context of {self.context} tokens; one atom and one voxel already take "
                f"{self.preamble_tokens(1, self.patch_size) + self.tokens_per_voxel}. Use a longer context."
            )

    @property
    def n_voxels(self) -> int:
        """Voxels of the full patch, P^3."""
        return self.patch_size**3

    def preamble_tokens(self, n_atoms: int, patch_side: int) -> int:
        """All tokens but density and padding, for `n_atoms` atoms and a patch of `patch_side`^3 voxels."""
        tokens = FIXED_TOKENS + TOKENS_PER_ATOM * n_atoms
        if self.version == "v2":
            return tokens + 3 * BLOCK_OF_THREE
        return tokens + (BLOCK_OF_THREE if patch_side < self.patch_size else 0)

    def used_tokens(self, n_atoms: int, patch_side: int) -> int:
        """All tokens but padding."""
        return self.preamble_tokens(n_atoms, patch_side) + self.tokens_per_voxel * patch_side**3

    def patch_side(self, n_atoms: int) -> int:
        """Side of the largest cube of voxels, at most P, that fits beside `n_atoms` atoms.

        Raises:
            TomatError: if not one voxel fits.
        """
        for side in range(self.patch_size, 0, -1):
            if self.used_tokens(n_atoms, side) <= self.context:
                return side
        raise TomatError(
            f"The context of layout {self.name} is too short: {n_atoms} atoms take "
            f"{self.preamble_tokens(n_atoms, 1):,} of {self.context:,} tokens and leave no room for density. Use a "
            f"layout with a longer context ({self.used_tokens(n_atoms, self.patch_size):,} tokens hold the full "
            "patch), or leave this material out."
        )

    def padding_share(self, n_atoms: int) -> float:
        """Part of the context that is padding for a material of `n_atoms` atoms, 0 to 1."""
        return 1 - self.used_tokens(n_atoms, self.patch_side(n_atoms)) / self.context


LAYOUTS: dict[str, SequenceLayout] = {
    layout.name: layout
    for layout in (
        # Largest number of atoms beside the full patch: 131, 121, 29, 18, 14 and 266. Of the Materials Project set the
        # median is 12 atoms, the 99th percentile 88.
        SequenceLayout("v3-p19", "v3", 19, 8192),
        SequenceLayout("v3-p15", "v3", 15, 4608),
        SequenceLayout("v3-p12", "v3", 12, 2048),
        # 1,536 = 12 x 128, the first multiple of the TPU's 128 lanes that holds the patch and the median material.
        SequenceLayout("v3-p11", "v3", 11, 1536),
        SequenceLayout("v3-p7", "v3", 7, 512),
        SequenceLayout("v2-p14", "v2", 14, 8192, tokens_per_voxel=2),
    )
}
"""The named layouts; `v3-p7` is the demonstration's."""


def layout_named(name: str) -> SequenceLayout:
    """The layout of that name.

    Raises:
        TomatError: naming the known layouts.
    """
    if name not in LAYOUTS:
        raise TomatError(f"There is no layout {name!r}; expected one of {', '.join(LAYOUTS)}.")
    return LAYOUTS[name]
