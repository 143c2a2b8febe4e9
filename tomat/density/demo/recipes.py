"""The cells of the embedded data set: which crystals, at which geometry, with which settings.

The index of the data set says it, and is the one place that does: a set is computed again from it.

Lattice constants are literature values rounded to what the purpose needs: a density is a density also 1 % away from
equilibrium. Cut-offs and k-meshes were chosen for a measured error of about 1 % NMAE; the measurements stand in the
index under `convergence`. Insulators and semiconductors only, at fixed occupations.

No point of a k-mesh is its own mirror image, so that all weights stay equal. With unequal weights (3x3x3 with Gamma)
the minimiser had not settled after 160 steps on MgO and NaCl; with equal ones it needs 20 to 60. MgO at 2x2x2 was 1.8 %
NMAE from 4x4x4, which is why it and MgS have the fine mesh.
"""

from dataclasses import dataclass

from tomat.density.demo.embedded import demo_index


@dataclass(frozen=True)
class Distortion:
    """What makes a cell differ from its compound's ideal one."""

    volume_factor: float = 1.0
    """Volume over the ideal volume."""
    strain: tuple[float, float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    """Small symmetric strain xx, yy, zz, yz, xz, xy (engineering shear halved), after the volume change."""
    rattle_a: float = 0.0
    """Standard deviation of each Cartesian displacement of each atom, A."""
    rattle_seed: int = 0
    """The displacements are `rattle_a` times normal numbers of `numpy.random.default_rng([rattle_seed, *compound,
    *structure_type])`, the two names as bytes, so that cells of one variant do not share theirs."""


@dataclass(frozen=True)
class CellRecipe:
    """One calculation, fully determined."""

    material_id: str
    compound: str
    structure_type: str
    split: str
    variant: str
    lattice_a: tuple[tuple[float, float, float], ...]
    """Rows a, b, c in A, rounded to 1e-9 A, which moves no density, so that the recipe in the index is the recipe."""
    symbols: tuple[str, ...]
    valence: tuple[int, ...]
    """Valence electrons of each atom's pseudopotential."""
    frac_coords: tuple[tuple[float, float, float], ...]
    e_cut_hartree: float
    k_mesh: tuple[int, int, int]
    k_shift: tuple[int, int, int]
    """Per axis 0 or 1: the mesh is moved by half a step."""
    distortion: Distortion


def cell_recipes() -> list[CellRecipe]:
    """Every cell of the data set, in the order they are computed; those that did not converge, last."""
    import draccus

    index = demo_index()
    return [draccus.decode(CellRecipe, entry["recipe"]) for entry in (*index["cells"], *index["discarded"])]
