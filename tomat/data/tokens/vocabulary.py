"""Vocabulary version 3: which id means what. The ids are fixed: data sets with them exist. Ids below `DENSITY_START`
are the same for every codec. The ids of the codec follow: 16,384 Lloyd-Max bins make 18,570 ids in all."""

from dataclasses import dataclass

import numpy as np

from tomat.base.errors import TomatError

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
"""A fractional coordinate in [0, 1) takes three tokens: sign and exponent (512 values), then two bytes of the mantissa
(256 values each) of a float32 that keeps 16 of 23 bits of its mantissa. Near 0 the precision is relative, so an atom
displaced by 1e-6 from the origin is not at the origin."""
N_EXPONENT_IDS = 512
N_BYTE_IDS = 256
TOKENS_PER_COORDINATE = 3
N_POSITION_IDS = N_EXPONENT_IDS + 2 * N_BYTE_IDS

MANTISSA_BITS_KEPT = 16
_DROPPED_BITS = 23 - MANTISSA_BITS_KEPT

MAX_POSITION_ERROR = 2.0**-18
"""Largest |decode(encode(x)) - x| modulo 1: half a step of 2^-17, the step between 1/2 and 1 with 16 mantissa bits."""

DENSITY_START = POSITION_START + N_POSITION_IDS

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


def encode_positions(frac_coords: np.ndarray) -> np.ndarray:
    """Three ids, uint16 [..., 3] in [0, 512), [512, 768) and [768, 1024), for each coordinate in [0, 1). Rounds to
    nearest; a coordinate that rounds to 1 becomes 0."""
    coords = np.ascontiguousarray(frac_coords, dtype=np.float64).reshape(np.shape(frac_coords))
    if not np.all((coords >= 0) & (coords <= 1)):
        bad = coords[~((coords >= 0) & (coords <= 1))].flat[0]
        raise TomatError(f"A fractional coordinate is {bad:g}; expected [0, 1). Wrap coordinates into the cell first.")
    # Round in float64, whose mantissa has 52 bits, to 16 of them; the result is exact in float32 (below 2^-126 it loses
    # bits again, which moves an atom by less than 1e-38).
    wide = coords.view(np.uint64)
    wide = (wide + np.uint64(1 << (51 - MANTISSA_BITS_KEPT))) >> np.uint64(52 - MANTISSA_BITS_KEPT)
    rounded = (wide << np.uint64(52 - MANTISSA_BITS_KEPT)).view(np.float64).astype(np.float32)
    bits = np.atleast_1d(rounded).view(np.uint32).reshape(coords.shape) >> np.uint32(_DROPPED_BITS)
    one = np.float32(1).view(np.uint32) >> np.uint32(_DROPPED_BITS)
    # Also takes -0.0, whose sign bit makes it larger than 1, to 0.
    bits = np.where(bits >= one, np.uint32(0), bits)
    upper, lower = (bits >> np.uint32(8)) & np.uint32(0xFF), bits & np.uint32(0xFF)
    ids = [bits >> np.uint32(16), N_EXPONENT_IDS + upper, N_EXPONENT_IDS + N_BYTE_IDS + lower]
    return np.stack(ids, axis=-1).astype(np.uint16)


def decode_positions(ids: np.ndarray) -> np.ndarray:
    """The coordinates, float64 [...] in [0, 1), that `encode_positions` rounded to, exactly."""
    parts = np.asarray(ids, dtype=np.int64) - [0, N_EXPONENT_IDS, N_EXPONENT_IDS + N_BYTE_IDS]
    if np.any((parts < 0) | (parts >= [N_EXPONENT_IDS, N_BYTE_IDS, N_BYTE_IDS])):
        raise TomatError(
            "The position ids are not triples in [0, 512), [512, 768) and [768, 1024): damaged, or from another codec."
        )
    bits = parts[..., 0] << 16 | parts[..., 1] << 8 | parts[..., 2]
    if np.any(bits >= int(np.float32(1).view(np.uint32)) >> _DROPPED_BITS):
        raise TomatError("A position triple decodes to a coordinate outside [0, 1). The sequence is damaged.")
    values = np.atleast_1d((bits << _DROPPED_BITS).astype(np.uint32)).view(np.float32)
    return values.astype(np.float64).reshape(bits.shape)
