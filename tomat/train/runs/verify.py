"""Whether what a run left is sound: checkpoints whole, files as they were written, every step in the log once."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tomat.base.documents import is_as_signed, parse_checked
from tomat.base.errors import TomatError
from tomat.base.layout import CODEC_FILE, CONFIG_FILE, EVALUATION_FILE, HISTORY_FILE, METRICS_FILE, PROMOLECULE_FILE
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
    notes: tuple[str, ...]
    """Findings that are no damage, such as saves that a kill cut short, which no resume takes."""
    checkpoints: int
    log_lines: int


def verify_run(record: RunRecord, checkpoints: list[Checkpoint]) -> Verdict:
    problems: list[str] = []
    notes: list[str] = []
    for name, numbers, n_whole, expected, remedy in (
        (METRICS_FILE, record.unreadable_lines, len(record.rows), "a step from 0 to 10^9", "; a resume drops it"),
        (HISTORY_FILE, record.unreadable_events, len(record.events), "an event", ""),
    ):
        for number in numbers:
            if number == n_whole + len(numbers):
                notes.append(f"the last line of {name} was cut short{remedy}")
            else:
                problems.append(f"line {number} of {name} is not JSON with {expected}")
    _check_steps(record, problems, notes)
    _check_files(record.url, problems, notes)
    whole = [found for found in checkpoints if found.whole]
    for found in (one for one in checkpoints if not one.whole):
        if found.completed:
            problems.append(f"{found.path}: {found.reason}")
        else:
            notes.append(f"{found.path}: {found.reason}; being written, or cut short by a kill, and never resumed from")
    if unchecked := [found.step for found in whole if not found.has_checksums]:
        notes.append(f"step {_name(unchecked, len(unchecked))}: {NO_CHECKSUMS}")
    last = record.rows[-1]["step"] if record.rows else -1
    if whole and whole[-1].step > last:
        problems.append(f"{METRICS_FILE} ends at step {last}, before the newest checkpoint, step {whole[-1].step}")
    if not whole:
        notes.append("no whole checkpoint: a resume starts from the beginning")
    return Verdict(record.shown_name, tuple(problems), tuple(notes), len(whole), len(record.rows))


def _check_steps(record: RunRecord, problems: list[str], notes: list[str]) -> None:
    steps = [row["step"] for row in record.rows]
    if not steps:
        notes.append(f"no {METRICS_FILE}, or nothing in it")
        return
    begin = min(steps)
    # A fork's own log begins where it left its parent.
    allowed = {0} | {event["step"] for event in record.events if event["event"] == "fork" and "step" in event}
    if begin not in allowed:
        problems.append(f"{METRICS_FILE} begins at step {begin}; expected {' or '.join(map(str, sorted(allowed)))}")
    times = Counter(steps)
    if n_missing := max(steps) + 1 - begin - len(times):
        # Only the first missing steps are listed: a damaged step may lie 10^9 after the others.
        missing = (number for a, b in itertools.pairwise(sorted(times)) for number in range(a + 1, b))
        problems.append(f"{METRICS_FILE} lacks step {_name(list(itertools.islice(missing, NAMED)), n_missing)}")
    twice = sorted(step for step, count in times.items() if count > 1)
    if twice:
        problems.append(f"{METRICS_FILE} has more than one line for step {_name(twice, len(twice))}")
    elif steps != sorted(steps):
        problems.append(f"{METRICS_FILE} is not in order of step")


def _check_files(url: str, problems: list[str], notes: list[str]) -> None:
    evaluation = (EVALUATION_FILE, "an evaluation", "Evaluate the run again.")
    checks: dict[str, Callable[[bytes], bool | None]] = {
        CONFIG_FILE: is_as_signed,
        CODEC_FILE: lambda content: codec_from_text(content.decode(), CODEC_FILE) is not None,
        PROMOLECULE_FILE: lambda content: Promolecule.from_text(content.decode(), PROMOLECULE_FILE) is not None,
        EVALUATION_FILE: lambda content: parse_checked(content, *evaluation)[1] or None,
    }
    for name, is_whole in checks.items():
        if (content := file_content(f"{url}/{name}")) is None:
            continue
        try:
            whole = is_whole(content)
        except (TomatError, UnicodeDecodeError) as error:
            problems.append(first_line(error))
            continue
        if whole is None:
            notes.append(f"{name} was written without a hash, by an earlier version: whether it is intact is not known")
        elif not whole:
            problems.append(f"{name} is not what was written: its lines do not have the SHA-256 that it states")


def _name(steps: list[int], count: int) -> str:
    """The first of `count` steps, and how many more there are."""
    more = f" and {count - NAMED:,} more" if count > NAMED else ""
    return ", ".join(map(str, steps[:NAMED])) + more
