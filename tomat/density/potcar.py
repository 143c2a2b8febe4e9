"""How many electrons a density should have: what the pseudopotentials of its calculation leave, where that is known."""

import re
from collections.abc import Mapping
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.density.elements import atomic_number, symbol_of
from tomat.density.grid import DensityGrid
from tomat.density.limits import COMPRESSION_ERRORS, open_text

_DATASET = re.compile(r"VRHFIN\s*=\s*([A-Z][a-z]?).*?ZVAL\s*=\s*([\d.]+)", re.DOTALL)
"""Element and valence of each potential: `VRHFIN =Na: ...`, `POMASS = 22.990; ZVAL = 1.000` (VASP's POTCAR)."""


def valences_beside(path: str) -> dict[int, float]:
    """Valence electrons by atomic number, of the POTCAR in the folder of a density; empty where there is none.

    Raises:
        TomatError: a POTCAR that cannot be read, or with two potentials of an element that differ.
    """
    for place in (Path(path).with_name(name) for name in ("POTCAR", "POTCAR.gz")):
        if "://" in path or not place.is_file():
            continue
        try:
            text = open_text(str(place))
            with text.stream:
                content = text.everything().decode("latin-1")
        except COMPRESSION_ERRORS as error:
            raise TomatError(f"cannot read {place}: {error}") from error
        found: dict[int, float] = {}
        for symbol, electrons in _DATASET.findall(content):
            if found.setdefault(atomic_number(symbol), float(electrons)) != float(electrons):
                raise TomatError(f"{place} has potentials of {symbol} with different valences; name them yourself.")
        return found
    return {}


def expected_electrons(grid: DensityGrid, path: str, valences: Mapping[int, float] | None) -> tuple[float, str]:
    """The electrons that a density should have, and where that is from.

    Args:
        path: its file; the POTCAR beside it is read.
        valences: go before it.

    Raises:
        TomatError: valences that lack an element of the density, and as `valences_beside`.
    """
    numbers = grid.atomic_numbers.tolist()
    if valences:
        if missing := sorted(set(numbers) - set(valences)):
            raise TomatError(f"{path}: no valence of {', '.join(map(symbol_of, missing))} was given; name every one.")
        return float(sum(valences[z] for z in numbers)), "the valences given"
    beside = valences_beside(path)
    if beside and set(numbers) <= set(beside):
        return float(sum(beside[z] for z in numbers)), "the POTCAR beside it"
    return float(max(round(grid.electron_count), 1)), "the nearest whole number"
