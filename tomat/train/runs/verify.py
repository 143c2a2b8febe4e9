"""Whether what a run left is sound: checkpoints whole, files as they were written, every step in the log once."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tomat.base.checked_json import is_as_signed, parse_checked
from tomat.base.errors import TomatError
from tomat.base.layout import (
    CODEC_FILE,
    CONFIG_FILE,
    EVALUATION_FILE,
    HISTORY_FILE,
    METRICS_FILE,
    PROMOLECULE_FILE,
)
from tomat.base.reporting import first_line
from tomat.data.codec.files import codec_from_text
from tomat.data.density.promolecule import Promolecule
from tomat.train.runs.checkpoints import NO_CHECKSUMS, Checkpoint
from tomat.train.runs.history import file_content
from tomat.train.runs.record import RunRecord

NAMED = 5
"""Steps that a message names before it says how many more there are."""


@dataclass(frozen=True)
class Verdict:
    name: str
    problems: tuple[str, ...]
    """What is wrong; empty for a sound run."""
    notes: tuple[str, ...]
    """What is no damage: saves that a kill cut short, which no resume takes."""
    checkpoints: int
    """Whole ones."""
    log_lines: int


def verify_run(record: RunRecord, checkpoints: list[Checkpoint]) -> Verdict:
    """Check a run's log and all its checkpoints, each examined, against each other."""
    problems, notes = _check_log(record)
    for found, more in zip((problems, notes), _check_files(record.url), strict=True):
        found += more
    last_event = len(record.events) + len(record.unreadable_events)
    for number in record.unreadable_events:
        if number == last_event:
            notes.append(f"the last line of {HISTORY_FILE} was cut short")
        else:
            problems.append(f"line {number} of {HISTORY_FILE} is not JSON with an event")
    whole = [found for found in checkpoints if found.whole]
    for found in (one for one in checkpoints if not one.whole):
        if found.completed:
            problems.append(f"{found.path}: {found.reason}")
        else:
            notes.append(f"{found.path}: {found.reason}; being written, or cut short by a kill, and never resumed from")
    if unchecked := [found.step for found in whole if not found.has_checksums]:
        notes.append(f"step {_name(unchecked)}: {NO_CHECKSUMS}")
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
            problems.append(f"line {number} of {METRICS_FILE} is not JSON with a step from 0 to 10^9")
    steps = [row["step"] for row in record.rows]
    if not steps:
        return problems, [*notes, f"no {METRICS_FILE}, or nothing in it"]
    begin = min(steps)
    # A fork's own log begins where it left its parent.
    allowed = {0} | {event["step"] for event in record.events if event["event"] == "fork" and "step" in event}
    if begin not in allowed:
        problems.append(f"{METRICS_FILE} begins at step {begin}; expected {' or '.join(map(str, sorted(allowed)))}")
    times = Counter(steps)
    n_missing = max(steps) + 1 - begin - len(times)
    if n_missing:
        problems.append(f"{METRICS_FILE} lacks step {_name(_first_missing(sorted(times)), n_missing)}")
    twice = sorted(step for step, count in times.items() if count > 1)
    if twice:
        problems.append(f"{METRICS_FILE} has more than one line for step {_name(twice, len(twice))}")
    if not twice and steps != sorted(steps):
        problems.append(f"{METRICS_FILE} is not in order of step")
    return problems, notes


def _first_missing(steps: list[int]) -> list[int]:
    """The first `NAMED` numbers between distinct, ascending steps; a damaged step may lie 10^9 after the others."""
    between = (number for a, b in itertools.pairwise(steps) for number in range(a + 1, b))
    return list(itertools.islice(between, NAMED))


def _check_files(url: str) -> tuple[list[str], list[str]]:
    """Compare the small files of a run, log and history apart, with the hashes that they hold themselves."""
    problems: list[str] = []
    notes: list[str] = []

    def check(name: str, is_whole: Callable[[bytes], bool | None]) -> None:
        content = file_content(f"{url}/{name}")
        if content is None:
            return
        try:
            whole = is_whole(content)
        except (TomatError, UnicodeDecodeError) as error:
            problems.append(first_line(error))
            return
        if whole is None:
            notes.append(f"{name} was written without a hash, by an earlier version: whether it is intact is not known")
        elif not whole:
            problems.append(f"{name} is not what was written: its lines have another SHA-256 than it says")

    def evaluated(content: bytes) -> bool | None:
        return parse_checked(content, EVALUATION_FILE, "an evaluation", "Evaluate the run again.")[1] or None

    check(CONFIG_FILE, is_as_signed)
    check(CODEC_FILE, lambda content: codec_from_text(content.decode(), CODEC_FILE) is not None)
    check(PROMOLECULE_FILE, lambda content: Promolecule.from_text(content.decode(), PROMOLECULE_FILE) is not None)
    check(EVALUATION_FILE, evaluated)
    return problems, notes


def _name(steps: list[int], count: int | None = None) -> str:
    """The first steps, and how many more there are of `count` (default: as many as named here)."""
    count = len(steps) if count is None else count
    more = f" and {count - NAMED:,} more" if count > NAMED else ""
    return ", ".join(map(str, steps[:NAMED])) + more
