"""The cells of the embedded data set: their crystals, geometries and settings.

Lattice constants are rounded literature values: a density 1 % away from equilibrium serves as well. Cut-offs depend on
the elements (`embedded_set_cells.py`), meshes on the kind of compound. Denser meshes change densities by 0.01 to 0.4 %
NMAE, see `convergence` in the index of the data set. Mostly insulators and semiconductors.
"""

import numpy as np
from embedded_set_cells import (
    COARSE_FCC_MESH,
    COARSE_MESH,
    FINE_FCC_MESH,
    WURTZITE_MESH,
    CellRecipe,
    Compound,
    binary,
    cell_of,
    fcc,
    fluorite,
    hexagonal,
    perovskite,
    rhombohedral,
    rutile,
    turned,
    wurtzite,
)
from embedded_set_covalent import covalent_compounds
from embedded_set_further import further_compounds
from embedded_set_more import more_compounds
from embedded_set_ternary import ternary_compounds
from embedded_set_unlike import unlike_compounds


def _silicon_cube() -> Compound:
    corner = [(0.0, 0.0, 0.0), (0.0, 0.5, 0.5), (0.5, 0.0, 0.5), (0.5, 0.5, 0.0)]
    sites = corner + [(x + 0.25, y + 0.25, z + 0.25) for x, y, z in corner]
    atoms = tuple(("Si", site) for site in sites)
    return Compound("Si", "diamond, cubic cell", 5.431 * np.eye(3), atoms, (4, 4, 4), (0, 0, 0), ("rattled",))


def _special_compounds() -> list[Compound]:
    al_ga_as = (
        ("Al", (0.0, 0.0, 0.0)), ("Ga", (0.5, 0.5, 0.5)),
        ("As", (0.5, 0.0, 0.25)), ("As", (0.0, 0.5, 0.75)),
    )  # fmt: skip
    a_tetragonal = 5.657 / np.sqrt(2)
    layered = (
        ("B", (1 / 3, 2 / 3, 0.25)), ("N", (2 / 3, 1 / 3, 0.25)),
        ("B", (2 / 3, 1 / 3, 0.75)), ("N", (1 / 3, 2 / 3, 0.75)),
    )  # fmt: skip
    tetragonal = np.diag([a_tetragonal, a_tetragonal, 5.657])
    return [
        _silicon_cube(),
        Compound("AlGaAs2", "copper-gold ordered zinc blende", tetragonal, al_ga_as, *WURTZITE_MESH, ("ideal",)),
        perovskite(3.905, "Sr", "Ti", "O", "SrTiO3", ("ideal",)),
        rutile(4.18, 2.667, 0.3065, "Si", "O", "SiO2", ("ideal", "sheared")),
        Compound("BN", "layered hexagonal", hexagonal(2.504, 6.66), layered, (6, 6, 2), (0, 0, 0), ("ideal",)),
    ]


def _more_nitrides_and_oxides() -> list[Compound]:
    """Compounds of elements that few others contain. In the first 28 training compounds (24 elements) N and Sr were in
    one, Mg and O in two, and the held-out AlN, MgO and SrF2 had the largest errors."""
    ideal, fine, ionic = ("ideal",), FINE_FCC_MESH, COARSE_FCC_MESH
    two = ("ideal", "sheared")
    n, o, f, s, li, mg, sr = "N", "O", "F", "S", "Li", "Mg", "Sr"
    half_filled = ((n, (0.0, 0.0, 0.0)), (li, (0.25, 0.25, 0.25)), (mg, (0.75, 0.75, 0.75)))
    lithium_nitride = (
        (n, (0.0, 0.0, 0.0)), (li, (0.0, 0.0, 0.5)), (li, (1 / 3, 2 / 3, 0.0)), (li, (2 / 3, 1 / 3, 0.0)),
    )  # fmt: skip
    u, v = 0.352, 0.556
    corundum = (
        *(("Al", (x, x, x)) for x in (u, 1 - u, 0.5 + u, 0.5 - u)),
        *((o, site) for site in (*turned(v, 1.5 - v, 0.25), *turned(1 - v, v - 0.5, 0.75))),
    )
    al_f3 = (("Al", (0.0, 0.0, 0.0)), *((f, site) for site in turned(0.5, 0.0, 0.0)))
    cristobalite = (
        ("Si", (0.0, 0.0, 0.0)), ("Si", (0.25, 0.25, 0.25)), (o, (0.125, 0.125, 0.125)),
        (o, (0.625, 0.125, 0.125)), (o, (0.125, 0.625, 0.125)), (o, (0.125, 0.125, 0.625)),
    )  # fmt: skip
    return [
        binary("zinc blende", 4.50, "Ga", n, ("ideal", "expanded", "sheared"), fine),
        wurtzite(2.55, 4.20, 0.375, "B", n, two),
        Compound("LiMgN", "half Heusler", fcc(4.955), half_filled, *ionic, two),
        wurtzite(3.189, 5.185, 0.377, "Ga", n, two),
        Compound("Li3N", "lithium nitride", hexagonal(3.648, 3.875), lithium_nitride, (4, 4, 4), (0, 0, 0), two),
        binary("rock salt", 4.23, "Ga", n, ideal, fine),
        wurtzite(2.698, 4.377, 0.378, "Be", o, ideal),
        binary("rock salt", 4.81, "Ca", o, two, ionic),
        binary("rock salt", 5.16, sr, o, two, ionic),
        Compound("Al2O3", "corundum", rhombohedral(5.128, 55.28), corundum, *COARSE_MESH, ideal),
        fluorite("antifluorite", 4.619, o, li, "Li2O", two, ionic),
        fluorite("antifluorite", 5.55, o, "Na", "Na2O", ideal, ionic),
        perovskite(3.50, mg, "Si", o, "MgSiO3", two),
        rutile(4.62, 3.05, 0.303, mg, f, "MgF2", two),
        Compound("AlF3", "rhenium trioxide", 3.58 * np.eye(3), al_f3, *COARSE_MESH, two),
        perovskite(3.99, "K", mg, f, "KMgF3", ideal),
        rutile(4.594, 2.959, 0.305, "Ti", o, "TiO2", ideal),
        rutile(4.395, 2.860, 0.306, "Ge", o, "GeO2", ideal),
        Compound("SiO2", "cristobalite", fcc(7.16), cristobalite, *ionic, ideal),
        fluorite("fluorite", 6.20, "Ba", f, "BaF2", ideal, ionic),
        fluorite("fluorite", 6.98, sr, "Cl", "SrCl2", two, ionic),
        binary("rock salt", 6.02, sr, s, two, ionic),
        binary("rock salt", 5.46, mg, "Se", two, fine),
        binary("rock salt", 5.69, "Ca", s, ideal, ionic),
        binary("rock salt", 5.52, "Ba", o, ideal, ionic),
        binary("zinc blende", 3.80, "Be", o, ideal, ionic),
        perovskite(4.00, "Ba", "Ti", o, "BaTiO3", ideal),
        binary("rock salt", 5.13, li, "Cl", ideal, ionic),
        binary("rock salt", 5.35, "K", f, ideal, ionic),
        binary("zinc blende", 6.42, mg, "Te", ideal, fine),
        binary("zinc blende", 4.777, "B", "As", ideal, fine),
    ]


def compounds() -> list[Compound]:
    """Every compound in every structure type: training compounds and held-out ones (`split="validation"`)."""
    ideal, squeezed, wide = "ideal", "compressed", "expanded"
    fine, ionic = FINE_FCC_MESH, COARSE_FCC_MESH
    one, two = (ideal, "sheared"), (ideal, squeezed, "sheared")
    return [
        binary("diamond", 5.431, "Si", "Si", (ideal, wide, "sheared"), fine),
        binary("rock salt", 5.64, "Na", "Cl", (ideal, wide, "sheared"), ionic),
        binary("zinc blende", 5.653, "Ga", "As", two, fine),
        binary("zinc blende", 5.451, "Ga", "P", two, fine, "validation"),
        binary("rock salt", 4.21, "Mg", "O", (ideal, wide, "sheared"), fine, "validation"),
        fluorite("fluorite", 5.463, "Ca", "F", "CaF2", one, ionic),
        fluorite("antifluorite", 6.35, "Si", "Mg", "Mg2Si", two, fine),
        wurtzite(3.112, 4.982, 0.382, "Al", "N", one, "validation"),
        binary("caesium chloride", 4.12, "Cs", "Cl", two, COARSE_MESH),
        binary("zinc blende", 3.615, "B", "N", two, ionic),
        binary("rock salt", 5.20, "Mg", "S", (ideal, wide, "sheared"), fine),
        binary("diamond", 3.567, "C", "C", two, fine),
        binary("rock salt", 4.03, "Li", "F", one, ionic),
        _special_compounds()[2],
        binary("zinc blende", 5.46, "Al", "P", two, fine),
        binary("zinc blende", 4.36, "Si", "C", one, fine),
        fluorite("fluorite", 5.80, "Sr", "F", "SrF2", one, ionic, "validation"),
        wurtzite(3.081, 5.045, 0.376, "Si", "C", (ideal,)),
        binary("rock salt", 4.083, "Li", "H", (ideal,), ionic),
        _special_compounds()[0],
        _special_compounds()[3],
        binary("zinc blende", 5.661, "Al", "As", one, fine),
        binary("zinc blende", 4.538, "B", "P", one, fine),
        binary("rock salt", 4.63, "Na", "F", (ideal,), ionic),
        fluorite("antifluorite", 6.53, "S", "Na", "Na2S", one, ionic),
        binary("zinc blende", 5.87, "In", "P", one, fine),
        binary("caesium chloride", 4.29, "Cs", "Br", (ideal,), COARSE_MESH),
        _special_compounds()[1],
        _special_compounds()[4],
        binary("zinc blende", 5.54, "Si", "Ge", one, fine),
        binary("rock salt", 6.29, "K", "Cl", (ideal,), ionic),
        binary("zinc blende", 6.136, "Al", "Sb", one, fine),
        *_more_nitrides_and_oxides(),
    ]


def cell_recipes() -> list[CellRecipe]:
    """Every cell of the data set in the order of computation: the cells that add most for the least time come first."""
    further, by_pw_alone = further_compounds(), [*more_compounds(), *ternary_compounds(), *covalent_compounds()]
    return [
        *(cell_of(compound, variant) for compound in compounds() for variant in compound.variants),
        *(cell_of(compound, compound.variants[0]) for compound in further),
        *(cell_of(compound, compound.variants[0]) for compound in unlike_compounds()),
        *(cell_of(compound, each) for compound in [*further, *unlike_compounds()] for each in compound.variants[1:]),
        *(cell_of(compound, each) for compound in by_pw_alone for each in compound.variants),
    ]
