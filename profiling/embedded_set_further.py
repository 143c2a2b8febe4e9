"""Further crystals of the embedded set, of two to nine atoms: more chemistry, all by pw.x.

Meshes reach equally far in every direction. None of the held-out compounds is among these crystals.
"""

import numpy as np
from embedded_set_cells import Atoms, Compound, Mesh, Site, hexagonal
from embedded_set_structures import fluorite, half_heusler, litharge, matlockite, pair, perovskite, rutile

GROUP = "further-crystals"

SEMICONDUCTOR_REACH_A, IONIC_REACH_A, WIDE_REACH_A = 22.0, 15.0, 11.0
"""Shortest lattice vector of the supercell that corresponds to a mesh. 6x6x6 points of GaP (23 A) differ by 0.09 % from
8x8x8; the meshes of wurtzite (15 A) were 0.3 to 0.5 % off (AlP, GaAs). The last value is for oxides and for insulators
of five or more atoms."""
Variants = tuple[str, ...]
TWO: Variants = ("ideal", "sheared")


def gamma_mesh(lattice: np.ndarray, reach_a: float) -> Mesh:
    """A mesh with Gamma whose supercell has no lattice vector below `reach_a`."""
    # With a tolerance of 1e-6, so that axes of the same length get the same number of points in spite of rounding.
    mesh = np.maximum(1, np.ceil(reach_a / np.linalg.norm(lattice, axis=1) - 1e-6)).astype(int)
    sums = np.array([signs for signs in np.ndindex(3, 3, 3) if signs != (1, 1, 1)]) - 1
    # In the long thin cell of a layered crystal, a difference of two axes can be shorter than the axes: from 5x5x5
    # points, 3x3x3 differ by 0.7 % for MgGeN2 and 0.3 % for LiAlO2.
    while (short := np.linalg.norm(sums * mesh @ lattice, axis=1) < reach_a - 1e-6).any():
        mesh = mesh + np.abs(sums[short]).max(axis=0)
    nx, ny, nz = mesh.tolist()
    return (nx, ny, nz), (0, 0, 0)


SMALL_GAPS = frozenset((
    "Ca3NAs", "CdO", "CdSe", "Ga2AsSb", "GaSb", "Ge", "GeSe", "HfSe2", "HgSe", "HgTe", "In2AsSb", "In2PAs", "InAlSb2",
    "InAs", "InBN2", "InGaAs2", "InGaN2", "InGaSb2", "InN", "InSb", "InSe", "K3Bi", "K3Sb", "LaBi", "LaP", "LaSb",
    "LaWN3", "Li3Bi", "LiCdAs", "LiGaSi", "LiMgBi", "LiZnAs", "LiZnBi", "LiZnSb", "Mg3Sb2", "MgTe", "Na3As", "Na3Sb",
    "NaAlGe", "NaZnAs", "P", "PbSe", "PbTe", "ScN", "ScP", "Se", "SiSn", "SnSe", "SnSe2", "SnTe", "Te", "TiS2", "WO3",
    "YP", "ZrSe2",
))  # fmt: skip
"""Compounds whose gap PBE closes or nearly closes, in one of their structures."""
SMALL_GAP_SMEARING_HARTREE = 0.002


def crystal(
    formula: str, structure: str, lattice: np.ndarray, sites: dict[str, list[Site]], reach_a: float,
    variants: Variants = ("ideal",), group: str = GROUP, split: str = "train", smearing_hartree: float | None = None,
) -> Compound:  # fmt: skip
    """A compound from its sites and a mesh of this reach. Without a smearing, small gaps get one and a dense mesh."""
    if smearing_hartree is None:
        smearing_hartree = SMALL_GAP_SMEARING_HARTREE if formula in SMALL_GAPS else 0.0
        # With 15 A, Na3Sb was 1.3 % off, Na3As 0.7, Mg3Sb2 0.5, SnSe2 and Li3Bi 0.3.
        reach_a = max(reach_a, SEMICONDUCTOR_REACH_A) if formula in SMALL_GAPS else reach_a
    atoms: Atoms = tuple((symbol, site) for symbol, places in sites.items() for site in places)
    mesh, shift = gamma_mesh(lattice, reach_a)
    return Compound(formula, structure, lattice, atoms, mesh, shift, variants, split, group, smearing_hartree)


def _binaries() -> list[Compound]:
    tables = (
        ("zinc blende", SEMICONDUCTOR_REACH_A, (
            ("Ga", "Sb", 6.096), ("In", "As", 6.058), ("In", "Sb", 6.479), ("In", "N", 4.98), ("Be", "S", 4.865),
            ("Be", "Se", 5.137), ("Be", "Te", 5.617), ("Mg", "S", 5.66), ("Mg", "Se", 5.92), ("B", "Sb", 5.25),
            ("Ge", "C", 4.61), ("Zn", "S", 5.41), ("Zn", "Se", 5.668), ("Zn", "O", 4.58), ("Cd", "Te", 6.48),
        )),
        ("rock salt", IONIC_REACH_A, (
            ("Na", "I", 6.47), ("Na", "Br", 5.97), ("K", "I", 7.07), ("K", "Br", 6.60), ("K", "H", 5.70),
            ("Na", "H", 4.88), ("Rb", "Cl", 6.58), ("Li", "Br", 5.50), ("Li", "I", 6.00), ("Sr", "Se", 6.24),
            ("Sr", "Te", 6.66), ("Ba", "S", 6.39), ("Ba", "Se", 6.60), ("Ca", "Se", 5.91), ("Ca", "Te", 6.35),
            ("Rb", "F", 5.64), ("Cs", "F", 6.01), ("Be", "O", 3.65), ("Cd", "O", 4.70),
            ("Zn", "O", 4.28),
        )),
        ("rock salt", SEMICONDUCTOR_REACH_A, (("In", "N", 4.62),)),
        ("caesium chloride", IONIC_REACH_A, (("Cs", "I", 4.57), ("Tl", "Cl", 3.83), ("Tl", "Br", 3.97))),
    )  # fmt: skip
    found = []
    for name, reach, rows in tables:
        for one, two, a in rows:
            found.append(crystal(one + two, *pair(name, one, two, a), reach, TWO))
    return found


def _of_three_atoms() -> list[Compound]:
    rows = (
        ("fluorite", 5.94, "Pb", "F"), ("fluorite", 7.34, "Ba", "Cl"), ("fluorite", 5.07, "Zr", "O"),
        ("fluorite", 5.08, "Hf", "O"), ("fluorite", 5.39, "Cd", "F"),
        ("antifluorite", 6.39, "Ge", "Mg"), ("antifluorite", 6.76, "Sn", "Mg"), ("antifluorite", 6.82, "Se", "Na"),
        ("antifluorite", 7.39, "S", "K"), ("antifluorite", 6.44, "O", "K"), ("antifluorite", 5.71, "S", "Li"),
        ("antifluorite", 6.00, "Se", "Li"), ("antifluorite", 4.34, "C", "Be"),
    )  # fmt: skip
    found = []
    for name, a, single, double in rows:
        formula = f"{single}{double}2" if name == "fluorite" else f"{double}2{single}"
        reach = SEMICONDUCTOR_REACH_A if double in ("Mg", "Be") else IONIC_REACH_A
        found.append(crystal(formula, *fluorite(name, single, double, a), reach, TWO))
    for filling, anion, a in (
        ("Mg", "P", 6.005),
        ("Mg", "As", 6.19),
        ("Al", "Si", 5.93),
        ("Zn", "P", 5.76),
        ("Zn", "N", 4.87),
    ):
        structure = half_heusler("Li", filling, anion, a)
        found.append(crystal(f"Li{filling}{anion}", *structure, SEMICONDUCTOR_REACH_A, TWO))
    return found


def _of_more_atoms() -> list[Compound]:
    found = []
    cubes = (
        ("Na", "Mg", "F", 3.96), ("Ba", "Li", "F", 3.995), ("Sr", "Li", "F", 3.87), ("Cs", "Pb", "Cl", 5.61),
        ("Rb", "Ca", "F", 4.45), ("K", "Ca", "F", 4.40), ("Cs", "Ca", "F", 4.52), ("Sr", "Zr", "O", 4.14),
        ("Ba", "Zr", "O", 4.19), ("Ca", "Ti", "O", 3.85),
    )  # fmt: skip
    for large, small, anion, a in cubes:
        structure = perovskite("perovskite", large, small, anion, a)
        found.append(crystal(f"{large}{small}{anion}3", *structure, WIDE_REACH_A, TWO))
    for metal, halogen, a, c, z, w in (
        ("Sr", "Cl", 4.126, 6.958, 0.2015, 0.643), ("Ba", "Cl", 4.394, 7.225, 0.2049, 0.6472),
        ("Ca", "Cl", 3.894, 6.818, 0.196, 0.643),
    ):  # fmt: skip
        found.append(crystal(f"{metal}F{halogen}", *matlockite(metal, halogen, a, c, z, w), WIDE_REACH_A, TWO))
    for single, double, a, c, x in (("Sn", "O", 4.737, 3.186, 0.307), ("Zn", "F", 4.71, 3.13, 0.303)):
        found.append(crystal(f"{single}{double}2", *rutile(single, double, a, c, x), WIDE_REACH_A, TWO))
    third, two_thirds = 1 / 3, 2 / 3
    # P3_2 21 with a twofold axis through the origin.
    x, y, z = 0.4135, 0.2669, 0.1191
    quartz = {
        "Si": [(0.4697, 0.0, 0.0), (0.0, 0.4697, two_thirds), (0.5303, 0.5303, third)],
        "O": [(x, y, z), (1 - y, x - y, z + two_thirds), (1 + y - x, 1 - x, z + third),
              (x - y, 1 - y, 1 - z), (y, x, two_thirds - z), (1 - x, 1 + y - x, third - z)],
    }  # fmt: skip
    return [
        *found,
        crystal("PbO", *litharge("Pb", 3.97, 5.02, 0.235), WIDE_REACH_A, TWO),
        crystal("SiO2", "quartz", hexagonal(4.913, 5.405), quartz, WIDE_REACH_A, TWO),
    ]


def further_compounds() -> list[Compound]:
    """Compounds of two to nine atoms, smaller cells first."""
    return [*_binaries(), *_of_three_atoms(), *_of_more_atoms()]
