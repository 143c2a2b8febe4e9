"""Valence electrons of a folder's elements: of the densities' electron counts, and of the POTCARs beside them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tomat.base.errors import TomatError
from tomat.base.reporting import first_line
from tomat.dataset.contents import Material
from tomat.dataset.potcar import potcar_beside, potcar_valences
from tomat.density.elements import atomic_number, symbol_of
from tomat.density.valences import VALENCE_TOLERANCE, settled_valences

_OF_COUNTS = "the densities' electron counts"


@dataclass(frozen=True)
class Potcars:
    """What the POTCARs beside densities state."""

    valences: Mapping[int, tuple[float, str]] = field(default_factory=dict)
    """By atomic number: the electrons, and the first file that says so."""
    differing: Mapping[int, str] = field(default_factory=dict)
    """Elements of which two files say different numbers, in words; they have none."""
    paths: frozenset[str] = frozenset()
    """Of all that were read."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Why, by path, of those that state nothing."""


def potcars_beside(paths: Iterable[str]) -> Potcars:
    """Read the POTCARs in the folders of densities.

    Args:
        paths: of the densities that were read.
    """
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


def choose_valences(materials: Sequence[Material], potcars: Potcars) -> tuple[dict[int, float], str]:
    """The valence electrons of each element, as far as counts or POTCARs settle them, and where each is from.

    Args:
        materials: that are learnt from.
        potcars: beside them, and beside what is held out.

    Returns:
        By atomic number; and `Mg 2, O 6 of the densities' electron counts; Na 1 of a/POTCAR`.

    Raises:
        TomatError: a POTCAR says another number than the counts, or a sum that a density does not hold.
    """
    atoms = [{atomic_number(symbol): count for symbol, count in each.atoms.items()} for each in materials]
    electrons = [each.electrons for each in materials]
    elements = sorted({z for row in atoms for z in row})
    counted = settled_valences(atoms, electrons)
    for z, number in counted.items():
        said, source = potcars.valences.get(z, (number, ""))
        if abs(said - number) > VALENCE_TOLERANCE:
            raise TomatError(
                f"valence electrons of {symbol_of(z)}: {_OF_COUNTS} give {number:g}, {source} says ZVAL = {said:g}. "
                "Put the POTCAR of these calculations there, or take it away."
            )
    stated = {z: potcars.valences[z] for z in elements if z in potcars.valences and z not in counted}
    valences = {**counted, **{z: number for z, (number, _) in stated.items()}}
    if stated:
        valences |= settled_valences(atoms, electrons, valences)
        _refuse_other_sums(materials, atoms, valences, stated)
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
        parts.append(f"not known of {', '.join(unknown)}{why}: `tomat predict` asks for --valences {asked}")
    return valences, "; ".join(parts)


def _refuse_other_sums(
    materials: Sequence[Material],
    atoms: Sequence[Mapping[int, int]],
    valences: Mapping[int, float],
    stated: Mapping[int, tuple[float, str]],
) -> None:
    """Refuse POTCARs with which a density would have other electrons than it holds."""
    for material, row in zip(materials, atoms, strict=True):
        if not set(row) <= set(valences):
            continue
        expected = sum(valences[z] * count for z, count in row.items())
        if abs(expected - material.electrons) > VALENCE_TOLERANCE * len(row):
            said = "; ".join(f"{symbol_of(z)} {stated[z][0]:g} in {stated[z][1]}" for z in row if z in stated)
            raise TomatError(
                f"valence electrons: {material.name} holds {material.electrons:.6g} electrons, and has {expected:g} "
                f"with ZVAL of the POTCARs ({said}). Put the POTCAR of these calculations there, or take it or that "
                "density away."
            )
