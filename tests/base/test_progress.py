"""Long work says what it does where nobody watches a bar; short work and terminals get no such lines."""

import io
import re
import time

from rich.progress import TextColumn

from tomat.base.progress import SpokenProgress, Stages
from tomat.base.reporting import plain_console


def lines_of(seconds: float, lines: int = 1000, *, terminal=False, total: int | None = 1000, first=0.05) -> list[str]:
    """What is printed for so many seconds, or until there are so many lines."""
    text = io.StringIO()
    console = plain_console(file=text, width=200, force_terminal=terminal)
    with SpokenProgress(TextColumn("bar"), console=console, first=first, repeat=0.1) as bar:
        task = bar.add_task("Compiling [1000] kernels", total=total)
        ended = time.monotonic() + seconds
        while time.monotonic() < ended and text.getvalue().count("\n") < lines:
            bar.advance(task)
            time.sleep(0.02)
    return [line for line in text.getvalue().splitlines() if "after" in line]


def test_in_a_pipe_long_work_says_how_far_it_is_again_and_again():
    lines = lines_of(30.0, lines=3)
    assert all(line.startswith("Compiling [1000] kernels: ") and " of 1,000 after " in line for line in lines)
    counts = [int(line.split(": ")[1].split()[0].replace(",", "")) for line in lines]
    assert len(counts) >= 3 and counts == sorted(set(counts)) and counts[0] < 1000
    without_end = lines_of(30.0, lines=1, total=None)
    assert without_end and not any(" of " in line for line in without_end)


def test_what_is_over_short_or_on_a_terminal_gets_no_lines():
    assert lines_of(0.5, total=1, first=0.2) == lines_of(0.1, first=5.0) == lines_of(0.3, terminal=True) == []


def test_a_pipe_gets_a_line_a_stage_and_a_sign_of_life():
    text = io.StringIO()
    with Stages(plain_console(file=text, width=200), repeat_seconds=0.2) as stages:
        for stage in ("lowering", "compiling", "done"):
            stages.show("200m [fast]", stage)
            time.sleep(0.5 if stage == "compiling" else 0.3)
        stages.say("a note")
    said = [re.fullmatch(r"\[ *\d+ s\] (.*)", line)[1] for line in text.getvalue().splitlines()]
    assert [line for line in said if "still" not in line] == [
        "200m [fast]: lowering", "200m [fast]: compiling", "200m [fast]: done", "a note",
    ]  # fmt: skip
    assert any(line.startswith("200m [fast]: still compiling, ") for line in said)
    assert not any("still done" in line for line in said)


def test_a_terminal_gets_how_long_each_stage_took():
    text = io.StringIO()
    with Stages(plain_console(file=text, width=200, force_terminal=True)) as stages:
        for stage in ("lowering", "compiling"):
            stages.show("200m", stage)
    assert re.search(r"200m: lowering took \d+ s(.|\n)*200m: compiling took \d+ s", text.getvalue())
