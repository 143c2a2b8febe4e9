"""A page that compares runs: their settings, figures, losses in one chart, and where the time went."""

from collections.abc import Sequence
from pathlib import Path

from tomat.base.report.formats import loss, percent
from tomat.base.report.markdown import update_page
from tomat.base.report.model import Axis, Chart, Code, Column, Items, Part, Report, Section, Series, Table, columns
from tomat.base.reporting import counted
from tomat.report.run import result_rows
from tomat.train.runs.compare import Comparison, RunView

PARTS = (
    ("wall", "wall-clock"),
    ("steps", "steps, from loss to loss"),
    ("evaluation", "evaluation"),
    ("checkpoints", "checkpoints"),
    ("profiler", "profiler"),
    ("other", "what came between"),
    ("compiling", "of these: compiling"),
    ("waiting_for_data", "of these: the host waiting for data"),
    ("hooks", "of these: hooks after a step"),
)
"""The wall-clock, the parts that add up to it, and times that lie inside these parts."""
COLOURS = ("#2b6cb0", "#dd8a33", "#2f855a", "#c53030", "#8a63b0", "#8c8c3b", "#3d8f93", "#6b7680")
"""One for each run; there are at most `MOST_RUNS`."""
BARS = "▁▂▃▄▅▆▇█"
SMOOTH_SHARE = 0.02
"""Share of the steps over which the drawn curves are averaged. The raw losses are drawn faintly."""


def write_comparison_page(comparison: Comparison, page: Path) -> Path:
    places = ", ".join(f"{run.name} (`{run.url}`)" for run in comparison.runs)
    comparable: list[Part] = [f"{places}. Same vocabulary, loss and data: their losses can be compared."]
    if comparison.not_comparable:
        said = "Their losses cannot be compared; errors of the density can, on the same materials:"
        comparable = [f"{places}.", said, Items(comparison.not_comparable)]
    sections = (
        Section("", comparable, "comparable"),
        Section("What differs in the settings", [settings_part(comparison)], "settings"),
        Section("Figures", [figures_table(comparison)], "figures"),
        Section("Losses", losses_parts(comparison, page.with_suffix(".svg").name), "losses"),
        Section("Where the time went", breakdown_parts(comparison), "breakdown"),
        Section("Notes", by_hand="<!-- What was seen. The text outside tomat's markers is yours. -->"),
    )
    return update_page(page, Report(" against ".join(run.name for run in comparison.runs), sections))


def settings_part(comparison: Comparison) -> Part:
    if not comparison.settings:
        return "Nothing: the runs have the same settings."
    rows = [(Code(key), *values) for key, values in comparison.settings.items()]
    return Table("", columns("key", *(run.name for run in comparison.runs), right=False), rows)


def figures_table(comparison: Comparison) -> Table:
    found = [dict(result_rows(run.figures)) for run in comparison.runs]
    names = [name for name in found[0] if any(one[name] is not None for one in found)]
    rows = [("ran on", *(run.devices for run in comparison.runs))]
    return Table("", _columns("figure", comparison), rows + [(name, *(one[name] for one in found)) for name in names])


def losses_parts(comparison: Comparison, file: str) -> list[Part]:
    """The loss curves, and each run's mean training loss in windows of the common steps, beside the first run's."""
    runs = comparison.runs
    parts: list[Part] = [losses_chart(comparison, file)] if any(run.losses for run in runs) else []
    if not comparison.common_steps:
        spans = [f"steps {min(run.losses)} to {max(run.losses)}" if run.losses else "none logged" for run in runs]
        named = "; ".join(f"{run.name}: {span}" for run, span in zip(runs, spans, strict=True))
        return [*parts, f"No step has a loss in every run ({named})."]
    first = runs[0].name
    rows = []
    for begin, end, losses in comparison.windows:
        others = (f"{loss(other)} ({loss(other - losses[0], '+')})" for other in losses[1:])
        rows.append((f"{begin:,} to {end:,}", loss(losses[0]), *others))
    headings = (first, *(f"{run.name} (less {first})" for run in runs[1:]))
    said = f"Means of the training loss over {counted(len(comparison.common_steps), 'common step')}"
    return [*parts, Table(said, [Column("steps"), *columns(*headings, right=True)], rows)]


def breakdown_parts(comparison: Comparison) -> list[Part]:
    """A table of the seconds of each part and its share of the wall-clock."""

    def shown(run: RunView, name: str) -> str:
        value, wall = run.breakdown_seconds[name], run.breakdown_seconds["wall"]
        return f"{value:,.1f}" if name == "wall" or not wall else f"{value:,.1f} ({percent(value / wall)})"

    rows = [(words, *(shown(run, name) for run in comparison.runs)) for name, words in PARTS]
    said = "The parts add up to the wall-clock from the first step to the last. What the host does while steps are "
    said += "dispatched ahead costs no time of the devices."
    return [Table("", _columns("seconds", comparison), rows), said]


def _columns(first: str, comparison: Comparison) -> list[Column]:
    return [Column(first), *columns(*(run.name for run in comparison.runs), right=True)]


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """A line of bars in eight heights, scaled from `low` to `high`."""
    span = (high - low) or 1.0
    return "".join(BARS[min(7, max(0, int(8 * (value - low) / span)))] for value in values)


def sparklines(comparison: Comparison) -> list[tuple[str, str]]:
    """Each run's training loss over the common steps, all on one scale; empty without common steps."""
    by_run = list(zip(*(losses for _, _, losses in comparison.windows), strict=True))
    every = [loss for losses in by_run for loss in losses]
    named = zip(comparison.runs, by_run, strict=bool(by_run))
    return [(run.name, sparkline(losses, min(every), max(every))) for run, losses in named]


def losses_chart(comparison: Comparison, file: str) -> Chart:
    import numpy as np

    series = []
    for run, colour in zip(comparison.runs, COLOURS, strict=False):
        if not run.losses:
            continue
        steps, losses = (np.array(list(values)) for values in (run.losses.keys(), run.losses.values()))
        width = max(1, round(SMOOTH_SHARE * len(losses)))
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        series.append(Series(run.name, steps[width - 1 :].tolist(), smooth.tolist(), colour=colour))
        series.append(Series("", steps.tolist(), losses.tolist(), colour=colour, faint=True, named=False))
        if run.validation:
            held_out = list(run.validation), list(run.validation.values())
            series.append(Series("", *held_out, "both", colour, dotted=True, named=False))
    note = " (not comparable)" if comparison.not_comparable else ""
    y = Axis(f"loss{note}; points: held out")
    said = "The table has means of the losses over windows of the steps."
    return Chart("Losses by step", series, Axis("step"), y, said, file, (7.0, 3.6))
