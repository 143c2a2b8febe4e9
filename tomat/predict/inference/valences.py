"""How many electrons a structure has: from valences that are given or learnt, never from a density."""

from collections.abc import Mapping

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.density.elements import plausible_electron_counts, symbol_of


def electron_count(
    crystal: Crystal, given: Mapping[int, float] | None, learnt: Mapping[int, float] | None
) -> tuple[float | None, str]:
    """The electrons of a structure, and where the count is from.

    Args:
        given: `--valences`, by atomic number; goes before what was learnt.

    Returns:
        None where neither is there.
    """
    if not given and not learnt:
        return None, "not known: the density is as the predictor gives it"
    table = {**(learnt or {}), **(given or {})}
    numbers = crystal.atomic_numbers.tolist()
    if missing := sorted(set(numbers) - set(table)):
        names = [symbol_of(z) for z in missing]
        raise TomatError(
            f"{crystal.name}: no valence electrons of {', '.join(names)} are known; name those of every element, such "
            f"as --valences {','.join(f'{name}=N' for name in names)}."
        )
    total = float(sum(table[z] for z in numbers))
    least, most = plausible_electron_counts(np.asarray(numbers))
    if not least <= total <= most:
        raise TomatError(
            f"{crystal.name}: the valences give its {len(numbers)} atoms {total:g} electrons; expected {least:.4g} to "
            f"{most:.4g}. Correct --valences."
        )
    sources = {"--valences" if given and z in given else "learnt from the training set" for z in numbers}
    return total, " and ".join(sorted(sources))
