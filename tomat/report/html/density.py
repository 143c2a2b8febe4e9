"""Densities in a page: surfaces of equal density, slices one can drag, atoms and cell; a reference beside a prediction.

The page holds the values themselves, on a coarser grid where the cell is large, and draws from them: the surfaces by
marching tetrahedra (`assets/cell_geometry.js`), since plotly's own `isosurface` needs a rectangular grid and most cells
are none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.layout import PREDICTED_DENSITY, REFERENCE_DENSITY
from tomat.base.report.formats import number, share, significant
from tomat.base.report.model import Column, Note, Section, Table
from tomat.data.density.elements import covalent_radius_a, symbol_of
from tomat.data.density.grid import DensityGrid
from tomat.data.density.io import open_density
from tomat.data.density.rules import ReadRules
from tomat.predict.evaluation.difference import compare_densities
from tomat.predict.evaluation.metrics import nmae
from tomat.predict.evaluation.picture import NEAR_PLANE_A, most_structured_plane
from tomat.report.html.document import details, json_script, typed
from tomat.report.html.elements import rendered

MOST_VOXELS = 340_000
"""Of all grids of a page together: float32 in base 64 are 5.3 bytes each, 1.8 of the page's 8 MB."""

LOOKED_AT = ReadRules(accept=("fractional_electrons", "electrons", "atoms"))
"""How densities of a page are read: a prediction whose electrons nothing settles has no whole number of them, and one
that is bad is looked at too; the page says how many electrons there are."""

NOTHING_KEPT = (
    f"The run's folder holds no densities: `tomat train` leaves {REFERENCE_DENSITY} and {PREDICTED_DENSITY} of "
    "the first held-out material where it predicts whole cells and draws pictures (evaluation.free_running, "
    "evaluation.picture). "
    "Predict one with `tomat predict --run RUN`, and give the output to `tomat page`."
)


PANELS = {
    "density": "Density",
    "reference": "Reference",
    "prediction": "Prediction",
    "difference": "Prediction minus reference",
}


@dataclass(frozen=True, eq=False)
class ShownDensity:
    """A density, and beside it the reference of the same crystal, on its own grid."""

    name: str
    density: DensityGrid
    reference: DensityGrid | None = None
    note: str = ""

    @property
    def grids(self) -> list[DensityGrid]:
        """Those that the page holds."""
        return [self.density] if self.reference is None else [self.density, self.reference]


def beside(name: str, density: DensityGrid, reference: DensityGrid | None) -> ShownDensity:
    """A density with its reference, both on one grid."""
    if reference is None:
        return ShownDensity(name, density)
    compared = compare_densities(reference, density)
    note = ""
    if compared.refined:
        sides = [_sides(grid.grid_shape) for grid in (density, reference)]
        note = f"The grids differ, {sides[0]} and {sides[1]}: both are interpolated by their Fourier series."
    return ShownDensity(name, compared.other, compared.reference, note)


def kept_density_section(run_url: str) -> Section:
    """The held-out material whose density and prediction a run has kept."""
    heading = "A held-out density"
    folder = Path(run_url)
    paths = [folder / REFERENCE_DENSITY, folder / PREDICTED_DENSITY]
    if "://" in run_url:
        return Section(heading, ("Densities of a run in a bucket are not fetched; give its local folder.",))
    if not all(path.is_file() for path in paths):
        return Section(heading, (NOTHING_KEPT,))
    reference, prediction = (open_density(path, rules=LOOKED_AT) for path in paths)
    shown = beside(f"{reference.formula}, held out of the training", prediction, reference)
    return Section(heading, density_parts([shown]))


def density_parts(shown: Sequence[ShownDensity]) -> list[Any]:
    """Figures of densities, one at a time where there are several, with what they say in tables."""
    if not shown:
        raise TomatError("no density to show; give a folder or a file that holds one.")
    budget = MOST_VOXELS // sum(len(one.grids) for one in shown)
    items, notes = [], []
    for one in shown:
        thinned = [coarser(grid.rho, budget) for grid in one.grids]
        items.append(_item(one, thinned))
        if thinned[0].shape != one.density.grid_shape:
            notes.append(
                f"{one.name}: drawn on {_sides(thinned[0].shape)} of {_sides(one.density.grid_shape)} points, "
                f"1 of {one.density.rho.size / thinned[0].size:.3g} (linear interpolation); figures are of all points."
            )
        notes += [f"{one.name}: {one.note}"] if one.note else []
    compared = any(one.reference is not None for one in shown)
    panels = ("reference", "prediction", "difference") if compared else ("density",)
    names = [one.name for one in shown]
    viewer = rendered("density.html", names=names, panels={name: PANELS[name] for name in panels}, near=NEAR_PLANE_A)
    return [
        _figures_table(shown),
        viewer,
        json_script("density-data", {"items": items, "near_plane_a": NEAR_PLANE_A}),
        *map(Note, notes),
        details("Cells and atoms as tables", *(table for one in shown for table in _crystal_tables(one))),
    ]


def coarser(values: np.ndarray, most: int) -> np.ndarray:
    """A periodic grid `[nx, ny, nz]` of at most so many points (8 at least), by linear interpolation, as float32. Point
    `i` of `m` along a side stands where point `i n / m` of `n` stood, as voxels do in the cell."""
    if values.size <= most:
        return np.asarray(values, np.float32)
    factor = (values.size / most) ** (1 / 3)
    # A side of two points stays: then the others give way.
    while np.prod(sides := [max(min(side, 2), int(side / factor + 1e-9)) for side in values.shape]) > most:
        factor *= 1.02
    found = values.astype(np.float64)
    for axis, side in enumerate(sides):
        at = np.arange(side) * values.shape[axis] / side
        low = np.floor(at).astype(int)
        weight = (at - low).reshape([-1 if i == axis else 1 for i in range(3)])
        above = np.take(found, (low + 1) % values.shape[axis], axis)
        found = np.take(found, low, axis) * (1 - weight) + above * weight
    return found.astype(np.float32)


def _item(one: ShownDensity, thinned: Sequence[np.ndarray]) -> dict[str, Any]:
    """What the page's program is given of one density."""
    grid, shape = one.density, thinned[0].shape
    values = dict(zip(("density", "reference"), (typed(one.ravel()) for one in thinned), strict=False))
    numbers = grid.atomic_numbers.tolist()
    return {
        "name": one.name,
        "shape": list(shape),
        "plane": round(most_structured_plane(one.reference or grid) * shape[2] / grid.grid_shape[2]) % shape[2],
        "lattice": grid.lattice.tolist(),
        "values": values,
        "symbols": [symbol_of(z) for z in numbers],
        "radii_a": [covalent_radius_a(z) for z in numbers],
        "frac_coords": grid.frac_coords.tolist(),
    }


def _figures_table(shown: Sequence[ShownDensity]) -> Table:
    """Figures of every density, of all of its points."""
    columns = [*map(Column, ("material", "formula", "grid")), Column("electrons", number(4))]
    columns += [Column(f"{which} e/Å³", significant()) for which in ("smallest", "mean", "largest")]
    compared = any(one.reference is not None for one in shown)
    if compared:
        columns += [Column("electrons of the reference", number(4)), Column("its largest e/Å³", significant())]
        columns.append(Column("NMAE", share))
    rows: list[list[Any]] = []
    for one in shown:
        grid, other = one.density, one.reference
        low, high = float(grid.rho.min()), float(grid.rho.max())
        mean = grid.electron_count / grid.volume_a3
        rows.append([one.name, grid.formula, _sides(grid.grid_shape), grid.electron_count, low, mean, high])
        if other is not None:
            rows[-1] += [other.electron_count, float(other.rho.max()), nmae(grid.rho, other.rho)]
        elif compared:
            rows[-1] += [None] * 3
    return Table("Figures of all points of the grids", columns, rows)


def _crystal_tables(one: ShownDensity) -> list[Table]:
    grid = one.density
    lattice = [(name, *map(float, row)) for name, row in zip("abc", grid.lattice, strict=True)]
    sides = [Column("vector"), *(Column(f"{axis}, A", number(6)) for axis in "xyz")]
    atoms = [
        (place, symbol_of(z), *map(float, coords))
        for place, z, coords in zip(itertools.count(1), grid.atomic_numbers.tolist(), grid.frac_coords, strict=False)
    ]
    heads = [Column("atom", number(0)), Column("element"), *(Column(f"along {axis}", number(6)) for axis in "abc")]
    return [
        Table(f"Cell of {one.name}", sides, lattice),
        Table(f"Atoms of {one.name}, in shares of the cell", heads, atoms),
    ]


def _sides(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
