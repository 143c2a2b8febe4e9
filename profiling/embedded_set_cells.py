"""The definition of a cell of the embedded data set: a compound, its distortion, the settings of its calculation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Site = tuple[float, float, float]
"""Fractional coordinates."""
Atoms = tuple[tuple[str, Site], ...]
"""Chemical symbol, fractional coordinates."""


VALENCES: dict[str, int] = {
    "H": 1, "He": 2, "Li": 3, "Be": 4, "B": 3, "C": 4, "N": 5, "O": 6, "F": 7, "Na": 1, "Mg": 2, "Al": 3, "Si": 4,
    "P": 5, "S": 6, "Cl": 7, "Ar": 8, "K": 9, "Ca": 10, "Sc": 11, "Ti": 12, "Cu": 11, "Zn": 12, "Ga": 3, "Ge": 4,
    "As": 5, "Se": 6, "Br": 7, "Rb": 9, "Sr": 10, "Y": 11, "Zr": 12, "Nb": 13, "Ag": 11, "Cd": 12, "In": 3, "Sn": 4,
    "Sb": 5, "Te": 6, "I": 7, "Cs": 9, "Ba": 10, "La": 11, "Hf": 12, "Ta": 13, "W": 14, "Au": 11, "Hg": 12, "Tl": 3,
    "Pb": 4, "Bi": 5,
}  # fmt: skip
"""Element -> valence electrons of its pseudopotential."""
HARD_CUTOFF_HARTREE, LEAST_CUTOFF_HARTREE = 45.0, 25.0
_HARD = (
    "H", "He", "Li", "B", "C", "N", "O", "F", "Cl", "Ar", "K", "Ca", "Sc", "Ti", "Rb", "Sr", "Y", "Zr", "Nb", "Ag",
    "Cd", "La", "Hf", "Ta", "W", "Au", "Hg",
)  # fmt: skip
CUTOFF_HARTREE: dict[str, float] = {
    **dict.fromkeys(_HARD, HARD_CUTOFF_HARTREE), "Be": 50.0, "Cu": 60.0, "Zn": 60.0,
}  # fmt: skip
"""Cut-offs of elements that need more than the least. A cell has the largest cut-off of its elements. A density depends
on its cut-off (NMAE of MgO from 45 to 55 hartree 1.5 %, of SrF2 from 40 to 45 1.4 %, of LiCl from 25 to 45 2.9 %). With
several cut-offs for one element, one structure had several densities, which was most of a model's error until
2026-11-29. Compounds of other elements change by 0.02 to 0.4 % from 25 to 45 hartree (Mg2Si, InP, AlAs, PbS, TlBr, CsI,
MgS, BaTe, BaS). None is converged: from 45 to 80 hartree BN and GaN change by 0.8 and CaO by 1.1 %, from 45 to 110 MgO
by 1.8 and SrF2 by 2.6 %. From 45 to 60 BeTe changes by 1.7 and ZnS by 5.6 %, so their metals have more."""


@dataclass(frozen=True)
class Distortion:
    """The difference of a cell from its compound's ideal cell."""

    volume_factor: float = 1.0
    """Volume divided by the ideal volume."""
    strain: tuple[float, float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    """Small symmetric strain xx, yy, zz, yz, xz, xy (engineering shear halved), after the volume change."""
    rattle_a: float = 0.0
    """Standard deviation of each Cartesian displacement of each atom, A."""
    rattle_seed: int = 0


VARIANTS: dict[str, Distortion] = {
    "ideal": Distortion(),
    "compressed": Distortion(volume_factor=0.95, rattle_a=0.03, rattle_seed=11),
    "expanded": Distortion(volume_factor=1.05, rattle_a=0.05, rattle_seed=12),
    "sheared": Distortion(strain=(0.015, -0.01, 0.0, 0.02, -0.015, 0.01), rattle_a=0.05, rattle_seed=13),
    "rattled": Distortion(volume_factor=1.01, strain=(0.0, 0.0, 0.01, 0.0, 0.01, 0.0), rattle_a=0.08, rattle_seed=14),
}


@dataclass(frozen=True)
class Compound:
    """A crystal in one structure type, and the settings of its calculations."""

    formula: str
    structure_type: str
    lattice: np.ndarray
    atoms: Atoms
    k_mesh: tuple[int, int, int]
    k_shift: tuple[int, int, int]
    """For each axis 0, or 1 if the mesh is moved by half a step."""
    variants: tuple[str, ...]
    split: str = "train"
    group: str = "crystals"
    smearing_hartree: float = 0.0

    @property
    def e_cut_hartree(self) -> float:
        """The largest cut-off that one of its elements needs."""
        return max(CUTOFF_HARTREE.get(symbol, LEAST_CUTOFF_HARTREE) for symbol, _ in self.atoms)

    @property
    def engine(self) -> str:
        """The code that computes it: eminus for crystals with a shifted mesh (equal k-point weights), else pw.x."""
        return "eminus" if self.group == "crystals" and any(self.k_shift) else "pw.x"


@dataclass(frozen=True)
class CellRecipe:
    """One calculation, fully determined."""

    material_id: str
    compound: str
    structure_type: str
    split: str
    variant: str
    lattice_a: tuple[tuple[float, float, float], ...]
    symbols: tuple[str, ...]
    valence: tuple[int, ...]
    frac_coords: tuple[tuple[float, float, float], ...]
    e_cut_hartree: float
    k_mesh: tuple[int, int, int]
    k_shift: tuple[int, int, int]
    distortion: Distortion
    group: str
    """Group of cells that are trained on or evaluated together."""
    engine: str
    """`eminus` or `pw.x`."""
    smearing_hartree: float
    """Width of a Gaussian smearing of the occupations in pw.x; 0: fixed occupations."""


def fcc(a: float) -> np.ndarray:
    """Primitive vectors of a face-centred cube of side `a`."""
    return a / 2 * np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])


def hexagonal(a: float, c: float) -> np.ndarray:
    """Vectors of a hexagonal cell, 120 degrees between the first two."""
    return np.array([[a, 0.0, 0.0], [-a / 2, a * np.sqrt(3) / 2, 0.0], [0.0, 0.0, c]])


def rhombohedral(a: float, alpha_degrees: float) -> np.ndarray:
    """Three vectors of length `a` with the same angle between each two, around the z axis."""
    half = np.deg2rad(alpha_degrees) / 2
    radius_a = 2 * a * np.sin(half) / np.sqrt(3)
    height_a = np.sqrt(a**2 - radius_a**2)
    turns = 2 * np.pi * np.arange(3) / 3
    return np.column_stack([radius_a * np.cos(turns), radius_a * np.sin(turns), np.full(3, height_a)])


def turned(x: float, y: float, z: float) -> tuple[tuple[float, float, float], ...]:
    """A site and its two images under a threefold axis along [111]."""
    return ((x, y, z), (z, x, y), (y, z, x))


Mesh = tuple[tuple[int, int, int], tuple[int, int, int]]

# Primitive cells of face-centred lattices. A mesh with Gamma has the symmetry of its lattice. One moved by half a step
# does not, and gave densities that broke their crystal's symmetry by up to 1.3 % NMAE. From 10x10x10 points, 4x4x4
# differ by 0.77 % for Si, 0.07 % for MgO and 0.02 % for NaCl, and 6x6x6 by 0.15 % for Si; from 8x8x8, 6x6x6 differ by
# 0.09 % for GaP. So the fine mesh is for gaps below 3 eV, and the coarse one for wider gaps.
FINE_FCC_MESH: Mesh = ((6, 6, 6), (0, 0, 0))
COARSE_FCC_MESH: Mesh = ((4, 4, 4), (0, 0, 0))
# For the lattices below, the moved meshes have the symmetry. None of their points is its own mirror image, so all
# weights are equal. With unequal weights (3x3x3 with Gamma) eminus's minimiser had not settled after 160 steps on MgO
# and NaCl; with equal weights it needs 20 to 60.
COARSE_MESH: Mesh = ((2, 2, 2), (1, 1, 1))
# Until 2026-11-29 wurtzite had 3x3x2 points, moved along the axis, and perovskite had the coarse mesh. The former
# differs by 0.4 (AlN), 0.5 (BN), 0.6 (GaN) and 0.9 % (SiC) from 6x6x4, the latter by 0.5 % (SrTiO3) from 4x4x4.
WURTZITE_MESH: Mesh = ((6, 6, 4), (0, 0, 0))
PEROVSKITE_MESH: Mesh = ((4, 4, 4), (0, 0, 0))


def binary(
    structure: str, a: float, one: str, two: str, variants: Sequence[str],
    mesh: Mesh, split: str = "train",
) -> Compound:  # fmt: skip
    """Two atoms: diamond, zinc blende, rock salt or caesium chloride."""
    quarter = structure in ("diamond", "zinc blende")
    second = (0.25, 0.25, 0.25) if quarter else (0.5, 0.5, 0.5)
    lattice = a * np.eye(3) if structure == "caesium chloride" else fcc(a)
    formula = one if one == two else one + two
    atoms = ((one, (0.0, 0.0, 0.0)), (two, second))
    return Compound(formula, structure, lattice, atoms, *mesh, tuple(variants), split)


def fluorite(
    structure: str, a: float, single: str, double: str, formula: str, variants: Sequence[str],
    mesh: Mesh, split: str = "train",
) -> Compound:  # fmt: skip
    """Three atoms, one of them in a cube of the others."""
    atoms = ((single, (0.0, 0.0, 0.0)), (double, (0.25, 0.25, 0.25)), (double, (0.75, 0.75, 0.75)))
    return Compound(formula, structure, fcc(a), atoms, *mesh, tuple(variants), split)


def wurtzite(
    a: float,
    c: float,
    u: float,
    one: str,
    two: str,
    variants: Sequence[str],
    split: str = "train",
) -> Compound:
    """Four atoms; `u` is the height of the second element above the first."""
    third, two_thirds = 1 / 3, 2 / 3
    atoms = (
        (one, (third, two_thirds, 0.0)), (one, (two_thirds, third, 0.5)),
        (two, (third, two_thirds, u)), (two, (two_thirds, third, 0.5 + u)),
    )  # fmt: skip
    return Compound(one + two, "wurtzite", hexagonal(a, c), atoms, *WURTZITE_MESH, tuple(variants), split)


def rutile(a: float, c: float, x: float, single: str, double: str, formula: str, variants: Sequence[str]) -> Compound:
    """Six atoms; `x` places the double one."""
    atoms = (
        (single, (0.0, 0.0, 0.0)), (single, (0.5, 0.5, 0.5)), (double, (x, x, 0.0)), (double, (1 - x, 1 - x, 0.0)),
        (double, (0.5 + x, 0.5 - x, 0.5)), (double, (0.5 - x, 0.5 + x, 0.5)),
    )  # fmt: skip
    return Compound(formula, "rutile", np.diag([a, a, c]), atoms, (2, 2, 3), (1, 1, 1), tuple(variants))


def perovskite(a: float, large: str, small: str, anion: str, formula: str, variants: Sequence[str]) -> Compound:
    """Five atoms in a cube."""
    atoms = (
        (large, (0.0, 0.0, 0.0)), (small, (0.5, 0.5, 0.5)),
        (anion, (0.5, 0.5, 0.0)), (anion, (0.5, 0.0, 0.5)), (anion, (0.0, 0.5, 0.5)),
    )  # fmt: skip
    return Compound(formula, "perovskite", a * np.eye(3), atoms, *PEROVSKITE_MESH, tuple(variants))


def cell_of(compound: Compound, variant: str) -> CellRecipe:
    """The calculation of one variant of a compound."""
    distortion = VARIANTS[variant]
    xx, yy, zz, yz, xz, xy = distortion.strain
    strain = np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])
    lattice = compound.lattice * distortion.volume_factor ** (1 / 3) @ (np.eye(3) + strain)
    ideal_coords = np.array([site for _, site in compound.atoms])
    # Each compound has its own seed, so that cells of one variant do not share their displacements.
    seed = [distortion.rattle_seed, *compound.formula.encode(), *compound.structure_type.encode()]
    displacement_a = np.random.default_rng(seed).normal(0.0, 1.0, ideal_coords.shape) * distortion.rattle_a
    coords = np.mod(ideal_coords + displacement_a @ np.linalg.inv(lattice), 1.0)
    name = re.sub(r"[^A-Za-z0-9]+", "-", compound.structure_type)
    return CellRecipe(
        material_id=f"{compound.formula}-{name}-{variant}",
        compound=compound.formula,
        structure_type=compound.structure_type,
        split=compound.split,
        variant=variant,
        # Rounded, so that the recipe in the index is exact. 1e-9 A does not change a density.
        lattice_a=tuple((x, y, z) for x, y, z in np.round(lattice, 9).tolist()),
        symbols=tuple(symbol for symbol, _ in compound.atoms),
        valence=tuple(VALENCES[symbol] for symbol, _ in compound.atoms),
        frac_coords=tuple((x, y, z) for x, y, z in np.round(coords, 9).tolist()),
        e_cut_hartree=compound.e_cut_hartree,
        k_mesh=compound.k_mesh,
        k_shift=compound.k_shift,
        distortion=distortion,
        group=compound.group,
        engine=compound.engine,
        smearing_hartree=compound.smearing_hartree,
    )
