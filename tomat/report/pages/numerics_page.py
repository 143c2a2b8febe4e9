"""The page of a comparison, its figures, and the table on the console."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tomat.base.layout import FIGURES_DIR
from tomat.base.report.document import empty_section, update_document
from tomat.base.report.formats import UNKNOWN, count, markdown_table, percent, signed
from tomat.base.report.text import plain
from tomat.base.reporting import write_json
from tomat.measure.bench.numerics.compare import PairedFigure, SeedFigure
from tomat.measure.bench.numerics.record import NumericsRecord, VariantRecord
from tomat.perf.tuning.changes import override_words
from tomat.report.pages.figures import draw_svg

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


def write_page(record: NumericsRecord, tracking_dir: Path) -> Path:
    """Write (or bring up to date) the page, its figures, and the record beside it.

    Args:
        record: All figures.
        tracking_dir: Such as `docs/tracking`.

    Raises:
        TomatError: The page's markers are broken. Nothing is written then.
    """
    name = record.numerics.name
    differences, curves = (f"{FIGURES_DIR}/{name}-{what}.svg" for what in ("differences", "curves"))
    contents = {
        "introduction": introduction(record),
        "exact": exact_section(record) + f"\n\n![Relative difference of the loss]({differences})",
        "inexact": inexact_section(record) + f"\n\n![Loss curves]({curves})",
    }
    page = tracking_dir / f"{name}.md"
    template = PAGE_TEMPLATE.format(
        title=plain(record.numerics.title), **{name: empty_section(name) for name in contents}
    )
    update_document(page, contents, template)
    draw_svg(tracking_dir / differences, _draw_differences, record, (7.0, 3.6))
    draw_svg(tracking_dir / curves, _draw_curves, record, (7.0, 3.6))
    write_json(tracking_dir / f"{name}.json", record.to_dict())
    return page


def introduction(record: NumericsRecord) -> str:
    """What was trained, and what the figures mean."""
    numerics, base = record.numerics, record.base
    said = (
        f"{count(record.steps)} steps of {record.batch_sequences} sequences of {record.sequence_tokens} tokens, "
        f"{count(base.parameters)} parameters, seeds {', '.join(map(str, record.seeds))}, {base.devices}. "
        f"A seed decides the initial weights and the order of the data, so a variant and the base of one seed begin "
        f"alike. Loss: {record.loss}, {record.loss_unit}."
    )
    noise = (
        f"*Noise*: the standard deviation of the base's loss over its seeds, averaged over windows of "
        f"{numerics.window_steps} steps. A variant is *the same* if the mean over seeds of its difference to the base "
        "is below the noise in every window, and the loss of its first step is the base's but for rounding "
        f"({numerics.first_step_tolerance:.0e}). NMAE (median decoder) and NEMD: teacher-forced, "
        f"{record.evaluation_patches_per_material} patches of each held-out material, mean over materials; mean and "
        "standard deviation over seeds; differences in percentage points, paired by seed."
    )
    changed = f" with `{_settings(numerics.overrides)}`" if numerics.overrides else ""
    words = (
        f"Base: `{numerics.config_path}`{changed}. Held out it has an NMAE of "
        f"{_error(base.held_out_nmae_median)} and a NEMD of {_error(base.held_out_nemd)}."
    )
    pending = record.not_trained_yet
    missing = f"Not trained yet: {', '.join(pending)}; the same command goes on." if pending else ""
    return "\n\n".join(filter(None, [numerics.introduction, said, noise, words, missing]))


def exact_section(record: NumericsRecord) -> str:
    """Largest differences of the loss of the same seed, and against the noise."""
    rows = [(row, row.curves) for row in record.variants if row.variant.exact and row.curves is not None]
    if not rows:
        return "No variant of this kind has been trained."
    body = [
        (
            *_named(row),
            _relative(curves.first_step_relative_difference),
            _relative(curves.first_window_relative_difference),
            _relative(curves.largest_relative_difference),
            _relative(curves.largest_window_difference_over_noise),
            "the same" if curves.same_curve else "**not the same**",
            _difference(row.held_out_nmae_median),
            _difference(row.held_out_nemd),
        )
        for row, curves in rows
    ]
    text = (
        "Largest relative difference of the loss to the base of the same seed, in the first step (rounding alone), in "
        "the first window and in all steps (rounding grows as training goes on); and the largest window difference of "
        "the mean curve over the noise."
    )
    return markdown_table(EXACT_HEADER, body, "lllrrrrlrr") + "\n\n" + text


def inexact_section(record: NumericsRecord) -> str:
    """What each change costs in held-out error."""
    rows = [row for row in record.variants if not row.variant.exact]
    if not rows:
        return "No variant of this kind has been trained."
    base = record.base
    body = [("base", "", "", count(base.parameters), _error(base.held_out_nmae_median), "",
             _error(base.held_out_nemd), "", "", "")]  # fmt: skip
    for row in rows:
        nmae, nemd = row.held_out_nmae_median, row.held_out_nemd
        body.append(
            (
                *_named(row),
                count(row.parameters),
                _error(nmae),
                _difference(nmae),
                _error(nemd),
                _difference(nemd),
                f"{nmae.seeds_higher} of {len(record.seeds)} seeds",
                "another loss" if row.curves is None else f"{row.curves.largest_window_difference_over_noise:.2f}",
            )
        )
    return markdown_table(INEXACT_HEADER, body, "lllrrrrrrr")


def _named(row: VariantRecord) -> tuple[str, str, str]:
    return row.variant.name, f"`{_settings(row.variant.overrides)}`", row.variant.reason


def _settings(overrides: Mapping[str, Any]) -> str:
    return " ".join(override_words(overrides)).replace("--", "", 1).replace(" --", " ")


def _relative(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _error(figure: SeedFigure) -> str:
    return f"{percent(figure.mean, 2)} ± {100 * figure.std:.2f}"


def _difference(figure: PairedFigure) -> str:
    return f"{signed(100 * figure.difference_mean)} ± {100 * figure.difference_std:.2f}"


def _draw_curves(axes: Axes, record: NumericsRecord) -> None:
    steps, base = record.window_end_steps, record.base.loss_window_means
    axes.fill_between(steps, base.min(axis=0), base.max(axis=0), color="#d4d9dd", lw=0, label="base, all seeds")
    for row in record.variants:
        if row.curves is not None:
            style = "--" if row.variant.exact else "-"
            axes.plot(steps, row.loss_window_means.mean(axis=0), style, lw=1, label=row.variant.name)
    axes.plot(steps, base.mean(axis=0), color="black", lw=0.8, label="base, mean")
    axes.set(xlabel="step", ylabel=f"loss, {record.loss_unit}")
    axes.legend(frameon=False, fontsize=7, ncols=2)


def _draw_differences(axes: Axes, record: NumericsRecord) -> None:
    steps, base = record.window_end_steps, record.base.loss_window_means
    apart = np.ptp(base, axis=0) / base.mean(axis=0)
    axes.plot(steps, apart, color="black", lw=1.2, label="base: highest less lowest seed")
    for row in record.variants:
        if row.curves is not None:
            relative = row.curves.window_relative_differences
            # A logarithm has no place for zero.
            shown = np.where(relative > 0, relative, np.nan)
            axes.plot(steps, shown, "--" if row.variant.exact else "-", lw=1, label=row.variant.name)
    axes.set(xlabel="step", ylabel="relative difference of the loss", yscale="log")
    axes.legend(frameon=False, fontsize=7, ncols=2)


def report_table(record: NumericsRecord) -> Table:
    """All variants on the console."""
    from rich.table import Table

    seeds = ", ".join(map(str, record.seeds))
    table = Table(title=f"{record.numerics.title}: {record.steps} steps, seeds {seeds}")
    for name in ("variant", "meant to be exact", "largest difference", "over noise", "NMAE", "- base", "- base, NEMD"):
        table.add_column(name, justify="left" if name in ("variant", "meant to be exact") else "right")
    table.add_row("base", "", "", "", _error(record.base.held_out_nmae_median), "", "")
    for row in record.variants:
        curves = row.curves
        table.add_row(
            row.variant.name,
            "no" if not row.variant.exact else "the same" if curves and curves.same_curve else "not the same",
            _relative(curves.largest_relative_difference) if curves else UNKNOWN,
            _relative(curves.largest_window_difference_over_noise) if curves else UNKNOWN,
            _error(row.held_out_nmae_median),
            _difference(row.held_out_nmae_median),
            _difference(row.held_out_nemd),
        )
    return table
