"""Whether what a run left is sound: every checkpoint whole, every step in the log once."""

from dataclasses import dataclass

from tomat.runs.record import METRICS_FILE, RunRecord
from tomat.training.checkpoints import Checkpoint

NAMED = 5
"""Steps that a message names before it says how many more there are."""


@dataclass(frozen=True)
class Verdict:
    """What `tomat runs verify` found in one run."""

    name: str
    problems: tuple[str, ...]
    """What is wrong; empty for a sound run."""
    notes: tuple[str, ...]
    """What is no damage: saves that a kill cut short, which no resume takes."""
    checkpoints: int
    """Whole ones."""
    log_lines: int


def verify_run(record: RunRecord, checkpoints: list[Checkpoint]) -> Verdict:
    """Check a run's log and checkpoints against each other.

    Args:
        record: The run.
        checkpoints: All of them, each examined.
    """
    problems, notes = _check_log(record)
    whole = [found for found in checkpoints if found.whole]
    for found in checkpoints:
        if found.whole:
            continue
        if found.seconds_utc is None:
            notes.append(f"{found.path}: {found.reason}; being written, or cut short by a kill, and never resumed from")
        else:
            problems.append(f"{found.path}: {found.reason}")
    last = record.rows[-1]["step"] if record.rows else -1
    if whole and whole[-1].step > last:
        problems.append(f"{METRICS_FILE} ends at step {last}, before the newest checkpoint, step {whole[-1].step}")
    if not whole:
        notes.append("no whole checkpoint: a resume starts from the beginning")
    return Verdict(record.name, tuple(problems), tuple(notes), len(whole), len(record.rows))


def _check_log(record: RunRecord) -> tuple[list[str], list[str]]:
    problems: list[str] = []
    notes: list[str] = []
    total_lines = len(record.rows) + len(record.unreadable_lines)
    for number in record.unreadable_lines:
        if number == total_lines:
            notes.append(f"the last line of {METRICS_FILE} was cut short; a resume drops it")
        else:
            problems.append(f"line {number} of {METRICS_FILE} is not JSON with a step")
    steps = [row["step"] for row in record.rows]
    if not steps:
        return problems, [*notes, f"no {METRICS_FILE}, or nothing in it"]
    begin = min(steps)
    # A fork's own log begins where it left its parent.
    allowed = {0} | {event["step"] for event in record.events if event["event"] == "fork" and "step" in event}
    if begin not in allowed:
        problems.append(f"{METRICS_FILE} begins at step {begin}; expected {' or '.join(map(str, sorted(allowed)))}")
    missing = sorted(set(range(begin, max(steps) + 1)) - set(steps))
    if missing:
        problems.append(f"{METRICS_FILE} lacks step {_name(missing)}")
    twice = sorted({step for step in steps if steps.count(step) > 1}) if len(set(steps)) < len(steps) else []
    if twice:
        problems.append(f"{METRICS_FILE} has more than one line for step {_name(twice)}")
    if not twice and steps != sorted(steps):
        problems.append(f"{METRICS_FILE} is not in order of step")
    return problems, notes


def _name(steps: list[int]) -> str:
    more = f" and {len(steps) - NAMED} more" if len(steps) > NAMED else ""
    return ", ".join(map(str, steps[:NAMED])) + more
