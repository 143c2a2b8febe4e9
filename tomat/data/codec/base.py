"""What every density codec offers."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np

from tomat.base.errors import TomatError

UNIT_E_PER_A3 = "e_per_A3"
UNIT_RHO_TIMES_VOLUME = "rho_times_volume"
UNITS = (UNIT_E_PER_A3, UNIT_RHO_TIMES_VOLUME)
"""Electrons per cubic angstrom; or density times cell volume, as CHGCAR and the first generation of tokens keep it."""

CODEC_FORMAT_VERSION = 1
MANTISSA_BITS = 13
SHIFT = 23 - MANTISSA_BITS
"""Number of low bits of a float32 that its fine bin ignores (`histogram.py`)."""

Decoder = Literal["median", "mean"]
DECODERS: tuple[Decoder, ...] = ("median", "mean")


class DensityCodec(Protocol):
    """Turns densities in `unit` into ids 0 to n_density_tokens - 1, and ids back. A relative codec (`relative.py`)
    takes and gives ratios instead of densities. `CellCodec` takes and gives e/Å³ with every codec."""

    tokens_per_voxel: ClassVar[int]

    @property
    def n_density_tokens(self) -> int: ...

    @property
    def unit(self) -> str: ...

    @property
    def fitted_range(self) -> tuple[float, float]:
        """Smallest density above zero and largest density that ids stand for, in `unit`. A density outside this range,
        except zero, takes the id at that end. A smallest density of 0 means that it is not known."""
        ...

    @property
    def sha256(self) -> str:
        """Hash of all that decides which id a density gets and which density an id gets."""
        ...

    def encode(self, rho: np.ndarray) -> np.ndarray:
        """float32 [...] to uint16 [...] for one token a voxel, [..., tokens_per_voxel] for more."""
        ...

    def decode(self, ids: np.ndarray, decoder: Decoder = "median") -> np.ndarray:
        """The ids of `encode` to float32 [...]."""
        ...

    def to_dict(self) -> dict[str, Any]: ...

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self: ...


def check_unit(unit: str, source: str) -> None:
    if unit not in UNITS:
        raise TomatError(f"{source} has the unit {unit!r}; expected one of {', '.join(UNITS)}.")


def require_unit(codec: DensityCodec, unit: str, source: str) -> None:
    """Refuse to read densities of one unit as the other."""
    if codec.unit != unit:
        raise TomatError(
            f"The codec is for densities in {codec.unit}, but {source} is in {unit}. Use a codec for that unit, or "
            "convert the densities (multiply or divide by the cell volume)."
        )


def content_sha256(fields: Mapping[str, str | int | float], tables: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over the fields as sorted JSON and the tables as little-endian float32, in order of name."""
    digest = hashlib.sha256(json.dumps(dict(fields), sort_keys=True).encode())
    for name in sorted(tables):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tables[name], dtype="<f4").tobytes())
    return digest.hexdigest()
