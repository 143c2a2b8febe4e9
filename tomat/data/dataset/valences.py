"""Valence electrons of a folder's elements, from the densities' electron counts and the POTCARs beside them."""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import counted, first_line
from tomat.data.dataset.survey import Material
from tomat.data.density.checks import ELECTRON_TOLERANCE
from tomat.data.density.elements import atomic_number, symbol_of
from tomat.data.density.grid import DensityGrid
from tomat.data.density.limits import COMPRESSION_ERRORS, structure_text
from tomat.data.density.rules import ReadRules
from tomat.data.density.valence_table import VALENCE_TOLERANCE, readings, settled_valences

MOST_TRIED = 50
"""How many of the commonest kinds of densities have their valences tried for the whole folder."""

_OF_COUNTS = "the densities' electron counts"


@dataclass(frozen=True)
class Potcars:
    valences: Mapping[int, tuple[float, str]] = field(default_factory=dict)
    """By atomic number: the valence electrons, and the first file that states them."""
    differing: Mapping[int, str] = field(default_factory=dict)
    """By atomic number: in words, the different numbers that two files state. `valences` leaves these elements out."""
    paths: frozenset[str] = frozenset()
    ignored: Mapping[str, str] = field(default_factory=dict)
    """By path, why a POTCAR is of no use."""


def potcars_beside(paths: Iterable[str]) -> Potcars:
    places = dict.fromkeys(place for path in paths if (place := potcar_beside(path)))
    valences: dict[int, tuple[float, str]] = {}
    differing: dict[int, str] = {}
    ignored: dict[str, str] = {}
    for place in places:
        try:
            found = potcar_valences(place)
        except TomatError as error:
            ignored[str(place)] = first_line(error)
            continue
        if not found:
            ignored[str(place)] = "it states no element with its valence (VRHFIN, ZVAL)"
        for z, electrons in found.items():
            before, source = valences.setdefault(z, (electrons, str(place)))
            if before != electrons:
                differing.setdefault(z, f"{symbol_of(z)} {before:g} in {source}, {electrons:g} in {place}")
    valences = {z: value for z, value in valences.items() if z not in differing}
    return Potcars(valences, differing, frozenset(map(str, places)), ignored)


def choose_valences(
    materials: Sequence[Material], potcars: Potcars, accept: Sequence[str] = ()
) -> tuple[dict[int, float], str]:
    """Valence electrons by atomic number, as far as electron counts or POTCARs settle them, and their sources in words:
    `Mg 2, O 6 of the densities' electron counts; Na 1 of a/POTCAR`. `accept`: as in `ReadRules`."""
    atoms = [{atomic_number(symbol): count for symbol, count in each.atoms.items()} for each in materials]
    electrons = [each.electrons for each in materials]
    elements = sorted({z for row in atoms for z in row})
    settled = settled_valences(atoms, electrons)
    if "electrons" not in accept:
        _refuse_odd_ones(materials)
    for z, number in settled.items():
        said, source = potcars.valences.get(z, (number, ""))
        if abs(said - number) > VALENCE_TOLERANCE:
            raise TomatError(
                f"valence electrons of {symbol_of(z)}: {_OF_COUNTS} give {number:g}, {source} says ZVAL = {said:g}. "
                "Put the POTCAR of these calculations there, or remove that one."
            )
    stated = {z: potcars.valences[z] for z in elements if z in potcars.valences and z not in settled}
    valences = {**settled, **{z: number for z, (number, _) in stated.items()}}
    if stated:
        valences |= settled_valences(atoms, electrons, valences)
        for material, row in zip(materials, atoms, strict=True):
            if not set(row) <= set(valences):
                continue
            expected = sum(valences[z] * count for z, count in row.items())
            if abs(expected - material.electrons) > VALENCE_TOLERANCE * len(row):
                said = "; ".join(f"{symbol_of(z)} {stated[z][0]:g} in {stated[z][1]}" for z in row if z in stated)
                raise TomatError(
                    f"valence electrons: {material.name} holds {material.electrons:.6g}, but ZVAL of the POTCARs "
                    f"({said}) adds up to {expected:g}. Put the POTCAR of these calculations there, or "
                    "remove it or that density."
                )
    by_source: dict[str, list[str]] = {}
    for z in elements:
        source = stated[z][1] if z in stated else _OF_COUNTS if z in valences else ""
        words = f"{symbol_of(z)} {valences[z]:g}" if z in valences else symbol_of(z)
        by_source.setdefault(source, []).append(words)
    unknown = by_source.pop("", [])
    parts = [f"{', '.join(words)} of {source}" for source, words in by_source.items()]
    if unknown:
        differing = [potcars.differing[z] for z in elements if z not in valences and z in potcars.differing]
        why = f" (the POTCARs differ: {'; '.join(differing)})" if differing else ""
        asked = ",".join(f"{symbol}=N" for symbol in unknown)
        parts.append(f"not known for {', '.join(unknown)}{why}: `tomat predict` asks for --valences {asked}")
    return valences, "; ".join(parts)


def _refuse_odd_ones(materials: Sequence[Material]) -> None:
    """Refuse densities whose elements have other valences than in most: they are from other pseudopotentials."""
    meanings = []
    for each in materials:
        numbers = np.repeat([atomic_number(symbol) for symbol in each.atoms], list(each.atoms.values()))
        near = (one for one in readings(numbers) if abs(one.electrons - each.electrons) < ELECTRON_TOLERANCE)
        meanings.append(tuple(dict(one.valences) for one in near))
    common = common_valences(meanings)
    odd = []
    for each, ways in zip(materials, meanings, strict=True):
        if ways and not any(all(common.get(z) == n for z, n in way.items()) for way in ways):
            expected = sum(common[atomic_number(symbol)] * count for symbol, count in each.atoms.items())
            odd.append(f"{each.name} holds {each.electrons:.6g} electrons, expected {expected:g}")
    if not odd:
        return
    more = f" and {len(odd) - 5:,} more" if len(odd) > 5 else ""
    words = ", ".join(f"{symbol_of(z)} {n:g}" for z, n in sorted(common.items()))
    raise TomatError(
        f"valence electrons: most densities fit {words}, but not {counted(len(odd), 'density', 'densities')}: "
        f"{'; '.join(odd[:5])}{more}. Take them out, or learn from all of them with `--data.accept electrons`."
    )


def common_valences(meanings: Sequence[Sequence[Mapping[int, float]]]) -> dict[int, float]:
    """The valences that explain most densities."""
    kinds = Counter(tuple(tuple(sorted(way.items())) for way in ways) for ways in meanings if ways)
    votes: dict[int, dict[float, float]] = {}
    for ways, often in kinds.items():
        for z in {z for way in ways for z, _ in way}:
            numbers = {dict(way)[z] for way in ways}
            for number in numbers:
                of_z = votes.setdefault(z, {})
                of_z[number] = of_z.get(number, 0.0) + often / len(numbers)
    # Of numbers that explain equally many, the smallest: most densities leave the cores out.
    found = {z: min(each, key=lambda number: (-each[number], number)) for z, each in votes.items()}

    def explained(valences: Mapping[int, float]) -> int:
        return sum(n for ways, n in kinds.items() if any(all(valences[z] == v for z, v in way) for way in ways))

    best, better = explained(found), True
    while better:
        better = False
        for ways, _ in kinds.most_common(MOST_TRIED):
            for way in ways:
                changed = {**found, **dict(way)}
                if (now := explained(changed)) > best:
                    found, best, better = changed, now, True
    return found


POTCAR_NAMES = ("POTCAR", "POTCAR.gz")

_ELEMENT = re.compile(r"^[ \t]*VRHFIN[ \t]*=[ \t]*([A-Z][a-z]?)", re.MULTILINE)
_VALENCE = re.compile(r"\bZVAL\s*=\s*([\d.]+)")
"""Element and valence of each potential of a POTCAR: `VRHFIN =Na: ...`, then `POMASS = 22.990; ZVAL = 1.000`.
pymatgen's `Potcar` is not used, since it needs whole data sets and takes seconds to import."""


def potcar_beside(path: str) -> Path | None:
    if "://" in path:
        return None
    return next((place for name in POTCAR_NAMES if (place := Path(path).with_name(name)).is_file()), None)


def potcar_valences(place: Path) -> dict[int, float]:
    """Valence electrons by atomic number, as a POTCAR states them. A potential that lacks one of both is skipped."""
    try:
        content = structure_text(str(place))
    except COMPRESSION_ERRORS as error:
        raise TomatError(f"cannot read {place}: {error}") from error
    found: dict[int, float] = {}
    # A potential ends at the next one's element, so one without a valence does not take the next one's.
    for symbol, rest in itertools.batched(_ELEMENT.split(content)[1:], 2):
        valence = _VALENCE.search(rest)
        with contextlib.suppress(KeyError, ValueError):
            z, electrons = atomic_number(symbol), float(valence[1] if valence else "")
            if found.setdefault(z, electrons) != electrons:
                differ = f"{found[z]:g} and {electrons:g}"
                raise TomatError(f"{place} has potentials of {symbol} with valences {differ}; name them yourself.")
    return found


def valences_beside(path: str) -> dict[int, float]:
    """`potcar_valences` of the POTCAR in the folder of a density; empty where there is none."""
    place = potcar_beside(path)
    return potcar_valences(place) if place else {}


def expected_electrons(grid: DensityGrid, path: str, valences: Mapping[int, float] | None) -> tuple[float, str]:
    """The electrons that a density should have, and where this number is from."""
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
