"""The histogram that a relative codec is fitted from, and the fit."""

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from tomat.base.checked_arrays import pack_arrays, unpack_arrays
from tomat.base.errors import TomatError
from tomat.data.codec.base import DECODERS, UNIT_E_PER_A3
from tomat.data.codec.histogram import FIRST_NORMAL_BIN, DensityHistogram, fine_bin_edges
from tomat.data.codec.lloyd_max import (
    OBJECTIVES,
    LloydMaxCodec,
    Objective,
    check_bins,
    fit_lloyd_max,
    too_few_values,
    within_bins,
)
from tomat.data.codec.quantiser import FineBins, optimal_cuts
from tomat.data.codec.relative import OFFSET_E_PER_A3, RelativeCodec, check_offset, grid_scale, ratios
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule

WEIGHT_STEP_E_PER_A3 = 1e-6
"""A voxel weighs its scale, in whole steps of this, so that weights add up exactly: at least 10,000 each."""


@dataclass(eq=False)
class RatioHistogram:
    """Ratios of densities to their promolecule, each weighing its voxel's scale: so what a fit minimises, and its floor
    says, is the error of the density. Grows with `add_grid` and `merge`."""

    promolecule: Promolecule
    offset_e_per_a3: float = OFFSET_E_PER_A3
    # A ratio has no unit; the histograms' is never asked for.
    weights: DensityHistogram = field(default_factory=DensityHistogram)
    voxels: DensityHistogram = field(default_factory=DensityHistogram)
    density_sum: float = 0.0
    """Sum of the densities of all voxels, e/Å³."""

    def __post_init__(self) -> None:
        check_offset(self.offset_e_per_a3)

    @property
    def material_ids(self) -> set[str]:
        """Names of the materials counted, as far as they were given."""
        return self.voxels.material_ids

    @property
    def n_voxels(self) -> int:
        return self.voxels.n_voxels

    def add_grid(self, grid: DensityGrid, material_id: str = "") -> None:
        """Count every voxel of a density; one with an element that the promolecule has not is refused."""
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
        """As an `.npz` file with its checksum; the promolecule is in it by its hash."""
        parts = {name: getattr(self, name).to_bytes() for name in ("weights", "voxels")}
        return pack_arrays(
            {name: np.frombuffer(content, np.uint8) for name, content in parts.items()}
            | {"density_sum": np.array(self.density_sum), "relative_to": np.array(self._relative_to)}
        )

    @classmethod
    def from_bytes(
        cls, content: bytes, source: str, promolecule: Promolecule, offset_e_per_a3: float, remedy: str
    ) -> Self:
        """What `to_bytes` gave; ratios to another promolecule, or with another offset, are refused."""
        arrays = unpack_arrays(content, source, "a histogram of ratios to a promolecule", remedy)
        empty = cls(promolecule, offset_e_per_a3)
        if str(arrays.get("relative_to")) != empty._relative_to:
            said = f"{source} counts ratios to the promolecule and offset {str(arrays.get('relative_to'))[:12]}..."
            raise TomatError(f"{said}, expected {empty._relative_to[:12]}... and {offset_e_per_a3}. {remedy}")
        parts = (DensityHistogram.from_bytes(arrays[name].tobytes(), source, remedy) for name in ("weights", "voxels"))
        return cls(promolecule, offset_e_per_a3, *parts, density_sum=float(arrays["density_sum"]))


def fit_codec(
    histogram: DensityHistogram | RatioHistogram, n_bins: int, objective: Objective = "absolute"
) -> LloydMaxCodec:
    """The codec of a histogram, of whichever kind."""
    if isinstance(histogram, RatioHistogram):
        return fit_relative(histogram, n_bins, objective)
    return fit_lloyd_max(histogram, n_bins, objective)


def fit_relative(histogram: RatioHistogram, n_bins: int, objective: Objective = "absolute") -> RelativeCodec:
    """As `fit_lloyd_max`, of ratios; floors are NMAE of the densities. The bin of u = 1 stands for 1 exactly, so that a
    voxel of which nothing is known but the atoms comes back as their sum, and vacuum as vacuum."""
    check_bins(n_bins, objective)
    fine, counts = FineBins(histogram.weights), FineBins(histogram.voxels).running_counts
    if len(fine.bins) < n_bins:
        raise TomatError(too_few_values("ratios to the sum of atoms", len(fine.bins), n_bins, len(fine.bins)))
    smallest = fine_bin_edges(np.array([FIRST_NORMAL_BIN]))
    codecs: dict[str, RelativeCodec] = {}
    report: dict[str, Any] = {"n_voxels": histogram.n_voxels, "counts": [], "iterations": {}, "nmae_floor": {}}
    for each in OBJECTIVES:
        cuts, report["iterations"][each] = optimal_cuts(fine, n_bins, each == "absolute")
        medians, means = fine.medians(cuts), fine.means(cuts)
        edges = fine.edges(cuts, medians if each == "absolute" else means)
        tables = [within_bins(values, np.concatenate([smallest, edges])) for values in (medians, means)]
        for table in tables:
            table[np.searchsorted(edges, np.float32(1), side="right")] = 1
        errors = (fine.absolute_error(cuts, table.astype(np.float64)) * WEIGHT_STEP_E_PER_A3 for table in tables)
        floors = (error / histogram.density_sum for error in errors)
        report["nmae_floor"][each] = dict(zip(DECODERS, floors, strict=True))
        if each == objective:
            report["counts"] = np.diff(counts[cuts]).tolist()
        codecs[each] = RelativeCodec(
            UNIT_E_PER_A3,
            each,
            edges,
            *tables,
            fitted_max=histogram.voxels.max_density,
            fitted_min=float(fine.lower[0]),
            fit=report,
            promolecule=histogram.promolecule,
            offset_e_per_a3=histogram.offset_e_per_a3,
        )
    return codecs[objective]
