"""The page of a study of quality: each row's speed and errors beside its base's, with intervals, and figures.

Rows that are meant to compute the base's numbers (`exact`) have a table of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tomat.base.layout import FIGURES_DIR
from tomat.base.report.document import find_sections, read_document
from tomat.base.report.formats import UNKNOWN, percent, signed
from tomat.base.report.markdown import markdown_table
from tomat.base.report.model import Column, Table
from tomat.base.report.svg import draw_svg
from tomat.base.reporting import counted
from tomat.report.pages.sweep_tables import settings_text, write_sections

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADINGS = {
    "introduction": "",
    "exact": "Meant to be exact",
    "inexact": "Not exact",
    "quality": "Speed and quality",
    "seeds": "Every seed",
}
"""Of the page's sections, in order."""
EXACT_HEADER = ("row", "settings", "why", "first step", "first window", "all steps", "over noise", "verdict",
                "NMAE - base", "NEMD - base")  # fmt: skip

ERRORS = (
    ("free_running_nmae", "NMAE, from structures alone"),
    ("held_out_nmae_median", "NMAE, teacher-forced"),
    ("held_out_nemd", "NEMD, teacher-forced"),
)
"""Held-out errors, fractions, and their headings."""
SPEED, LOSS = "tokens_per_second_median", "validation_loss"


def page_path(tracking_dir: Path, name: str) -> Path:
    """Of the study of a sweep."""
    return tracking_dir / f"quality-{name}.md"


def write_quality_page(record: Mapping[str, Any], tracking_dir: Path, page: Path | None = None) -> Path:
    """Write (or bring up to date) the page of a study, and its figures.

    Args:
        record: As `Quality.record` gives it.
        tracking_dir: Such as `docs/tracking`.
        page: Instead of `page_path`.

    Raises:
        TomatError: The page's markers are broken. Nothing is written then.
    """
    page = page or page_path(tracking_dir, record["sweep"])
    if page.is_file():
        find_sections(read_document(page), str(page))
    contents = {"introduction": introduction_section(record)}
    if "window_end_steps" in record:
        drawn = {
            "differences": (_draw_differences, "Relative difference of the loss", (7.0, 3.6)),
            "curves": (_draw_curves, "Loss curves", (7.0, 3.6)),
        }
        contents |= {"exact": exact_section(record), "inexact": quality_section(record)}
    else:
        drawn = {"": (_draw, "Speed against error, both held against the base", (6.0, 3.6))} if _points(record) else {}
        contents |= {"quality": quality_section(record), "seeds": seeds_section(record)}
    for section, (name, (_, caption, _)) in zip(list(contents)[1:], drawn.items(), strict=False):
        contents[section] += f"\n\n![{caption}]({_figure(page, name)})"
    headings = {name: heading for name, heading in HEADINGS.items() if name in contents}
    write_sections(page, record["title"] or record["sweep"], contents, headings)
    for name, (draw, _, size) in drawn.items():
        draw_svg(tracking_dir / _figure(page, name), draw, record, size)
    return page


def _figure(page: Path, name: str) -> str:
    return f"{FIGURES_DIR}/{'-'.join(filter(None, [page.stem, name]))}.svg"


def introduction_section(record: Mapping[str, Any]) -> str:
    """What was trained and by what it is judged."""
    materials = max((row["materials"] for row in record["rows"]), key=len, default=[])
    trained = (
        f"{record['steps']:,} steps of {record['batch_sequences']} sequences of {record['sequence_tokens']} tokens, "
        f"seeds {', '.join(map(str, record['seeds']))}, {record['devices'] or 'nothing trained yet'}. A seed decides "
        "the initial weights and the order of the data; a row and its base of one seed are a pair. Rows are trained "
        "in turn, seed by seed, on a machine that may be shared: their speeds are less sure than those of "
        "`tomat lab run`, which interleaves windows."
    )
    judged = (
        f"Data: {record['data']}. Judged by {counted(len(materials), 'material')} that no row is trained on, of the "
        f"{percent(record['validation_share'], 0)} set aside with seed {record['split_seed']}, whole compositions: "
        f"{', '.join(materials) or UNKNOWN}. tomat's held-out compounds are neither trained on nor looked at, so that "
        "a choice made here can be tested on them."
        if record["data"] == "the embedded training compounds"
        else f"Data: {record['data']}; {counted(len(materials), 'material')} held out of them judge: "
        f"{', '.join(materials) or UNKNOWN}. What is chosen by them has to be tested on others."
    )
    if shared := _shared(record):
        trained += f" Every row has {_settings(shared)}."
    if "window_end_steps" in record:
        judged += (
            f"\n\n*Noise*: the standard deviation of the base's loss over its seeds, averaged over windows of "
            f"{record['window_steps']} steps. A row is *the same* if the mean over seeds of its difference to the base "
            "is below the noise in every window, and the loss of its first step is the base's but for rounding "
            f"({record['first_step_tolerance']:.0e})."
        )
        missing = [row["name"] for row in record["rows"] if len(row["figures"]) < len(record["seeds"])]
        judged += f"\n\nNot trained yet: {', '.join(missing)}; the same command goes on." if missing else ""
    return "\n\n".join(filter(None, [str(record["introduction"]), trained, judged]))


def exact_section(record: Mapping[str, Any]) -> str:
    """How far each row that is meant to be exact is from the base."""
    body, shared = [], _shared(record)
    for row in record["rows"]:
        if row["exact"] and row["figures"]:
            curves = _curves(row)
            own = {key: value for key, value in row["overrides"].items() if key not in shared}
            distances = [_relative(curves, f"{what}_relative_difference") for what in ("first_step", "first_window",
                         "largest")]  # fmt: skip
            differences = [_difference(row["against_base"], key, 100.0, 2) for key, _ in ERRORS[1:]]
            over = _relative(curves, "largest_window_difference_over_noise")
            body.append((row["name"], _settings(own), row["question"], *distances, over, _same(row), *differences))
    if not body:
        return "No row of this kind has been trained."
    text = (
        "Largest relative difference of the loss to the base of the same seed, in the first step (rounding alone), in "
        "the first window and in all steps (rounding grows as training goes on); and the largest window difference of "
        "the mean curve over the noise."
    )
    return markdown_table(EXACT_HEADER, body, "lllrrrrlrr") + "\n\n" + text


def _curves(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """`CurveComparison` of a row; empty where there is none, or the record is of before."""
    return (row["against_base"] or {}).get("curves") or {}


def _same(row: Mapping[str, Any]) -> str:
    return "the same" if _curves(row).get("same_curve") else "**not the same**"


def _relative(curves: Mapping[str, Any], key: str) -> str:
    """An infinity, of curves without noise, is null on record."""
    if key not in curves:
        return UNKNOWN
    value = curves[key]
    return "without noise" if value is None else "0" if value == 0 else f"{value:.1e}"


def quality_section(record: Mapping[str, Any]) -> str:
    """A line for each row that is not meant to be exact: speed, loss, errors, each less the base's with its interval,
    and the verdict."""
    rows = [row for row in record["rows"] if not row.get("exact")]
    why = [row["question"] for row in rows] if "window_end_steps" in record else None
    errors = [(key, heading) for key, heading in ERRORS if any(_values(row, key) for row in record["rows"])]
    header = ("row", "settings", *(["why"] if why else []), "parameters", "tok/s", "against base", "loss", "- base",
              *(["over noise"] if why else []), *(word for _, heading in errors for word in (heading, "- base")),
              "verdict")  # fmt: skip
    body, shared = [], _shared(record)
    for row in rows:
        against = row["against_base"]
        own = {key: value for key, value in row["overrides"].items() if key not in shared}
        cells = [row["name"], _settings(own), *([row["question"]] if why else [])]
        cells += [f"{row['parameters']:,}", _mean(row, SPEED, "{:,.0f}"), _ratio(against)]
        cells += [_mean(row, LOSS, "{:.4f}"), _difference(against, LOSS, 1.0, 4)]
        cells += [_relative(_curves(row), "largest_window_difference_over_noise")] if why else []
        for key, _ in errors:
            cells += [_mean(row, key, "{:.2f} %", 100.0), _difference(against, key, 100.0, 2)]
        cells.append(_verdict(row, against))
        body.append(cells)
    left = "lll" if why else "ll"
    table = markdown_table(header, body, left + "r" * (len(header) - len(left) - 1) + "l")
    legend = (
        "Means over seeds. *against base*: tokens a second over the base's, *- base*: less the base's (losses in "
        f"{record['loss_unit']}, errors in percentage points); means of the pairs with Student's 95 % interval. "
        "*Within noise*: the interval holds 1, or 0. The verdict on quality is by the first error that there is, else "
        "by the loss; what other figures say, if not the same, stands behind it; one in twenty is chance. "
        "Losses of another kind are not compared. loss: on what was set aside, at the end."
    )
    return f"{table}\n\n{legend}"


def seeds_section(record: Mapping[str, Any]) -> str:
    """The figures of each run."""
    body = []
    for row in record["rows"]:
        for seed in record["seeds"]:
            figures = row["figures"].get(str(seed), row["figures"].get(seed))
            if figures is None:
                reason = row["failed"].get(str(seed), row["failed"].get(seed, "not trained yet"))
                body.append((row["name"], str(seed), UNKNOWN, UNKNOWN, UNKNOWN, *(UNKNOWN for _ in ERRORS), reason))
                continue
            cells = [f"{figures[SPEED]:,.0f}" if SPEED in figures else UNKNOWN]
            cells += [f"{figures[key]:.4f}" if key in figures else UNKNOWN for key in ("last_loss", LOSS)]
            cells += [percent(figures.get(key), 2) for key, _ in ERRORS]
            body.append((row["name"], str(seed), *cells, ""))
    header = (
        "row",
        "seed",
        "tok/s",
        "training loss, last 10",
        "loss, set aside",
        *(heading for _, heading in ERRORS),
        "",
    )
    return markdown_table(header, body, "lr" + "r" * (len(header) - 3) + "l")


def quality_table(record: Mapping[str, Any]) -> Table:
    """The same for the console."""
    headings = ["row", "seeds", "tok/s against base", "loss - base", "NMAE - base, points", "verdict"]
    if with_curves := "window_end_steps" in record:
        headings[4:4] = ["largest difference", "over noise"]
    body = []
    for row in record["rows"]:
        against, curves = row["against_base"], _curves(row)
        decides = next((key for key, _ in ERRORS if against and key in against["differences"]), ERRORS[0][0])
        cells = [row["name"], len(row["figures"]), _ratio(against), _difference(against, LOSS, 1.0, 4)]
        if with_curves:
            cells.append(_relative(curves, "largest_relative_difference"))
            cells.append(_relative(curves, "largest_window_difference_over_noise"))
        body.append((*cells, _difference(against, decides, 100.0, 2), _verdict(row, against).replace("*", "")))
    return Table(record["title"] or record["sweep"], [Column(heading) for heading in headings], body)


def _values(row: Mapping[str, Any], key: str) -> list[float]:
    return [one[key] for one in row["figures"].values() if key in one]


def _mean(row: Mapping[str, Any], key: str, form: str, scale: float = 1.0) -> str:
    found = _values(row, key)
    return form.format(scale * statistics.fmean(found)) if found else UNKNOWN


def _ratio(against: Mapping[str, Any] | None) -> str:
    if against is None or against["speed"] is None:
        return UNKNOWN
    speed = against["speed"]
    return f"{speed['mean']:.3f} ({speed['low']:.3f} to {speed['high']:.3f})"


def _difference(against: Mapping[str, Any] | None, key: str, scale: float, digits: int) -> str:
    found = None if against is None else against["differences"].get(key)
    if found is None:
        return UNKNOWN
    mean, low, high = (signed(scale * found[name], digits) for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _verdict(row: Mapping[str, Any], against: Mapping[str, Any] | None) -> str:
    if row["failed"]:
        return f"**failed** with {counted(len(row['failed']), 'seed')}"
    if against is None:
        return "base"
    if row.get("exact"):
        return _same(row)
    return against["verdict"] or "too few seeds"


def _shared(record: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that every row has."""
    first, *others = (row["overrides"] for row in record["rows"])
    return {key: value for key, value in first.items() if all(key in one and one[key] == value for one in others)}


def _settings(overrides: Mapping[str, Any]) -> str:
    return f"`{settings_text(overrides)}`" if overrides else ""


def _points(record: Mapping[str, Any]) -> Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Name, speed and difference of the first error, of each row that has both."""
    found = []
    for row in record["rows"]:
        against = row["against_base"]
        if against is None or against["speed"] is None:
            continue
        key = next((key for key, _ in ERRORS if key in against["differences"]), None)
        if key is not None:
            found.append((row["name"], against["speed"], against["differences"][key]))
    return found


def _draw(axes: Axes, record: Mapping[str, Any]) -> None:
    axes.axhline(0.0, color="#6b7680", lw=0.8)
    axes.axvline(1.0, color="#6b7680", lw=0.8)
    for name, speed, error in _points(record):
        x, y = speed["mean"], 100 * error["mean"]
        wide = [[x - speed["low"]], [speed["high"] - x]]
        tall = [[y - 100 * error["low"]], [100 * error["high"] - y]]
        axes.errorbar([x], [y], xerr=wide, yerr=tall, fmt="o", ms=4, lw=1, capsize=2, label=name)
    axes.set(xlabel="tokens a second over the base's", ylabel="NMAE less the base's, points")
    axes.legend(frameon=False, fontsize=7)


def _draw_curves(axes: Axes, record: Mapping[str, Any]) -> None:
    steps, base = record["window_end_steps"], _window_means(record["rows"][0])
    axes.fill_between(steps, base.min(axis=0), base.max(axis=0), color="#d4d9dd", lw=0, label="base, all seeds")
    for row in record["rows"]:
        if _curves(row):
            axes.plot(steps, _window_means(row).mean(axis=0), _style(row), lw=1, label=row["name"])
    axes.plot(steps, base.mean(axis=0), color="black", lw=0.8, label="base, mean")
    axes.set(xlabel="step", ylabel=f"loss, {record['loss_unit']}")
    axes.legend(frameon=False, fontsize=7, ncols=2)


def _draw_differences(axes: Axes, record: Mapping[str, Any]) -> None:
    steps, base = record["window_end_steps"], _window_means(record["rows"][0])
    apart = np.ptp(base, axis=0) / base.mean(axis=0)
    axes.plot(steps, apart, color="black", lw=1.2, label="base: highest less lowest seed")
    for row in record["rows"]:
        if curves := _curves(row):
            relative = np.array(curves["window_relative_differences"])
            # A logarithm has no place for zero.
            axes.plot(steps, np.where(relative > 0, relative, np.nan), _style(row), lw=1, label=row["name"])
    axes.set(xlabel="step", ylabel="relative difference of the loss", yscale="log")
    axes.legend(frameon=False, fontsize=7, ncols=2)


def _window_means(row: Mapping[str, Any]) -> np.ndarray:
    return np.array([row["loss_window_means"][seed] for seed in row["loss_window_means"]])


def _style(row: Mapping[str, Any]) -> str:
    return "--" if row["exact"] else "-"
