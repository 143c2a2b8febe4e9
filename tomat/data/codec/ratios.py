"""The histogram that a relative codec is fitted from, and the fit of every Lloyd-Max codec."""

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from tomat.base.checked_arrays import pack_arrays, unpack_arrays
from tomat.base.errors import TomatError
from tomat.data.codec.base import DECODERS, UNIT_E_PER_A3
from tomat.data.codec.histogram import FIRST_NORMAL_BIN, DensityHistogram, fine_bin_edges
from tomat.data.codec.lloyd_max import OBJECTIVES, LloydMaxCodec, Objective
from tomat.data.codec.quantiser import FineBins, optimal_cuts
from tomat.data.codec.relative import OFFSET_E_PER_A3, RelativeCodec, check_offset, grid_scale, ratios
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule

WEIGHT_STEP_E_PER_A3 = 1e-6
"""A voxel's weight is its scale in whole steps of this, so that weights add up exactly: 10,000 or more by default."""


@dataclass(eq=False)
class RatioHistogram:
    """Ratios of densities to their promolecule, each weighted by its voxel's scale, so that a fit minimises the error
    of the density and its floor is of the density. Grows with `add_grid` and `merge`."""

    promolecule: Promolecule
    offset_e_per_a3: float = OFFSET_E_PER_A3
    # A ratio has no unit; the unit of these histograms is never read.
    weights: DensityHistogram = field(default_factory=DensityHistogram)
    voxels: DensityHistogram = field(default_factory=DensityHistogram)
    density_sum: float = 0.0
    """Sum of the densities of all voxels, e/Å³."""

    def __post_init__(self) -> None:
        check_offset(self.offset_e_per_a3)

    @property
    def material_ids(self) -> set[str]:
        return self.voxels.material_ids

    @property
    def n_voxels(self) -> int:
        return self.voxels.n_voxels

    def add_grid(self, grid: DensityGrid, material_id: str = "") -> None:
        """Count every voxel of a density. Refuses a density with an element that the promolecule lacks."""
        scale = grid_scale(self.promolecule, self.offset_e_per_a3, grid)
        found = ratios(grid.rho, scale, self.offset_e_per_a3)
        self.voxels.add(found, material_id)
        self.weights.add(found, material_id, np.rint(scale.astype(np.float64) / WEIGHT_STEP_E_PER_A3))
        self.density_sum += float(grid.rho.sum(dtype=np.float64))

    def merge(self, other: "RatioHistogram") -> None:
        if other._relative_to != self._relative_to:
            raise TomatError("Ratios to one promolecule cannot be added to ratios to another; count them again.")
        self.weights.merge(other.weights)
        self.voxels.merge(other.voxels)
        self.density_sum += other.density_sum

    @property
    def _relative_to(self) -> str:
        return f"{self.promolecule.sha256} {self.offset_e_per_a3!r}"

    def to_bytes(self) -> bytes:
        """The content of an `.npz` file with a checksum. It names the promolecule by its hash."""
        parts = {name: getattr(self, name).to_bytes() for name in ("weights", "voxels")}
        return pack_arrays(
            {name: np.frombuffer(content, np.uint8) for name, content in parts.items()}
            | {"density_sum": np.array(self.density_sum), "relative_to": np.array(self._relative_to)}
        )

    @classmethod
    def from_bytes(
        cls, content: bytes, source: str, promolecule: Promolecule, offset_e_per_a3: float, remedy: str
    ) -> Self:
        """Read what `to_bytes` gave. Refuses ratios to another promolecule or with another offset."""
        arrays = unpack_arrays(content, source, "a histogram of ratios to a promolecule", remedy)
        empty = cls(promolecule, offset_e_per_a3)
        if str(arrays.get("relative_to")) != empty._relative_to:
            said = f"{source} counts ratios to the promolecule and offset {str(arrays.get('relative_to'))[:12]}..."
            raise TomatError(f"{said}, expected {empty._relative_to[:12]}... and {offset_e_per_a3}. {remedy}")
        parts = (DensityHistogram.from_bytes(arrays[name].tobytes(), source, remedy) for name in ("weights", "voxels"))
        return cls(promolecule, offset_e_per_a3, *parts, density_sum=float(arrays["density_sum"]))


def fit_codec(
    histogram: DensityHistogram | RatioHistogram, n_bins: int = 16_384, objective: Objective = "absolute"
) -> LloydMaxCodec:
    """Fit bins and reconstructions to all the voxels of a histogram. Both objectives are fitted, so that their floors
    can be compared; the codec is for the one asked for. Ratios give a `RelativeCodec`. Floor: NMAE of the densities
    when each is replaced by its reconstruction.

    For densities, bin 0 stands for zero. For ratios, the bin of u = 1 stands for exactly 1, so a voxel about which only
    the atoms are known comes back as their sum, and vacuum as vacuum.
    """
    if objective not in OBJECTIVES:
        raise TomatError(f"There is no objective {objective!r}; expected one of {', '.join(OBJECTIVES)}.")
    if not 2 <= n_bins <= 1 << 16:
        raise TomatError(f"A Lloyd-Max codec of {n_bins:,} bins was asked for; expected 2 to 65,536.")
    plain = isinstance(histogram, DensityHistogram)
    fine = FineBins(histogram if plain else histogram.weights)
    what, n = ("densities", n_bins - 1) if plain else ("ratios to the sum of atoms", n_bins)
    if len(fine.bins) < n:
        raise TomatError(
            f"The {what} have {len(fine.bins):,} distinct values above zero (fine bins of 1.2e-4 and less), too few "
            f"for {n_bins:,} bins. Fit to more densities, or ask for at most {len(fine.bins) + n_bins - n:,} bins."
        )
    smallest = fine_bin_edges(np.array([FIRST_NORMAL_BIN]))
    step, total = (1.0, float(histogram.sums.sum())) if plain else (WEIGHT_STEP_E_PER_A3, histogram.density_sum)
    report: dict[str, Any] = {"n_voxels": histogram.n_voxels, "iterations": {}, "nmae_floor": {}}
    fits = {}
    for each in OBJECTIVES:
        cuts, report["iterations"][each] = optimal_cuts(fine, n, each == "absolute")
        medians, means = fine.medians(cuts), fine.means(cuts)
        lower = np.concatenate([smallest, fine.edges(cuts, medians if each == "absolute" else means)])
        # Rounding to float32 must not push a reconstruction out of its bin.
        highest = np.append(np.nextafter(lower[1:], np.float32(0)), np.finfo(np.float32).max)
        tables = [np.clip(values.astype(np.float32), lower, highest) for values in (medians, means)]
        if not plain:
            for table in tables:
                table[np.searchsorted(lower[1:], np.float32(1), side="right")] = 1
        errors = (fine.absolute_error(cuts, table.astype(np.float64)) * step for table in tables)
        report["nmae_floor"][each] = dict(zip(DECODERS, (error / total for error in errors), strict=True))
        fits[each] = cuts, lower, tables
    cuts, lower, tables = fits[objective]
    seen: dict[str, Any] = {"fitted_min": float(fine.lower[0]), "fit": report}
    if plain:
        report["counts"] = [histogram.n_zero, *np.diff(fine.running_counts[cuts]).tolist()]
        tables = [np.append(np.float32(0), table) for table in tables]
        return LloydMaxCodec(histogram.unit, objective, lower, *tables, fitted_max=histogram.max_density, **seen)
    report["counts"] = np.diff(FineBins(histogram.voxels).running_counts[cuts]).tolist()
    seen |= {"promolecule": histogram.promolecule, "offset_e_per_a3": histogram.offset_e_per_a3}
    largest = histogram.voxels.max_density
    return RelativeCodec(UNIT_E_PER_A3, objective, lower[1:], *tables, fitted_max=largest, **seen)
