"""Free-running evaluation: whole cells are predicted from their structures alone, as for a user.

The predictor is given the lattice, the atoms and the grid's sides. The valences that it learnt give the electron count.
The true density is used only afterwards, for the comparison.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.relative import cell_codec
from tomat.data.density.crystal import Crystal
from tomat.data.density.geometry import nearest_atom_a
from tomat.data.density.grid import DensityGrid
from tomat.predict.evaluation.metrics import nmae, spread
from tomat.predict.evaluation.result import Evaluation
from tomat.predict.inference.interface import ACCEPTABLE, Predictor, electron_count, normalised

FREE_RUNNING = "free-running, whole cell, structure only"
"""Stands beside the figures: nothing of the true density was read."""

SHELL_EDGES_A = (0.5, 1.25, 2.0, 4.0)
"""Outer radii of the shells around atoms by which an error is divided: the core, the bond (most of a covalent crystal's
error), between the atoms, the tails, and beyond the last the vacuum, which holds no more than the sum of atoms."""

COLUMNS = (
    ("model", "free_running_nmae"),
    ("promolecule", "promolecule_nmae"),
    ("constant", "constant_nmae"),
    ("codec floor", "codec_floor_nmae"),
)


@dataclass(frozen=True)
class FreeRunningMaterial:
    """Figures of one whole cell; NMAE is the integral of |difference| over that of the true density."""

    material_id: str
    voxels: int
    seconds: float
    electrons_before: float
    electrons: float | None
    """Sum of the valences, to which the density was scaled; None: the valences are not known, and nothing is scaled."""
    free_running_nmae: float
    promolecule_nmae: float
    """NMAE of the sum of atoms, scaled to the same count."""
    constant_nmae: float
    """NMAE of the same count spread evenly over the cell."""
    codec_floor_nmae: float
    """NMAE of the true density rounded to the codec."""
    spread_share: float | None = None
    """Integral of the standard deviation over samples, divided by that of the density; None for a single sample."""
    spread_rank_correlation: float | None = None
    """Spearman's correlation, over the cell's voxels, between that deviation and the error of the mean."""
    compound: str = ""
    flags: tuple[str, ...] = ()
    """Where the cell or its prediction lies outside the training data, in words (`Prediction.flags`)."""
    nmae_by_distance: tuple[float, ...] = ()
    """The model's NMAE split by each voxel's distance from the nearest atom: a part for each shell that ends at one of
    `SHELL_EDGES_A`, and one beyond the last. The parts sum to the NMAE."""
    far_electrons: float = 0.0
    """Electrons predicted farther than the last of `SHELL_EDGES_A` from every atom."""
    far_reference_electrons: float = 0.0
    """Electrons of the true density there."""
    group: str = ""
    """Group of the embedded set; empty for other densities."""


@dataclass(frozen=True)
class FreeRunningResult(Evaluation):
    materials: tuple[FreeRunningMaterial, ...]

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        sampled = () if self.materials[0].spread_share is None else (("spread", "spread_share"),)
        return (*COLUMNS, *sampled, ("seconds", "seconds"))

    @property
    def spread_says(self) -> dict[str, float] | None:
        """How well the spread over samples predicts the error: Spearman's rank correlation over the voxels of a cell
        (median over cells) and over the cells, and the error divided by sqrt(2 / pi) sigma, the mean absolute value of
        a Gaussian with that deviation (median; 1: the spread is as large as the error). None for single samples."""
        if self.materials[0].spread_share is None:
            return None
        errors = np.array([m.free_running_nmae for m in self.materials])
        expected = np.sqrt(2 / np.pi) * np.array([m.spread_share for m in self.materials], np.float64)
        within = np.array([m.spread_rank_correlation for m in self.materials], np.float64)
        return {
            "rank_correlation_over_voxels": float(np.median(within)),
            "rank_correlation_over_materials": _rank_correlation(expected, errors),
            "error_over_expected": float(np.median(errors / expected)),
        }

    def by_group(self) -> dict[str, tuple["FreeRunningMaterial", ...]]:
        """The materials of each group, in the order of first appearance; empty if no material has a group."""
        names = dict.fromkeys(each.group for each in self.materials if each.group)
        return {name: tuple(each for each in self.materials if each.group == name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": FREE_RUNNING,
            "settings": dict(self.settings),
            "over_materials": {name: asdict(self.spread(name)) for _, name in self.columns if name != "seconds"},
            "by_group": {
                name: asdict(spread([each.free_running_nmae for each in found]))
                for name, found in self.by_group().items()
            },
            "shell_edges_a": list(SHELL_EDGES_A),
            "nmae_by_distance_mean": self._by_distance().tolist(),
            "spread_says": self.spread_says,
            "materials": [asdict(material) for material in self.materials],
        }

    def _by_distance(self) -> np.ndarray:
        return np.mean([each.nmae_by_distance for each in self.materials], axis=0)

    def summary(self) -> str:
        """The model beside the sum of atoms, and the flagged materials, in sentences."""
        atoms = self.spread("promolecule_nmae")
        better = sum(m.free_running_nmae < m.promolecule_nmae for m in self.materials)
        words = (
            f"{FREE_RUNNING.capitalize()}: NMAE {self.headline()}. The sum of atoms has a median of "
            f"{100 * atoms.median:.2f} %, a mean of {100 * atoms.mean:.2f} %; the model is the better one on {better}."
        )
        if len(groups := self.by_group()) > 1:
            over = {name: spread([each.free_running_nmae for each in found]) for name, found in groups.items()}
            each = (f"{name} {100 * s.median:.2f} and {100 * s.mean:.2f} % ({s.materials})" for name, s in over.items())
            words += f" By group, median and mean: {', '.join(each)}."
        shares = self._by_distance()
        shares = shares / max(shares.sum(), np.finfo(float).tiny)
        edges = [*(f"to {edge:g} A" for edge in SHELL_EDGES_A), "beyond"]
        parts = ", ".join(f"{edge} {share:.0%}" for edge, share in zip(edges, shares, strict=True))
        words += f" Shares of the mean error by distance from the nearest atom: {parts}."
        far = max(self.materials, key=lambda m: abs(m.far_electrons - m.far_reference_electrons))
        if far.far_electrons or far.far_reference_electrons:
            words += (
                f" Beyond {SHELL_EDGES_A[-1]:g} A from every atom it is farthest off in {far.material_id}: "
                f"{far.far_electrons:.4f} electrons, {far.far_reference_electrons:.4f} in the reference."
            )
        if flagged := [m for m in self.materials if m.flags]:
            first = f"{flagged[0].material_id}: {flagged[0].flags[0]}"
            words += f" Flagged as unlike the training: {len(flagged)}, such as {first}."
        if (says := self.spread_says) is not None:
            several = len(self.materials) > 1
            over = f" and {says['rank_correlation_over_materials']:.2f} over materials" if several else ""
            words += (
                " The spread over samples goes with the error at a rank correlation of "
                f"{says['rank_correlation_over_voxels']:.2f} over voxels{over}; errors are "
                f"{says['error_over_expected']:.1f} times as large as the spread predicts."
            )
        return words


def evaluate_free_running(
    predictor: Predictor,
    codec: DensityCodec,
    material_ids: Sequence[str],
    load: Callable[[str], DensityGrid],
    *,
    settings: Mapping[str, Any] | None = None,
    groups: Mapping[str, str] | None = None,
    on_material: Callable[[FreeRunningMaterial], None] | None = None,
    on_patches: Callable[[int, int], None] | None = None,
) -> FreeRunningResult:
    """Predict each material from its structure and compare it with its true density. `groups` maps ids to groups."""
    if not material_ids:
        raise TomatError("no material to evaluate; choose a split or input that has at least one.")
    found: list[FreeRunningMaterial] = []
    for name in material_ids:
        truth = load(name)
        crystal, shape = Crystal.of(truth), truth.grid_shape
        learnt = predictor.valences
        settled = learnt is not None and set(crystal.atomic_numbers.tolist()) <= set(learnt)
        electrons = electron_count(crystal, None, learnt)[0] if settled else None
        # Nothing is refused, because the comparison shows how wrong a prediction is.
        words = {"electrons": electrons, "accept": tuple(ACCEPTABLE), "on_patches": on_patches}
        prediction = predictor.predict(crystal, shape, **words)
        atoms, _ = normalised(predictor.promolecule.density(crystal, shape), crystal, electrons)
        total = prediction.electrons_before if electrons is None else electrons
        correlation = share = None
        if prediction.spread is not None:
            share = float(prediction.spread.sum(dtype=np.float64) / prediction.rho.sum(dtype=np.float64))
            correlation = _rank_correlation(prediction.spread, np.abs(prediction.rho - truth.rho))
        distances_a = nearest_atom_a(crystal.lattice, crystal.frac_coords, shape).reshape(shape)
        shell = np.searchsorted(SHELL_EDGES_A, distances_a.ravel())
        parts = np.bincount(
            shell, np.abs(prediction.rho.astype(np.float64) - truth.rho).ravel(), len(SHELL_EDGES_A) + 1
        ) / truth.rho.sum(dtype=np.float64)
        far, voxel_a3 = distances_a > SHELL_EDGES_A[-1], crystal.volume_a3 / truth.rho.size
        material = FreeRunningMaterial(
            material_id=name,
            voxels=truth.rho.size,
            seconds=prediction.seconds,
            electrons_before=prediction.electrons_before,
            electrons=electrons,
            free_running_nmae=nmae(prediction.rho, truth.rho),
            promolecule_nmae=nmae(atoms, truth.rho),
            constant_nmae=nmae(np.full(shape, total / crystal.volume_a3, np.float32), truth.rho),
            codec_floor_nmae=nmae(cell_codec(codec, truth).rounded(truth.rho), truth.rho),
            spread_share=share,
            spread_rank_correlation=correlation,
            compound=truth.formula,
            flags=tuple(flag["text"] for flag in prediction.flags),
            nmae_by_distance=tuple(parts.tolist()),
            far_electrons=float(prediction.rho[far].sum(dtype=np.float64) * voxel_a3),
            far_reference_electrons=float(truth.rho[far].sum(dtype=np.float64) * voxel_a3),
            group=(groups or {}).get(name, ""),
        )
        found.append(material)
        if on_material is not None:
            on_material(material)
    return FreeRunningResult(settings or {}, tuple(found))


def _rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    from scipy.stats import spearmanr

    correlation, _ = spearmanr(one.ravel(), other.ravel())
    return float(correlation)
