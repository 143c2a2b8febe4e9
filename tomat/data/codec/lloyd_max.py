"""The Lloyd-Max codec ("LMQ"): one token per voxel, bins where the densities are. Bin 0 is exact zero. Every other bin
runs from its edge up to, but not including, the next edge; the last bin has no upper end. A bin has two
reconstructions: its median, best for absolute error, and its mean, best for squared error."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.codec.base import CODEC_FORMAT_VERSION, DECODERS, SHIFT, Decoder, check_unit, content_sha256

Objective = Literal["absolute", "squared"]
OBJECTIVES: tuple[Objective, ...] = ("absolute", "squared")

TABLES = ("edges", "medians", "means")
"""The tables that decide ids and densities."""

_CHUNK_VOXELS = 1 << 16
"""Voxels encoded at a time, so that intermediate arrays stay in the L2 cache."""


@dataclass(frozen=True, eq=False)
class LloydMaxCodec:
    """Bins of density with two reconstruction tables; made by `fit_codec` (`ratios.py`)."""

    unit: str
    objective: Objective
    edges: np.ndarray
    """float32 [n_bins - 1], strictly increasing, in `unit`: bin k holds edges[k - 1] <= rho < edges[k]."""
    medians: np.ndarray
    """float32 [n_bins], strictly increasing, in `unit`; 0 for bin 0."""
    means: np.ndarray
    """float32 [n_bins], strictly increasing, in `unit`; 0 for bin 0."""
    fitted_max: float
    """Largest density the fit saw, in `unit`; above it the last bin is a guess."""
    fitted_min: float = 0.0
    """Smallest density above zero the fit saw, in `unit`; below it bin 1 is a guess. 0: not recorded."""
    fit: Mapping[str, Any] = field(default_factory=dict)
    """How the fit went: `n_voxels`, voxels of each bin (`counts`), `nmae_floor` of both objectives with both tables."""

    kind: ClassVar[str] = "lloyd_max"
    tokens_per_voxel: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_unit(self.unit, "The Lloyd-Max codec")
        said = "The Lloyd-Max codec"
        if self.objective not in OBJECTIVES:
            raise TomatError(f"{said} has objective {self.objective!r}; expected one of {', '.join(OBJECTIVES)}.")
        for name in TABLES:
            table = np.ascontiguousarray(getattr(self, name), dtype=np.float32)
            table.setflags(write=False)
            object.__setattr__(self, name, table)
        n_bins = len(self.medians)
        if self.means.shape != (n_bins,) or self.edges.shape != (n_bins - 1,) or not 2 <= n_bins <= 1 << 16:
            raise TomatError(
                f"{said} has {self.edges.shape} edges, {self.medians.shape} medians and {self.means.shape} means; "
                "expected n - 1, n and n, with n from 2 to 65,536."
            )
        for name in TABLES:
            table = getattr(self, name)
            if not (np.all(np.isfinite(table)) and np.all(np.diff(table) > 0) and table[0] >= 0):
                raise TomatError(f"{said}'s {name} are not finite, non-negative and strictly increasing.")
            if name != "edges" and not (np.all(table[1:] >= self.edges) and np.all(table[:-1] < self.edges)):
                raise TomatError(f"{said}'s {name} lie outside their bins.")
        if self.edges[0] <= 0:
            raise TomatError(f"{said}'s first edge is 0; bin 0 holds exact zero, so it must be above.")
        if not 0 <= self.fitted_min <= self.fitted_max < np.inf or self.fitted_max < self.edges[-1]:
            raise TomatError(
                f"{said} says it saw densities from {self.fitted_min:g} to {self.fitted_max:g}; expected finite ones, "
                f"up to its last edge of {self.edges[-1]:g} or more."
            )

    @property
    def n_density_tokens(self) -> int:
        """Number of bins, the one of zero included."""
        return len(self.medians)

    @cached_property
    def _lookup(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Bin at the start of each fine cell of float32 bits, edges as bits, and the most edges inside one cell. A
        fitted codec has none inside: its edges are edges of cells. Each edge inside costs one more comparison."""
        edge_bits = self.edges.view(np.int32).astype(np.int64)
        n_cells = (int(edge_bits[-1]) >> SHIFT) + 2
        cell_starts = np.arange(n_cells, dtype=np.int64) << SHIFT
        first = np.searchsorted(edge_bits, cell_starts, side="right")
        last = np.searchsorted(edge_bits, cell_starts + (1 << SHIFT) - 1, side="right")
        # A sentinel above all float32 bits, compared against when the last bin is reached.
        bits = np.append(edge_bits, np.iinfo(np.int32).max).astype(np.int32)
        return first.astype(np.uint16), bits, int((last - first).max())

    def encode(self, rho: np.ndarray) -> np.ndarray:
        """Bin of each density, float32 [...] in `unit`, as uint16 [...]: `np.searchsorted(edges, rho, side="right")`,
        computed from the bits of the float32. Negative values get 0. The caller must exclude NaN."""
        values = np.asarray(rho, dtype=np.float32)
        bits = np.ascontiguousarray(values).reshape(-1).view(np.int32)
        table, edge_bits, corrections = self._lookup
        ids = np.empty(bits.size, dtype=np.uint16)
        for start in range(0, bits.size, _CHUNK_VOXELS):
            # Negative numbers have the sign bit, so they are negative as integers too.
            chunk = np.maximum(bits[start : start + _CHUNK_VOXELS], 0)
            out = ids[start : start + _CHUNK_VOXELS]
            np.take(table, chunk >> SHIFT, out=out, mode="clip")
            for _ in range(corrections):
                out += chunk >= edge_bits[out]
        return ids.reshape(values.shape)

    def decode(self, ids: np.ndarray, decoder: Decoder = "median") -> np.ndarray:
        """Density of each bin: float32 [...], in `unit`. `ids`: integers [...], 0 to n_bins - 1."""
        if decoder not in DECODERS:
            raise TomatError(f"There is no decoder {decoder!r}; expected one of {', '.join(DECODERS)}.")
        ids = np.asarray(ids)
        n_bins = self.n_density_tokens
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < n_bins:
            raise TomatError(f"Density ids {ids.min()} to {ids.max()}; expected 0 to {n_bins - 1}. Is the codec wrong?")
        return (self.medians if decoder == "median" else self.means)[ids]

    @property
    def fitted_range(self) -> tuple[float, float]:
        return self.fitted_min, self.fitted_max

    @property
    def sha256(self) -> str:
        fields = {"kind": self.kind, "unit": self.unit, "objective": self.objective}
        return content_sha256(fields, {name: getattr(self, name) for name in TABLES})

    def to_dict(self) -> dict[str, Any]:
        return {
            "format_version": CODEC_FORMAT_VERSION,
            "kind": self.kind,
            "unit": self.unit,
            "objective": self.objective,
            # Each float32 as the shortest decimal that reads back as it: half the text of its float64 digits.
            **{name: [float(text) for text in getattr(self, name).astype(str)] for name in TABLES},
            "fitted_max": self.fitted_max,
            "fitted_min": self.fitted_min,
            "fit": dict(self.fit),
            "sha256": self.sha256,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        return cls(
            content["unit"],
            content["objective"],
            *(np.asarray(content[name], dtype=np.float32) for name in TABLES),
            fitted_max=float(content["fitted_max"]),
            fitted_min=float(content.get("fitted_min", 0.0)),
            fit=dict(content["fit"]),
        )
