"""Results of an evaluation: per material, over materials, as JSON and as a table."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tomat.base.documents import mapping
from tomat.base.errors import TomatError
from tomat.base.records import Count, typed, typed_text
from tomat.base.report.formats import number
from tomat.base.report.model import Cell, Column, Table
from tomat.base.reporting import write_text, writing
from tomat.predict.evaluation.metrics import PairedComparison, Spread, compare_paired, headline, spread

LABEL = "teacher-forced diagnostic, not a prediction"
"""Stands beside every figure: the model was given the true values of all earlier voxels."""

UNITS = {
    "nmae": "fraction of sum |rho_ref| over the voxels evaluated",
    "nemd": "fraction of sum |rho_ref| over the voxels evaluated",
    "cross_entropy_nats": "nats a voxel, softmax over density bins",
    "charge_e": "electrons in the voxels evaluated (the whole cell where settings.whole_cell is true)",
    "charge_relative_error": "(predicted - reference) / reference, signed",
}

MOST_SHOWN = 20
"""Most materials that a table shows on the terminal."""

COLUMNS = (
    ("model median", "teacher_forced_nmae_median"),
    ("mean", "teacher_forced_nmae_mean"),
    ("mode", "teacher_forced_nmae_mode"),
    ("NEMD", "teacher_forced_nemd"),
    ("Lorenzo", "lorenzo_nmae"),
    ("copy previous", "copy_previous_nmae"),
    ("constant", "constant_median_nmae"),
    ("codec floor", "codec_floor_nmae"),
)


@dataclass(frozen=True)
class Evaluation:
    settings: Mapping[str, Any]
    """What was evaluated and how: run, step, split, codec, layout, patches, seed."""
    materials: tuple[Any, ...]

    def figure(self, name: str) -> dict[str, float]:
        return {material.material_id: getattr(material, name) for material in self.materials}

    def spread(self, name: str) -> Spread:
        return spread(list(self.figure(name).values()))

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """The table's columns, each as a heading and the name of a figure. The model's NMAE comes first."""
        raise NotImplementedError

    def headline(self) -> str:
        name = self.columns[0][1]
        return headline([(each.material_id, each.compound, getattr(each, name)) for each in self.materials])

    def table(self, most: int | None = None) -> Table:
        """Fractions in per cent, and seconds: a row for each material, or the first `most`, and mean and median."""
        shown = [Column("material")]
        names = [name for _, name in self.columns]
        for heading, name in self.columns:
            seconds = name == "seconds"
            shown.append(Column(heading if seconds else f"{heading} %", number(1) if seconds else number(2, 100), True))
        rows: list[list[Cell]] = [[each.material_id, *(getattr(each, n) for n in names)] for each in self.materials]
        if most is not None and len(rows) > most:
            rows[most:] = [[f"... {len(rows) - most} more", *[""] * len(names)]]
        spreads = [self.spread(name) for name in names]
        rows.append(["mean over materials", *(each.mean for each in spreads)])
        return Table("", shown, rows, ["median over materials", *(each.median for each in spreads)])


@dataclass(frozen=True)
class MaterialResult:
    """Figures of one material; model and baselines on exactly the same voxels."""

    material_id: str
    patches: Count
    voxels: Count
    teacher_forced_nmae_median: float
    teacher_forced_nmae_mean: float
    teacher_forced_nmae_mode: float
    teacher_forced_nemd: float
    teacher_forced_cross_entropy_nats: float
    teacher_forced_charge_relative_error: float
    """With the median decoder."""
    teacher_forced_charge_e: float
    reference_charge_e: float
    codec_floor_nmae: float
    """NMAE of the reference rounded to the codec, which a perfect model would have with the median decoder."""
    lorenzo_nmae: float
    copy_previous_nmae: float
    constant_median_nmae: float
    compound: str = ""


FIGURES = tuple(f.name for f in fields(MaterialResult) if f.type is float and not f.name.endswith("_charge_e"))
"""The figures whose spread over materials is meaningful. Electrons are left out, because they scale with the cell."""


@dataclass(frozen=True)
class TeacherForcedResult(Evaluation):
    materials: tuple[MaterialResult, ...]

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        return COLUMNS

    def against_lorenzo(self) -> PairedComparison:
        """The model's median decoder (first) against Lorenzo (second), material by material."""
        return compare_paired(self.figure("teacher_forced_nmae_median"), self.figure("lorenzo_nmae"))

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": LABEL,
            "units": UNITS,
            "settings": dict(self.settings),
            "over_materials": {name: asdict(self.spread(name)) for name in FIGURES},
            "paired_nmae_median_minus_lorenzo": asdict(self.against_lorenzo()),
            "materials": [asdict(material) for material in self.materials],
        }

    @classmethod
    def from_dict(cls, values: Any, origin: str | Path) -> "TeacherForcedResult":
        """The inverse of `to_dict`. Other keys of the mapping are ignored."""
        if mapping(values).get("label") != LABEL:
            raise TomatError(f"{origin} is not a report of `tomat eval --json`; give one that is.")
        read = {key: values[key] for key in ("settings", "materials") if key in values}
        found = typed(read, cls, origin, "Evaluate again.", extra_keys=False)
        names = [material.material_id for material in found.materials]
        if len(set(names)) < max(1, len(names)):
            said = f"{len(names) - len(set(names))} of its {len(names)} materials stand in it more than once"
            raise TomatError(f"{origin} is damaged: {said if names else 'it has no materials'}. Evaluate again.")
        return found

    def compare(self, other: "TeacherForcedResult") -> PairedComparison:
        """NMAE (median decoder) of this evaluation (first) against another (second) of the same voxels."""
        for key in ("materials_from", "layout", "patches_per_material", "whole_cell", "seed", "seq_len"):
            mine, theirs = self.settings.get(key), other.settings.get(key)
            if mine != theirs:
                said = f"the evaluations differ in {key} ({mine!r} and {theirs!r}), so their voxels differ"
                raise TomatError(f"{said}; evaluate both with the same options.")
        theirs = {each.material_id: each for each in other.materials}
        for mine in self.materials:
            its = theirs.get(mine.material_id, mine)
            # The sum of the true density over the voxels; formats keep seven digits.
            near = math.isclose(mine.reference_charge_e, its.reference_charge_e, rel_tol=1e-5)
            if (mine.voxels, mine.patches) != (its.voxels, its.patches) or not near:
                held = [f"{each.reference_charge_e:.6g} electrons in {each.voxels:,} voxels" for each in (mine, its)]
                said = f"the evaluations differ in the density of {mine.material_id} ({held[0]} and {held[1]})"
                raise TomatError(f"{said}; evaluate both on the same densities.")
        return compare_paired(self.figure("teacher_forced_nmae_median"), other.figure("teacher_forced_nmae_median"))

    def summary(self) -> str:
        """The model's error beside Lorenzo extrapolation, which needs no model, in sentences."""
        lorenzo, paired = self.spread("lorenzo_nmae"), self.against_lorenzo()
        averaged = "The weights are averaged ones. " if self.settings.get("weights") == "averaged" else ""
        return (
            f"Teacher-forced NMAE (median decoder): {self.headline()}. Lorenzo extrapolation, without parameters: "
            f"median {100 * lorenzo.median:.2f} %, mean {100 * lorenzo.mean:.2f} %. "
            f"The model is the better one on {paired.first_better} of {paired.materials} materials. "
            f"{averaged}This is a {LABEL}."
        )


class PartialResults:
    """The finished materials of an evaluation, so that a stopped one continues where it was. The file holds JSON lines:
    first the settings, then one material a line. A file with other settings is started afresh, and so is one of other
    hashes: `of` has those of what the settings only name, such as weights and densities. An older file has none."""

    def __init__(self, path: Path, settings: Mapping[str, Any], of: Mapping[str, str | None] | None = None) -> None:
        self.path = path
        older = header = json.dumps({"settings": dict(settings)}, sort_keys=True)
        if of:
            header = json.dumps({"of": dict(of), "settings": dict(settings)}, sort_keys=True)
        self.done: dict[str, MaterialResult] = {}
        """Finished materials of the same settings, by id."""
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        remedy = "Delete the file; its materials are then evaluated again."
        first, *rows = text.split("\n")
        for place, row in enumerate(rows[:-1] if first in (header, older) else (), start=2):
            result = typed_text(row, MaterialResult, f"{path}, line {place},", remedy, extra_keys=False)
            self.done[result.material_id] = result
        # The file is rewritten, because a killed process may have left half a line at the end.
        write_text(path, "".join([header + "\n", *map(_line, self.done.values())]))

    def add(self, result: MaterialResult) -> None:
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(result))


def _line(result: MaterialResult) -> str:
    return json.dumps(asdict(result), sort_keys=True) + "\n"
