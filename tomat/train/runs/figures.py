"""What a run has come to, and where its time went, from its log of steps and its evaluation."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tomat.base.checked_json import parse_checked
from tomat.base.documents import is_figure, mapping
from tomat.base.layout import EVALUATION_FILE
from tomat.train.runs.history import file_content

FIRST_STEPS = 3
"""Steps of a process that warm caches and compile; no speed is read off them."""
LAST_STEPS = 10
"""Whose mean is the last loss."""
SPEEDS = ("step_seconds", "tokens_per_second", "mfu_full")
HELD_OUT = {
    "held_out_nmae_median": ("over_materials", "teacher_forced_nmae_median"),
    "held_out_nemd": ("over_materials", "teacher_forced_nemd"),
    "free_running_nmae": ("free_running", "over_materials", "free_running_nmae"),
}
"""Mean over held-out materials, a fraction, and where it stands in `evaluation.json`."""

Figures = dict[str, Any]
"""Figures by name, units in the names; a figure that is not known is left out."""


def run_figures(
    rows: Sequence[Mapping[str, Any]],
    evaluation: Mapping[str, Any],
    ran: Sequence[Mapping[str, Any]] | None = None,
) -> Figures:
    """First, last and best loss, the newest validation loss, medians of the speeds, seconds, errors held out.

    Args:
        ran: Those of the rows that speeds are of, which all ran on the same devices (`RunRecord.ran`); None: all.
    """
    losses = _values(rows, "train/loss")
    validation = _values(rows, "eval/validation/loss")
    figures: Figures = {}
    if losses:
        figures |= {"first_loss": losses[0], "last_loss": statistics.fmean(losses[-LAST_STEPS:])}
    if validation:
        figures |= {"validation_loss": validation[-1], "validation_loss_best": min(validation)}
    for key in SPEEDS:
        if values := _values(steady(rows if ran is None else ran), key):
            figures[f"{key}_median"] = statistics.median(values)
    figures["wall_seconds"] = sum(_values(rows, "wall_seconds"))
    rates = [row for row in rows if is_figure(row.get("tokens_per_second")) and is_figure(row.get("step_seconds"))]
    figures["tokens"] = round(sum(row["tokens_per_second"] * row["step_seconds"] for row in rates))
    for name, path in HELD_OUT.items():
        found: Any = evaluation
        for key in (*path, "mean"):
            found = mapping(found).get(key)
        if is_figure(found):
            figures[name] = found
    return figures


def read_evaluation(url: str) -> Mapping[str, Any]:
    """`evaluation.json` of a run's folder or URL; empty where there is none."""
    content = file_content(f"{url}/{EVALUATION_FILE}")
    if content is None:
        return {}
    return parse_checked(content, f"{url}/{EVALUATION_FILE}", "an evaluation", "Evaluate the run again.")[0]


def steady(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The rows whose times are those of the steps: without the first ones and those that compiled; all, if none is."""
    return [row for row in rows[FIRST_STEPS:] if not row.get("compile_seconds")] or rows


def step_breakdown(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Where the wall-clock of a run's steps went, in seconds.

    `wall` is all of it; `steps`, `evaluation`, `checkpoints`, `profiler` and `other` add up to it. `steps` are from one
    loss to the next; `waiting_for_data` and `hooks` (log, guards, and what is due after a step) are what the host did
    meanwhile: with steps dispatched ahead the devices compute through both, so they are no part of the sum. `compiling`
    lies inside whichever part compiled.
    """

    def seconds(**keys: str) -> dict[str, float]:
        return {name: sum(_values(rows, key)) for name, key in keys.items()}

    wall = sum(_values(rows, "wall_seconds"))
    parts = seconds(
        steps="step_seconds",
        evaluation="eval_seconds",
        checkpoints="checkpoint_seconds",
        profiler="profiler_seconds",
    )
    inside = seconds(
        compiling="compile_seconds",
        waiting_for_data="throughput/loading_time",
        hooks="throughput/hook_time",
    )
    return {"wall": wall, **parts, "other": max(0.0, wall - sum(parts.values())), **inside}


def _values(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The rows' figures of one name; one that was not finite is null in the log."""
    return [row[key] for row in rows if is_figure(row.get(key))]
