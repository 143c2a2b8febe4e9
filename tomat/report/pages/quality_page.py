"""The page of a study of quality: each row's speed and errors beside its base's, with intervals, and figures.

Rows that are meant to compute the base's numbers (`exact`) have a table of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.layout import FIGURES_DIR
from tomat.base.report.formats import UNKNOWN, number, percent, signed
from tomat.base.report.markdown import update_page
from tomat.base.report.model import (
    VERDICT,
    Axis,
    Cell,
    Chart,
    Code,
    Column,
    Facts,
    Part,
    Report,
    Section,
    Series,
    State,
    Table,
    Verdict,
)
from tomat.base.reporting import counted
from tomat.report.sweep import settings_cell

ERRORS = (
    ("free_running_nmae", "NMAE, from structures alone"),
    ("held_out_nmae_median", "NMAE, teacher-forced"),
    ("held_out_nemd", "NEMD, teacher-forced"),
)
"""Held-out errors, fractions, and their headings."""
SPEED, LOSS = "tokens_per_second_median", "validation_loss"
EMBEDDED = "the embedded training compounds"
OVER_NOISE = "largest_window_difference_over_noise"
Row = Mapping[str, Any]
"""Of the record."""


def page_path(tracking_dir: Path, name: str) -> Path:
    """Of the study of a sweep."""
    return tracking_dir / f"quality-{name}.md"


def write_quality_page(record: Mapping[str, Any], tracking_dir: Path, page: Path | None = None) -> Path:
    """Write (or bring up to date) the page of a study, `page_path` where none is given, and its figures.

    `record` is as `Quality.record` gives it.
    """
    page = page or page_path(tracking_dir, record["sweep"])
    return update_page(page, _report(record, page.stem), tracking_dir / FIGURES_DIR)


def _report(record: Mapping[str, Any], stem: str) -> Report:
    introduction = Section("", _introduction(record), "introduction")
    if _with_curves(record):
        sections = [
            introduction,
            Section("Meant to be exact", [*_exact_parts(record), _differences_chart(record, stem)], "exact"),
            Section("Not exact", [*_quality_parts(record), _curves_chart(record, stem)], "inexact"),
        ]
    else:
        sections = [
            introduction,
            Section("Speed and quality", [*_quality_parts(record), *_speed_charts(record, stem)], "quality"),
            Section("Every seed", [_seeds_table(record)], "seeds"),
        ]
    return Report(record["title"] or record["sweep"], [*sections, VERDICT])


def _with_curves(record: Mapping[str, Any]) -> bool:
    """Whether rows are said to be exact or not, so that whole curves are compared."""
    return "window_end_steps" in record


def _introduction(record: Mapping[str, Any]) -> list[Part]:
    """What was trained and by what it is judged."""
    materials = max((row["materials"] for row in record["rows"]), key=len, default=[])
    embedded = record["data"] == EMBEDDED
    facts: dict[str, Cell] = {
        "steps": f"{record['steps']:,} of {record['batch_sequences']} sequences of {record['sequence_tokens']} tokens",
        "seeds": ", ".join(map(str, record["seeds"])),
        "devices": record["devices"] or "nothing trained yet",
        "data": record["data"],
        "set aside": f"{percent(record['validation_share'], 0)}, seed {record['split_seed']}" if embedded else None,
        "judged by": f"{counted(len(materials), 'material')}: {', '.join(materials) or UNKNOWN}",
        "every row has": settings_cell(_shared(record)),
    }
    missing = [row["name"] for row in record["rows"] if len(row["figures"]) < len(record["seeds"])]
    if _with_curves(record) and missing:
        facts["not trained yet"] = f"{', '.join(missing)}; the same command goes on"
    parts: list[Part] = [
        str(record["introduction"]),
        Facts(facts),
        "A seed decides the initial weights and the order of the data; a row and its base of one seed are a pair. Rows "
        "are trained in turn, seed by seed, on a machine that may be shared: their speeds are less sure than those of "
        "`tomat lab run`, which interleaves windows.",
        "Whole compositions judge that no row is trained on. tomat's held-out compounds are neither trained on nor "
        "looked at, so that a choice made here can be tested on them."
        if embedded
        else "What is chosen by the materials that judge has to be tested on others.",
    ]
    if _with_curves(record):
        parts.append(
            f"Noise: the standard deviation of the base's loss over its seeds, averaged over windows of "
            f"{record['window_steps']} steps. A row is the same if the mean over seeds of its difference to the base "
            "is below the noise in every window, and the loss of its first step is the base's but for rounding "
            f"({record['first_step_tolerance']:.0e})."
        )
    return parts


def _exact_parts(record: Mapping[str, Any]) -> list[Part]:
    """How far each row that is meant to be exact is from the base."""
    distances = ("first_step", "first_window", "largest")
    body = [
        (
            *_asked(row, record),
            row["question"],
            *(_relative(row, f"{what}_relative_difference") for what in distances),
            _relative(row, OVER_NOISE),
            _same(row),
            *(_difference(row["against_base"], key, 100.0, 2) for key, _ in ERRORS[1:]),
        )
        for row in record["rows"]
        if row["exact"] and row["figures"]
    ]
    if not body:
        return ["No row of this kind has been trained."]
    figures = (Column(name, right=True) for name in ("first step", "first window", "all steps", "over noise"))
    less = (Column(name, right=True) for name in ("NMAE - base", "NEMD - base"))
    columns = [*map(Column, ("row", "settings", "why")), *figures, Column("verdict"), *less]
    said = (
        "Largest relative difference of the loss to the base of the same seed, in the first step (rounding alone), in "
        "the first window and in all steps (rounding grows as training goes on); and the largest window difference of "
        "the mean curve over the noise."
    )
    return [Table("", columns, body), said]


def _asked(row: Row, record: Mapping[str, Any]) -> tuple[str, Code | None]:
    shared = _shared(record)
    return row["name"], settings_cell({key: value for key, value in row["overrides"].items() if key not in shared})


def _curves(row: Row) -> Mapping[str, Any]:
    """`CurveComparison` of a row; empty where there is none, or the record is of before."""
    return (row["against_base"] or {}).get("curves") or {}


def _same(row: Row) -> Verdict:
    same = bool(_curves(row).get("same_curve"))
    return Verdict("the same", State.GOOD) if same else Verdict("not the same", State.BAD)


def _relative(row: Row, key: str) -> str | None:
    """An infinity, of curves without noise, is null on record."""
    if key not in (curves := _curves(row)):
        return None
    value = curves[key]
    return "without noise" if value is None else "0" if value == 0 else f"{value:.1e}"


def _quality_parts(record: Mapping[str, Any]) -> list[Part]:
    """A line for each row that is not meant to be exact: speed, loss, errors, each less the base's with its interval,
    and the verdict."""
    rows, with_curves = [row for row in record["rows"] if not row.get("exact")], _with_curves(record)
    errors = [(key, heading) for key, heading in ERRORS if any(_values(row, key) for row in record["rows"])]
    less = Column("- base", right=True)
    columns = [Column("row"), Column("settings"), *([Column("why")] if with_curves else [])]
    columns += [Column("parameters", number(0)), Column("tok/s", number(0)), Column("against base", right=True)]
    columns += [Column("loss", number(4)), less, *([Column("over noise", right=True)] if with_curves else [])]
    for _, heading in errors:
        columns += [Column(heading, number(2, 100.0, " %")), less]
    body = []
    for row in rows:
        against = row["against_base"]
        cells: list[Cell] = [*_asked(row, record), *([row["question"]] if with_curves else [])]
        cells += [row["parameters"], _mean(row, SPEED), _ratio(against), _mean(row, LOSS)]
        cells += [_difference(against, LOSS, 1.0, 4), *([_relative(row, OVER_NOISE)] if with_curves else [])]
        for key, _ in errors:
            cells += [_mean(row, key), _difference(against, key, 100.0, 2)]
        body.append((*cells, _verdict(row)))
    legend = (
        "Means over seeds. against base: tokens a second over the base's, - base: less the base's (losses in "
        f"{record['loss_unit']}, errors in percentage points); means of the pairs with Student's 95 % interval. "
        "Within noise: the interval holds 1, or 0. The verdict on quality is by the first error that there is, else "
        "by the loss; what other figures say, if not the same, stands behind it; one in twenty is chance. "
        "Losses of another kind are not compared. loss: on what was set aside, at the end."
    )
    return [Table("", [*columns, Column("verdict")], body), legend]


def _seeds_table(record: Mapping[str, Any]) -> Table:
    body = []
    keys = (SPEED, "last_loss", LOSS, *(key for key, _ in ERRORS))
    for row in record["rows"]:
        for seed in record["seeds"]:
            figures = row["figures"].get(str(seed), row["figures"].get(seed))
            reason = "" if figures else row["failed"].get(str(seed), row["failed"].get(seed, "not trained yet"))
            body.append((row["name"], seed, *((figures or {}).get(key) for key in keys), reason))
    columns = [Column("row"), Column("seed"), Column("tok/s", number(0)), Column("training loss, last 10", number(4))]
    columns += [Column("loss, set aside", number(4)), *(Column(name, number(2, 100.0, " %")) for _, name in ERRORS)]
    return Table("", [*columns, Column("")], body)


def quality_table(record: Mapping[str, Any]) -> Table:
    """The same for the console."""
    headings = ["row", "seeds", "tok/s against base", "loss - base", "NMAE - base, points", "verdict"]
    if with_curves := _with_curves(record):
        headings[4:4] = ["largest difference", "over noise"]
    body = []
    for row in record["rows"]:
        against = row["against_base"]
        cells: list[Cell] = [row["name"], len(row["figures"]), _ratio(against), _difference(against, LOSS, 1.0, 4)]
        if with_curves:
            cells += [_relative(row, "largest_relative_difference"), _relative(row, OVER_NOISE)]
        body.append((*cells, _difference(against, _deciding(row), 100.0, 2), _verdict(row)))
    return Table(record["title"] or record["sweep"], [Column(heading) for heading in headings], body)


def _deciding(row: Row) -> str:
    """The first error that the row and its base have."""
    against = row["against_base"]
    return next((key for key, _ in ERRORS if against and key in against["differences"]), ERRORS[0][0])


def _values(row: Row, key: str) -> list[float]:
    return [one[key] for one in row["figures"].values() if key in one]


def _mean(row: Row, key: str) -> float | None:
    found = _values(row, key)
    return statistics.fmean(found) if found else None


def _ratio(against: Mapping[str, Any] | None) -> str | None:
    if against is None or against["speed"] is None:
        return None
    speed = against["speed"]
    return f"{speed['mean']:.3f} ({speed['low']:.3f} to {speed['high']:.3f})"


def _difference(against: Mapping[str, Any] | None, key: str, scale: float, digits: int) -> str | None:
    found = None if against is None else against["differences"].get(key)
    if found is None:
        return None
    mean, low, high = (signed(scale * found[name], digits) for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _verdict(row: Row) -> Cell:
    if row["failed"]:
        return Verdict(f"failed with {counted(len(row['failed']), 'seed')}", State.BAD)
    if row["against_base"] is None:
        return "base"
    return _same(row) if row.get("exact") else row["against_base"]["verdict"] or "too few seeds"


def _shared(record: Mapping[str, Any]) -> dict[str, Any]:
    first, *others = (row["overrides"] for row in record["rows"])
    return {key: value for key, value in first.items() if all(key in one and one[key] == value for one in others)}


def _speed_charts(record: Mapping[str, Any], stem: str) -> list[Chart]:
    """Speed against the first error, a point for each row that has both; none where no row has."""
    series = []
    for row in record["rows"]:
        against, key = row["against_base"], _deciding(row)
        if against is not None and against["speed"] is not None and key in against["differences"]:
            speed, error = against["speed"], against["differences"][key]
            ranges = (100 * error["low"], 100 * error["high"])
            series.append(
                Series(row["name"], [speed["mean"]], [100 * error["mean"]], "points",
                       x_ranges=[(speed["low"], speed["high"])], y_ranges=[ranges])
            )  # fmt: skip
    if not series:
        return []
    said = "Speed against error, both held against the base"
    x, y = Axis("tokens a second over the base's"), Axis("NMAE less the base's, points")
    return [Chart(said, [*series, Series("base", [1.0], [0.0], "crosses", "#6b7680")], x, y, said, f"{stem}.svg")]


def _curves_chart(record: Mapping[str, Any], stem: str) -> Chart:
    steps, base = record["window_end_steps"], _window_means(record["rows"][0])
    rows = [(row, _window_means(row).mean(axis=0)) for row in record["rows"] if _curves(row)]
    series = [Series(row["name"], steps, mean.tolist(), dotted=row["exact"]) for row, mean in rows]
    for name, values in (("least", base.min(axis=0)), ("mean", base.mean(axis=0)), ("most", base.max(axis=0))):
        series.append(Series(f"base, {name} of the seeds", steps, values.tolist(), colour="#000000"))
    return _by_step("Loss curves", f"loss, {record['loss_unit']}", series, f"{stem}-curves.svg")


def _differences_chart(record: Mapping[str, Any], stem: str) -> Chart:
    steps, base = record["window_end_steps"], _window_means(record["rows"][0])
    apart = np.ptp(base, axis=0) / base.mean(axis=0)
    series = [Series("base: highest less lowest seed", steps, apart.tolist(), colour="#000000")]
    for row in record["rows"]:
        if curves := _curves(row):
            # A logarithm has no place for zero.
            relative = [value or None for value in curves["window_relative_differences"]]
            series.append(Series(row["name"], steps, relative, dotted=row["exact"]))
    name = "Relative difference of the loss"
    return _by_step(name, name.lower(), series, f"{stem}-differences.svg", log=True)


def _by_step(title: str, y: str, series: Sequence[Series], file: str, log: bool = False) -> Chart:
    said = f"{title}; dotted: rows that are meant to be exact."
    return Chart(title, series, Axis("step"), Axis(y, log=log), said, file, (7.0, 3.6))


def _window_means(row: Row) -> np.ndarray:
    return np.array(list(row["loss_window_means"].values()))
