"""What a teacher-forced evaluation found: per material, over materials, as JSON and as a table."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tomat.base.documents import mapping
from tomat.base.errors import TomatError
from tomat.base.records import Count, typed
from tomat.predict.evaluation.metrics import PairedComparison, Spread, compare_paired, headline, spread

LABEL = "teacher-forced diagnostic, not a prediction"
"""Stands beside every figure: the model was given the true values of all earlier voxels."""

AGAIN = "Evaluate again."

UNITS = {
    "nmae": "fraction of sum |rho_ref| over the voxels evaluated",
    "nemd": "fraction of sum |rho_ref| over the voxels evaluated",
    "cross_entropy_nats": "nats a voxel, softmax over density bins",
    "charge_e": "electrons in the voxels evaluated (the whole cell where settings.whole_cell is true)",
    "charge_relative_error": "(predicted - reference) / reference, signed",
}


@dataclass(frozen=True)
class MaterialResult:
    """Figures of one material; model and baselines on exactly the same voxels."""

    material_id: str
    patches: Count
    voxels: Count
    """Voxels counted."""
    teacher_forced_nmae_median: float
    teacher_forced_nmae_mean: float
    teacher_forced_nmae_mode: float
    teacher_forced_nemd: float
    teacher_forced_cross_entropy_nats: float
    teacher_forced_charge_relative_error: float
    """Of the median decoder."""
    teacher_forced_charge_e: float
    """Electrons by the median decoder."""
    reference_charge_e: float
    codec_floor_nmae: float
    """Of the reference rounded to the codec: what a perfect model would have with the median decoder."""
    lorenzo_nmae: float
    copy_previous_nmae: float
    constant_median_nmae: float
    compound: str = ""
    """Reduced formula; empty in reports of an earlier tomat."""


FIGURES = tuple(f.name for f in fields(MaterialResult) if f.type is float and not f.name.endswith("_charge_e"))
"""The figures whose spread over materials means something; electrons scale with the cell."""


@dataclass(frozen=True)
class TeacherForcedResult:
    """A whole evaluation."""

    settings: Mapping[str, Any]
    """What was evaluated and how: run, step, split, codec, layout, patches, seed."""
    materials: tuple[MaterialResult, ...]

    def figure(self, name: str) -> dict[str, float]:
        """One figure of every material, by material id."""
        return {material.material_id: getattr(material, name) for material in self.materials}

    def spread(self, name: str) -> Spread:
        """Spread of one figure over the materials."""
        return spread(list(self.figure(name).values()))

    def against_lorenzo(self) -> PairedComparison:
        """The model's median decoder (first) against Lorenzo (second), material by material."""
        return compare_paired(self.figure("teacher_forced_nmae_median"), self.figure("lorenzo_nmae"))

    def to_dict(self) -> dict[str, Any]:
        """Plain mapping for JSON."""
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
        """The inverse of `to_dict`.

        Args:
            values: of the JSON; the rest of it is for other readers.
        """
        if mapping(values).get("label") != LABEL:
            raise TomatError(f"{origin} is not a report of `tomat eval --json`; give one that is.")
        found = typed({key: values[key] for key in ("settings", "materials") if key in values}, cls, origin, AGAIN,
                      extra_keys=False)  # fmt: skip
        names = [material.material_id for material in found.materials]
        if len(set(names)) < max(1, len(names)):
            said = f"{len(names) - len(set(names))} of its {len(names)} materials stand in it more than once"
            raise TomatError(f"{origin} is damaged: {said if names else 'it has no materials'}. {AGAIN}")
        return found

    def compare(self, other: "TeacherForcedResult") -> PairedComparison:
        """NMAE (median decoder) of this evaluation (first) against another (second) of the same voxels."""
        for key in ("materials_from", "layout", "patches_per_material", "whole_cell", "seed", "seq_len"):
            mine, theirs = self.settings.get(key), other.settings.get(key)
            if mine != theirs:
                raise TomatError(
                    f"the evaluations differ in {key} ({mine!r} and {theirs!r}), so their voxels differ; "
                    "evaluate both with the same options."
                )
        return compare_paired(self.figure("teacher_forced_nmae_median"), other.figure("teacher_forced_nmae_median"))

    def headline(self) -> str:
        """NMAE of the median decoder over materials and by compound."""
        name = "teacher_forced_nmae_median"
        return headline([(each.material_id, each.compound, getattr(each, name)) for each in self.materials])

    def summary(self) -> str:
        """Two sentences that say how far the model is from what needs no model."""
        model, lorenzo = self.headline(), self.spread("lorenzo_nmae")
        paired = self.against_lorenzo()
        averaged = "The weights are averaged ones. " if self.settings.get("weights") == "averaged" else ""
        return (
            f"Teacher-forced NMAE (median decoder): {model}. Lorenzo extrapolation, without parameters: median "
            f"{100 * lorenzo.median:.2f} %, mean {100 * lorenzo.mean:.2f} %. "
            f"The model is the better one on {paired.first_better} of {paired.materials} materials. "
            f"{averaged}"
            f"This is a {LABEL}."
        )

    def table(self, max_rows: int = 20) -> Table:
        """A Rich table: the first `max_rows` materials, then the spread over all; NMAE and NEMD in per cent.

        Fits 80 columns: headings wrap at their words, material ids anywhere, figures never.
        """
        table = Table(
            title=f"NMAE in % ({LABEL})",
            caption=self.summary(),
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.add_column("material", overflow="fold")
        for heading, _ in COLUMNS:
            longest_word = max(len(word) for word in heading.split())
            table.add_column(heading, justify="right", min_width=max(longest_word, len(_percent(10.0))))
        for material in self.materials[:max_rows]:
            table.add_row(material.material_id, *[_percent(getattr(material, name)) for _, name in COLUMNS])
        if len(self.materials) > max_rows:
            table.add_row(f"... {len(self.materials) - max_rows} more", *[""] * len(COLUMNS))
        table.add_section()
        spreads = [self.spread(name) for _, name in COLUMNS]
        for row in ("median", "mean", "p10", "p90"):
            table.add_row(f"all: {row}", *[_percent(getattr(s, row)) for s in spreads])
        return table


def _percent(fraction: float) -> str:
    """`fraction` in per cent: two decimals below 100 %, none above."""
    return f"{100 * fraction:.2f}" if fraction < 1 else f"{100 * fraction:,.0f}"


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
"""Heading and figure of the table's columns."""
