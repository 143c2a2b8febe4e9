"""The choice of held-out compositions: by a seed, and so that the rest has the elements that they need."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

Atoms = Mapping[str, int]


def held_out_compositions(materials: Sequence[tuple[str, Atoms]], share: float, seed: int) -> tuple[str, ...]:
    """The formulas of the validation set, sorted. They are drawn in an order that the seed decides, until they have
    `share` of all densities (0 to 1; 0: none), but at least one.

    The rest must have every element of a held-out composition: nothing can be predicted for others. Compositions whose
    valences the rest settles too (`PromoleculeFit.valences`) come first: their numbers of electrons are known.
    """
    atoms = {formula: counts for formula, counts in materials}
    sizes = {formula: sum(each == formula for each, _ in materials) for formula in atoms}
    wanted = max(1, round(share * len(materials)))
    order = sorted(atoms, key=lambda formula: hashlib.sha256(f"{seed}:{formula}".encode()).hexdigest())
    chosen: dict[str, bool] = {}  # formula to whether the rest must settle its valences
    n_chosen = 0
    for settles in (True, False) if share > 0 else ():
        for formula in order:
            fits = n_chosen + sizes[formula] <= wanted or not chosen
            if formula in chosen or not fits or n_chosen >= wanted:
                continue
            held = {**chosen, formula: settles}
            rest = [atoms[each] for each in order if each not in held]
            if all(_is_taught(atoms[each], rest, asked) for each, asked in held.items()):
                chosen = held
                n_chosen += sizes[formula]
    return tuple(sorted(chosen))


def _is_taught(atoms: Atoms, rest: Sequence[Atoms], settles: bool) -> bool:
    """Whether the rest has every element and, with `settles`, its counts determine the valence of each."""
    elements = sorted({symbol for each in rest for symbol in each})
    if not set(atoms) <= set(elements):
        return False
    if not settles:
        return True
    matrix = np.array([[each.get(symbol, 0) for symbol in elements] for each in rest], dtype=float)
    rank = int(np.linalg.matrix_rank(matrix))
    _, _, directions = np.linalg.svd(matrix)
    # Valences can shift along a direction that changes no count; its elements are not settled.
    free = np.abs(directions[rank:]).max(axis=0, initial=0.0)
    return all(free[elements.index(symbol)] < 1e-9 for symbol in atoms)
