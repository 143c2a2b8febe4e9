"""How many electrons a density should have: what the pseudopotentials of its calculation leave, where that is known."""

import contextlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.data.density.electron_count import ELECTRON_TOLERANCE
from tomat.data.density.elements import atomic_number, symbol_of
from tomat.data.density.grid import DensityGrid
from tomat.data.density.limits import COMPRESSION_ERRORS, structure_text
from tomat.data.density.rules import ReadRules
from tomat.data.density.valence_table import readings

NAMES = ("POTCAR", "POTCAR.gz")

_ELEMENT = re.compile(r"^[ \t]*VRHFIN[ \t]*=[ \t]*([A-Z][a-z]?)", re.MULTILINE)
_VALENCE = re.compile(r"\bZVAL\s*=\s*([\d.]+)")
"""Element and valence of each potential: `VRHFIN =Na: ...`, then `POMASS = 22.990; ZVAL = 1.000` (VASP's POTCAR).

These two lines alone, and not pymatgen's `Potcar`: that wants whole data sets, warns of each that its table of hashes
lacks, and takes seconds to import."""


def potcar_beside(path: str) -> Path | None:
    """The POTCAR in the folder of a local file; None where there is none."""
    if "://" in path:
        return None
    return next((place for name in NAMES if (place := Path(path).with_name(name)).is_file()), None)


def potcar_valences(place: Path) -> dict[int, float]:
    """Valence electrons by atomic number, as a POTCAR states them; a potential without an element or a valence is
    passed over.
    """
    try:
        content = structure_text(str(place))
    except COMPRESSION_ERRORS as error:
        raise TomatError(f"cannot read {place}: {error}") from error
    found: dict[int, float] = {}
    # Each potential reaches to the next one's element: one without a valence has not that of the next.
    for symbol, rest in itertools.batched(_ELEMENT.split(content)[1:], 2):
        valence = _VALENCE.search(rest)
        with contextlib.suppress(KeyError, ValueError):
            z, electrons = atomic_number(symbol), float(valence[1] if valence else "")
            if found.setdefault(z, electrons) != electrons:
                raise TomatError(
                    f"{place} has potentials of {symbol} with different valences, {found[z]:g} and {electrons:g}; "
                    "name them yourself."
                )
    return found


def valences_beside(path: str) -> dict[int, float]:
    """`potcar_valences` of the POTCAR in the folder of a density; empty where there is none."""
    place = potcar_beside(path)
    return potcar_valences(place) if place else {}


def expected_electrons(grid: DensityGrid, path: str, valences: Mapping[int, float] | None) -> tuple[float, str]:
    """The electrons that a density should have, and where that is from."""
    numbers = grid.atomic_numbers.tolist()
    if valences:
        if missing := sorted(set(numbers) - set(valences)):
            raise TomatError(f"{path}: no valence of {', '.join(map(symbol_of, missing))} was given; name every one.")
        return float(sum(valences[z] for z in numbers)), "the valences given"
    beside = valences_beside(path)
    if beside and set(numbers) <= set(beside):
        return float(sum(beside[z] for z in numbers)), "the POTCAR beside it"
    read = grid.electron_count - grid.clipped_electrons
    near = [each for each in readings(grid.atomic_numbers) if abs(each.electrons - read) < ELECTRON_TOLERANCE]
    if near:
        others = "" if len(near) == 1 else " or others"
        return near[0].electrons, f"pseudopotentials in use: {near[0].valence_words}{others}"
    return float(max(round(grid.electron_count), 1)), "the nearest whole number"


def rules_for(path: str, rules: ReadRules, valences: Mapping[int, float] | None) -> ReadRules:
    """The rules with the valences of one file: those given, else those of the POTCAR beside it."""
    return replace(rules, valences=valences or valences_beside(path) or None)
