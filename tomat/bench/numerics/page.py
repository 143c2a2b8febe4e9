"""The page of a comparison, its figures, and the table on the console."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.reporting import write_json
from tomat.pages.document import empty_section, find_sections, update_document
from tomat.pages.tables import UNKNOWN, count, markdown_table, percent, signed
from tomat.tracking.figures import draw_svg
from tomat.tracking.report import FIGURES_DIR
from tomat.tuning.changes import override_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

PAGE_TEMPLATE = """# {title}

{introduction}

## Meant to be exact

{exact}

## Not exact

{inexact}

## Verdict

<!-- What to do because of it. The text outside tomat's markers is yours. -->
"""

EXACT_HEADER = ("variant", "settings", "why", "first step", "first window", "all steps", "over noise", "verdict",
                "NMAE - base", "NEMD - base")  # fmt: skip
INEXACT_HEADER = ("variant", "settings", "why", "parameters", "NMAE", "- base", "NEMD", "- base", "NMAE higher in",
                  "loss over noise")  # fmt: skip


def write_page(record: Mapping[str, Any], tracking_dir: Path) -> Path:
    """Write (or bring up to date) the page, its figures, and the record beside it.

    Args:
        record: As `make_record` gives it.
        tracking_dir: Such as `docs/tracking`.

    Raises:
        TomatError: The page's markers are broken. Nothing is written then.
    """
    page = tracking_dir / f"{record['name']}.md"
    if page.exists():
        find_sections(page.read_text(encoding="utf-8"), str(page))
    figures = tracking_dir / FIGURES_DIR
    curves = draw_svg(figures / f"{record['name']}-curves.svg", _draw_curves, record, (7.0, 3.6))
    differences = draw_svg(figures / f"{record['name']}-differences.svg", _draw_differences, record, (7.0, 3.6))
    contents = {
        "introduction": introduction(record),
        "exact": exact_section(record) + f"\n\n![Relative difference of the loss]({FIGURES_DIR}/{differences.name})",
        "inexact": inexact_section(record) + f"\n\n![Loss curves]({FIGURES_DIR}/{curves.name})",
    }
    template = PAGE_TEMPLATE.format(title=record["title"], **{name: empty_section(name) for name in contents})
    update_document(page, contents, template)
    write_json(tracking_dir / f"{record['name']}.json", record)
    return page


def introduction(record: Mapping[str, Any]) -> str:
    """What was trained, and what the figures mean."""
    base, seeds = record["base"], record["seeds"]
    said = (
        f"{count(record['steps'])} steps of {record['batch_sequences']} sequences of {record['sequence_tokens']} "
        f"tokens, {count(base['parameters'])} parameters, seeds {', '.join(map(str, seeds))}, {base['devices']}. "
        f"A seed decides the initial weights and the order of the data, so a variant and the base of one seed begin "
        f"alike. Loss: {record['loss']}, {record['loss_unit']}."
    )
    noise = (
        f"*Noise*: the standard deviation of the base's loss over its seeds, averaged over windows of "
        f"{record['window_steps']} steps. A variant is *the same* if the mean over seeds of its difference to the base "
        "is below the noise in every window, and the loss of its first step is the base's but for rounding "
        f"({record['first_step_tolerance']:.0e}). NMAE (median decoder) and NEMD: teacher-forced, "
        f"{record['evaluation_patches_per_material']} patches of each held-out material, mean over materials; mean and "
        "standard deviation over seeds; differences in percentage points, paired by seed."
    )
    words = f"Base: `{record['config_path']}` with `{_settings(record['overrides'])}`. Held out it has {_base(base)}."
    pending = record["not_trained_yet"]
    missing = [f"Not trained yet: {', '.join(pending)}; the same command goes on."] if pending else []
    return "\n\n".join(filter(None, [record["introduction"], said, noise, words, *missing]))


def _base(base: Mapping[str, Any]) -> str:
    nmae, nemd = base["held_out_nmae_median"], base["held_out_nemd"]
    return f"an NMAE of {_error(nmae)} and a NEMD of {_error(nemd)}"


def exact_section(record: Mapping[str, Any]) -> str:
    """Largest differences of the loss of the same seed, and against the noise."""
    rows = [row for row in record["variants"] if row["exact"]]
    if not rows:
        return "No variant of this kind has been trained."
    body = [
        (
            row["name"],
            f"`{_settings(row['overrides'])}`",
            row["reason"],
            _relative(row["first_step_relative_difference"]),
            _relative(row["first_window_relative_difference"]),
            _relative(row["largest_relative_difference"]),
            _relative(row["largest_window_difference_over_noise"]),
            verdict(row),
            _difference(row["held_out_nmae_median"]),
            _difference(row["held_out_nemd"]),
        )
        for row in rows
    ]
    text = (
        "Largest relative difference of the loss to the base of the same seed, in the first step (rounding alone), in "
        "the first window and in all steps (rounding grows as training goes on); and the largest window difference of "
        "the mean curve over the noise."
    )
    return markdown_table(EXACT_HEADER, body, "lllrrrrlrr") + "\n\n" + text


def verdict(row: Mapping[str, Any]) -> str:
    """`the same`, or that it is not."""
    return "the same" if row["same_curve"] else "**not the same**"


def inexact_section(record: Mapping[str, Any]) -> str:
    """What each change costs in held-out error."""
    rows = [row for row in record["variants"] if not row["exact"]]
    if not rows:
        return "No variant of this kind has been trained."
    body = [("base", "", "", count(record["base"]["parameters"]), _error(record["base"]["held_out_nmae_median"]), "",
             _error(record["base"]["held_out_nemd"]), "", "", "")]  # fmt: skip
    for row in rows:
        nmae, nemd = row["held_out_nmae_median"], row["held_out_nemd"]
        over = row.get("largest_window_difference_over_noise")
        body.append(
            (
                row["name"],
                f"`{_settings(row['overrides'])}`",
                row["reason"],
                count(row["parameters"]),
                _error(nmae),
                _difference(nmae),
                _error(nemd),
                _difference(nemd),
                f"{nmae['seeds_higher']} of {len(record['seeds'])} seeds",
                "another loss" if over is None else f"{over:.2f}",
            )
        )
    return markdown_table(INEXACT_HEADER, body, "lllrrrrrrr")


def _settings(overrides: Mapping[str, Any]) -> str:
    return " ".join(override_words(overrides)).replace("--", "", 1).replace(" --", " ")


def _relative(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _error(figure: Mapping[str, float]) -> str:
    return f"{percent(figure['mean'], 2)} ± {100 * figure['std']:.2f}"


def _difference(figure: Mapping[str, float]) -> str:
    return f"{signed(100 * figure['difference_mean'])} ± {100 * figure['difference_std']:.2f}"


def _means(windows: list[list[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*windows, strict=True)]


def _draw_curves(axes: Axes, record: Mapping[str, Any]) -> None:
    steps, base = record["window_end_steps"], record["base"]["loss_window_means"]
    low, high = ([pick(column) for column in zip(*base, strict=True)] for pick in (min, max))
    axes.fill_between(steps, low, high, color="#d4d9dd", lw=0, label="base, all seeds")
    for row in record["variants"]:
        if row["same_loss"]:
            style = "--" if row["exact"] else "-"
            axes.plot(steps, _means(row["loss_window_means"]), style, lw=1, label=row["name"])
    axes.plot(steps, _means(base), color="black", lw=0.8, label="base, mean")
    axes.set(xlabel="step", ylabel=f"loss, {record['loss_unit']}")
    axes.legend(frameon=False, fontsize=7, ncols=2)


def _draw_differences(axes: Axes, record: Mapping[str, Any]) -> None:
    steps, base = record["window_end_steps"], record["base"]["loss_window_means"]
    means = _means(base)
    apart = [(max(c) - min(c)) / m for c, m in zip(zip(*base, strict=True), means, strict=True)]
    axes.plot(steps, apart, color="black", lw=1.2, label="base: highest less lowest seed")
    for row in record["variants"]:
        if row["same_loss"]:
            shown = [value if value > 0 else float("nan") for value in row["window_relative_differences"]]
            axes.plot(steps, shown, "--" if row["exact"] else "-", lw=1, label=row["name"])
    axes.set(xlabel="step", ylabel="relative difference of the loss", yscale="log")
    axes.legend(frameon=False, fontsize=7, ncols=2)


def report_table(record: Mapping[str, Any]) -> Table:
    """All variants on the console."""
    from rich.table import Table

    table = Table(title=f"{record['title']}: {record['steps']} steps, seeds {', '.join(map(str, record['seeds']))}")
    for name in ("variant", "meant to be exact", "largest difference", "over noise", "NMAE", "- base", "- base, NEMD"):
        table.add_column(name, justify="left" if name in ("variant", "meant to be exact") else "right")
    base = record["base"]
    table.add_row("base", "", "", "", _error(base["held_out_nmae_median"]), "", "")
    for row in record["variants"]:
        same = row["same_loss"]
        table.add_row(
            row["name"],
            verdict(row).strip("*") if row["exact"] else "no",
            _relative(row["largest_relative_difference"]) if same else UNKNOWN,
            _relative(row["largest_window_difference_over_noise"]) if same else UNKNOWN,
            _error(row["held_out_nmae_median"]),
            _difference(row["held_out_nmae_median"]),
            _difference(row["held_out_nemd"]),
        )
    return table
