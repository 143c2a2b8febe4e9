"""Vocabulary version 3: which id means what. The ids are fixed: data sets with them exist. Those below `DENSITY_START`
are the same for every codec; one for each id of the codec follows: 16,384 Lloyd-Max bins make 18,570 ids in all."""

from dataclasses import dataclass

from tomat.base.errors import TomatError
from tomat.data.codec.position import N_IDS

VOCABULARY_VERSION = 3

PAD = 0
BOS = 1
EOS = 2
ATOMS_START, ATOMS_END = 3, 4
POSITIONS_START, POSITIONS_END = 5, 6
GRID_START, GRID_END = 7, 8
SHAPE_START, SHAPE_END = 9, 10
OFFSET_START, OFFSET_END = 11, 12
HIGH_START, HIGH_END = 13, 14
DENSITY_BLOCK_START, DENSITY_BLOCK_END = 15, 16
NEWLINE = 17
LATTICE_START, LATTICE_END = 18, 19

ELEMENT_START = 20
"""Id of hydrogen, Z = 1."""
N_ELEMENTS = 118

INTEGER_START = ELEMENT_START + N_ELEMENTS
N_INTEGERS = 1024

POSITION_START = INTEGER_START + N_INTEGERS
"""First of the ids of `tomat.data.codec.position`: 512 of sign and exponent, then 256 and 256 of the mantissa."""

DENSITY_START = POSITION_START + N_IDS

SPECIAL_NAMES = tuple(
    "PAD BOS EOS ATOMS /ATOMS POS /POS GRID /GRID SHAPE /SHAPE OFFSET /OFFSET HI /HI DENS /DENS NL LATTICE "
    "/LATTICE".split()
)
"""Names of the ids 0 to 19; the end of a block carries a slash."""

MAX_IDS = 1 << 16
"""Shards keep tokens as uint16."""


@dataclass(frozen=True)
class Vocabulary:
    """All ids of a data set whose codec uses `n_density_tokens` ids."""

    n_density_tokens: int
    """Number of ids of the codec: 16,384 for one token a voxel at the default number of bins."""

    def __post_init__(self) -> None:
        most = MAX_IDS - DENSITY_START
        if not 1 <= self.n_density_tokens <= most:
            raise TomatError(
                f"A codec with {self.n_density_tokens:,} density ids does not fit the vocabulary (uint16), which has 1 "
                f"to {most:,} left. Fit a codec with fewer bins."
            )

    @property
    def size(self) -> int:
        """Number of ids in all: 18,570 for 16,384 density ids."""
        return DENSITY_START + self.n_density_tokens

    def name(self, token: int) -> str:
        """The id in words: `BOS`, `Z14`, `int 64`, `exp 126`, `mant1 7`, `mant2 9`, `rho 8191`."""
        if not 0 <= token < self.size:
            raise TomatError(f"Token {token} is not in the vocabulary, whose ids are 0 to {self.size - 1:,}.")
        if token < ELEMENT_START:
            return SPECIAL_NAMES[token]
        if token < INTEGER_START:
            return f"Z{token - ELEMENT_START + 1}"
        if token < POSITION_START:
            return f"int {token - INTEGER_START}"
        if token < DENSITY_START:
            position = token - POSITION_START
            for name, count in (("exp", 512), ("mant1", 256), ("mant2", 256)):
                if position < count:
                    return f"{name} {position}"
                position -= count
        return f"rho {token - DENSITY_START}"
