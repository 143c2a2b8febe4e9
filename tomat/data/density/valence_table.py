"""The counts that valence electrons of pseudopotentials in use (`elements.KNOWN_VALENCES`) add up to. A density with
another count is of another kind, in another unit, of other atoms, or of a charged cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tomat.data.density.elements import KNOWN_VALENCES, symbol_of

HEAVIEST_WITH_ITS_CORE = 36
"""Molecular codes keep the cores of elements up to krypton and replace those of heavier ones (the def2 sets)."""

MOST_READINGS = 24
"""Most readings kept for one count."""

Valences = Mapping[int, float]
"""Electrons that an atom brings, by atomic number."""


@dataclass(frozen=True)
class Reading:
    """One meaning of a count of electrons: how many each atom brings."""

    electrons: float
    valences: Valences

    @property
    def with_cores(self) -> tuple[int, ...]:
        """Elements with all of their electrons, where every pseudopotential leaves fewer."""
        return tuple(z for z, n in self.valences.items() if n == z and n > max(KNOWN_VALENCES.get(z, (0,))))

    @property
    def valence_words(self) -> str:
        """`Ga 3, As 5`."""
        return ", ".join(f"{symbol_of(z)} {n:g}" for z, n in self.valences.items())

    def words(self) -> str:
        """`8 (Ga 3, As 5)`."""
        return f"{self.electrons:g} ({self.valence_words})"


def readings(atomic_numbers: np.ndarray, given: Valences | None = None) -> tuple[Reading, ...]:
    """What densities of these atoms can hold: the electrons of pseudopotentials, all electrons, or all electrons of the
    lighter elements with pseudopotentials of the heavier. Every count, ascending, with at most `MOST_READINGS` each."""
    elements, counts = np.unique(atomic_numbers, return_counts=True)
    atoms = dict(zip(elements.tolist(), counts.tolist(), strict=True))
    if given is not None and set(atoms) <= set(given):
        return _sums(atoms, {z: (float(given[z]),) for z in atoms})
    # An element beyond the table (Z > 103) has no potential that anybody uses.
    pseudo = {z: KNOWN_VALENCES.get(z, (float(z),)) for z in atoms}
    every = {z: (float(z),) for z in atoms}
    molecular = {z: every[z] if z <= HEAVIEST_WITH_ITS_CORE else pseudo[z] for z in atoms}
    found = {(each.electrons, tuple(each.valences.items())): each
             for options in (pseudo, every, molecular) for each in _sums(atoms, options)}  # fmt: skip
    return tuple(sorted(found.values(), key=lambda each: each.electrons))


def _sums(atoms: Mapping[int, int], options: Mapping[int, tuple[float, ...]]) -> tuple[Reading, ...]:
    """Readings by one option per element. They grow element by element: many elements cost no more than the counts."""
    sums: dict[float, list[dict[int, float]]] = {0.0: [{}]}
    for z, count in atoms.items():
        longer: dict[float, list[dict[int, float]]] = {}
        for total, ways in sums.items():
            for valence in options[z]:
                kept = longer.setdefault(total + count * valence, [])
                kept += [{**way, z: valence} for way in ways[: MOST_READINGS - len(kept)]]
        sums = longer
    return tuple(Reading(total, way) for total, ways in sums.items() for way in ways)


VALENCE_TOLERANCE = 0.05
"""Electrons: float32 grids of plane-wave codes hold their counts to 0.001 and better."""


def settled_valences(
    atoms: Sequence[Mapping[int, int]], electrons: Sequence[float], known: Mapping[int, float] | None = None
) -> dict[int, float]:
    """Electrons that an atom of each element brings, as far as the densities' counts settle this: whole numbers within
    `VALENCE_TOLERANCE`, by least squares over all compositions at once.

    Empty if the counts do not add up within the tolerance (several sets of pseudopotentials). Leaves out an element if
    another's number could make up for it. `known`: electrons known otherwise; they help, and are not in the answer.
    """
    known = known or {}
    present = {z for row in atoms for z in row}
    elements = sorted(present - set(known))
    if not elements:
        return {}
    matrix = np.array([[float(row.get(z, 0)) for z in elements] for row in atoms])
    of_known = [sum(known.get(z, 0.0) * count for z, count in row.items()) for row in atoms]
    rest = np.array(electrons) - np.array(of_known)
    found, _, rank, _ = np.linalg.lstsq(matrix, rest, rcond=None)
    settled = np.ones(len(elements), bool)
    if rank < len(elements):
        # Valences can shift along a direction that changes no count; its elements are not settled.
        _, _, directions = np.linalg.svd(matrix)
        settled = np.abs(directions[rank:]).max(axis=0) < 1e-9
    whole = np.where(settled, np.round(found), found)
    if np.abs(matrix @ whole - rest).max(initial=0.0) > VALENCE_TOLERANCE * len(present):
        return {}
    near = np.abs(found - whole) < VALENCE_TOLERANCE
    return {z: float(v) for z, v, ok in zip(elements, whole.tolist(), settled & near, strict=True) if ok}
