"""More crystals of the embedded set: the elements of the other sets in many more pairs and triples, all by pw.x.

A model's errors on compounds set aside were largest for elements that were in few other compounds. Structures are those
of the compounds or of their nearest relatives. Sides are from the literature or, where nobody has made the crystal,
near the sum of the atoms' radii. None of the held-out compounds is among these crystals.
"""

import numpy as np
from embedded_set_cells import Compound, Site, fcc, hexagonal
from embedded_set_further import (
    IONIC_REACH_A,
    SEMICONDUCTOR_REACH_A,
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
    litharge,
    matlockite,
    pair,
    perovskite,
    rutile,
)

GROUP = "more-crystals"


def _crystal(formula: str, structure: Structure, reach_a: float) -> Compound:
    # Only ideal cells: sheared ones too would take four times as long, because without symmetry all k-points count.
    return crystal(formula, *structure, reach_a, group=GROUP)


def _binaries() -> list[Compound]:
    tables = (
        ("zinc blende", SEMICONDUCTOR_REACH_A, (
            ("Zn", "Te", 6.10), ("Cd", "S", 5.83), ("Cd", "Se", 6.08), ("Si", "Sn", 6.00), ("Sn", "C", 5.05),
        )),
        ("rock salt", IONIC_REACH_A, (
            ("Rb", "Br", 6.85), ("Rb", "I", 7.34), ("Rb", "H", 6.04), ("Cs", "H", 6.38), ("Ba", "Te", 7.00),
            ("Tl", "F", 5.90),
        )),
        ("rock salt", SEMICONDUCTOR_REACH_A, (
            ("Pb", "S", 5.94), ("Pb", "Se", 6.12), ("Pb", "Te", 6.46), ("Sn", "Te", 6.32), ("Sc", "N", 4.52),
            ("Y", "N", 4.88),
        )),
        ("caesium chloride", IONIC_REACH_A, (("Tl", "I", 4.20), ("Rb", "Cl", 3.75))),
    )  # fmt: skip
    found = [
        _crystal(one + two, pair(name, one, two, a), reach) for name, reach, rows in tables for one, two, a in rows
    ]
    return [*found, _crystal("Ge", pair("diamond", "Ge", "Ge", 5.658), SEMICONDUCTOR_REACH_A)]


def _of_three_atoms() -> list[Compound]:
    found = []
    for single, double, a in (
        ("Te", "Li", 6.517), ("Te", "Na", 7.32), ("Se", "K", 7.68), ("Te", "K", 8.15), ("O", "Rb", 6.74),
        ("S", "Rb", 7.65), ("Se", "Rb", 8.02),
    ):  # fmt: skip
        structure = fluorite("antifluorite", single, double, a)
        # With 15 A, Na2Te was 0.4 % off.
        reach = SEMICONDUCTOR_REACH_A if single == "Te" else IONIC_REACH_A
        found.append(_crystal(f"{double}2{single}", structure, reach))
    for metal, other, a in (("Sr", "Br", 7.30), ("Ca", "H", 5.40), ("Sr", "H", 5.75), ("Ca", "Cl", 6.70)):
        found.append(_crystal(f"{metal}{other}2", fluorite("fluorite", metal, other, a), IONIC_REACH_A))
    for alkali, filling, anion, a in (
        ("Li", "Zn", "As", 5.94), ("Li", "Mg", "Sb", 6.62), ("Li", "Cd", "P", 6.09), ("Li", "Cd", "As", 6.26),
        ("Li", "Be", "P", 5.45), ("Li", "Be", "N", 4.65), ("Li", "Be", "As", 5.70), ("Li", "Al", "Ge", 5.98),
        ("Li", "Ca", "N", 5.55), ("Na", "Zn", "As", 6.20), ("Na", "Mg", "P", 6.45), ("Na", "Mg", "N", 5.50),
        ("Li", "Ca", "P", 6.55), ("Na", "Mg", "As", 6.65), ("Li", "B", "Si", 5.10), ("K", "Mg", "P", 6.95),
    ):  # fmt: skip
        structure = half_heusler(alkali, filling, anion, a)
        found.append(_crystal(f"{alkali}{filling}{anion}", structure, SEMICONDUCTOR_REACH_A))
    # The structure of CaC2: pairs of carbon or oxygen along the axis of a body-centred cell.
    for metal, other, a, c, z in (
        ("Ca", "C", 3.89, 6.38, 0.407), ("Sr", "C", 4.11, 6.68, 0.409), ("Ba", "C", 4.40, 7.06, 0.411),
        ("Sr", "O", 3.56, 6.61, 0.388), ("Ba", "O", 3.81, 6.84, 0.393),
    ):  # fmt: skip
        lattice = 0.5 * np.array([[-a, a, c], [a, -a, c], [a, a, -c]])
        sites: dict[str, list[Site]] = {metal: [CORNER], other: [(z, z, 0.0), (1 - z, 1 - z, 0.0)]}
        found.append(_crystal(f"{metal}{other}2", ("calcium carbide", lattice, sites), IONIC_REACH_A))
    for metal, other, a, c, z in (
        ("Mg", "I", 4.15, 6.86, 0.25), ("Cd", "I", 4.24, 6.84, 0.25), ("Ca", "Br", 3.95, 6.55, 0.25),
        ("Cd", "Cl", 3.85, 5.90, 0.25), ("Hf", "S", 3.63, 5.85, 0.25), ("Zr", "Se", 3.77, 6.14, 0.257),
        ("Hf", "Se", 3.75, 6.16, 0.257), ("Pb", "Br", 4.35, 6.70, 0.26), ("Zn", "Cl", 3.75, 5.80, 0.25),
    ):  # fmt: skip
        found.append(_crystal(f"{metal}{other}2", cadmium_iodide(metal, other, a, c, z), IONIC_REACH_A))
    return found


def _of_more_atoms() -> list[Compound]:
    found = []
    for metal, a in (("Sc", 4.01), ("Ga", 3.85), ("In", 4.15), ("Y", 4.35)):
        sites: dict[str, list[Site]] = {metal: [CORNER], "F": [(0.5, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.5)]}
        found.append(_crystal(f"{metal}F3", ("rhenium trioxide", a * np.eye(3), sites), WIDE_REACH_A))
    for alkali, a in (("Li", 6.57), ("K", 8.49)):
        sites = {"Sb": [CORNER], alkali: [*QUARTERS, CENTRE]}
        found.append(_crystal(f"{alkali}3Sb", ("bismuth trifluoride", fcc(a), sites), IONIC_REACH_A))
    # In the second half, anion and cation are exchanged.
    for large, small, anion, a in (
        ("Cs", "Pb", "Br", 5.87), ("Cs", "Pb", "I", 6.29), ("Cs", "Sn", "Cl", 5.60), ("Cs", "Sn", "Br", 5.80),
        ("Cs", "Ge", "Cl", 5.43), ("Cs", "Ca", "Cl", 5.39), ("K", "Zn", "F", 4.055), ("Rb", "Cd", "F", 4.40),
        ("Cs", "Sr", "F", 4.75), ("Rb", "Mg", "F", 4.10), ("Ca", "Si", "O", 3.57), ("Ba", "Sn", "O", 4.117),
        ("Sr", "Sn", "O", 4.03), ("Pb", "Ti", "O", 3.97), ("Sr", "Hf", "O", 4.10), ("Y", "Al", "O", 3.68),
        ("Sc", "Al", "O", 3.60), ("Ba", "Li", "H", 4.02), ("Sr", "Li", "H", 3.83), ("Cs", "Ca", "H", 4.62),
        ("K", "Mg", "H", 4.03), ("Cl", "O", "Li", 3.91), ("Br", "O", "Li", 4.02), ("Cl", "O", "Na", 4.50),
        ("As", "N", "Mg", 4.22), ("P", "N", "Ca", 4.73), ("As", "N", "Ca", 4.76),
    ):  # fmt: skip
        inverse = small in ("O", "N")
        formula = f"{anion}3{small}{large}" if inverse else f"{large}{small}{anion}3"
        kind = "inverse perovskite" if inverse else "perovskite"
        reach = SEMICONDUCTOR_REACH_A if small == "N" else WIDE_REACH_A
        found.append(_crystal(formula, perovskite(kind, large, small, anion, a), reach))
    for metal, halogen, a, c, z, w in (
        ("Ba", "Br", 4.51, 7.44, 0.191, 0.650), ("Sr", "Br", 4.22, 7.34, 0.184, 0.644),
        ("Pb", "Cl", 4.11, 7.22, 0.2058, 0.6497),
    ):  # fmt: skip
        found.append(_crystal(f"{metal}F{halogen}", matlockite(metal, halogen, a, c, z, w), WIDE_REACH_A))
    for single, double, a, c, x in (("Mg", "H", 4.52, 3.02, 0.306), ("Ca", "Br", 6.55, 4.34, 0.31)):
        found.append(_crystal(f"{single}{double}2", rutile(single, double, a, c, x), WIDE_REACH_A))
    for one, two, anion, a, c, z, w in (
        ("Mg", "Mg", "Sb", 4.57, 7.23, 0.63, 0.228), ("Ca", "Mg", "P", 4.28, 6.83, 0.63, 0.245),
    ):  # fmt: skip
        between: list[Site] = [(1 / 3, 2 / 3, z), (2 / 3, 1 / 3, 1 - z)]
        sites = {one: [CORNER, *between]} if one == two else {one: [CORNER], two: between}
        sites[anion] = [(1 / 3, 2 / 3, w), (2 / 3, 1 / 3, 1 - w)]
        formula = f"{one}3{anion}2" if one == two else f"{one}{two}2{anion}2"
        structure = ("calcium dialuminide disilicide", hexagonal(a, c), sites)
        found.append(_crystal(formula, structure, IONIC_REACH_A))
    return [*found, _crystal("SnO", litharge("Sn", 3.80, 4.84, 0.238), WIDE_REACH_A)]


def more_compounds() -> list[Compound]:
    """Compounds of two to six atoms, smaller cells first."""
    return [*_binaries(), *_of_three_atoms(), *_of_more_atoms()]
