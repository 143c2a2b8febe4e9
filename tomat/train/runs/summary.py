"""The outcome of a run, from its log of steps, its history and its evaluation: its figures, and one line of them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tomat.base.documents import is_figure, mapping, parse_checked
from tomat.base.layout import EVALUATION_FILE
from tomat.train.runs.checkpoints import Checkpoint, survey
from tomat.train.runs.devices import devices_sentence, last_devices
from tomat.train.runs.history import Event, file_content
from tomat.train.runs.record import RunRecord

FIRST_STEPS = 3
"""Steps of a process that warm caches and compile; no speed is read off them."""
LAST_STEPS = 10
"""Number of last steps whose mean is the last loss."""
MFU_STEPS = 50
"""Number of last steps whose median MFU a run shows."""
LARGEST_FIGURE = 1e300
"""Largest figure of a log: a larger one is damage, and sums of smaller ones are finite."""
HELD_OUT = {
    "held_out_nmae_median": ("over_materials", "teacher_forced_nmae_median"),
    "held_out_nemd": ("over_materials", "teacher_forced_nemd"),
    "free_running_nmae": ("free_running", "over_materials", "free_running_nmae"),
}
"""Means over held-out materials, as fractions, each with its place in `evaluation.json`."""
ENDS = ("start", "resume", "stop", "preempted")
"""Events that say whether a process is at work on the run."""
PARTS = {"steps": "step_seconds", "evaluation": "eval_seconds", "checkpoints": "checkpoint_seconds",
         "profiler": "profiler_seconds"}  # fmt: skip
INSIDE = {"compiling": "compile_seconds", "waiting_for_data": "throughput/loading_time",
          "hooks": "throughput/hook_time"}  # fmt: skip
"""Parts of the wall-clock, and what lies inside them, by key of the log."""

VALIDATION, SEQUENCES = "eval/validation/loss", "eval/validation/sequences"
"""Keys of the log: a validation loss, and the number of sequences that it is the mean over."""

Figures = dict[str, Any]
"""Figures by name, units in the names; a figure that is not known is left out."""


def run_figures(
    rows: Sequence[Mapping[str, Any]],
    evaluation: Mapping[str, Any],
    ran: Sequence[Mapping[str, Any]] | None = None,
) -> Figures:
    """First and last loss, newest validation loss and the best over as many sequences, medians of the speeds, seconds,
    errors held out. `ran`: the rows that speeds are taken from, all of which ran on the same devices (`RunRecord.ran`);
    None: all rows. Errors of an evaluation before the last step, which a run that went on still has, are left out."""
    losses, evaluated = _values(rows, "train/loss"), validated(rows)
    # A run that went on with another `trainer.max_eval_batches`, or other devices beside it, has evaluated other rows.
    validation = _values([row for row in evaluated if row.get(SEQUENCES) == evaluated[-1].get(SEQUENCES)], VALIDATION)
    figures: Figures = {}
    if losses:
        figures |= {"first_loss": losses[0], "last_loss": statistics.fmean(losses[-LAST_STEPS:])}
    if validation:
        figures |= {"validation_loss": validation[-1], "validation_loss_best": min(validation)}
    for key in ("step_seconds", "tokens_per_second", "mfu_full"):
        if values := _values(steady(rows if ran is None else ran), key):
            figures[f"{key}_median"] = statistics.median(values)
    figures["wall_seconds"] = sum(_values(rows, "wall_seconds"))
    rates = [row for row in rows if is_figure(row.get("tokens_per_second")) and is_figure(row.get("step_seconds"))]
    tokens = sum(float(row["tokens_per_second"]) * float(row["step_seconds"]) for row in rates)
    if is_figure(tokens):  # else damage made them too large
        figures["tokens"] = round(tokens)
    last_step = max((row["step"] for row in rows if is_figure(row.get("step"))), default=-1)
    for name, (*part, over, key) in HELD_OUT.items():
        result = mapping(evaluation.get(part[0])) if part else evaluation
        step = mapping(result.get("settings")).get("step")
        found = mapping(mapping(result.get(over)).get(key)).get("mean")
        if is_figure(found) and not (is_figure(step) and step < last_step):
            figures[name] = found
    return figures


def validated(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows with a validation loss."""
    return [row for row in rows if _values([row], VALIDATION)]


def read_evaluation(url: str) -> Mapping[str, Any]:
    """`evaluation.json` of a run's folder or URL; empty where there is none."""
    content = file_content(f"{url}/{EVALUATION_FILE}")
    if content is None:
        return {}
    return parse_checked(content, f"{url}/{EVALUATION_FILE}", "an evaluation", "Evaluate the run again.")[0]


def steady(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The rows with the times of steps: without the first ones and those that compiled; all rows, if none is left."""
    return [row for row in rows[FIRST_STEPS:] if not row.get("compile_seconds")] or rows


def step_breakdown(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Where the wall-clock of a run's steps went, in seconds.

    `wall` is all of it; `steps`, `evaluation`, `checkpoints`, `profiler` and `other` add up to it. `steps` are from one
    loss to the next; `waiting_for_data` and `hooks` (log, guards, and what is due after a step) are what the host did
    meanwhile: with steps dispatched ahead the devices compute through both, so they are no part of the sum. `compiling`
    lies inside whichever part compiled.
    """

    parts, inside = ({name: sum(_values(rows, key)) for name, key in keys.items()} for keys in (PARTS, INSIDE))
    wall = sum(_values(rows, "wall_seconds"))
    return {"wall": wall, **parts, "other": max(0.0, wall - sum(parts.values())), **inside}


@dataclass(frozen=True)
class RunSummary:
    name: str
    url: str
    steps_done: int
    steps_total: int | None
    state: str
    """`finished`, `preempted`, `stopped`, `guard NAME`, or `open`: the last thing the run wrote is a step."""
    state_detail: str
    """Why it stopped; of an open run, how long ago it wrote."""
    last_whole_step: int | None
    partial_checkpoints: int
    """Checkpoints that are not whole, newer than that (`list`) or at all (`show`)."""
    first_loss: float | None
    last_loss: float | None
    """Mean of the last 10 steps."""
    validation_loss: float | None
    mfu: float | None
    """Median MFU by the full count over the last 50 steps on the devices that ran last (`RunRecord.ran`); None if the
    chip's peak is not known."""
    survived: int
    """Times the run went on after SIGTERM, Ctrl-C, a notice or a kill."""
    devices: str
    """The devices that its newest piece ran on (`devices_sentence`)."""
    written_utc: float | None

    def to_dict(self) -> dict[str, Any]:
        figures = dict(vars(self))
        figures["mfu_full_median_last_50_steps"] = figures.pop("mfu")
        figures["written_seconds_utc"] = figures.pop("written_utc")
        return figures


def outcome(record: RunRecord, run_url: str, now_utc: float) -> tuple[RunSummary, Figures]:
    """A run's summary and its figures now, evaluation included; its checkpoints are at `run_url`."""
    whole, partial = survey(run_url, record.temporary_url)
    summary = summarise(record, whole, len(partial), now_utc)
    figures = {"steps_done": summary.steps_done, "steps_total": summary.steps_total}
    return summary, figures | run_figures(record.rows, read_evaluation(record.url), record.ran.rows)


def summarise(record: RunRecord, whole: Checkpoint | None, partial: int, now_utc: float) -> RunSummary:
    """Put a run into one line: `whole` is its newest whole checkpoint, `partial` how many are not whole."""
    losses, validations = _values(record.rows, "train/loss"), _values(record.rows, VALIDATION)
    mfus = _values(record.ran.rows[-MFU_STEPS:], "mfu_full")
    done = max((row["step"] for row in record.rows), default=-1) + 1
    state, detail = run_state(record, done, whole, now_utc)
    survived, last = 0, None
    for event in record.events:
        if event["event"] == "resume":
            survived += event.get("after") in ("preempted", "killed") or (last is not None and _is_preemption(last))
        last = event if event["event"] in ENDS else last
    return RunSummary(
        name=record.shown_name,
        url=record.url,
        steps_done=done,
        steps_total=record.total_steps,
        state=state,
        state_detail=detail,
        last_whole_step=whole.step if whole is not None else None,
        partial_checkpoints=partial,
        first_loss=losses[0] if losses else None,
        last_loss=statistics.fmean(losses[-LAST_STEPS:]) if losses else None,
        validation_loss=validations[-1] if validations else None,
        mfu=statistics.median(mfus) if mfus else None,
        survived=survived,
        devices=devices_sentence(last_devices(record.events), record.asked_slice),
        written_utc=record.written_utc,
    )


def run_state(record: RunRecord, done: int, whole: Checkpoint | None, now_utc: float) -> tuple[str, str]:
    """The run's state and what there is to say about it, from what it wrote and nothing else. A killed run could not
    say so: it is `open`, like a run at work, and only the age of its last line tells them apart."""
    total = record.total_steps
    if total is not None and done >= total and whole is not None and whole.step >= total - 1:
        return "finished", ""
    last = next((event for event in reversed(record.events) if event["event"] in ENDS), None)
    for event in reversed(record.events):  # a guard that ended the last process, perhaps before that said it had begun
        if event["event"] in ("start", "resume", "preempted"):
            break
        if event["event"] == "guard:hang" or (event["event"] == "guard:bad_loss" and event.get("action") == "stop"):
            return f"guard {event['event'].partition(':')[2]}", str(event.get("reason") or event.get("after") or "")
    if last is not None and _is_preemption(last):
        where = f"after step {last['step'] - 1}" if last.get("step") else "before the first step"
        return "preempted", f"{last.get('cause') or 'SIGTERM'} {where}"
    if last is not None and last["event"] == "stop":
        return "stopped", str(last.get("reason", ""))
    if record.written_utc is None:
        return "open", "nothing written yet"
    return "open", last_written(record.written_utc, now_utc)


def last_written(written_utc: float, now_utc: float) -> str:
    return f"last written {ago(now_utc - written_utc)}"


def ago(seconds: float) -> str:
    """`90 s ago`, `3 h ago`."""
    seconds, unit = max(0.0, seconds), "s"
    for longer, size in (("min", 60), ("h", 60), ("d", 24)):
        if seconds < 2 * size:
            break
        seconds, unit = seconds / size, longer
    return f"{seconds:.0f} {unit} ago"


def _is_preemption(event: Event) -> bool:
    """Whether SIGTERM, Ctrl-C or a notice ended the run by this event, in good order or because its grace was over."""
    overrun = event["event"] == "stop" and "of grace are over" in str(event.get("reason", ""))
    return event["event"] == "preempted" or overrun


def _values(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The rows' figures of one name; one that was not finite is null in the log."""
    return [row[key] for row in rows if is_figure(row.get(key)) and abs(row[key]) <= LARGEST_FIGURE]
