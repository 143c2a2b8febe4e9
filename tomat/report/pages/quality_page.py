"""The page of a quality study: the speed and errors of each row beside those of its base, with intervals, and figures.

Rows that should compute the same numbers as the base (`exact`) have a table of their own.
"""

import statistics
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.documents import in_common
from tomat.base.layout import FIGURES_DIR
from tomat.base.report.formats import UNKNOWN, number, percent, ranged, share, signed
from tomat.base.report.markdown import update_page
from tomat.base.report.model import (
    VERDICT,
    Axis,
    Cell,
    Chart,
    Column,
    Facts,
    Part,
    Report,
    Section,
    Series,
    State,
    Table,
    Verdict,
    columns,
)
from tomat.base.reporting import counted
from tomat.report.sweep import settings_cell

ERRORS = {
    "free_running_nmae": "NMAE, from structures alone",
    "held_out_nmae_median": "NMAE, teacher-forced",
    "held_out_nemd": "NEMD, teacher-forced",
}
SPEED, LOSS = "tokens_per_second_median", "validation_loss"
EMBEDDED = "the embedded training compounds"
Row = Mapping[str, Any]
Shown = tuple[Column, Callable[[Row], Cell]]
"""A column of a table of rows, and the function that gives its cell for a row."""


def page_path(tracking_dir: Path, name: str) -> Path:
    return tracking_dir / f"quality-{name}.md"


def write_quality_page(record: Mapping[str, Any], tracking_dir: Path, page: Path | None = None) -> Path:
    """Write or update the page of a study (at `page_path` if `page` is not given) and its figures. `record` is what
    `Quality.record` gives."""
    page = page or page_path(tracking_dir, record["sweep"])
    sections = [Section("", _introduction(record), "introduction")]
    if _with_curves(record):
        charts = _curve_charts(record, page.stem)
        sections.append(Section("Meant to be exact", [*_exact_parts(record), *charts[1:]], "exact"))
        sections.append(Section("Not exact", [*_quality_parts(record), *charts[:1]], "inexact"))
    else:
        quality = [*_quality_parts(record), *_speed_charts(record, page.stem)]
        sections.append(Section("Speed and quality", quality, "quality"))
        sections.append(Section("Every seed", [_seeds_table(record)], "seeds"))
    report = Report(record["title"] or record["sweep"], [*sections, VERDICT])
    return update_page(page, report, tracking_dir / FIGURES_DIR)


def _with_curves(record: Mapping[str, Any]) -> bool:
    """Whether the record compares whole loss curves, which it does if its rows are marked as exact or not exact."""
    return "window_end_steps" in record


def _introduction(record: Mapping[str, Any]) -> list[Part]:
    materials = max((row["materials"] for row in record["rows"]), key=len, default=[])
    embedded = record["data"] == EMBEDDED
    facts: dict[str, Cell] = {
        "steps": f"{record['steps']:,} of {record['batch_sequences']} sequences of {record['sequence_tokens']} tokens",
        "seeds": ", ".join(map(str, record["seeds"])),
        "devices": record["devices"] or "nothing trained yet",
        "data": record["data"],
        "set aside": f"{percent(record['validation_share'], 0)}, seed {record['split_seed']}" if embedded else None,
        "judged by": f"{counted(len(materials), 'material')}: {', '.join(materials) or UNKNOWN}",
        "every row has": settings_cell(in_common([row["overrides"] for row in record["rows"]])),
    }
    missing = [row["name"] for row in record["rows"] if len(row["figures"]) < len(record["seeds"])]
    if _with_curves(record) and missing:
        facts["not trained yet"] = f"{', '.join(missing)}; the same command goes on"
    parts: list[Part] = [
        str(record["introduction"]),
        Facts(facts),
        "A seed decides the initial weights and the order of the data; a row and its base of one seed are a pair. "
        "Speeds, of rows trained in turn, are less sure than those of `tomat lab run`, which interleaves windows.",
        "Rows are judged by whole compositions that none of them trains on. tomat's held-out compounds are neither "
        "trained on nor looked at, so a choice made here can be tested on them."
        if embedded
        else "A choice made by these materials has to be tested on others.",
    ]
    if _with_curves(record):
        parts.append(
            f"Noise: the deviation of the base's loss over its seeds, in windows of {record['window_steps']} steps. "
            "A row is the same if the mean of its differences is below it in every window, and the loss of its first "
            f"step is the base's but for rounding ({record['first_step_tolerance']:.0e})."
        )
    return parts


def _exact_parts(record: Mapping[str, Any]) -> list[Part]:
    distances = {"first_step": "first step", "first_window": "first window", "largest": "all steps"}
    shown: list[Shown] = [*_asked(record), (Column("why"), itemgetter("question"))]
    shown += [_distance(heading, f"{name}_relative_difference") for name, heading in distances.items()]
    shown += [OVER_NOISE, (Column("verdict"), _same)]
    shown += [_less("NMAE - base", "held_out_nmae_median"), _less("NEMD - base", "held_out_nemd")]
    rows = [row for row in record["rows"] if row["exact"] and row["figures"]]
    if not rows:
        return ["No row of this kind has been trained."]
    said = "Largest relative difference of the loss to the base of the same seed; its part from rounding grows with "
    said += "the steps. over noise: the largest window difference of the mean curve over the noise."
    return [Table.of("", rows, shown), said]


def _quality_parts(record: Mapping[str, Any]) -> list[Part]:
    """A table of the rows that are not meant to be exact: speed, loss and errors, their differences from the base with
    intervals, and the verdict. A legend follows."""
    with_curves = _with_curves(record)
    shown = [*_asked(record), *([(Column("why"), itemgetter("question"))] if with_curves else [])]
    shown += [(Column("parameters", number(0)), itemgetter("parameters")), _mean("tok/s", SPEED, number(0))]
    shown += [(Column("against base", right=True), _ratio), _mean("loss", LOSS, number(4)), _less("- base", LOSS)]
    shown += [OVER_NOISE] if with_curves else []
    for key, heading in ERRORS.items():
        if any(_values(row, key) for row in record["rows"]):
            shown += [_mean(heading, key, share), _less("- base", key)]
    rows = [row for row in record["rows"] if not row.get("exact")]
    legend = (
        "Means over seeds. against base: tokens a second over the base's, - base: less the base's (losses in "
        f"{record['loss_unit']}, errors in percentage points); means of the pairs with Student's 95 % interval. "
        "Within noise: the interval contains 1, or 0. The verdict on quality is by the first error that there is, else "
        "by the loss; other figures that disagree stand behind it; one in twenty is chance. "
        "loss: on what was set aside, at the end; losses of another kind are not compared."
    )
    return [Table.of("", rows, [*shown, (Column("verdict"), _verdict)]), legend]


def _seeds_table(record: Mapping[str, Any]) -> Table:
    body = []
    for row in record["rows"]:
        for seed in record["seeds"]:
            figures = row["figures"].get(str(seed), row["figures"].get(seed)) or {}
            reason = "" if figures else row["failed"].get(str(seed), row["failed"].get(seed, "not trained yet"))
            body.append((row["name"], seed, *map(figures.get, (SPEED, "last_loss", LOSS, *ERRORS)), reason))
    heads = [Column("row"), Column("seed"), Column("tok/s", number(0))]
    heads += columns("training loss, last 10", "loss, set aside", show=number(4))
    return Table("", [*heads, *columns(*ERRORS.values(), show=share), Column("")], body)


def quality_table(record: Mapping[str, Any]) -> Table:
    shown: list[Shown] = [(Column("row"), itemgetter("name")), (Column("seeds"), lambda row: len(row["figures"]))]
    shown += [(Column("tok/s against base"), _ratio), (Column("loss - base"), lambda row: _difference(row, LOSS))]
    if _with_curves(record):
        shown += [_distance("largest difference", "largest_relative_difference"), OVER_NOISE]
    shown.append((Column("NMAE - base, points"), lambda row: _difference(row, _deciding(row))))
    return Table.of(record["title"] or record["sweep"], record["rows"], [*shown, (Column("verdict"), _verdict)])


def _asked(record: Mapping[str, Any]) -> list[Shown]:
    shared = in_common([row["overrides"] for row in record["rows"]])

    def own(row: Row) -> Cell:
        return settings_cell({key: value for key, value in row["overrides"].items() if key not in shared})

    return [(Column("row"), itemgetter("name")), (Column("settings"), own)]


def _mean(heading: str, key: str, show: Callable[[float], str]) -> Shown:
    def mean(row: Row) -> float | None:
        found = _values(row, key)
        return statistics.fmean(found) if found else None

    return Column(heading, show), mean


def _less(heading: str, key: str) -> Shown:
    return Column(heading, right=True), lambda row: _difference(row, key)


def _difference(row: Row, key: str) -> str | None:
    """A figure minus the base's, with its interval; fractions in percentage points."""
    found = (row["against_base"] or {}).get("differences", {}).get(key)
    if found is None:
        return None
    scale, digits = (1.0, 4) if key == LOSS else (100.0, 2)
    return ranged(found["mean"], found["low"], found["high"], lambda value: signed(scale * value, digits))


def _distance(heading: str, key: str) -> Shown:
    """A column for a figure of the curve comparison. The record has null for an infinity, from curves without noise."""

    def distance(row: Row) -> str | None:
        if key not in (curves := _curves(row)):
            return None
        value = curves[key]
        return "without noise" if value is None else "0" if value == 0 else f"{value:.1e}"

    return Column(heading, right=True), distance


OVER_NOISE = _distance("over noise", "largest_window_difference_over_noise")


def _ratio(row: Row) -> str | None:
    speed = (row["against_base"] or {}).get("speed")
    return ranged(speed["mean"], speed["low"], speed["high"], number(3)) if speed else None


def _curves(row: Row) -> Mapping[str, Any]:
    """The `CurveComparison` of a row; empty where there is none, as in older records."""
    return (row["against_base"] or {}).get("curves") or {}


def _same(row: Row) -> Verdict:
    if (same := _curves(row).get("same_curve")) is None:
        return Verdict("not compared", State.DOUBTFUL)
    return Verdict("the same", State.GOOD) if same else Verdict("not the same", State.BAD)


def _verdict(row: Row) -> Cell:
    if row["failed"]:
        return Verdict(f"failed with {counted(len(row['failed']), 'seed')}", State.BAD)
    if row["against_base"] is None:
        return "base"
    return _same(row) if row.get("exact") else row["against_base"]["verdict"] or "too few seeds"


def _deciding(row: Row) -> str:
    """The first of `ERRORS` that both the row and its base have."""
    found = (row["against_base"] or {}).get("differences", {})
    return next((key for key in ERRORS if key in found), next(iter(ERRORS)))


def _values(row: Row, key: str) -> list[float]:
    return [one[key] for one in row["figures"].values() if key in one]


def _speed_charts(record: Mapping[str, Any], stem: str) -> list[Chart]:
    """Speed against the first error, with a point for each row that has both; no chart if no row has both."""
    series = []
    for row in record["rows"]:
        against = row["against_base"] or {}
        speed, error = against.get("speed"), against.get("differences", {}).get(_deciding(row))
        if speed and error:
            spans: dict[str, Any] = {"x_ranges": [(speed["low"], speed["high"])]}
            spans["y_ranges"] = [(100 * error["low"], 100 * error["high"])]
            series.append(Series(row["name"], [speed["mean"]], [100 * error["mean"]], "points", **spans))
    if not series:
        return []
    said = "Speed against error, both held against the base"
    x, y = Axis("tokens a second over the base's"), Axis("NMAE less the base's, points")
    return [Chart(said, [*series, Series("base", [1.0], [0.0], "crosses", "#6b7680")], x, y, said, f"{stem}.svg")]


def _curve_charts(record: Mapping[str, Any], stem: str) -> list[Chart]:
    """The loss curves, and their differences from the base's; none if no seed of the base was trained."""
    steps, base = record["window_end_steps"], _window_means(record["rows"][0])
    if not base.size:
        return []
    apart = np.ptp(base, axis=0) / base.mean(axis=0)
    curves = []
    differences = [Series("base: highest less lowest seed", steps, apart.tolist(), colour="#000000")]
    for row in record["rows"]:
        if found := _curves(row):
            mean = _window_means(row).mean(axis=0).tolist()
            curves.append(Series(row["name"], steps, mean, dotted=row["exact"]))
            # A logarithmic axis cannot show zero.
            relative = [value or None for value in found["window_relative_differences"]]
            differences.append(Series(row["name"], steps, relative, dotted=row["exact"]))
    for name, values in (("least", base.min(axis=0)), ("mean", base.mean(axis=0)), ("most", base.max(axis=0))):
        curves.append(Series(f"base, {name} of the seeds", steps, values.tolist(), colour="#000000"))
    said = "dotted: rows that are meant to be exact."
    first, second = "Loss curves", "Relative difference of the loss"
    of_loss, of_difference = Axis(f"loss, {record['loss_unit']}"), Axis(second.lower(), log=True)
    size = (7.0, 3.6)
    return [
        Chart(first, curves, Axis("step"), of_loss, f"{first}; {said}", f"{stem}-curves.svg", size),
        Chart(second, differences, Axis("step"), of_difference, f"{second}; {said}", f"{stem}-differences.svg", size),
    ]


def _window_means(row: Row) -> np.ndarray:
    return np.array(list(row["loss_window_means"].values()))
