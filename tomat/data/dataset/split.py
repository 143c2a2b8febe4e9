"""Which compositions are held out: by a seed, and so that the rest teaches what the held-out ones need."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

Atoms = Mapping[str, int]


def held_out_compositions(materials: Sequence[tuple[str, Atoms]], share: float, seed: int) -> tuple[str, ...]:
    """The compositions of the validation set, sorted formulas: drawn in an order that the seed decides, until their
    densities are `share` of all (0 to 1; 0: none), but at least one.

    Each of a composition's elements must be in the rest: nothing can be predicted of others. Those come first whose
    valence electrons the rest settles too (`PromoleculeFit.valences`), so that the electrons of a prediction are known.
    """
    atoms = {formula: counts for formula, counts in materials}
    sizes = {formula: sum(each == formula for each, _ in materials) for formula in atoms}
    wanted = max(1, round(share * len(materials)))
    order = sorted(atoms, key=lambda formula: hashlib.sha256(f"{seed}:{formula}".encode()).hexdigest())
    chosen: dict[str, bool] = {}  # to whether its valences are to be settled
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
    """Whether every element is in the rest; and, if asked, the valence of each follows from the counts of the rest."""
    elements = sorted({symbol for each in rest for symbol in each})
    if not set(atoms) <= set(elements):
        return False
    if not settles:
        return True
    matrix = np.array([[each.get(symbol, 0) for symbol in elements] for each in rest], dtype=float)
    rank = int(np.linalg.matrix_rank(matrix))
    _, _, directions = np.linalg.svd(matrix)
    # A direction that changes no count changes the elements it has a part in.
    free = np.abs(directions[rank:]).max(axis=0, initial=0.0)
    return all(free[elements.index(symbol)] < 1e-9 for symbol in atoms)
