"""What may be wrong with a prediction: refused, or flagged, by the command and the Python API alike.

A flag is an object with `kind`, `text` and the figures behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import console
from tomat.data.density.crystal import Crystal
from tomat.data.density.elements import symbol_of
from tomat.data.density.geometry import check_cell, nearest_atom_a, shortest_distances_a, void_radius_a
from tomat.data.density.promolecule import Promolecule

ACCEPTABLE = {
    "distances": "atoms however near or far",
    "normalisation": "densities scaled by more than 10 % to the electron count",
}
"""Refusals that a caller can lift, each with what that lets in."""

MODEL_DEVIATION = 0.01
"""Of a model's electrons from those that the structure has, beyond which a prediction is flagged. The demo's ten
held-out cells deviate by up to 0.8 %, but for GaP, its worst compound, by 1.2 to 1.8 %."""

PROMOLECULE_DEVIATION = 0.05
"""The same of a sum of atoms, whose functions hold no whole numbers of electrons: in the 103 embedded cells, to most of
which it was fitted, it is up to 4.6 % off."""

LARGEST_DEVIATION = 0.1
"""Beyond it a prediction is refused. What is too much is taken from everywhere in the cell alike, so that every atom
is wrong by as much: N2 in a box of 8 A comes out as 13.4 electrons for 10, Na in one of 20 A as 43.9 for 1."""

VOID_TOLERANCE = 1.05
"""A void up to this times the largest of the training is that of a crystal a little expanded."""

LARGEST_SPACING_RATIO = 1.5
"""Between the spacing asked for and that of the training, either way; beyond it a prediction is flagged."""

DISTANCE_TOLERANCE_A = 0.001
"""Below the shortest trained distance, or between two places of an atom, before it is flagged: the last digit of many
structure files."""

Flag = dict[str, Any]


class Learnt:
    """What of a predictor is known from its promolecule, which was fitted to its training densities."""

    promolecule: Promolecule
    usual_deviation: float
    """Share by which the electrons of its densities, before they are scaled, differ from a crystal's at most."""

    @property
    def elements(self) -> tuple[int, ...]:
        return self.promolecule.elements

    @property
    def shortest_distance_a(self) -> Mapping[tuple[int, int], float] | None:
        """By pair of atomic numbers, the lower one first: the shortest distance of neighbours in the training, A
        (`density.geometry.shortest_distances_a`). None: not known."""
        return self.promolecule.shortest_distance_a or None

    @property
    def void_radius_a(self) -> float | None:
        """The farthest that a point of the training's cells is from its nearest atom, A
        (`density.geometry.void_radius_a`). None: not known."""
        return self.promolecule.void_radius_a

    @property
    def spacing_a(self) -> float | None:
        """Median voxel spacing of the training, A. None: any is as good."""
        return self.promolecule.spacing_a or None

    @property
    def valences(self) -> Mapping[int, float] | None:
        """By atomic number: electrons that an atom brings, learnt from the training set. None: not known."""
        return self.promolecule.valences or None


def say_if_voids_unknown(promolecule: Promolecule, place: str) -> None:
    """Print that vacuum is not checked, where the training's voids are not known."""
    if promolecule.void_radius_a is None:
        console.print(
            f"note: the promolecule of {place} was fitted by an earlier tomat, which did not record how far points of "
            "its cells were from atoms: vacuum is not flagged, only too many or too few electrons."
        )


def check_structure(predictor: Learnt, crystal: Crystal, accept: Collection[str]) -> None:
    """Refuse what cannot be predicted, before it is."""
    if unknown := sorted(set(accept) - set(ACCEPTABLE)):
        raise TomatError(f"accept names {unknown[0]!r}; expected some of {', '.join(ACCEPTABLE)}.")
    if other := sorted(set(crystal.atomic_numbers.tolist()) - set(predictor.elements)):
        raise TomatError(
            f"{crystal.name or 'the structure'} has {', '.join(map(symbol_of, other))}, which no training density had; "
            f"the model knows {' '.join(map(symbol_of, predictor.elements))}. Train it on densities with that element."
        )
    if "distances" not in accept:
        source = crystal.name or "the structure"
        check_cell(crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, source)


def extrapolations(predictor: Learnt, crystal: Crystal, grid_shape: Sequence[int]) -> list[Flag]:
    """Where atoms or grid lie outside of what the predictor was trained on."""
    found: list[Flag] = []
    trained = predictor.shortest_distance_a
    if trained is not None:
        ours = shortest_distances_a(crystal.lattice, crystal.atomic_numbers, crystal.frac_coords)
        for pair, distance_a in ours.items():
            names = "-".join(symbol_of(z) for z in pair)
            if pair not in trained:
                text = f"no training structure has {names} neighbours; here they are {distance_a:.3f} A apart"
                found.append({"kind": "pair", "pair": names, "distance_a": distance_a, "text": text})
            elif distance_a < trained[pair] - DISTANCE_TOLERANCE_A:
                text = f"{names} are {distance_a:.3f} A apart, the shortest in training was {trained[pair]:.3f} A"
                figures = {"distance_a": distance_a, "trained_a": trained[pair]}
                found.append({"kind": "distance", "pair": names, **figures, "text": text})
    trained_a = predictor.spacing_a
    if trained_a is not None:
        ratio, asked_a = max((max(a / trained_a, trained_a / a), a) for a in spacing_a(crystal, grid_shape))
        if ratio > LARGEST_SPACING_RATIO:
            text = f"the voxel spacing is {asked_a:.3f} A, that of the training {trained_a:.3f} A"
            found.append({"kind": "spacing", "spacing_a": asked_a, "trained_a": trained_a, "text": text})
    return found


def vacuum(predictor: Learnt, crystal: Crystal, rho: np.ndarray) -> list[Flag]:
    """Whether the cell has voxels farther from every atom than any of the training was, and the electrons of `rho`,
    float `[nx, ny, nz]` in e/Å³, there."""
    trained_a = predictor.void_radius_a
    if trained_a is None:
        return []
    radius_a = void_radius_a(crystal.lattice, crystal.frac_coords)
    if radius_a <= VOID_TOLERANCE * trained_a:
        return []
    shape = rho.shape[0], rho.shape[1], rho.shape[2]
    beyond = nearest_atom_a(crystal.lattice, crystal.frac_coords, shape) > trained_a
    share, electrons = float(beyond.mean()), float(rho[beyond].sum(dtype=np.float64)) * crystal.volume_a3 / rho.size
    text = (
        f"{share:.0%} of the cell is farther than {trained_a:.2f} A from every atom (up to {radius_a:.2f} A), where no "
        f"training structure has a point; the prediction puts {electrons:.3g} electrons there"
    )
    figures = {"void_radius_a": radius_a, "trained_a": trained_a, "share": share, "electrons": electrons}
    return [{"kind": "vacuum", **figures, "text": text}]


def normalisation(
    predictor: Learnt,
    crystal: Crystal,
    before: float,
    electrons: float | None,
    vacuums: Sequence[Flag],
    accept: Collection[str],
) -> list[Flag]:
    """Whether the density had to be scaled by more than an ordinary crystal's; beyond `LARGEST_DEVIATION` it is
    refused, with the vacuums that were found, unless `accept` lifts it. Electrons are None where they are not known."""
    if electrons is None:
        text = "the valence electrons are not known, so the density is not scaled to them; give them with --valences"
        return [{"kind": "electrons", "text": text}]
    deviation = before / electrons - 1
    if abs(deviation) <= predictor.usual_deviation:
        return []
    words = f"{before:.4g} electrons were predicted for {electrons:g}, {abs(deviation):.1%} too "
    words += "many" if deviation > 0 else "few"
    if abs(deviation) > LARGEST_DEVIATION and "normalisation" not in accept:
        raise TomatError(
            f"{crystal.name or 'the structure'}: {words}; expected within {LARGEST_DEVIATION:.0%}"
            + "".join(f" ({flag['text']})" for flag in vacuums)
            + ". Scaled, every atom would be wrong by as much: the structure is too far from those of the training, or "
            "the valences are others than its. `--accept normalisation` (accept in Python) takes it scaled."
        )
    text = f"{words}; the density was scaled to them"
    return [{"kind": "normalisation", "factor": electrons / before, "deviation": deviation, "text": text}]


def spacing_a(crystal: Crystal, grid_shape: Sequence[int]) -> list[float]:
    """Of neighbouring voxels along a, b, c, in A."""
    return (np.linalg.norm(crystal.lattice, axis=1) / np.array(grid_shape)).tolist()
