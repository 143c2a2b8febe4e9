"""Where nobody watches, a plan says its stages line by line, and that it still works."""

import io
import re
import time

from tomat.base.reporting import plain_console
from tomat.base.stages import Stages


def test_a_pipe_gets_a_line_a_stage_and_a_sign_of_life():
    text = io.StringIO()
    with Stages(plain_console(file=text, width=200), repeat_seconds=0.2) as stages:
        stages.show("200m [fast]", "lowering")
        stages.show("200m [fast]", "compiling")
        time.sleep(0.5)
        stages.show("200m [fast]", "done")
        stages.say("a note")
        time.sleep(0.5)
    lines = text.getvalue().splitlines()
    assert all(line.startswith("[") and " s] " in line for line in lines)
    said = [line.split(" s] ")[1] for line in lines]
    assert [line for line in said if "still" not in line] == [
        "200m [fast]: lowering", "200m [fast]: compiling", "200m [fast]: done", "a note",
    ]  # fmt: skip
    assert any(line.startswith("200m [fast]: still compiling, ") for line in said)
    assert not any("still done" in line for line in said)


def test_a_terminal_gets_how_long_each_stage_took():
    text = io.StringIO()
    with Stages(plain_console(file=text, width=200, force_terminal=True)) as stages:
        stages.show("200m", "lowering")
        stages.show("200m", "compiling")
    assert re.search(r"200m: lowering took \d+ s", text.getvalue())
    assert re.search(r"200m: compiling took \d+ s", text.getvalue())
