"""Structure types of the embedded set. Each function gives the name, the cell vectors `[3, 3]` in A, and the sites of
each element. Sides are in A, free coordinates are fractions of the cell."""

import numpy as np
from embedded_set_cells import Site, fcc, hexagonal

Structure = tuple[str, np.ndarray, dict[str, list[Site]]]
CORNER: Site = (0.0, 0.0, 0.0)
CENTRE: Site = (0.5, 0.5, 0.5)
SECOND_SITE: dict[str, Site] = {
    "diamond": (0.25, 0.25, 0.25), "zinc blende": (0.25, 0.25, 0.25), "rock salt": CENTRE, "caesium chloride": CENTRE,
}  # fmt: skip
QUARTERS: list[Site] = [(0.25, 0.25, 0.25), (0.75, 0.75, 0.75)]


def pair(name: str, one: str, two: str, a: float) -> Structure:
    """Two atoms; `name` is one of `SECOND_SITE`."""
    lattice = a * np.eye(3) if name == "caesium chloride" else fcc(a)
    second = SECOND_SITE[name]
    return name, lattice, {one: [CORNER, second]} if one == two else {one: [CORNER], two: [second]}


def fluorite(name: str, single: str, double: str, a: float) -> Structure:
    """Three atoms in fluorite, or in antifluorite, where the single atom is the anion."""
    return name, fcc(a), {single: [CORNER], double: QUARTERS}


def half_heusler(alkali: str, filling: str, anion: str, a: float) -> Structure:
    """Zinc blende of the last two elements; the first one fills the other holes."""
    return "half Heusler", fcc(a), {anion: [CORNER], alkali: [CENTRE], filling: [(0.25, 0.25, 0.25)]}


def cadmium_iodide(metal: str, other: str, a: float, c: float, z: float) -> Structure:
    """A layer of octahedra that share edges."""
    sites = {metal: [CORNER], other: [(1 / 3, 2 / 3, z), (2 / 3, 1 / 3, 1 - z)]}
    return "cadmium iodide", hexagonal(a, c), sites


def perovskite(name: str, large: str, small: str, faces: str, a: float) -> Structure:
    """Five atoms in a cube. In an inverse perovskite the small atom is the anion."""
    on_faces: list[Site] = [(0.5, 0.5, 0.0), (0.5, 0.0, 0.5), (0.0, 0.5, 0.5)]
    return name, a * np.eye(3), {large: [CORNER], small: [CENTRE], faces: on_faces}


def matlockite(metal: str, halogen: str, a: float, c: float, z: float, w: float) -> Structure:
    """PbFCl: a square layer of fluorine between two layers of each other element."""
    sites: dict[str, list[Site]] = {
        "F": [CORNER, (0.5, 0.5, 0.0)],
        metal: [(0.0, 0.5, z), (0.5, 0.0, 1 - z)],
        halogen: [(0.0, 0.5, w), (0.5, 0.0, 1 - w)],
    }
    return "matlockite", np.diag([a, a, c]), sites


def rutile(single: str, double: str, a: float, c: float, x: float) -> Structure:
    """Six atoms; `x` is the free coordinate of the double element."""
    octahedra = [(x, x, 0.0), (1 - x, 1 - x, 0.0), (0.5 + x, 0.5 - x, 0.5), (0.5 - x, 0.5 + x, 0.5)]
    return "rutile", np.diag([a, a, c]), {single: [CORNER, CENTRE], double: octahedra}


def litharge(metal: str, a: float, c: float, z: float) -> Structure:
    """A square layer of oxygen with the metal alternately on either side."""
    sites = {"O": [CORNER, (0.5, 0.5, 0.0)], metal: [(0.0, 0.5, z), (0.5, 0.0, 1 - z)]}
    return "litharge", np.diag([a, a, c]), sites
