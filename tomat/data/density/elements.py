"""Tables of the 118 chemical symbols, properties of elements, and the valence electrons that pseudopotentials leave
them. With these a tokenizing worker reads a structure without importing pymatgen (about a second)."""

from collections import Counter
from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a verb reads the symbols before anything heavy is imported
    import numpy as np

SYMBOLS: tuple[str, ...] = tuple(
    """
    H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo
    Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl
    Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts Og
    """.split()
)
"""IUPAC symbols in order of atomic number: `SYMBOLS[Z - 1]`."""

_COVALENT_RADII_A: tuple[float, ...] = tuple(
    float(word)
    for word in """
    0.31 0.28 1.28 0.96 0.84 0.73 0.71 0.66 0.57 0.58 1.66 1.41 1.21 1.11 1.07 1.05 1.02 1.06 2.03 1.76 1.70 1.60
    1.53 1.39 1.50 1.42 1.38 1.24 1.32 1.22 1.22 1.20 1.19 1.20 1.20 1.16 2.20 1.95 1.90 1.75 1.64 1.54 1.47 1.46
    1.42 1.39 1.45 1.44 1.42 1.39 1.39 1.38 1.39 1.40 2.44 2.15 2.07 2.04 2.03 2.01 1.99 1.98 1.98 1.96 1.94 1.92
    1.92 1.89 1.90 1.87 1.87 1.75 1.70 1.62 1.51 1.44 1.41 1.36 1.36 1.32 1.45 1.46 1.48 1.40 1.50 1.50 2.60 2.21
    2.15 2.06 2.00 1.96 1.90 1.87 1.80 1.69
    """.split()
)
"""Covalent radii of Z = 1..96: Cordero et al., Covalent radii revisited, Dalton Trans. 2832 (2008), table 2; for carbon
the sp2 value, for manganese, iron and cobalt the mean of low and high spin. Heavier elements take curium's."""

_PAULING: tuple[float, ...] = tuple(
    float(word)
    for word in """
    2.2 0 0.98 1.57 2.04 2.55 3.04 3.44 3.98 0 0.93 1.31 1.61 1.9 2.19 2.58 3.16 0 0.82 1 1.36 1.54 1.63 1.66 1.55
    1.83 1.88 1.91 1.9 1.65 1.81 2.01 2.18 2.55 2.96 3 0.82 0.95 1.22 1.33 1.6 2.16 1.9 2.2 2.28 2.2 1.93 1.69 1.78
    1.96 2.05 2.1 2.66 2.6 0.79 0.89 1.1 1.12 1.13 1.14 1.13 1.17 1.2 1.2 1.1 1.22 1.23 1.24 1.25 1.1 1.27 1.3 1.5
    2.36 1.9 2.2 2.2 2.28 2.54 2 1.62 2.33 2.02 2 2.2 2.2 0.7 0.9 1.1 1.3 1.5 1.38 1.36 1.28 1.3 1.3 1.3 1.3 1.3 1.3
    1.3 1.3 1.3
    """.split()
)
"""Electronegativity on Pauling's scale of Z = 1..103, 0 where there is none (He, Ne, Ar): the CRC Handbook of Chemistry
and Physics, as in pymatgen's periodic table; a test compares them."""

_ATOMIC_RADII_A: tuple[float, ...] = tuple(
    float(word)
    for word in """
    0.25 0 1.45 1.05 0.85 0.7 0.65 0.6 0.5 0 1.8 1.5 1.25 1.1 1 1 1 0.71 2.2 1.8 1.6 1.4 1.35 1.4 1.4 1.4 1.35 1.35
    1.35 1.35 1.3 1.25 1.15 1.15 1.15 0 2.35 2 1.8 1.55 1.45 1.45 1.35 1.3 1.35 1.4 1.6 1.55 1.55 1.45 1.45 1.4 1.4
    0 2.6 2.15 1.95 1.85 1.85 1.85 1.85 1.85 1.85 1.8 1.75 1.75 1.75 1.75 1.75 1.75 1.75 1.55 1.45 1.35 1.35 1.3
    1.35 1.35 1.35 1.5 1.9 1.8 1.6 1.9 0 0 0 2.15 1.95 1.8 1.8 1.75 1.75 1.75 1.75
    """.split()
)
"""Atomic radii of Z = 1..95, 0 where there is none: Slater, Atomic radii in crystals, J. Chem. Phys. 41, 3199 (1964),
as in pymatgen's periodic table; a test compares them."""

_IONIZATION_EV: tuple[float, ...] = tuple(
    float(word)
    for word in """
    13.60 24.59 5.39 9.32 8.30 11.26 14.53 13.62 17.42 21.56 5.14 7.65 5.99 8.15 10.49 10.36 12.97 15.76 4.34 6.11
    6.56 6.83 6.75 6.77 7.43 7.90 7.88 7.64 7.73 9.39 6.00 7.90 9.79 9.75 11.81 14.00 4.18 5.69 6.22 6.63 6.76 7.09
    7.12 7.36 7.46 8.34 7.58 8.99 5.79 7.34 8.61 9.01 10.45 12.13 3.89 5.21 5.58 5.54 5.47 5.53 5.58 5.64 5.67 6.15
    5.86 5.94 6.02 6.11 6.18 6.25 5.43 6.83 7.55 7.86 7.83 8.44 8.97 8.96 9.23 10.44 6.11 7.42 7.29 8.42 9.32 10.75
    4.07 5.28 5.38 6.31 5.89 6.19 6.27 6.03 5.97 5.99 6.20 6.28 6.37 6.50 6.58 6.63 4.96
    """.split()
)
"""First ionisation energy of Z = 1..103: NIST Atomic Spectra Database. A test compares it with pymatgen's table."""

_NOBLE = 2, 10, 18, 36, 54, 86
"""Z at which a period ends."""

LOWEST_VALENCE_SHARE = 0.75
"""Least electrons found over the fewest that pseudopotentials leave. It is below one for charged cells and rounding."""

_NUMBER_OF = {symbol: number for number, symbol in enumerate(SYMBOLS, start=1)}

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
"""`ZVAL` of VASP's PAW and ultrasoft sets (LDA, PW91, PBE, releases up to 64), from the file by which pymatgen
2026.10.24 identifies POTCARs (`potcar-summary-stats.json.bz2`), and q of the GTH sets for PBE and LDA that eminus 3.3
has from CP2K. Left out: fractional hydrogens, which passivate slabs (`--valences H=0.75` if all are alike), potentials
without a core, and silicon with 10 (`Si_pv_GW`), since a density of silicon's cores has 10 electrons too. A test
compares the table with both packages."""

_NORM_CONSERVING = """
    Se 16; Br 17; Kr 18; Te 16; I 17; Xe 18; Hf 26; Ta 27; W 28; Re 29; Os 30; Ir 15
"""
"""Valences of sets for Quantum ESPRESSO and ABINIT that are not above: with the d shell below a p shell or the f shell
below a d shell (`z_valence` of PseudoDojo, van Setten et al., Comput. Phys. Commun. 226, 39, 2018, and of SG15, Schlipf
and Gygi, ibid. 196, 36, 2015), and iridium of GBRV (Garrity et al., Comput. Mater. Sci. 81, 446, 2014). Copied from
these tables; no package has them, so no test compares them."""


def atomic_number(symbol: str) -> int:
    """Z of a chemical symbol; a KeyError for any other word. Deuterium and tritium are hydrogen; the oxidation state in
    `O2-` is ignored."""
    bare = symbol.rstrip("+-0123456789.")
    return 1 if bare in ("D", "T") else _NUMBER_OF[bare]


def symbol_of(number: int) -> str:
    return SYMBOLS[number - 1]


def covalent_radius_a(number: int) -> float:
    return _COVALENT_RADII_A[min(number, len(_COVALENT_RADII_A)) - 1]


def pauling_electronegativity(number: int) -> float | None:
    return _PAULING[number - 1] or None if number <= len(_PAULING) else None


def atomic_radius_a(number: int) -> float | None:
    """Slater's radius of Z in 1..118, A; None where there is none."""
    return _ATOMIC_RADII_A[number - 1] or None if number <= len(_ATOMIC_RADII_A) else None


def ionization_energy_ev(number: int) -> float | None:
    return _IONIZATION_EV[number - 1] if number <= len(_IONIZATION_EV) else None


def period_of(number: int) -> int:
    """Row of the periodic table of Z, from 1."""
    return 1 + sum(number > last for last in _NOBLE)


def reduced_formula(atomic_numbers: Sequence[int]) -> str:
    """Elements and their smallest whole counts, symbols in alphabetical order: `CaF2`, `AsGa`."""
    counts = Counter(symbol_of(number) for number in atomic_numbers)
    divisor = gcd(*counts.values())
    return "".join(f"{symbol}{'' if n == divisor else n // divisor}" for symbol, n in sorted(counts.items()))


def _parsed(*tables: str) -> dict[int, tuple[float, ...]]:
    found: dict[int, set[float]] = {}
    for entry in ";".join(tables).split(";"):
        symbol, *numbers = entry.split()
        found.setdefault(atomic_number(symbol), set()).update(map(float, numbers))
    return {z: tuple(sorted(valences)) for z, valences in sorted(found.items())}


KNOWN_VALENCES = _parsed(_VASP_AND_GTH, _NORM_CONSERVING)
"""Valence electrons that pseudopotentials in use leave an element, ascending, by atomic number up to 103."""

_F_SHELL_IN_CORE = {*range(57, 72), *range(87, 119)}
"""Z of the lanthanides and from francium on. No table is at hand of their potentials with the f shell in the core; 3
electrons are taken as left, as in the commonest ions."""


def plausible_electron_counts(atomic_numbers: "np.ndarray") -> tuple[float, float]:
    """The least and the most electrons that a valence or all-electron density of these atoms can hold."""
    fewest = sum(3.0 if z in _F_SHELL_IN_CORE else KNOWN_VALENCES[z][0] for z in map(int, atomic_numbers))
    return LOWEST_VALENCE_SHARE * fewest, float(sum(map(int, atomic_numbers))) * 1.02 + 1.0
