"""A start is never silent, and a stage of it that lasts too long ends the process with what is missing."""

import threading

from forked import until

from tomat.base.layout import HUNG_STATUS
from tomat.base.stages import StartStages


def test_each_stage_is_a_line_and_one_that_lasts_is_repeated_with_what_it_waits_for(capsys):
    stages = StartStages(repeat_seconds=0.04)
    with stages.watching():
        stages.known_as(3, 4)
        stages.begin("waiting for the coordinator at 10.0.0.2:8476", missing=lambda: "nothing answers there")
        said = ""

        def repeated() -> bool:
            nonlocal said
            said += capsys.readouterr().out
            return said.count("host 3 of 4: still waiting for the coordinator") >= 2

        assert until(repeated)
        stages.begin("opening the devices")
    assert said.startswith("host 3 of 4: waiting for the coordinator at 10.0.0.2:8476\n")
    assert "(0 s): nothing answers there" in said and stages.now == "opening the devices"
    assert "host 3 of 4: opening the devices" in capsys.readouterr().out


def test_one_host_alone_says_only_what_takes_long(capsys):
    stages = StartStages(repeat_seconds=60)
    stages.known_as(0, 1)
    stages.begin("opening the data")
    assert capsys.readouterr().out == ""


def test_a_stage_that_lasts_too_long_ends_the_process_with_one_line(capfd):
    left, ended = [], threading.Event()
    stages = StartStages(0.04, leave=lambda status: (left.append(status), ended.set()))
    with stages.watching():
        stages.known_as(0, 2)
        stages.begin("waiting for the other hosts", 0.1, lambda: "1 of 1 other hosts have not come")
        assert ended.wait(10)
    assert left == [HUNG_STATUS]
    (error,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "host 0 of 2" in error and "1 of 1 other hosts have not come" in error


def test_nothing_is_ended_once_the_start_is_over():
    left: list[int] = []
    stages = StartStages(0.01, leave=left.append)
    with stages.watching():
        stages.begin("compiling and taking the first step", 0.3)
        stages.end()
        threading.Event().wait(0.5)
    assert not left
