"""Electrons that an atom of each element brings, from how many electrons densities hold."""

from collections.abc import Mapping, Sequence

import numpy as np

VALENCE_TOLERANCE = 0.05
"""Electrons: float32 grids of plane-wave codes hold their counts to 0.001 and better."""


def settled_valences(
    atoms: Sequence[Mapping[int, int]], electrons: Sequence[float], known: Mapping[int, float] | None = None
) -> dict[int, float]:
    """Electrons that an atom of each element brings, as far as the densities' counts settle it.

    A whole number within `VALENCE_TOLERANCE` each, from all compositions at once by least squares. Nothing where the
    counts do not add up to within that (densities of several sets of pseudopotentials), and no element whose number
    another's could make up for (it is always in the same ratio with others). `known`: elements whose electrons are
    known otherwise. They help to settle the others, and are not in the answer.
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
        # A direction that changes no count changes the elements it has a part in.
        _, _, directions = np.linalg.svd(matrix)
        settled = np.abs(directions[rank:]).max(axis=0) < 1e-9
    whole = np.where(settled, np.round(found), found)
    if np.abs(matrix @ whole - rest).max(initial=0.0) > VALENCE_TOLERANCE * len(present):
        return {}
    near = np.abs(found - whole) < VALENCE_TOLERANCE
    return {z: float(v) for z, v, ok in zip(elements, whole.tolist(), settled & near, strict=True) if ok}
