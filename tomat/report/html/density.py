"""Densities in a page: isosurfaces, slices that can be dragged, atoms and cell, with a reference beside a prediction.
Also the pages of a folder of `tomat predict` and of one density.

The page contains the density values, on a coarser grid where the cell is large, and draws from them. It computes the
surfaces by marching tetrahedra (`assets/cell_geometry.js`), because plotly's own `isosurface` needs a rectangular grid
and most cells are not rectangular.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.documents import is_figure
from tomat.base.errors import TomatError
from tomat.base.layout import PREDICTED_DENSITY, REFERENCE_DENSITY
from tomat.base.report.formats import number, share, significant
from tomat.base.report.model import Column, Facts, Note, Report, Section, Table
from tomat.data.density.elements import covalent_radius_a, symbol_of
from tomat.data.density.grid import DensityGrid
from tomat.data.density.io import find_densities, open_density
from tomat.data.density.rules import ReadRules
from tomat.predict.evaluation.difference import compare_densities
from tomat.predict.evaluation.metrics import nmae
from tomat.predict.inference.folder import AGAIN, LINES_FILE, read_line
from tomat.predict.inference.slices import NEAR_PLANE_A, most_structured_plane
from tomat.report.html.document import details, json_script, rendered, typed

MOST_VOXELS = 340_000
"""Most voxels of all grids of a page together: at 5.3 bytes for a float32 in base 64, 1.8 of the page's 8 MB."""

LOOKED_AT = ReadRules(accept=("fractional_electrons", "electrons", "atoms"))
"""Rules for reading the densities of a page. A prediction without a fixed electron count may hold any number of them,
and people want to look at bad predictions too. The page states the number of electrons."""

NOTHING_KEPT = (
    f"The run's folder holds no densities: `tomat train` writes {REFERENCE_DENSITY} and {PREDICTED_DENSITY} of "
    "the first held-out material if it predicts whole cells and draws pictures (evaluation.free_running, "
    "evaluation.picture). Predict one with `tomat predict --run RUN`, and give the output to `tomat page`."
)

MOST_SHOWN = 8
"""Most densities that a page of a folder draws. More of them would have too coarse a grid each."""
UNREADABLE = ("qe",)
"""Output formats of `tomat predict` that tomat does not read back."""


@dataclass(frozen=True, eq=False)
class ShownDensity:
    name: str
    density: DensityGrid
    reference: DensityGrid | None = None
    note: str = ""

    @property
    def grids(self) -> list[DensityGrid]:
        return [self.density] if self.reference is None else [self.density, self.reference]


def beside(name: str, density: DensityGrid, reference: DensityGrid | None) -> ShownDensity:
    """A density with its reference, both on the same grid."""
    if reference is None:
        return ShownDensity(name, density)
    compared = compare_densities(reference, density)
    sides = " and ".join(_sides(grid.grid_shape) for grid in (density, reference))
    note = f"The grids differ, {sides}: both are interpolated by their Fourier series." if compared.refined else ""
    return ShownDensity(name, compared.other, compared.reference, note)


def kept_density_section(run_url: str) -> Section:
    paths = [Path(run_url) / name for name in (REFERENCE_DENSITY, PREDICTED_DENSITY)]
    parts: list[Any] = [NOTHING_KEPT]
    if "://" in run_url:
        parts = ["Densities of a run in a bucket are not fetched; give its local folder."]
    elif all(path.is_file() for path in paths):
        try:
            reference, prediction = (open_density(path, rules=LOOKED_AT) for path in paths)
            parts = density_parts([beside(f"{reference.formula}, held out", prediction, reference)])
        except TomatError as error:  # a prediction may hold any number of electrons
            parts = [f"Not drawn: {error}"]
    return Section("A held-out density", parts)


def density_parts(shown: Sequence[ShownDensity]) -> list[Any]:
    if not shown:
        raise TomatError("no density to show; give a folder or a file that holds one.")
    budget = MOST_VOXELS // sum(len(one.grids) for one in shown)
    items, notes, crystals = [], [], []
    sides = [Column("vector"), *(Column(f"{axis}, A", number(6)) for axis in "xyz")]
    heads = [Column("atom", number(0)), Column("element"), *(Column(f"along {axis}", number(6)) for axis in "abc")]
    for one in shown:
        thinned = [coarser(grid.rho, budget) for grid in one.grids]
        items.append(_item(one, thinned))
        if thinned[0].shape != one.density.grid_shape:
            notes.append(
                f"{one.name}: drawn on {_sides(thinned[0].shape)} of {_sides(one.density.grid_shape)} points, "
                f"1 of {one.density.rho.size / thinned[0].size:.3g} (linear interpolation); figures are of all points."
            )
        notes += [f"{one.name}: {one.note}"] if one.note else []
        lattice = [(name, *map(float, row)) for name, row in zip("abc", one.density.lattice, strict=True)]
        both = zip(one.density.atomic_numbers.tolist(), one.density.frac_coords, strict=True)
        atoms = [(place, symbol_of(z), *map(float, coords)) for place, (z, coords) in enumerate(both, 1)]
        crystals.append(Table(f"Cell of {one.name}", sides, lattice))
        crystals.append(Table(f"Atoms of {one.name}, in shares of the cell", heads, atoms))
    panels = {"density": "Density"}
    if any(one.reference is not None for one in shown):
        panels = {"reference": "Reference", "prediction": "Prediction", "difference": "Prediction minus reference"}
    viewer = rendered("density.html", names=[one.name for one in shown], panels=panels, near=NEAR_PLANE_A)
    return [
        viewer,
        json_script("density-data", {"items": items, "near_plane_a": NEAR_PLANE_A}),
        _figures_table(shown),
        *map(Note, notes),
        details("Cells and atoms as tables", *crystals),
    ]


def coarser(values: np.ndarray, most: int) -> np.ndarray:
    """A periodic grid `[nx, ny, nz]` reduced to at most `most` points (at least 8) by linear interpolation, as float32.
    Point `i` of the `m` new points along a side lies at point `i n / m` of the old `n`, as for voxels of the cell."""
    if values.size <= most:
        return np.asarray(values, np.float32)
    factor = (values.size / most) ** (1 / 3)
    # A side of two points stays, and the other sides shrink more.
    while np.prod(sides := [max(min(side, 2), int(side / factor + 1e-9)) for side in values.shape]) > most:
        factor *= 1.02
    from scipy.ndimage import affine_transform

    apart = np.divide(values.shape, sides)
    return affine_transform(values, apart, output_shape=sides, output=np.float32, order=1, mode="grid-wrap")


def _item(one: ShownDensity, thinned: Sequence[np.ndarray]) -> dict[str, Any]:
    grid, shape = one.density, thinned[0].shape
    numbers = grid.atomic_numbers.tolist()
    return {
        "name": one.name,
        "shape": list(shape),
        "plane": round(most_structured_plane(one.reference or grid) * shape[2] / grid.grid_shape[2]) % shape[2],
        "lattice": grid.lattice.tolist(),
        "values": dict(zip(("density", "reference"), (typed(one.ravel()) for one in thinned), strict=False)),
        "symbols": [symbol_of(z) for z in numbers],
        "radii_a": [covalent_radius_a(z) for z in numbers],
        "frac_coords": grid.frac_coords.tolist(),
    }


def _figures_table(shown: Sequence[ShownDensity]) -> Table:
    compared = any(one.reference is not None for one in shown)
    columns = [*map(Column, ("material", "formula")), *([Column("NMAE", share)] if compared else []), Column("grid")]
    columns += [Column("electrons", number(4))]
    columns += [Column(f"{which} e/Å³", significant()) for which in ("smallest", "mean", "largest")]
    if compared:
        columns += [Column("reference, electrons", number(4)), Column("its largest", significant())]
    rows: list[list[Any]] = []
    for one in shown:
        grid, other = one.density, one.reference
        low, mean, high = float(grid.rho.min()), grid.electron_count / grid.volume_a3, float(grid.rho.max())
        row: list[Any] = [one.name, grid.formula, _sides(grid.grid_shape), grid.electron_count, low, mean, high]
        if compared:
            row.insert(2, None if other is None else nmae(grid.rho, other.rho))
            row += [None, None] if other is None else [other.electron_count, float(other.rho.max())]
        rows.append(row)
    return Table("Figures of all points of the grids", columns, rows)


def _sides(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def density_page(path: str, reference: str | None = None, rules: ReadRules = LOOKED_AT) -> Report:
    given = [path] if reference is None else [path, reference]
    names = (str(Path(*Path(one.rstrip("/")).parts[-2:])) for one in given)
    density, *others = (open_density(one, name, rules) for one, name in zip(given, names, strict=True))
    shown = beside(density.material_id, density, others[0] if others else None)
    kind = "prediction" if others else "density"
    file = Path(path.rstrip("/"))
    lines = read_lines(file.parent) if (file.parent / LINES_FILE).is_file() else []
    made = [line for line in lines if line.get("output") == file.name]
    return _page(density.material_id, kind, [shown], [f"{', against '.join(given)}.", *_made_by(made)], ())


def predictions_page(folder: Path, reference: str | None = None, rules: ReadRules = LOOKED_AT) -> Report:
    """The page of a folder of predictions. `reference` is a density, or a folder of densities with the names of the
    structures."""
    lines = read_lines(folder)
    done = [line for line in lines if "error" not in line]
    readable = [line for line in done if line.get("format") not in UNREADABLE]
    references = _references(reference, [str(line["name"]) for line in readable])
    chosen = [line for line in readable if line["name"] in references] if references else readable
    files = [(str(line["name"]), folder / str(line["output"])) for line in chosen]
    shown = []
    for name, path in files[:MOST_SHOWN]:
        try:
            density = open_density(path, name, rules)
        except TomatError as error:
            said = f"{folder / LINES_FILE}: the output of {name} is {path.name!r}, expected a density in the folder"
            raise TomatError(f"{said} ({error}) {AGAIN}") from error
        place = references.get(name)
        shown.append(beside(name, density, None if place is None else open_density(place, rules=rules)))
    lead: list[Any] = [f"{len(done):,} predicted, {len(lines) - len(done):,} failed; {folder}.", *_made_by(done)]
    if len(files) > MOST_SHOWN:
        lead.append(f"The first {MOST_SHOWN} are drawn. To draw another one: `tomat page {files[MOST_SHOWN][1]}`.")
    if not files:
        lead.append("None of them is in a format that tomat reads as a density, so none is drawn.")
    return _page(folder.resolve().name, "prediction", shown, lead, (_lines_table(lines),))


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The last line of each structure of a folder of predictions."""
    path = folder / LINES_FILE
    written = path.read_text(encoding="utf-8", errors="replace").splitlines()
    read = (read_line(line, f"{path}, line {place}") for place, line in enumerate(written, 1))
    return list({str(line["name"]): line for line in read}.values())


def _made_by(lines: Sequence[Mapping[str, Any]]) -> list[Facts]:
    """How the predictions were made: the values that all lines share, and the number of values where lines differ."""
    made = [{**line["made_by"], "flags": _flags_of(line)} for line in lines if line.get("made_by")]
    names = {"model": "model", "weights_sha256": "hash of its weights", "decoder": "decoder", "grid": "grid",
             "electrons": "electrons", "held_out": "on what was held out", "flags": "flagged"}  # fmt: skip
    facts = {}
    for key, words in names.items():
        ways = list(dict.fromkeys(str(each[key]) for each in made if each.get(key)))
        facts[words] = ways[0] if len(ways) == 1 else f"{len(ways)} ways, in the table below" if ways else None
    return [Facts(facts)] if made else []


def _flags_of(line: Mapping[str, Any]) -> str:
    return "; ".join(str(flag.get("text", "")) for flag in line.get("flags", ()) if isinstance(flag, dict))


def _page(title: str, kind: str, shown: Sequence[ShownDensity], lead: Sequence[Any], after: Sequence[Table]) -> Report:
    errors = [
        (share(nmae(one.density.rho, one.reference.rho)), f"NMAE of {one.name} against its reference")
        for one in shown if one.reference is not None
    ]  # fmt: skip
    sections = [Section("", [*([rendered("headline.html", figures=errors)] if errors else []), *lead])]
    sections += [Section("Density", density_parts(shown))] if shown else []
    sections += [Section("All structures", after)] if after else []
    figures = [
        {"name": one.name, "electrons": one.density.electron_count, "grid": list(one.density.grid_shape),
         "has_reference": one.reference is not None}
        for one in shown
    ]  # fmt: skip
    return Report(title, sections, kind, {"densities": figures})


def _references(reference: str | None, names: Sequence[str]) -> dict[str, str]:
    """Name of a prediction -> path of its reference; empty where no reference is given."""
    if reference is None:
        return {}
    found = {file.name: file.path for file in find_densities([reference]).files}
    if len(found) == 1 and len(names) == 1:
        return {names[0]: next(iter(found.values()))}
    matching = [name for name in names if name in found]
    if not matching:
        said = f"no density of {reference} is named like a prediction ({', '.join(names[:5])})"
        here = ", ".join(list(found)[:5])
        raise TomatError(f"{said}; found {here}. Give a folder whose files are named like the structures.")
    return {name: found[name] for name in matching}


def _lines_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    figures = {
        "atoms": Column("atoms", number(0)),
        "seconds": Column("seconds", number(1)),
        "electrons": Column("electrons", number(4)),
        "electrons_before": Column("before scaling", number(4)),
        "spread_share": Column("spread", share),
    }
    rows = []
    for line in lines:
        words = str(line["name"]), str(line.get("formula", "")), " x ".join(map(str, line.get("grid") or ()))
        known = (line.get(key) if is_figure(line.get(key)) else None for key in figures)
        rows.append((*words, *known, str(line.get("output", "")), str(line.get("error") or _flags_of(line))))
    heads = [*map(Column, ("name", "formula", "grid")), *figures.values(), Column("output"), Column("warnings")]
    return Table("Structures that were predicted", heads, rows)
