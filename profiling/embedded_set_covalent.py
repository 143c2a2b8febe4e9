"""Covalent crystals of the embedded set, and crystals of molecules: three to sixteen atoms, ideal cells, by pw.x.

On compounds set aside a model's errors were largest where atoms share their electrons (BP, Be2C, SiO2), and where a
compound has none that is like it (nitrogen, water). Sides and free coordinates are from the literature or, where nobody
has made a crystal, near the sum of its atoms' radii; an ordered alloy has the mean of its ends. None of the held-out
compounds is here, in any structure and in no ordered alloy.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from embedded_set_cells import Compound, Site
from embedded_set_further import (
    IONIC_REACH_A,
    SEMICONDUCTOR_REACH_A,
    WIDE_REACH_A,
    crystal,
)
from embedded_set_structures import fluorite
from embedded_set_ternary import wurtzite
from pymatgen.core import Lattice, Structure

GROUP = "covalent-crystals"

_crystal = partial(crystal, group=GROUP)


def _of_group(
    formula: str, name: str, space_group: str, cell: Lattice, sites: Sequence[tuple[str, Site]], reach_a: float
) -> Compound:
    """The primitive cell of a crystal by its space group and the sites that it repeats."""
    whole = Structure.from_spacegroup(space_group, cell, [symbol for symbol, _ in sites], [site for _, site in sites])
    primitive = whole.get_primitive_structure()
    found: dict[str, list[Site]] = {}
    for site in primitive:
        x, y, z = site.frac_coords.tolist()
        found.setdefault(site.species_string, []).append((x, y, z))
    return _crystal(formula, name, primitive.lattice.matrix, found, reach_a)


def _wurtzites() -> Iterator[Compound]:
    for one, two, a in (
        ("In", "As", 4.28), ("Ga", "Sb", 4.31), ("In", "Sb", 4.58), ("Al", "Sb", 4.34), ("B", "As", 3.37),
        ("B", "Sb", 3.68), ("Be", "Se", 3.63), ("Mg", "Se", 4.15), ("Ge", "C", 3.25), ("Si", "Ge", 3.92),
        ("Sn", "C", 3.57), ("Si", "Sn", 4.24),
    ):  # fmt: skip
        yield _crystal(one + two, *wurtzite(one, two, a), SEMICONDUCTOR_REACH_A)
    # Of four double layers: every second one as in zinc blende.
    for one, two, a in (
        ("Si", "C", 3.08), ("B", "N", 2.55), ("Ga", "N", 3.19), ("C", "C", 2.52), ("Si", "Si", 3.84),
        ("Be", "O", 2.70), ("B", "P", 3.20),
    ):  # fmt: skip
        sites = [(one, (0.0, 0.0, 0.0)), (one, (1 / 3, 2 / 3, 0.25))]
        sites += [(two, (0.0, 0.0, 3 / 16)), (two, (1 / 3, 2 / 3, 7 / 16))]
        cell = Lattice.hexagonal(a, np.sqrt(32 / 3) * a)
        name = one if one == two else one + two
        reach = IONIC_REACH_A if two in ("O", "N") else SEMICONDUCTOR_REACH_A
        yield _of_group(name, "4H", "P6_3mc", cell, sites, reach)


def _alloys() -> Iterator[Compound]:
    """Zinc blende with two cations, or two anions, in turn along one axis."""
    for formula, first, second, common, a in (
        ("InGaAs2", "In", "Ga", "As", 5.86), ("AlInAs2", "Al", "In", "As", 5.86), ("AlInP2", "Al", "In", "P", 5.67),
        ("AlBP2", "Al", "B", "P", 5.00), ("InBP2", "In", "B", "P", 5.21), ("AlGaSb2", "Al", "Ga", "Sb", 6.12),
        ("InGaSb2", "In", "Ga", "Sb", 6.29), ("InAlSb2", "In", "Al", "Sb", 6.31), ("InGaN2", "In", "Ga", "N", 4.74),
        ("GaBN2", "Ga", "B", "N", 4.06), ("InBN2", "In", "B", "N", 4.30), ("AlBAs2", "Al", "B", "As", 5.22),
        ("GaBAs2", "Ga", "B", "As", 5.22), ("ZnBeSe2", "Zn", "Be", "Se", 5.40), ("BeMgTe2", "Be", "Mg", "Te", 6.02),
        ("BeZnS2", "Be", "Zn", "S", 5.14), ("BeZnO2", "Be", "Zn", "O", 4.19), ("SiGeC2", "Si", "Ge", "C", 4.48),
        ("Ga2AsSb", "As", "Sb", "Ga", 5.87), ("In2PAs", "P", "As", "In", 5.96), ("In2AsSb", "As", "Sb", "In", 6.27),
        ("Al2PAs", "P", "As", "Al", 5.56), ("Al2AsSb", "As", "Sb", "Al", 5.90), ("B2NP", "N", "P", "B", 4.08),
        ("B2PAs", "P", "As", "B", 4.66), ("Be2SSe", "S", "Se", "Be", 5.00),
    ):  # fmt: skip
        # P-4m2 has the axes of the primitive square.
        side = a / np.sqrt(2)
        sites = [(first, (0.0, 0.0, 0.0)), (second, (0.5, 0.5, 0.5)), (common, (0.0, 0.5, 0.25))]
        cell = Lattice.tetragonal(side, a)
        yield _of_group(formula, "copper-gold ordered zinc blende", "P-4m2", cell, sites, SEMICONDUCTOR_REACH_A)


def _chalcopyrites() -> Iterator[Compound]:
    for one, two, anion, a, c, x in (
        ("Cd", "Si", "P", 5.68, 10.43, 0.297), ("Mg", "Si", "P", 5.72, 10.11, 0.292),
        ("Be", "Si", "P", 5.05, 9.90, 0.255), ("Be", "Ge", "P", 5.18, 10.20, 0.245),
        ("Mg", "Si", "As", 5.93, 10.60, 0.288), ("Be", "C", "N", 3.68, 7.25, 0.265),
        ("Be", "Si", "N", 4.10, 8.05, 0.290), ("Be", "Ge", "N", 4.27, 8.40, 0.275),
        ("Mg", "Si", "N", 4.50, 8.20, 0.325), ("Zn", "Ge", "N", 4.55, 8.90, 0.275),
        ("Li", "P", "N", 4.575, 7.118, 0.330),
    ):  # fmt: skip
        sites = [(one, (0.0, 0.0, 0.0)), (two, (0.0, 0.0, 0.5)), (anion, (x, 0.25, 0.125))]
        reach = IONIC_REACH_A if anion == "N" else SEMICONDUCTOR_REACH_A
        yield _of_group(f"{one}{two}{anion}2", "chalcopyrite", "I-42d", Lattice.tetragonal(a, c), sites, reach)


def _spinels() -> Iterator[Compound]:
    for single, double, anion, a, u in (
        ("Si", "Si", "N", 7.74, 0.2583), ("Ge", "Ge", "N", 8.21, 0.2580), ("Sn", "Sn", "N", 9.04, 0.2591),
        ("C", "Si", "N", 7.35, 0.2520), ("Mg", "Al", "O", 8.08, 0.2624), ("Be", "Al", "O", 7.85, 0.2550),
        ("Ge", "Mg", "O", 8.25, 0.2510), ("Si", "Mg", "O", 8.08, 0.2440),
    ):  # fmt: skip
        sites = [(single, (1 / 8, 1 / 8, 1 / 8)), (double, (0.5, 0.5, 0.5)), (anion, (u, u, u))]
        formula = f"{single}3{anion}4" if single == double else f"{single}{double}2{anion}4"
        yield _of_group(formula, "spinel", "Fd-3m:2", Lattice.cubic(a), sites, WIDE_REACH_A)


def _others() -> Iterator[Compound]:
    hexagonal, tetragonal, cubic = Lattice.hexagonal, Lattice.tetragonal, Lattice.cubic
    semiconductor, ionic, wide = SEMICONDUCTOR_REACH_A, IONIC_REACH_A, WIDE_REACH_A
    third = 1 / 3
    phenakite = [("Si", (0.1733, 0.7694, 0.25)), ("N", (0.3337, 0.0323, 0.25)), ("N", (third, 2 * third, 0.25))]
    yield _of_group("Si3N4", "beta silicon nitride", "P6_3/m", hexagonal(7.61, 2.91), phenakite, wide)
    heights = (("Al", 0.2930), ("Al", 0.1296), ("C", 0.0), ("C", 0.2168))
    carbide = [(symbol, (0.0, 0.0, height)) for symbol, height in heights]
    yield _of_group("Al4C3", "aluminium carbide", "R-3m", hexagonal(3.335, 24.97), carbide, ionic)
    for formula, metal, anion, a, c in (
        ("Li3P", "Li", "P", 4.26, 7.58), ("Li3As", "Li", "As", 4.39, 7.81), ("Na3P", "Na", "P", 4.99, 8.83),
        ("Na3As", "Na", "As", 5.09, 9.00),
    ):  # fmt: skip
        sites = [(metal, (0.0, 0.0, 0.25)), (metal, (third, 2 * third, 0.583)), (anion, (third, 2 * third, 0.25))]
        yield _of_group(formula, "sodium arsenide", "P6_3/mmc", hexagonal(a, c), sites, semiconductor)
    for formula, metal, anion, a, c, z, w in (
        ("GaS", "Ga", "S", 3.59, 15.49, 0.171, 0.602), ("GaSe", "Ga", "Se", 3.75, 15.95, 0.174, 0.602),
        ("InSe", "In", "Se", 4.00, 16.64, 0.157, 0.602),
    ):  # fmt: skip
        sites = [(metal, (third, 2 * third, z)), (anion, (third, 2 * third, w))]
        yield _of_group(formula, "gallium sulfide", "P6_3/mmc", hexagonal(a, c), sites, semiconductor)
    for formula, one, two, a, c, x, y, z in (
        ("BPO4", "B", "P", 4.34, 6.64, 0.138, 0.260, 0.131), ("BAsO4", "B", "As", 4.46, 6.80, 0.160, 0.262, 0.139),
    ):  # fmt: skip
        sites = [(one, (0.5, 0.0, 0.25)), (two, (0.0, 0.0, 0.0)), ("O", (x, y, z))]
        yield _of_group(formula, "boron phosphate", "I-4", tetragonal(a, c), sites, wide)
    for symbol, a, c, x in (("Se", 4.37, 4.95, 0.225), ("Te", 4.46, 5.92, 0.269)):
        sites = [(symbol, (x, 0.0, third))]
        yield _of_group(symbol, "selenium", "P3_121", hexagonal(a, c), sites, semiconductor)
    black = [("P", (0.0, 0.1017, 0.0806))]
    yield _of_group("P", "black phosphorus", "Cmce", Lattice.orthorhombic(3.31, 10.48, 4.38), black, semiconductor)
    for symbol, a, b, c, y, z in (
        ("Cl", 6.24, 4.48, 8.26, 0.102, 0.103), ("Br", 6.67, 4.48, 8.72, 0.135, 0.110),
        ("I", 7.14, 4.69, 9.78, 0.154, 0.117),
    ):  # fmt: skip
        sites = [(symbol, (0.0, y, z))]
        yield _of_group(f"{symbol}2", "iodine", "Cmce", Lattice.orthorhombic(a, b, c), sites, wide)
    for formula, one, two, a, b, c, x1, z1, x2, z2 in (
        ("GeS", "Ge", "S", 10.47, 3.64, 4.30, 0.1215, 0.1060, 0.8515, 0.4970),
        ("GeSe", "Ge", "Se", 10.84, 3.83, 4.39, 0.1210, 0.1060, 0.8535, 0.5020),
        ("SnSe", "Sn", "Se", 11.50, 4.15, 4.44, 0.1180, 0.1030, 0.8560, 0.4790),
    ):  # fmt: skip
        sites = [(one, (x1, 0.25, z1)), (two, (x2, 0.25, z2))]
        yield _of_group(formula, "germanium sulfide", "Pnma", Lattice.orthorhombic(a, b, c), sites, semiconductor)
    for alkali, a in (("Na", 6.15), ("K", 6.73), ("Rb", 7.02)):
        sites = [(alkali, (0.5, 0.5, 0.5)), ("B", (0.0, 0.0, 0.0)), ("H", (0.113 * 6.15 / a,) * 3)]
        yield _of_group(f"{alkali}BH4", "ordered borohydride", "F-43m", cubic(a), sites, wide)
    for formula, a, *sites in (
        ("CO2", 5.62, ("C", 0.0), ("O", 0.1185)),
        ("N2", 5.65, ("N", 0.0559)),
        ("C2H2", 6.10, ("C", 0.0566), ("H", 0.1579)),
    ):
        # Molecules along the diagonals of a cube.
        places = [(symbol, (x, x, x)) for symbol, x in sites]
        yield _of_group(formula, "molecular crystal", "Pa-3", cubic(a), places, wide)
    ammonia = [("N", (0.2107, 0.2107, 0.2107)), ("H", (0.3720, 0.2620, 0.1120))]
    yield _of_group("NH3", "molecular crystal", "P2_13", cubic(5.13), ammonia, wide)
    yield _crystal("Mg2C", *fluorite("antifluorite", "C", "Mg", 5.44), semiconductor)
    quartz = [("Be", (0.4697, 0.0, 0.0)), ("F", (0.4135, 0.2669, 0.1191))]
    yield _of_group("BeF2", "quartz", "P3_221", hexagonal(4.73, 5.18), quartz, wide)


def covalent_compounds() -> list[Compound]:
    """Compounds of three to sixteen atoms, smaller cells first."""
    found = [*_wurtzites(), *_alloys(), *_chalcopyrites(), *_spinels(), *_others()]
    return sorted(found, key=lambda each: len(each.atoms))
