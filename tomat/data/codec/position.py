"""Fractional coordinates in [0, 1) as three tokens: sign and exponent (512 values), then two bytes of the mantissa (256
values each), of a float32 of whose mantissa 16 of 23 bits are kept. Near 0 the precision is relative, so that an atom
displaced by 1e-6 from the origin is not at the origin."""

import numpy as np

from tomat.base.errors import TomatError

N_EXPONENT_IDS = 512
N_BYTE_IDS = 256
TOKENS_PER_COORDINATE = 3
N_IDS = N_EXPONENT_IDS + 2 * N_BYTE_IDS

MANTISSA_BITS_KEPT = 16
_DROPPED_BITS = 23 - MANTISSA_BITS_KEPT

MAX_ERROR = 2.0**-18
"""Largest |decode(encode(x)) - x| modulo 1: half a step of 2^-17, the step between 1/2 and 1 with 16 mantissa bits."""


def encode_positions(frac_coords: np.ndarray) -> np.ndarray:
    """Three ids, uint16 [..., 3], for each coordinate in [0, 1), nearest rounding; what rounds to 1 becomes 0."""
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
            "The position ids are no triples in [0, 512), [512, 768) and [768, 1024): damaged, or of another codec."
        )
    bits = parts[..., 0] << 16 | parts[..., 1] << 8 | parts[..., 2]
    if np.any(bits >= int(np.float32(1).view(np.uint32)) >> _DROPPED_BITS):
        raise TomatError("A position triple decodes to a coordinate outside [0, 1). The sequence is damaged.")
    values = np.atleast_1d((bits << _DROPPED_BITS).astype(np.uint32)).view(np.float32)
    return values.astype(np.float64).reshape(bits.shape)
