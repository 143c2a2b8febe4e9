"""Crystals of three and four elements, other structures of known pairs, and nine elements that no other cell has.

All are computed by pw.x as ideal cells. Sides are from the literature or, where nobody has made the crystal, near the
sum of the atoms' radii. None of the held-out compounds is among them, neither in another structure nor in an alloy.
"""

import numpy as np
from embedded_set_cells import Compound, Site, fcc, hexagonal, rhombohedral
from embedded_set_further import (
    IONIC_REACH_A,
    SEMICONDUCTOR_REACH_A,
    SMALL_GAP_SMEARING_HARTREE,
    WIDE_REACH_A,
    crystal,
)
from embedded_set_structures import (
    CENTRE,
    CORNER,
    QUARTERS,
    Structure,
    cadmium_iodide,
    fluorite,
    half_heusler,
    pair,
    perovskite,
)

TERNARY, FURTHER_ELEMENTS = "ternary-crystals", "further-elements"
NEW_ELEMENTS = frozenset(("Cu", "Ag", "Hg", "La", "Bi", "Nb", "Ta", "W", "Au"))
ROCK_SALT_OVER_ZINC_BLENDE, CAESIUM_CHLORIDE_OVER_ROCK_SALT = 1.07, 1.036
"""Ratios of neighbour distances between two structures: the first as in MgS and ZnO, the second as in CsCl."""


def _crystal(formula: str, structure: Structure, reach_a: float, smearing_hartree: float | None = None) -> Compound:
    group = FURTHER_ELEMENTS if NEW_ELEMENTS & set(structure[2]) else TERNARY
    return crystal(formula, *structure, reach_a, group=group, smearing_hartree=smearing_hartree)


def wurtzite(one: str, two: str, a: float) -> Structure:
    """Wurtzite with ideal tetrahedra, which fix its height."""
    height = 3 / 8
    sites: dict[str, list[Site]] = {
        one: [(1 / 3, 2 / 3, 0.0), (2 / 3, 1 / 3, 0.5)],
        two: [(1 / 3, 2 / 3, height), (2 / 3, 1 / 3, 0.5 + height)],
    }
    return "wurtzite", hexagonal(a, np.sqrt(8 / 3) * a), sites


def layers(one: str, two: str, anion: str, a: float, c: float) -> Structure:
    """Rock salt with alternating layers of the two cations; a and c are those of the hexagonal cell."""
    height = 0.26
    sites = {one: [CORNER], two: [CENTRE], anion: [(height, height, height), (1 - height, 1 - height, 1 - height)]}
    return "alpha sodium ferrite", _in_thirds(a, c), sites


def _in_thirds(a: float, c: float) -> np.ndarray:
    """The rhombohedral vectors for a hexagonal cell with three times the volume."""
    length = np.sqrt(a**2 / 3 + c**2 / 9)
    return rhombohedral(length, np.rad2deg(2 * np.arcsin(a / 2 / length)))


def _binaries() -> list[Compound]:
    found = []
    # Side of rock salt; those of zinc blende and caesium chloride follow from it.
    for one, two, a in (
        ("Ca", "O", 4.81), ("Sr", "O", 5.16), ("Ba", "O", 5.52), ("Ca", "S", 5.69), ("Sr", "S", 6.02),
        ("Ba", "S", 6.39), ("Ca", "Se", 5.91), ("Li", "F", 4.03), ("Li", "Cl", 5.13), ("Na", "F", 4.63),
        ("Na", "Cl", 5.64), ("Na", "Br", 5.97), ("K", "F", 5.35), ("K", "Cl", 6.29), ("Li", "H", 4.083),
        ("Na", "H", 4.88), ("Rb", "F", 5.64), ("Ag", "F", 4.92), ("Ag", "Cl", 5.55),
    ):  # fmt: skip
        tetrahedral = 2 / np.sqrt(3) * a / ROCK_SALT_OVER_ZINC_BLENDE
        cubic = a * CAESIUM_CHLORIDE_OVER_ROCK_SALT / np.sqrt(3)
        found.append(_crystal(one + two, pair("caesium chloride", one, two, cubic), IONIC_REACH_A))
        found.append(_crystal(one + two, pair("zinc blende", one, two, tetrahedral), IONIC_REACH_A))
    for one, two, a in (
        ("Ag", "F", 4.92), ("Ag", "Cl", 5.55), ("Ag", "Br", 5.77), ("La", "N", 5.30), ("La", "P", 6.03),
        ("La", "Sb", 6.49), ("La", "Bi", 6.58), ("Mg", "Te", 5.92), ("Cd", "S", 5.45), ("Zn", "S", 5.06),
        ("Cd", "Se", 5.71), ("Y", "P", 5.65), ("Sc", "P", 5.31), ("Tl", "Cl", 6.35), ("Cu", "F", 4.65),
        ("In", "Cl", 6.10),
    ):  # fmt: skip
        found.append(_crystal(one + two, pair("rock salt", one, two, a), IONIC_REACH_A))
    for one, two, a in (
        ("Cu", "F", 4.80), ("Cu", "Cl", 5.42), ("Cu", "Br", 5.69), ("Ag", "I", 6.50), ("Hg", "S", 5.85),
        ("Hg", "Se", 6.08), ("Hg", "Te", 6.46),
    ):  # fmt: skip
        found.append(_crystal(one + two, pair("zinc blende", one, two, a), SEMICONDUCTOR_REACH_A))
    found.append(_crystal("CsAu", pair("caesium chloride", "Cs", "Au", 4.26), IONIC_REACH_A))
    found.append(_crystal("RbAu", pair("caesium chloride", "Rb", "Au", 4.10), IONIC_REACH_A))
    for one, two, a in (
        ("In", "N", 3.54), ("Mg", "Te", 4.53), ("Mg", "S", 3.99), ("Al", "P", 3.86), ("In", "P", 4.15),
        ("Ga", "As", 3.99), ("Al", "As", 4.00), ("B", "P", 3.20), ("Li", "Cl", 3.92), ("Li", "Br", 4.22),
        ("Be", "S", 3.43), ("Be", "Te", 3.97), ("C", "C", 2.52), ("Si", "Si", 3.84),
    ):  # fmt: skip
        name, lattice, sites = wurtzite(one, two, a)
        if one == two:
            again: list[Site] = [(1 / 3, 2 / 3, 0.0), (2 / 3, 1 / 3, 0.5), (1 / 3, 2 / 3, 0.375), (2 / 3, 1 / 3, 0.875)]
            name, sites = "lonsdaleite", {one: again}
        reach = IONIC_REACH_A if one == "Li" else SEMICONDUCTOR_REACH_A
        found.append(_crystal(one if one == two else one + two, (name, lattice, sites), reach))
    return found


def _of_three_atoms() -> list[Compound]:
    found = []
    for metal, other, a in (
        ("Mg", "F", 4.92), ("Zn", "F", 4.90), ("Ti", "O", 4.83), ("Si", "O", 4.52), ("Ge", "O", 4.75),
        ("Sn", "O", 4.98), ("Pb", "O", 5.30), ("Hg", "F", 5.54), ("Sr", "I", 7.95), ("Mg", "Cl", 5.85),
        ("Be", "F", 4.40),
    ):  # fmt: skip
        found.append(_crystal(f"{metal}{other}2", fluorite("fluorite", metal, other, a), IONIC_REACH_A))
    for single, double, a in (
        ("O", "Cs", 7.00), ("S", "Cs", 8.15), ("Si", "Ca", 7.15), ("Ge", "Be", 5.30), ("Pb", "Mg", 6.82),
    ):  # fmt: skip
        reach = IONIC_REACH_A if double == "Cs" else SEMICONDUCTOR_REACH_A
        found.append(_crystal(f"{double}2{single}", fluorite("antifluorite", single, double, a), reach))
    for alkali, filling, anion, a in (
        ("Li", "Zn", "Sb", 6.30), ("Li", "Ga", "Si", 6.00), ("Na", "Al", "Ge", 6.45), ("Na", "Al", "Si", 6.40),
        ("Li", "Ca", "As", 6.68), ("Li", "Sr", "N", 5.95), ("Na", "Ca", "N", 6.05), ("Na", "Ca", "P", 7.00),
        ("Na", "Be", "P", 5.85), ("K", "Ca", "N", 6.50), ("Li", "Cd", "N", 5.35), ("Li", "Be", "Sb", 6.15),
        ("Li", "Mg", "Bi", 6.76), ("Cu", "Mg", "P", 5.85), ("Cu", "Mg", "N", 5.00), ("Ag", "Mg", "As", 6.25),
        ("Li", "Zn", "Bi", 6.40), ("Na", "B", "Si", 5.55), ("Li", "B", "C", 4.60), ("Li", "Al", "C", 5.05),
        ("Na", "Al", "C", 5.50), ("K", "Be", "As", 6.40),
    ):  # fmt: skip
        structure = half_heusler(alkali, filling, anion, a)
        found.append(_crystal(f"{alkali}{filling}{anion}", structure, SEMICONDUCTOR_REACH_A))
    for metal, other, a, c, z in (
        ("Ti", "S", 3.41, 5.70, 0.25), ("Cd", "Br", 3.98, 6.22, 0.25), ("Ca", "Cl", 3.83, 5.95, 0.25),
        ("Sr", "I", 4.62, 7.30, 0.25), ("Mg", "F", 3.08, 4.55, 0.25), ("Sn", "O", 3.25, 4.85, 0.21),
        ("Hg", "I", 4.30, 6.90, 0.25), ("Be", "Cl", 3.45, 5.60, 0.25), ("Ca", "F", 3.55, 4.75, 0.23),
        ("Si", "S", 3.35, 5.50, 0.25),
    ):  # fmt: skip
        found.append(_crystal(f"{metal}{other}2", cadmium_iodide(metal, other, a, c, z), IONIC_REACH_A))
    return found


def _of_four_atoms() -> list[Compound]:
    found = []
    for one, two, anion, a, c in (
        ("Li", "Al", "O", 2.80, 14.21), ("Li", "Ga", "O", 2.92, 14.45), ("Li", "In", "O", 3.27, 14.80),
        ("Li", "Sc", "O", 3.15, 14.90), ("Na", "Al", "O", 2.87, 15.90), ("Na", "Ga", "O", 2.98, 16.10),
        ("Na", "In", "O", 3.235, 16.36), ("Na", "Sc", "O", 3.17, 16.27), ("Na", "Y", "O", 3.40, 16.50),
        ("K", "In", "O", 3.30, 18.30), ("K", "Al", "O", 2.95, 17.90), ("Li", "B", "O", 2.55, 13.40),
        ("Na", "Al", "S", 3.60, 19.30), ("Na", "In", "S", 3.80, 19.89), ("Na", "Sc", "S", 3.75, 19.70),
        ("Na", "Y", "S", 3.97, 19.89), ("Li", "Al", "S", 3.55, 18.10), ("Li", "In", "Se", 3.90, 19.20),
        ("Na", "In", "Se", 3.97, 20.89), ("K", "Al", "Se", 3.80, 22.60), ("Na", "Ga", "S", 3.65, 19.60),
        ("Li", "Al", "Se", 3.75, 18.90), ("Rb", "In", "S", 3.87, 22.90), ("Na", "Al", "Te", 4.15, 22.00),
        ("Sr", "Hf", "N", 3.35, 17.65), ("Ca", "Zr", "N", 3.30, 16.70), ("Mg", "Zr", "N", 3.28, 15.40),
        ("Mg", "Ti", "N", 3.05, 14.70), ("Ca", "Ti", "N", 3.10, 16.20), ("Mg", "Si", "N", 2.85, 14.10),
        ("Ca", "Sn", "N", 3.25, 16.60), ("Ba", "Zr", "N", 3.42, 18.90), ("Mg", "Ge", "N", 2.98, 14.60),
        ("Na", "Nb", "N", 3.12, 16.90), ("Li", "Bi", "S", 3.95, 18.90), ("Na", "Bi", "Se", 4.20, 20.70),
        ("Na", "La", "S", 4.20, 20.30), ("Na", "La", "O", 3.65, 16.80), ("Li", "Y", "O", 3.35, 15.20),
        ("Mg", "Hf", "N", 3.25, 15.30),
    ):  # fmt: skip
        reach = WIDE_REACH_A if anion == "O" else IONIC_REACH_A
        found.append(_crystal(f"{one}{two}{anion}2", layers(one, two, anion, a, c), reach))
    for metal, anion, a in (
        ("Al", "Cl", 4.90), ("Bi", "F", 4.20), ("La", "F", 4.50), ("W", "O", 3.80), ("Sc", "Cl", 5.00),
        ("Ga", "Cl", 4.90),
    ):  # fmt: skip
        sites: dict[str, list[Site]] = {metal: [CORNER], anion: [(0.5, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.5)]}
        found.append(_crystal(f"{metal}{anion}3", ("rhenium trioxide", a * np.eye(3), sites), WIDE_REACH_A))
    for alkali, middle, a in (
        ("Li", "Bi", 6.71), ("K", "Bi", 8.80), ("Na", "Sb", 7.60), ("Li", "P", 5.90), ("Na", "N", 5.60),
    ):  # fmt: skip
        sites = {middle: [CORNER], alkali: [*QUARTERS, CENTRE]}
        found.append(_crystal(f"{alkali}3{middle}", ("bismuth trifluoride", fcc(a), sites), IONIC_REACH_A))
    return found


def _of_five_atoms() -> list[Compound]:
    found = []
    for metal, anion, a, c, z, w in (
        ("Bi", "Se", 4.14, 28.64, 0.399, 0.211), ("Sb", "Te", 4.26, 30.45, 0.399, 0.211),
        ("Bi", "Te", 4.38, 30.49, 0.400, 0.212),
    ):  # fmt: skip
        sites = {metal: [(z, z, z), (1 - z, 1 - z, 1 - z)], anion: [CORNER, (w, w, w), (1 - w, 1 - w, 1 - w)]}
        # On 6x6x6 points, the mesh of other small gaps, pw.x takes more than 20 minutes.
        structure = "tetradymite", _in_thirds(a, c), sites
        found.append(_crystal(f"{metal}2{anion}3", structure, IONIC_REACH_A, SMALL_GAP_SMEARING_HARTREE))
    for large, small, anion, a in (
        ("K", "Nb", "O", 4.01), ("Na", "Nb", "O", 3.95), ("K", "Ta", "O", 3.99), ("Na", "Ta", "O", 3.93),
        ("La", "Al", "O", 3.79), ("La", "Ga", "O", 3.90), ("La", "Sc", "O", 4.07), ("La", "In", "O", 4.12),
        ("Bi", "Al", "O", 3.77), ("Bi", "Sc", "O", 4.05), ("Cs", "Hg", "F", 4.57), ("Ag", "Mg", "F", 4.10),
        ("Ag", "Zn", "F", 3.98), ("La", "W", "N", 4.03), ("Li", "Ta", "O", 3.90), ("Na", "Zn", "F", 3.93),
        ("Rb", "Zn", "F", 4.11), ("Cs", "Cd", "F", 4.50), ("K", "Cd", "F", 4.33), ("Cs", "Mg", "F", 4.25),
        ("Cs", "Mg", "Cl", 5.15), ("K", "Mg", "Cl", 5.00), ("Ba", "Hf", "O", 4.17), ("Ca", "Zr", "O", 4.09),
        ("Ca", "Hf", "O", 4.06), ("Ca", "Sn", "O", 3.95), ("Ca", "Ge", "O", 3.73), ("Sr", "Ge", "O", 3.80),
        ("Sr", "Si", "O", 3.63), ("Ba", "Si", "O", 3.72), ("Ba", "Ge", "O", 3.88), ("Mg", "Ti", "O", 3.80),
        ("Mg", "Ge", "O", 3.68), ("Pb", "Zr", "O", 4.16), ("Pb", "Hf", "O", 4.13), ("Ga", "Al", "O", 3.63),
        ("In", "Al", "O", 3.68), ("Y", "Sc", "O", 3.95), ("Y", "Ga", "O", 3.78), ("Ba", "Zr", "S", 5.00),
        ("Sr", "Zr", "S", 4.95), ("Ca", "Zr", "S", 4.90), ("Ba", "Hf", "S", 4.98), ("Ba", "Ti", "S", 4.80),
        ("Ba", "Zr", "Se", 5.25), ("Na", "Mg", "H", 3.75), ("Rb", "Mg", "H", 4.15), ("Cs", "Mg", "H", 4.25),
        ("K", "Ca", "H", 4.48), ("Rb", "Ca", "H", 4.53), ("Cs", "Sr", "H", 4.85), ("Rb", "Sr", "F", 4.65),
        ("Li", "Be", "F", 3.55), ("Na", "Be", "F", 3.65), ("Sb", "N", "Ca", 4.85), ("Sb", "N", "Mg", 4.35),
    ):  # fmt: skip
        inverse = small in ("O", "N", "S", "P")
        formula = f"{anion}3{small}{large}" if inverse else f"{large}{small}{anion}3"
        kind = "inverse perovskite" if inverse else "perovskite"
        reach = SEMICONDUCTOR_REACH_A if "N" in (small, anion) else WIDE_REACH_A
        found.append(_crystal(formula, perovskite(kind, large, small, anion, a), reach))
    return found


def ternary_compounds() -> list[Compound]:
    """Compounds of two to five atoms, smaller cells first."""
    return [*_binaries(), *_of_three_atoms(), *_of_four_atoms(), *_of_five_atoms()]
