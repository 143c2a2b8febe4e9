"""One slice against scripted answers of gcloud, in simulated time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tomat.base.errors import TomatError
from tomat.launch.command import Command, Result
from tomat.launch.gcloud import TpuLaunch
from tomat.launch.machine import Clock, Machine
from tomat.launch.pack import Pack
from tomat.launch.policy import Ending, RestartPolicy

LOST = Result(1, "", "ERROR: (gcloud) Connection reset by peer")


class Simulated(Clock):
    def __init__(self) -> None:
        self.at = 1e9

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Callable[[Callable[[str], Result]], Machine]:
    """A machine whose commands, by the verb after `tpu-vm`, are answered by a function; a hundred of them at most."""
    monkeypatch.chdir(tmp_path)
    pack = Pack(Path("pack.tar.gz"), "0" * 64, "c", False, "run.yaml", ())
    launch = TpuLaunch("r", "v6e-4", "us-east5-b", output_dir="gs://b/runs", tpu_name="t", pack=pack, label="me")

    def made(answer: Callable[[str], Result]) -> Machine:
        asked: list[str] = []

        def run(command: Command) -> Result:
            asked.append(command.argv[4])
            assert len(asked) < 100, "asks without end"
            return answer(asked[-1])

        return Machine(launch, RestartPolicy(), run, print, Simulated())

    return made


def test_a_slice_whose_create_answer_was_lost_counts_as_held_until_it_is_known_to_be_gone(machine):
    states = iter([Result(1, "", "NOT_FOUND")])
    tried = machine(lambda verb: next(states, LOST) if verb == "describe" else LOST)
    with pytest.raises(TomatError, match="give the slice back"):
        tried.get()
    assert tried.held and tried.held_since is not None


def test_a_slice_that_cannot_be_deleted_is_waited_for_and_then_given_up(machine):
    exists = Result(1, "", "ALREADY_EXISTS: Resource 't' already exists")
    answers = {"describe": Result(0, "PREEMPTED\tme\n"), "create": exists, "delete": LOST}
    tried = machine(answers.__getitem__)
    ending, why = tried.get()
    assert ending is Ending.FAILED and "not deleted in 10 attempts" in why
    assert tried.clock.now() > 1e9


def test_a_network_that_is_cut_as_a_slice_is_asked_for_ends_no_launch(machine):
    """gcloud tells of it as of a login that has expired; the next attempt waits."""
    states = iter([Result(1, "", "NOT_FOUND")] * 2)
    cut = Result(1, "There was a problem refreshing your current auth tokens: Max retries exceeded with url: /token")
    tried = machine(lambda verb: next(states) if verb == "describe" else cut)
    assert tried.get() == (Ending.NO_CAPACITY, f"us-east5-b: {cut.last_line}") and not tried.held
