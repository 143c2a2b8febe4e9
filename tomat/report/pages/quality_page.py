"""The page of a study of quality: each row's speed and errors beside its base's, with intervals, and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tomat.base.layout import FIGURES_DIR
from tomat.base.report.document import empty_section, find_sections, read_document, update_document
from tomat.base.report.formats import UNKNOWN, markdown_table, percent, signed
from tomat.base.report.text import plain
from tomat.base.reporting import counted
from tomat.perf.tuning.changes import override_words
from tomat.report.pages.figures import draw_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE_TEMPLATE = """# {title}

{introduction}

## Speed and quality

{quality}

## Every seed

{seeds}

## Verdict

<!-- What to do because of it. The text outside tomat's markers is yours. -->
"""

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


def write_quality_page(record: Mapping[str, Any], tracking_dir: Path) -> Path:
    """Write (or bring up to date) the page of a study, and its figure.

    Args:
        record: As `Quality.record` gives it.
        tracking_dir: Such as `docs/tracking`.

    Raises:
        TomatError: The page's markers are broken. Nothing is written then.
    """
    page = page_path(tracking_dir, record["sweep"])
    if page.is_file():
        find_sections(read_document(page), str(page))
    quality = quality_section(record)
    figure = f"{FIGURES_DIR}/quality-{record['sweep']}.svg"
    if _points(record):
        quality += f"\n\n![Speed against error, both held against the base]({figure})"
    contents = {
        "introduction": introduction_section(record),
        "quality": quality,
        "seeds": seeds_section(record),
    }
    title = f"{record['title'] or record['sweep']}"
    template = PAGE_TEMPLATE.format(title=plain(title), **{name: empty_section(name) for name in contents})
    update_document(page, contents, template)
    if _points(record):
        draw_svg(tracking_dir / figure, _draw, record, (6.0, 3.6))
    return page


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
    return "\n\n".join(filter(None, [str(record["introduction"]), trained, judged]))


def quality_section(record: Mapping[str, Any]) -> str:
    """A line a row: speed, loss, errors, each less the base's with its interval, and the verdict."""
    errors = [(key, heading) for key, heading in ERRORS if any(_values(row, key) for row in record["rows"])]
    header = ("row", "settings", "parameters", "tok/s", "against base", "loss", "- base",
              *(word for _, heading in errors for word in (heading, "- base")), "verdict")  # fmt: skip
    body, shared = [], _shared(record)
    for row in record["rows"]:
        against = row["against_base"]
        own = {key: value for key, value in row["overrides"].items() if key not in shared}
        cells = [row["name"], _settings(own), f"{row['parameters']:,}", _mean(row, SPEED, "{:,.0f}"), _ratio(against)]
        cells += [_mean(row, LOSS, "{:.4f}"), _difference(against, LOSS, 1.0, 4)]
        for key, _ in errors:
            cells += [_mean(row, key, "{:.2f} %", 100.0), _difference(against, key, 100.0, 2)]
        cells.append(_verdict(row, against))
        body.append(cells)
    table = markdown_table(header, body, "ll" + "r" * (len(header) - 3) + "l")
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
    """The same on the console."""
    table = Table(title=record["title"] or record["sweep"])
    for name in ("row", "seeds", "tok/s against base", "loss - base", "NMAE - base, points", "verdict"):
        table.add_column(name, justify="left" if name in ("row", "verdict") else "right")
    for row in record["rows"]:
        against = row["against_base"]
        decides = next((key for key, _ in ERRORS if against and key in against["differences"]), ERRORS[0][0])
        table.add_row(
            row["name"], str(len(row["figures"])), _ratio(against), _difference(against, LOSS, 1.0, 4),
            _difference(against, decides, 100.0, 2), _verdict(row, against),
        )  # fmt: skip
    return table


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
    return against["verdict"] or "too few seeds"


def _shared(record: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that every row has."""
    first, *others = (row["overrides"] for row in record["rows"])
    return {key: value for key, value in first.items() if all(key in one and one[key] == value for one in others)}


def _settings(overrides: Mapping[str, Any]) -> str:
    words = " ".join(override_words(overrides)).replace("--", "", 1).replace(" --", " ")
    return f"`{words}`" if words else ""


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
