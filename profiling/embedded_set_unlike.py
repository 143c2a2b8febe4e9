"""Cells of the embedded set that are unlike its crystals: with vacuum, layered, large, or metals; all by pw.x.

Surfaces are cut from the crystal and not relaxed. Vacuum is 9 A or more between atoms. Where bands may be partially
filled (surfaces, vacancies, open shells), occupations are smeared. No calculation is spin-polarised.
"""

from dataclasses import replace

import numpy as np
from embedded_set_cells import Compound, Site, fcc, hexagonal
from embedded_set_further import IONIC_REACH_A, SEMICONDUCTOR_REACH_A, TWO, crystal
from embedded_set_structures import SECOND_SITE, cadmium_iodide

VACUUM, LAYERED, LARGE, METALS = "vacuum", "layered", "large", "metals"
VACUUM_A = 9.0
SMEARING_HARTREE = 0.005
METAL_REACH_A = 28.0
IDEAL, RATTLED = ("ideal",), ("rattled",)
IN_PLANE = ((0.0, 0.0), (1 / 3, 2 / 3), (2 / 3, 1 / 3))
"""The three positions of close-packed planes in a hexagonal cell."""


def _slab(
    formula: str, face: str, sides: np.ndarray, planes: list[tuple[str, float, float, float]], reach_a: float,
    split: str = "train", smearing_hartree: float = 0.0, variants: tuple[str, ...] = IDEAL,
) -> Compound:  # fmt: skip
    """A slab of atoms, each with its place in the surface cell `sides` `[2, 2]` and its height in A."""
    heights = np.array([plane[3] for plane in planes])
    c = float(np.ptp(heights)) + VACUUM_A
    lattice = np.zeros((3, 3))
    lattice[:2, :2], lattice[2, 2] = sides, c
    sites: dict[str, list[Site]] = {}
    for symbol, x, y, z in planes:
        # In the middle of the cell, so that a picture shows the whole slab.
        sites.setdefault(symbol, []).append((x, y, (z - float(heights.mean())) / c + 0.5))
    found = crystal(formula, face, lattice, sites, reach_a, variants, VACUUM, split, smearing_hartree)
    return replace(found, k_mesh=(*found.k_mesh[:2], 1))


def _rock_salt_001(one: str, two: str, a: float, layers: int, split: str = "train") -> Compound:
    planes = []
    for n in range(layers):
        here, there = (one, two) if n % 2 == 0 else (two, one)
        planes += [(here, 0.0, 0.0, n * a / 2), (there, 0.5, 0.5, n * a / 2)]
    return _slab(one + two, "rock salt slab 001", a / np.sqrt(2) * np.eye(2), planes, IONIC_REACH_A, split)


def _zinc_blende_110(one: str, two: str, a: float, layers: int) -> Compound:
    planes = []
    for n in range(layers):
        z, odd = n * a / (2 * np.sqrt(2)), n % 2
        planes += [(one, 0.5 * odd, 0.5 * odd, z), (two, 0.75 - 0.5 * odd, 0.5 - 0.5 * odd, z)]
    sides = np.diag([a, a / np.sqrt(2)])
    return _slab(one + two, "zinc blende slab 110", sides, planes, IONIC_REACH_A, "train", SMEARING_HARTREE)


def _hydrogenated_111(one: str, two: str, a: float, below_a: float, above_a: float) -> Compound:
    """Two double layers of diamond or zinc blende with hydrogen on their dangling bonds."""
    bond = np.sqrt(3) * a / 4
    heights = (-below_a, 0.0, bond / 3, 4 * bond / 3, 5 * bond / 3, 5 * bond / 3 + above_a)
    places = (0, 0, 1, 1, 2, 2)
    symbols = ("H", one, two, one, two, "H")
    planes = [(s, *IN_PLANE[p], float(z)) for s, p, z in zip(symbols, places, heights, strict=True)]
    formula = f"{one}2H" if one == two else f"{one}{two}H"
    sides = hexagonal(a / np.sqrt(2), 1.0)[:2, :2]
    return _slab(formula, "hydrogenated slab 111", sides, planes, IONIC_REACH_A)


def _fluorite_111(metal: str, a: float, layers: int, split: str = "train") -> Compound:
    thick = a / np.sqrt(3)
    planes: list[tuple[str, float, float, float]] = []
    for n in range(layers):
        planes += [
            ("F", *IN_PLANE[(n - 1) % 3], (n - 0.25) * thick),
            (metal, *IN_PLANE[n % 3], n * thick),
            ("F", *IN_PLANE[(n + 1) % 3], (n + 0.25) * thick),
        ]
    sides = hexagonal(a / np.sqrt(2), 1.0)[:2, :2]
    return _slab(f"{metal}F2", "fluorite slab 111", sides, planes, IONIC_REACH_A, split)


def _boxed(
    formula: str, side_a: float, atoms: list[tuple[str, float, float, float]], smearing_hartree: float = 0.0
) -> Compound:
    """An atom or a molecule in a cube, with positions in A."""
    sites: dict[str, list[Site]] = {}
    for symbol, x, y, z in atoms:
        sites.setdefault(symbol, []).append((x / side_a + 0.5, y / side_a + 0.5, z / side_a + 0.5))
    kind = "molecule" if len(atoms) > 1 else "atom"
    # A reach of 0 gives only Gamma.
    return crystal(formula, kind, side_a * np.eye(3), sites, 0.0, IDEAL, VACUUM, "train", smearing_hartree)


def _tetrahedron(centre: str, corner: str, bond_a: float) -> list[tuple[str, float, float, float]]:
    d = bond_a / float(np.sqrt(3))
    return [(centre, 0.0, 0.0, 0.0), *((corner, x * d, y * d, x * y * d) for x in (1, -1) for y in (1, -1))]


def vacuum_compounds() -> list[Compound]:
    """Atoms and molecules in boxes, single layers and slabs. Held out: slabs of MgO and SrF2."""
    n2 = [("N", 0.0, 0.0, -0.549), ("N", 0.0, 0.0, 0.549)]
    f2 = [("F", 0.0, 0.0, -0.706), ("F", 0.0, 0.0, 0.706)]
    water = [("O", 0.0, 0.0, 0.0), ("H", 0.757, 0.0, 0.587), ("H", -0.757, 0.0, 0.587)]
    salt = [("Na", 0.0, 0.0, -1.18), ("Cl", 0.0, 0.0, 1.18)]
    sheet = hexagonal(2.504, 1.0)[:2, :2]
    return [
        _boxed("Na", 9.0, [("Na", 0.0, 0.0, 0.0)], SMEARING_HARTREE),
        _boxed("Mg", 8.0, [("Mg", 0.0, 0.0, 0.0)]),
        _boxed("Si", 8.0, [("Si", 0.0, 0.0, 0.0)], SMEARING_HARTREE),
        _boxed("He", 6.0, [("He", 0.0, 0.0, 0.0)]),
        _boxed("Ar", 7.0, [("Ar", 0.0, 0.0, 0.0)]),
        _boxed("SiH4", 7.5, _tetrahedron("Si", "H", 1.48)),
        _boxed("NaCl", 8.0, salt),
        _boxed("N2", 6.5, n2),
        _boxed("H2O", 6.5, water),
        _boxed("CH4", 6.5, _tetrahedron("C", "H", 1.09)),
        _boxed("F2", 6.5, f2),
        _slab("BN", "single layer", sheet, [("B", *IN_PLANE[0], 0.0), ("N", *IN_PLANE[1], 0.0)], IONIC_REACH_A),
        _hydrogenated_111("Si", "Si", 5.431, 1.50, 1.50),
        _rock_salt_001("Na", "Cl", 5.64, 4),
        _rock_salt_001("K", "Cl", 6.29, 3),
        _zinc_blende_110("Al", "P", 5.46, 4),
        _zinc_blende_110("Ga", "As", 5.653, 4),
        _rock_salt_001("Ca", "O", 4.81, 3),
        _rock_salt_001("Li", "F", 4.03, 3),
        _fluorite_111("Ca", 5.463, 2),
        _hydrogenated_111("C", "C", 3.567, 1.10, 1.10),
        _hydrogenated_111("Si", "C", 4.36, 1.50, 1.10),
        _rock_salt_001("Mg", "O", 4.21, 3, "validation"),
        _fluorite_111("Sr", 5.80, 2, "validation"),
    ]


def layered_compounds() -> list[Compound]:
    """Layered crystals of CdI2's structure; held out: SnS2."""
    rows = (
        ("Mg", "Br", 3.81, 6.26, 0.25, "train"), ("Mg", "Cl", 3.64, 5.93, 0.25, "train"),
        ("Ca", "I", 4.49, 6.98, 0.25, "train"), ("Pb", "I", 4.56, 6.98, 0.265, "train"),
        ("Zr", "S", 3.66, 5.85, 0.25, "train"), ("Sn", "Se", 3.81, 6.14, 0.25, "train"),
        ("Sn", "S", 3.65, 5.90, 0.25, "validation"),
    )  # fmt: skip
    found = []
    for metal, anion, a, c, z, split in rows:
        structure, variants = cadmium_iodide(metal, anion, a, c, z), TWO if split == "train" else IDEAL
        found.append(crystal(f"{metal}{anion}2", *structure, IONIC_REACH_A, variants, LAYERED, split))
    brucite = {
        "Mg": [(0.0, 0.0, 0.0)],
        "O": [(1 / 3, 2 / 3, 0.2216), (2 / 3, 1 / 3, 0.7784)],
        "H": [(1 / 3, 2 / 3, 0.4303), (2 / 3, 1 / 3, 0.5697)],
    }
    found.append(crystal("MgO2H2", "brucite", hexagonal(3.142, 4.766), brucite, IONIC_REACH_A, TWO, LAYERED))
    return found


def _supercell(
    one: str, two: str, structure: str, a: float, repeats: tuple[int, int, int], change: str, reach_a: float,
    split: str = "train",
) -> Compound:  # fmt: skip
    """Repeats of a two-atom cell. `change`: `vacancy` removes the last atom, `antisite` exchanges the last atom of each
    kind, `alloy` exchanges half of them with their neighbours; empty: the cell is only rattled."""
    second = np.array(SECOND_SITE[structure])
    corners = np.stack(np.meshgrid(*map(np.arange, repeats), indexing="ij"), -1).reshape(-1, 3)
    atoms = [(one, tuple((corner / repeats).tolist())) for corner in corners]
    atoms += [(two, tuple(((corner + second) / repeats).tolist())) for corner in corners]
    n = len(corners)
    if change == "vacancy":
        atoms.pop()
    elif change == "antisite":
        (symbol, first), (other, last) = atoms[n - 1], atoms[-1]
        atoms[n - 1], atoms[-1] = (other, first), (symbol, last)
    elif change == "alloy":
        for at in np.random.default_rng(5).permutation(n)[: n // 2]:
            (symbol, first), (other, last) = atoms[at], atoms[at + n]
            atoms[at], atoms[at + n] = (other, first), (symbol, last)
    sites: dict[str, list[Site]] = {}
    for symbol, site in atoms:
        sites.setdefault(symbol, []).append(site)
    lattice = fcc(a) * np.array(repeats)[:, None]
    formula = one if one == two else one + two
    kind = f"{structure}, {change or 'supercell'} of {len(atoms)} atoms"
    smearing = SMEARING_HARTREE if change in ("vacancy", "antisite") else 0.0
    found = crystal(formula, kind, lattice, sites, reach_a, RATTLED, LARGE, split, smearing)
    # With a mesh moved off Gamma, half as many points suffice. Without crystal symmetry, no symmetry is broken by it.
    return replace(found, k_shift=(1, 1, 1)) if min(found.k_mesh) > 1 else found


def large_compounds() -> list[Compound]:
    """Rattled supercells, vacancies, antisites and an alloy. Held out: vacancies of GaP and MgO."""
    cube = (2, 2, 2)
    wide, near = SEMICONDUCTOR_REACH_A - 7.0, 8.0
    return [
        _supercell("Si", "Si", "diamond", 5.431, cube, "", wide),
        _supercell("Ga", "As", "zinc blende", 5.653, cube, "antisite", wide),
        _supercell("Si", "Ge", "zinc blende", 5.54, cube, "alloy", wide),
        _supercell("Al", "P", "zinc blende", 5.46, cube, "", wide),
        _supercell("Ga", "P", "zinc blende", 5.451, cube, "vacancy", wide, "validation"),
        _supercell("Na", "Cl", "rock salt", 5.64, cube, "", near),
        _supercell("B", "P", "zinc blende", 4.538, cube, "antisite", wide),
        _supercell("Mg", "S", "rock salt", 5.20, cube, "", near),
        _supercell("Mg", "O", "rock salt", 4.21, cube, "vacancy", near, "validation"),
        _supercell("B", "N", "zinc blende", 3.615, cube, "", near),
        _supercell("Si", "C", "zinc blende", 4.36, cube, "antisite", near),
        _supercell("Li", "F", "rock salt", 4.03, cube, "", near),
        _supercell("Si", "Si", "diamond", 5.431, cube, "vacancy", wide),
        _supercell("Al", "As", "zinc blende", 5.661, cube, "vacancy", wide),
        _supercell("Al", "P", "zinc blende", 5.46, cube, "vacancy", wide),
        _supercell("In", "P", "zinc blende", 5.87, cube, "vacancy", wide),
        _supercell("Mg", "S", "rock salt", 5.20, cube, "vacancy", near),
        _supercell("Li", "F", "rock salt", 4.03, cube, "vacancy", near),
        _supercell("Be", "O", "zinc blende", 3.80, cube, "vacancy", near),
        _supercell("Ga", "N", "zinc blende", 4.50, cube, "", near),
        _supercell("Ca", "O", "rock salt", 4.81, cube, "", near),
    ]


def metals() -> list[Compound]:
    """Metals without d or f electrons, whose bands are filled by smearing."""
    body = np.array([[-1.0, 1.0, 1.0], [1.0, -1.0, 1.0], [1.0, 1.0, -1.0]]) / 2
    one: list[Site] = [(0.0, 0.0, 0.0)]
    two: list[Site] = [(1 / 3, 2 / 3, 0.25), (2 / 3, 1 / 3, 0.75)]
    rows = (
        ("Al", "face-centred cubic", fcc(4.05), one), ("Na", "body-centred cubic", 4.28 * body, one),
        ("Mg", "close-packed hexagonal", hexagonal(3.21, 5.21), two), ("K", "body-centred cubic", 5.33 * body, one),
        ("Li", "body-centred cubic", 3.44 * body, one), ("Ca", "face-centred cubic", fcc(5.58), one),
    )  # fmt: skip
    return [
        crystal(metal, structure, lattice, {metal: sites}, METAL_REACH_A, TWO, METALS, smearing_hartree=0.01)
        for metal, structure, lattice, sites in rows
    ]


def unlike_compounds() -> list[Compound]:
    """All compounds of this module."""
    return [*metals(), *vacuum_compounds(), *layered_compounds(), *large_compounds()]
