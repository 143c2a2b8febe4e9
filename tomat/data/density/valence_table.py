"""Valence electrons that pseudopotentials in use leave an element, and the counts they add up to. A count that no set
gives is a density of another kind, in another unit, of other atoms, or of a charged cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tomat.data.density.elements import atomic_number, symbol_of

_VASP_AND_GTH = """
    H 1; He 2; Li 1 3; Be 2 4; B 3; C 4; N 5; O 6; F 7; Ne 8; Na 1 7 9; Mg 2 8 10; Al 3 9 11; Si 4 12; P 5; S 6;
    Cl 7; Ar 8; K 1 7 9; Ca 2 8 10; Sc 3 9 11; Ti 2 4 10 12; V 5 11 13; Cr 6 12 14; Mn 7 13 15; Fe 8 14 16;
    Co 9 15 17; Ni 10 16 18; Cu 1 11 17 19; Zn 2 12 18 20; Ga 3 13 19 21; Ge 4 14 22; As 5 15 23; Se 6 24; Br 7 25;
    Kr 8; Rb 1 7 9; Sr 2 8 10; Y 3 9 11; Zr 4 10 12; Nb 5 11 13; Mo 6 12 14; Tc 7 13 15; Ru 8 14 16; Rh 9 15 17;
    Pd 10 16 18; Ag 1 11 17 19; Cd 2 12 18 20; In 3 13 19 21; Sn 4 14 22; Sb 5 15 23; Te 6 24; I 7 25; Xe 8 26;
    Cs 1 7 9; Ba 2 8 10; La 9 11; Ce 10 11 12 30; Pr 11 13; Nd 11 14; Pm 11 15; Sm 10 11 16; Eu 8 9 17; Gd 9 18;
    Tb 9 19; Dy 9 20; Ho 9 21; Er 8 9 22; Tm 9 23; Yb 8 9 10 24; Lu 9 25; Hf 4 10 12; Ta 5 11 13; W 6 12 14;
    Re 7 13 15; Os 8 14 16; Ir 9 17; Pt 10 16 18; Au 1 11 17 19; Hg 2 12 20; Tl 3 13 15 21; Pb 4 14 16 22;
    Bi 5 15 17 21 23; Po 6 16 18 24; At 7 17 25; Rn 8 18 26; Fr 9; Ra 10; Ac 9 11 29; Th 10 12 30; Pa 11 13 31;
    U 14 32; Np 15 33; Pu 16 34; Am 17 35; Cm 18 36; Bk 19 37; Cf 20 38; Es 21 39; Fm 22 40; Md 23 41; No 24 42;
    Lr 25 43
"""
"""`ZVAL` of VASP's PAW and ultrasoft sets (LDA, PW91, PBE, releases up to 64), by which pymatgen 2026.10.24 tells
POTCARs (`potcar-summary-stats.json.bz2`), and q of the GTH sets for PBE and LDA that eminus 3.3 has from CP2K. Left
out: hydrogen with a fraction of a charge, which passivates slabs (`--valences H=0.75` where it has one value),
potentials without a core, and silicon with 10 (`Si_pv_GW`), which the density of silicon's cores holds too. A test
holds the table against both packages."""

_NORM_CONSERVING = """
    Se 16; Br 17; Kr 18; Te 16; I 17; Xe 18; Hf 26; Ta 27; W 28; Re 29; Os 30; Ir 15
"""
"""Of the sets for Quantum ESPRESSO and ABINIT what the others have not: the d shell below a p shell and the f shell
below a d shell (`z_valence` of PseudoDojo, van Setten et al., Comput. Phys. Commun. 226, 39, 2018, and of SG15, Schlipf
and Gygi, ibid. 196, 36, 2015), iridium of GBRV (Garrity et al., Comput. Mater. Sci. 81, 446, 2014). Written down from
these tables; no package that could hold them in a test has them."""

HEAVIEST_WITH_ITS_CORE = 36
"""Molecular codes keep the cores of elements up to krypton and replace those of heavier ones (the def2 sets)."""

MOST_READINGS = 24
"""Kept of one count."""

Valences = Mapping[int, float]
"""Electrons that an atom brings, by atomic number."""


def _parsed(*tables: str) -> dict[int, tuple[float, ...]]:
    found: dict[int, set[float]] = {}
    for entry in ";".join(tables).split(";"):
        symbol, *numbers = entry.split()
        found.setdefault(atomic_number(symbol), set()).update(map(float, numbers))
    return {z: tuple(sorted(valences)) for z, valences in sorted(found.items())}


KNOWN_VALENCES = _parsed(_VASP_AND_GTH, _NORM_CONSERVING)


@dataclass(frozen=True)
class Reading:
    """What a count of electrons means: how many each atom brings."""

    electrons: float
    valences: Valences

    @property
    def with_cores(self) -> tuple[int, ...]:
        """Elements with all of their electrons, where that is more than a pseudopotential leaves any."""
        return tuple(z for z, n in self.valences.items() if n == z and n > max(KNOWN_VALENCES.get(z, (0,))))

    @property
    def valence_words(self) -> str:
        """`Ga 3, As 5`."""
        return ", ".join(f"{symbol_of(z)} {n:g}" for z, n in self.valences.items())

    def words(self) -> str:
        """`8 (Ga 3, As 5)`."""
        return f"{self.electrons:g} ({self.valence_words})"


def readings(atomic_numbers: np.ndarray, given: Valences | None = None) -> tuple[Reading, ...]:
    """What densities of these atoms can hold: of pseudopotentials, of all electrons, or of all of the lighter elements
    and pseudopotentials of the heavier. Ascending; of each count at most `MOST_READINGS`, of the counts all."""
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
    """Element by element, so that many elements cost no more than there are counts."""
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
    """Electrons that an atom of each element brings, as far as the densities' counts settle it: a whole number within
    `VALENCE_TOLERANCE` each, from all compositions at once by least squares.

    Nothing where the counts do not add up to within that (several sets of pseudopotentials), and no element whose
    number another's could make up for. `known`: electrons known otherwise, which help and are not in the answer.
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
