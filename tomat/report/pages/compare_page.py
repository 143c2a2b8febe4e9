"""Runs beside each other as a page: settings, figures, losses over one another, where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.report.document import empty_section, find_sections, read_document, update_document
from tomat.base.report.formats import UNKNOWN, markdown_table, percent
from tomat.base.report.svg import draw_svg
from tomat.base.report.text import plain
from tomat.base.reporting import counted
from tomat.report.pages.run_log_page import result_rows
from tomat.train.runs.compare import Comparison, RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE_TEMPLATE = """# {title}

{comparable}

## What differs in the settings

{settings}

## Figures

{figures}

## Losses

{losses}

## Where the time went

{breakdown}

## Notes

<!-- What was seen. The text outside tomat's markers is yours. -->
"""
PARTS = (
    ("steps", "steps, from loss to loss"),
    ("evaluation", "evaluation"),
    ("checkpoints", "checkpoints"),
    ("profiler", "profiler"),
    ("other", "what came between"),
)
"""Of the wall-clock, which they add up to."""
INSIDE = (
    ("compiling", "compiling"),
    ("waiting_for_data", "the host waiting for data"),
    ("hooks", "hooks after a step"),
)
"""What lies inside those; with steps dispatched ahead the devices compute meanwhile."""
BARS = "▁▂▃▄▅▆▇█"
SMOOTH_SHARE = 0.02
"""Of the steps, averaged in the drawn curves; the raw losses are drawn faintly."""


def write_comparison_page(comparison: Comparison, page: Path) -> Path:
    """Write the page of a comparison, or bring it up to date, and its figure beside it.

    Raises:
        TomatError: The page's markers are broken. Nothing is written then.
    """
    if page.is_file():
        find_sections(read_document(page), str(page))
    figure = page.with_suffix(".svg")
    contents = comparison_sections(comparison, figure.name)
    title = " against ".join(run.name for run in comparison.runs)
    template = PAGE_TEMPLATE.format(title=plain(title), **{name: empty_section(name) for name in contents})
    update_document(page, contents, template)
    if any(run.losses for run in comparison.runs):
        draw_svg(figure, _draw, comparison, (7.0, 3.6))
    return page


def comparison_sections(comparison: Comparison, figure: str) -> dict[str, str]:
    """The sections of the page by name."""
    losses = losses_table(comparison)
    if any(run.losses for run in comparison.runs):
        losses = f"![Losses by step]({figure})\n\n{losses}"
    return {
        "comparable": comparable_text(comparison),
        "settings": settings_table(comparison),
        "figures": figures_table(comparison),
        "losses": losses,
        "breakdown": breakdown_table(comparison),
    }


def comparable_text(comparison: Comparison) -> str:
    """Whether losses may be held against each other."""
    places = ", ".join(f"{run.name} (`{run.url}`)" for run in comparison.runs)
    if not comparison.not_comparable:
        return f"{places}. Same vocabulary, loss and data: their losses can be compared."
    reasons = "\n".join(f"- {reason}" for reason in comparison.not_comparable)
    said = "**Their losses cannot be compared**; errors of the density can, on the same materials:"
    return f"{places}.\n\n{said}\n\n{reasons}"


def settings_table(comparison: Comparison) -> str:
    """Dotted keys whose values differ, run by run."""
    if not comparison.settings:
        return "Nothing: the runs have the same settings."
    body = [
        (f"`{key}`", *(UNKNOWN if value is None else f"{value}" for value in values))
        for key, values in comparison.settings.items()
    ]
    return markdown_table(("key", *(run.name for run in comparison.runs)), body, "l" * (1 + len(comparison.runs)))


def figures_table(comparison: Comparison) -> str:
    """What each run came to."""
    columns = [dict(result_rows(run.figures)) for run in comparison.runs]
    names = [name for name in columns[0] if any(column.get(name) is not None for column in columns)]
    body = [("ran on", *(run.devices for run in comparison.runs))]
    body += [(name, *(column.get(name) or UNKNOWN for column in columns)) for name in names]
    return markdown_table(("figure", *(run.name for run in comparison.runs)), body)


def losses_table(comparison: Comparison) -> str:
    """Means of the training losses over windows of the common steps, beside those of the first run."""
    if not comparison.common_steps:
        spans = [
            f"{run.name}: " + (f"steps {min(run.losses)} to {max(run.losses)}" if run.losses else "none logged")
            for run in comparison.runs
        ]
        return f"No step has a loss in every run ({'; '.join(spans)})."
    first = comparison.runs[0].name
    body = []
    for begin, end, losses in comparison.windows:
        cells = [f"{begin:,} to {end:,}", f"{losses[0]:.4f}"]
        for loss in losses[1:]:
            cells.append(f"{loss:.4f} ({loss - losses[0]:+.4f})")
        body.append(cells)
    header = ("steps", first, *(f"{run.name} (less {first})" for run in comparison.runs[1:]))
    said = f"Means of the training loss over {counted(len(comparison.common_steps), 'common step')}."
    return f"{said}\n\n{markdown_table(header, body)}"


def breakdown_table(comparison: Comparison) -> str:
    """Seconds of each part and its share of the wall-clock."""
    rows = [("wall-clock", *(_seconds(run, "wall") for run in comparison.runs))]
    rows += [(words, *(_seconds(run, name) for run in comparison.runs)) for name, words in PARTS]
    rows += [(f"*of these:* {words}", *(_seconds(run, name) for run in comparison.runs)) for name, words in INSIDE]
    said = (
        "The parts add up to the wall-clock from the first step to the last. What the host does while steps are "
        "dispatched ahead costs no time of the devices."
    )
    return f"{markdown_table(('seconds', *(run.name for run in comparison.runs)), rows)}\n\n{said}"


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Bars of eight heights, from `low` to `high`."""
    span = (high - low) or 1.0
    return "".join(BARS[min(7, max(0, int(8 * (value - low) / span)))] for value in values)


def sparklines(comparison: Comparison) -> list[tuple[str, str]]:
    """Each run's training loss over the common steps, all on one scale; nothing where there are none."""
    every = [loss for _, _, losses in comparison.windows for loss in losses]
    if not every:
        return []
    return [
        (run.name, sparkline([losses[number] for _, _, losses in comparison.windows], min(every), max(every)))
        for number, run in enumerate(comparison.runs)
    ]


def _seconds(run: RunView, name: str) -> str:
    value, wall = run.breakdown_seconds[name], run.breakdown_seconds["wall"]
    return f"{value:,.1f}" if name == "wall" or not wall else f"{value:,.1f} ({percent(value / wall)})"


def _draw(axes: Axes, comparison: Comparison) -> None:
    import numpy as np

    for run in comparison.runs:
        if not run.losses:
            continue
        steps, losses = (np.array(list(values)) for values in (run.losses.keys(), run.losses.values()))
        width = max(1, round(SMOOTH_SHARE * len(losses)))
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        (line,) = axes.plot(steps[width - 1 :], smooth, lw=1.2, label=run.name)
        axes.plot(steps, losses, lw=0.5, alpha=0.25, color=line.get_color())
        if run.validation:
            options: dict[str, Any] = {"ms": 3.5, "lw": 0.8, "color": line.get_color()}
            axes.plot(list(run.validation), list(run.validation.values()), "o--", **options)
    note = "" if not comparison.not_comparable else " (not comparable)"
    axes.set(xlabel="step", ylabel=f"loss{note}; points: held out")
    axes.legend(frameon=False, fontsize=7)
