"""One line a run: how far it is, whether it ended and how, what it has learnt, what it survived."""

import statistics
from dataclasses import dataclass
from typing import Any

from tomat.base.documents import is_figure
from tomat.train.runs.checkpoints import Checkpoint, survey
from tomat.train.runs.devices import devices_sentence, last_devices
from tomat.train.runs.figures import Figures, read_evaluation, run_figures
from tomat.train.runs.history import Event
from tomat.train.runs.record import RunRecord

MFU_STEPS = 50
"""Last steps whose median is shown."""
ENDS = ("start", "resume", "stop", "preempted")
"""Events that say whether a process is at work on the run."""


@dataclass(frozen=True)
class RunSummary:
    """What `tomat runs list` shows of a run."""

    name: str
    url: str
    steps_done: int
    """Steps in the log."""
    steps_total: int | None
    state: str
    """`finished`, `preempted`, `stopped`, `guard NAME`, or `open`: the last thing the run wrote is a step."""
    state_detail: str
    """Why it stopped; of an open run, how long ago it wrote."""
    last_whole_step: int | None
    """The last step in the newest whole checkpoint."""
    partial_checkpoints: int
    """Checkpoints that are not whole, newer than that (`list`) or at all (`show`)."""
    first_loss: float | None
    last_loss: float | None
    """Mean of the last 10 steps."""
    validation_loss: float | None
    """The newest."""
    mfu: float | None
    """Median over the last 50 steps on the devices that ran last (`RunRecord.ran`) of MFU by the full count; None if
    the chip's peak is not known."""
    survived: int
    """Times the run went on after SIGTERM, Ctrl-C, a notice or a kill."""
    devices: str
    """What its newest piece ran on, such as `16 x TPU v6 lite on 4 hosts`, and the slice that was asked for where it is
    another."""
    written_utc: float | None

    def to_dict(self) -> dict[str, Any]:
        figures = dict(vars(self))
        figures["mfu_full_median_last_50_steps"] = figures.pop("mfu")
        figures["written_seconds_utc"] = figures.pop("written_utc")
        return figures


def outcome(record: RunRecord, run_url: str, now_utc: float) -> tuple[RunSummary, Figures]:
    """A run's line and its figures, evaluation included, now; its checkpoints are at `run_url`."""
    whole, partial = survey(run_url, record.temporary_url)
    summary = summarise(record, whole, len(partial), now_utc)
    figures = {"steps_done": summary.steps_done, "steps_total": summary.steps_total}
    return summary, figures | run_figures(record.rows, read_evaluation(record.url), record.ran.rows)


def summarise(record: RunRecord, whole: Checkpoint | None, partial: int, now_utc: float) -> RunSummary:
    """Put a run into one line: `whole` is its newest whole checkpoint, `partial` how many are not whole."""

    def values(key: str, rows: list[dict[str, Any]]) -> list[float]:
        return [row[key] for row in rows if is_figure(row.get(key))]

    losses, validations = values("train/loss", record.rows), values("eval/validation/loss", record.rows)
    mfus = values("mfu_full", record.ran.rows[-MFU_STEPS:])
    done = max((row["step"] for row in record.rows), default=-1) + 1
    state, detail = run_state(record, done, whole, now_utc)
    return RunSummary(
        name=record.name,
        url=record.url,
        steps_done=done,
        steps_total=record.total_steps,
        state=state,
        state_detail=detail,
        last_whole_step=whole.step if whole is not None else None,
        partial_checkpoints=partial,
        first_loss=losses[0] if losses else None,
        last_loss=statistics.fmean(losses[-10:]) if losses else None,
        validation_loss=validations[-1] if validations else None,
        mfu=statistics.median(mfus) if mfus else None,
        survived=_survived(record.events),
        devices=devices_sentence(last_devices(record.events), record.asked_slice),
        written_utc=record.written_utc,
    )


def run_state(record: RunRecord, done: int, whole: Checkpoint | None, now_utc: float) -> tuple[str, str]:
    """The run's state and what there is to say about it, from what it wrote and nothing else.

    A process that was killed could not say so: such a run is `open`, as is one at work, and only the age of its last
    line tells them apart.
    """
    total = record.total_steps
    if total is not None and done >= total and whole is not None and whole.step >= total - 1:
        return "finished", ""
    last = next((event for event in reversed(record.events) if event["event"] in ENDS), None)
    if last is not None and _is_preemption(last):
        return "preempted", f"{last.get('cause') or 'SIGTERM'} after step {last.get('step', 0) - 1}"
    guard = _guard_that_ended_it(record.events)
    if guard is not None:
        return f"guard {guard['event'].partition(':')[2]}", str(guard.get("reason") or guard.get("after") or "")
    if last is not None and last["event"] == "stop":
        return "stopped", str(last.get("reason", ""))
    age = "nothing written yet" if record.written_utc is None else f"last written {_ago(now_utc - record.written_utc)}"
    return "open", age


def _is_preemption(event: Event) -> bool:
    """The event of a run that SIGTERM, Ctrl-C or a notice ended, in good order or because its grace was over."""
    overrun = event["event"] == "stop" and "of grace are over" in str(event.get("reason", ""))
    return event["event"] == "preempted" or overrun


def _survived(events: list[Event]) -> int:
    """How often the run went on after SIGTERM, Ctrl-C, a notice or a kill."""
    count = 0
    last: Event | None = None
    for event in events:
        if event["event"] == "resume":
            count += event.get("after") in ("preempted", "killed") or (last is not None and _is_preemption(last))
        last = event if event["event"] in ENDS else last
    return count


def _guard_that_ended_it(events: list[Event]) -> Event | None:
    """The guard event that ended the last process: a hang, or a bad loss under the policy to stop."""
    for event in reversed(events):
        if event["event"] in ("start", "resume"):
            return None
        if event["event"] == "guard:hang" or (event["event"] == "guard:bad_loss" and event.get("action") == "stop"):
            return event
    return None


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
