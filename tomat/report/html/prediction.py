"""The page of predictions: a folder of `tomat predict`, or one density; beside a reference or alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tomat.base.documents import is_figure
from tomat.base.errors import TomatError
from tomat.base.report.formats import number, share
from tomat.base.report.model import Column, Report, Section, Table
from tomat.data.density.find import find_densities
from tomat.data.density.grid import DensityGrid
from tomat.data.density.io import open_density
from tomat.data.density.rules import ReadRules
from tomat.predict.inference.folder import LINES_FILE, read_line
from tomat.report.html.density import LOOKED_AT, ShownDensity, beside, density_parts

MOST_SHOWN = 8
"""Densities that a page of a folder draws: more would each be on too coarse a grid."""
UNREADABLE = ("qe",)
"""Formats of `tomat predict` that tomat does not read by name."""


def density_page(path: str, reference: str | None = None, rules: ReadRules = LOOKED_AT) -> Report:
    """The page of one file of a density, beside another one of the same crystal where that is given."""
    density = open_density(path, _name(path), rules)
    other = open_density(reference, _name(reference), rules) if reference is not None else None
    shown = beside(density.material_id, density, other)
    lead = f"{path}, against {reference}." if reference is not None else f"{path}."
    return _page(density.material_id, "density" if other is None else "prediction", [shown], [lead], ())


def predictions_page(folder: Path, reference: str | None = None, rules: ReadRules = LOOKED_AT) -> Report:
    """The page of a folder of predictions; the reference is a density, or a folder of densities that are called as the
    structures were."""
    lines = _lines(folder / LINES_FILE)
    done = [line for line in lines if "error" not in line]
    readable = [line for line in done if line.get("format") not in UNREADABLE]
    references = _references(reference, [str(line["name"]) for line in readable], rules)
    chosen = [line for line in readable if line["name"] in references] if references else readable
    shown = []
    for line in chosen[:MOST_SHOWN]:
        name, path = str(line["name"]), folder / str(line["output"])
        density = open_density(path, name, rules)
        shown.append(beside(name, density, references.get(name)))
    said = f"{len(done):,} predicted, {len(lines) - len(done):,} failed; {folder}."
    lead = [said]
    if len(chosen) > MOST_SHOWN:
        lead.append(
            f"The first {MOST_SHOWN} are drawn. A page of another one: "
            f"`tomat page {folder / str(chosen[MOST_SHOWN]['output'])}`."
        )
    if not shown:
        lead.append("None of them is in a format that tomat reads as a density, so that none is drawn.")
    return _page(folder.resolve().name, "prediction", shown, lead, (_lines_table(lines),))


def _page(title: str, kind: str, shown: Sequence[ShownDensity], lead: Sequence[str], after: Sequence[Table]) -> Report:
    sections = [Section("", lead)]
    sections += [Section("Density", density_parts(shown))] if shown else []
    sections += [Section("All structures", after)] if after else []
    figures = [
        {
            "name": one.name,
            "electrons": one.density.electron_count,
            "grid": list(one.density.grid_shape),
            "has_reference": one.reference is not None,
        }
        for one in shown
    ]
    return Report(title, sections, kind, {"densities": figures})


def _name(path: str) -> str:
    return str(Path(*Path(path.rstrip("/")).parts[-2:]))


def _references(reference: str | None, names: Sequence[str], rules: ReadRules) -> dict[str, DensityGrid]:
    """The references by the names of the predictions; none where none is given."""
    if reference is None:
        return {}
    found = {file.name: file.path for file in find_densities([reference]).files}
    if len(found) == 1 and len(names) == 1:
        return {names[0]: open_density(next(iter(found.values())), rules=rules)}
    matching = [name for name in names if name in found]
    if not matching:
        raise TomatError(
            f"no density of {reference} is called as a prediction ({', '.join(names[:5])}); found "
            f"{', '.join(list(found)[:5])}. Give a folder whose files are called as the structures were."
        )
    return {name: open_density(found[name], rules=rules) for name in matching[:MOST_SHOWN]}


def _lines(path: Path) -> list[Mapping[str, Any]]:
    """The last line of each structure."""
    lines: dict[str, Mapping[str, Any]] = {}
    for number_, written in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        line = read_line(written, f"{path}, line {number_}")
        lines[str(line["name"])] = line
    return list(lines.values())


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
        flags = "; ".join(str(flag.get("text", "")) for flag in line.get("flags", ()) if isinstance(flag, dict))
        words = str(line["name"]), str(line.get("formula", "")), " x ".join(map(str, line.get("grid") or ()))
        known = (line.get(key) if is_figure(line.get(key)) else None for key in figures)
        rows.append((*words, *known, str(line.get("output", "")), str(line.get("error") or flags)))
    heads = [*map(Column, ("name", "formula", "grid")), *figures.values(), Column("output"), Column("warnings")]
    return Table("Structures that were predicted", heads, rows)
