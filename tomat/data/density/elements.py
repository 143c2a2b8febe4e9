"""The 118 chemical symbols, and the fewest valence electrons that a pseudopotential leaves an element: a table of its
own, so that a tokenizing worker reads a structure without importing pymatgen (about a second)."""

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
"""Of Z = 1..96: Cordero et al., Covalent radii revisited, Dalton Trans. 2832 (2008), table 2; for carbon that of sp2,
for manganese, iron and cobalt the mean of low and high spin. Beyond, that of curium."""

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
and Physics, as pymatgen's periodic table has it, against which a test holds it."""

LOWEST_VALENCE_SHARE = 0.75
"""Electrons found over the fewest that pseudopotentials leave these atoms. Below one for charged cells and rounding."""

_NUMBER_OF = {symbol: number for number, symbol in enumerate(SYMBOLS, start=1)}
_NOBLE_GASES = (0, 2, 10, 18, 36, 54, 86, 118)


def atomic_number(symbol: str) -> int:
    """Z of a chemical symbol (a KeyError if it is none): deuterium and tritium are hydrogen, the oxidation state of
    `O2-` is ignored."""
    bare = symbol.rstrip("+-0123456789.")
    return 1 if bare in ("D", "T") else _NUMBER_OF[bare]


def symbol_of(number: int) -> str:
    return SYMBOLS[number - 1]


def covalent_radius_a(number: int) -> float:
    """Covalent radius of Z in 1..118, A."""
    return _COVALENT_RADII_A[min(number, len(_COVALENT_RADII_A)) - 1]


def pauling_electronegativity(number: int) -> float | None:
    """Electronegativity of Z in 1..118 on Pauling's scale; None where it has none."""
    return _PAULING[number - 1] or None if number <= len(_PAULING) else None


def fewest_valence_electrons(number: int) -> int:
    """A lower bound on the valence electrons that any pseudopotential in use leaves an atom of Z in 1..118: the
    electrons outside the noble-gas core without a full d or f shell below a p shell; 3 for lanthanides and actinides, 1
    and 2 for the coinage metals and the zinc group. At or below the smallest `ZVAL` of VASP's PBE PAW set and `q` of
    the GTH tables."""
    core = max(gas for gas in _NOBLE_GASES if gas < number)
    outside = number - core
    period_length = min(gas for gas in _NOBLE_GASES if gas >= number) - core
    if outside <= 2:
        return outside
    from_the_right = period_length - outside  # 0 for the noble gas that closes the period
    if from_the_right <= 5:
        return 8 - from_the_right
    if from_the_right == 6:
        return 2  # zinc, cadmium, mercury
    if from_the_right == 7:
        return 1  # copper, silver, gold
    if period_length == 32 and outside <= 17:
        return 3  # lanthanides and actinides, up to Lu and Lr
    return outside if period_length == 18 else outside - 14


def reduced_formula(atomic_numbers: Sequence[int]) -> str:
    """Elements and their smallest whole counts, symbols in alphabetical order: `CaF2`, `AsGa`."""
    counts = Counter(symbol_of(number) for number in atomic_numbers)
    divisor = gcd(*counts.values())
    return "".join(f"{symbol}{'' if n == divisor else n // divisor}" for symbol, n in sorted(counts.items()))


def plausible_electron_counts(atomic_numbers: "np.ndarray") -> tuple[float, float]:
    """The least and the most electrons that a valence or all-electron density of these atoms can hold."""
    fewest = sum(fewest_valence_electrons(int(number)) for number in atomic_numbers)
    return LOWEST_VALENCE_SHARE * fewest, float(sum(map(int, atomic_numbers))) * 1.02 + 1.0
