"""Two tokens a voxel, 9 + 12 bits: 512 bins of log-magnitude, 4,096 steps within each (the version 2 sequences).

log10 of the density runs from -4.13 to 4.97, cut into 2^21 equal levels; the upper 9 bits of the level are the first
token, the lower 12 the second. A level is a factor 10^(9.1 / 2^21) = 1 + 1.0e-5 wide, so a density comes back with a
relative error of at most 5.0e-6 (float32 adds 6e-8). Level 0 stands for zero and for all that lies below the range.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.codec.base import CODEC_FORMAT_VERSION, UNIT_RHO_TIMES_VOLUME, Decoder, check_unit, content_sha256

N_COARSE = 512
N_FINE = 4096
N_LEVELS = N_COARSE * N_FINE


@dataclass(frozen=True)
class TwoTokenCodec:
    """The 9 + 12 bit codec; its ids are 0 to 511 for the coarse and 512 to 4,607 for the fine token."""

    unit: str = UNIT_RHO_TIMES_VOLUME
    """Unit of the densities; the first generation's data is `rho_times_volume`."""
    log10_low: float = -4.13
    """log10 of the lower end of the range; densities below it decode to 0."""
    log10_high: float = 4.97
    """log10 of the upper end; densities above take the last level."""

    kind: ClassVar[str] = "two_token"
    tokens_per_voxel: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_unit(self.unit, "The two-token codec")
        # float32 spans 10^-38 to 10^38.
        if not -38 <= self.log10_low < self.log10_high <= 38:
            found = f"{self.log10_low} to {self.log10_high}"
            raise TomatError(f"The two-token codec's log10 range is {found}; expected an ascending one in -38 to 38.")

    @property
    def n_density_tokens(self) -> int:
        return N_COARSE + N_FINE

    @property
    def fitted_range(self) -> tuple[float, float]:
        """The ends of the range, in `unit`: densities below it decode to 0, those above it take the last level."""
        return 10.0**self.log10_low, 10.0**self.log10_high

    def encode(self, rho: np.ndarray) -> np.ndarray:
        """Ids of each density, at least 0 in `unit`: uint16 [..., 2], coarse in [0, 512), fine in [512, 4608)."""
        values = np.asarray(rho, dtype=np.float64)
        if not np.all((values >= 0) & (values < np.inf)):
            raise TomatError("A density to encode is negative or not finite; expected finite values of at least 0.")
        with np.errstate(divide="ignore"):
            place = (np.log10(values) - self.log10_low) / (self.log10_high - self.log10_low) * N_LEVELS
        level = np.clip(np.floor(place), 0, N_LEVELS - 1).astype(np.int64)
        return np.stack([level // N_FINE, N_COARSE + level % N_FINE], axis=-1).astype(np.uint16)

    def decode(self, ids: np.ndarray, decoder: Decoder = "median") -> np.ndarray:
        """Density, float32 [...], of each pair of ids: the middle of the level in log10, 0 for level 0."""
        ids = np.asarray(ids, dtype=np.int64)
        coarse, fine = ids[..., 0], ids[..., 1] - N_COARSE
        if np.any((coarse < 0) | (coarse >= N_COARSE) | (fine < 0) | (fine >= N_FINE)):
            raise TomatError(
                "The density ids are not pairs in [0, 512) and [512, 4608); they are damaged, or from another codec."
            )
        level = coarse * N_FINE + fine
        log10 = self.log10_low + (level + 0.5) * ((self.log10_high - self.log10_low) / N_LEVELS)
        return np.where(level == 0, 0.0, 10.0**log10).astype(np.float32)

    @property
    def sha256(self) -> str:
        fields = {"kind": self.kind, "unit": self.unit, "log10_low": self.log10_low, "log10_high": self.log10_high}
        return content_sha256(fields, {})

    def to_dict(self) -> dict[str, Any]:
        return {
            "format_version": CODEC_FORMAT_VERSION,
            "kind": self.kind,
            "unit": self.unit,
            "log10_low": self.log10_low,
            "log10_high": self.log10_high,
            "sha256": self.sha256,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        return cls(content["unit"], float(content["log10_low"]), float(content["log10_high"]))
