"""The restart loop against a `gcloud` whose hosts are folders: the scripts really run there, with signals and locks."""

import dataclasses
import json
import time
from pathlib import Path

import pytest
from json_keys import assert_keys_of_before

from tomat.base.errors import TomatError
from tomat.launch.command import Command, Result, run_command
from tomat.launch.gcloud import TpuLaunch, launch_folder
from tomat.launch.machine import Clock
from tomat.launch.pack import build_pack, read_tree
from tomat.launch.policy import Ending, RestartPolicy
from tomat.launch.record import Login
from tomat.launch.remote import PACK
from tomat.launch.supervisor import Supervisor

# On a busy machine the hosts of one slice end seconds apart.
FAST = RestartPolicy(backoff_seconds=0.01, poll_seconds=0.1, straggler_seconds=30, max_failures=3, unreachable_polls=3)


ME = Login("me@example.org", "me", "laptop")


def supervisor(policy: RestartPolicy = FAST, **settings) -> Supervisor:
    values = {"run_name": "soak_1", "slice_name": "v6e-4", "zone": "us-east5-b", "tpu_name": "soak"}
    config = Path("run.yaml")
    pack = build_pack(read_tree(Path.cwd(), config), config, ("--a", "b c"), launch_folder("soak_1") / PACK)
    launch = TpuLaunch(**{**values, "output_dir": "gs://bucket/runs", "pack": pack, **settings})
    launch = dataclasses.replace(launch, label=ME.label(launch.run_url))
    return Supervisor(launch, policy, run_command, print, ME)


def test_a_run_survives_preemption_crash_and_orderly_stop(world):
    world.behave("preempt", 143, 1, 0)
    report = supervisor(dataclasses.replace(FAST, max_failures=9), slice_name="v6e-16").supervise()
    assert report.endings == ["lost its machines", "was stopped in good order", "failed", "finished"]
    # Only the lost machines are created again, and only new machines are installed on.
    assert world.verbs() == ["create", *["ssh"] * 3, "delete", "create", *["ssh"] * 5, "delete"]
    assert world.machines() == []
    assert report.waited_seconds == pytest.approx(0.01)
    logs = world.checkout / "runs" / "soak_1" / "launch"
    for host in range(4):
        text = (logs / f"attempt-4-host-{host}.log").read_text()
        assert text.startswith(f"host {host} attempt 4: --config_path tomat-launch/run.yaml --a b c\n")


def test_a_refused_input_is_never_tried_again(world):
    world.behave(2)
    with pytest.raises(TomatError, match="refused its input.*data.train does not exist"):
        supervisor().supervise()
    assert (world.folder / "attempts-host-0").read_text() == "1"
    assert world.machines() == []


def test_failures_in_a_row_are_capped_and_wait_longer_each_time(world):
    """Attempts of few steps, which the logs of the hosts show; a healthy one breaks the row."""
    few, many = {"steps": 3, "status": 1}, {"steps": 60, "status": 75}
    world.behave(few, "held", many, few, 1, few)
    watched = supervisor()
    with pytest.raises(TomatError, match="3 attempts in a row with fewer than 50 steps"):
        watched.supervise()
    kinds = ["failed", "found its chips held by another process", "could not reach its storage", *["failed"] * 3]
    assert watched.endings == kinds and world.machines() == []
    assert watched.waited_seconds == pytest.approx(0.01 + 0.02 + 0.01 + 0.02 + 0.04)


def test_two_quick_failures_replace_the_slice_whatever_the_logs_say(world):
    world.behave(1, 75, 1, 0)
    watched = supervisor(dataclasses.replace(FAST, max_failures=4))
    assert watched.supervise().endings == ["failed", "could not reach its storage", "failed", "finished"]
    # The third failure is the first one of the second slice.
    assert [verb for verb in world.verbs() if verb != "ssh"] == ["create", "delete", "create", "delete"]
    world.behave(1, 1, 1)
    with pytest.raises(TomatError, match="2 attempts in a row with fewer than 50 steps"):
        supervisor(dataclasses.replace(FAST, max_failures=2)).supervise()
    # What is given back already is not given back again, which gcloud would answer with an error.
    assert [verb for verb in world.verbs() if verb != "ssh"][-2:] == ["create", "delete"]


def test_hosts_that_outlive_one_that_crashed_are_stopped_in_good_order(world):
    world.behave([1, "wait", "wait", "wait"], 0)
    watched = supervisor(dataclasses.replace(FAST, straggler_seconds=0.2), slice_name="v6e-16")
    assert watched.supervise().endings == ["failed", "finished"]
    statuses = [words for words in world.calls() if "kill -TERM" in str(words)]
    assert len(statuses) == 1


def test_a_host_that_is_lost_is_no_reason_to_wait_and_one_that_is_dead_for_another_slice(world):
    # The process on the first host alone, and then its machine, of which the others tell.
    world.behave([137, 76, 76, 76], ["dies", 76, 76, 76], 0)
    watched = supervisor(slice_name="v6e-16").supervise()
    assert watched.endings == ["lost a host", "lost a host", "finished"] and watched.waited_seconds == 0
    assert [verb for verb in world.verbs() if verb != "ssh"] == ["create", "delete", "create", "delete"]


def test_machines_whose_chips_another_process_holds_are_replaced(world):
    """After a slice of before that was being deleted was waited for."""
    world.behave("held", 0)
    world.answer("describe", "DELETING", "STOPPING")
    report = supervisor().supervise()
    assert report.endings == ["found its chips held by another process", "finished"]
    assert [verb for verb in world.verbs() if verb != "ssh"] == ["create", "delete", "create", "delete"]


def test_the_verb_runs_what_it_prints_and_writes_figures(world, capsys):
    """Through the command line: the same commands, dry and executed."""
    from tomat.app.cli import main

    words = "launch --config_path run.yaml --zone us-east5-b --slice v6e-4 --poll_seconds 0.05".split()
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert world.calls() == []
    world.behave(143, 0)
    assert main([*words, "--execute", "--json", "figures.json"]) == 0
    lines = [line for line in printed.splitlines() if line.startswith("gcloud ")]
    called = [words_run for words_run in world.calls() if words_run[0] == "compute"]
    assert all(any(" ".join(words_run[:5]) in line for line in lines) for words_run in called)
    figures = json.loads((world.checkout / "figures.json").read_text())
    assert_keys_of_before("launch --execute", figures)
    assert figures["endings"] == ["was stopped in good order", "finished"] and figures["attempts"] == 2


def test_an_error_of_this_process_leaves_no_slice_running(world):
    world.behave("wait")
    broken = supervisor()
    broken.run = lambda command: run_command(command) if command != broken.launch.status else 1 / 0
    with pytest.raises(ZeroDivisionError):
        broken.supervise()
    assert world.verbs()[0] == "create" and world.machines() == []


class Ticking(Clock):
    """A minute and a half later whenever it is asked."""

    at = 0.0

    def now(self) -> float:
        self.at += 90
        return self.at


def test_hosts_that_are_all_mute_do_not_keep_a_slice_for_the_sake_of_their_logs(world):
    """gcloud tries for a minute and longer; 64 hosts one after another would take hours."""
    watched, asked = supervisor(slice_name="v6e-256"), []
    watched.clock = Ticking()
    watched.run = lambda command: asked.append(command) or Result(124, "", "no answer")
    watched._collect(1)
    assert 1 < len(asked) < 10


def test_a_fault_is_that_of_its_own_host_and_attempt(world, capsys):
    """Of 16 hosts, whose files are not in the order of their numbers; a file of an earlier launch is there too."""
    busy = "open(/dev/vfio/0): Device or resource busy"
    watched = supervisor(slice_name="v6e-64")
    (watched.launch.folder / "attempt-1-host-2.log").write_text(busy)
    assert watched._after(1, Ending.FAILED, "cannot install on every host", 0.0)[0] is Ending.FAILED

    def copy(command: Command) -> Result:
        *_, target, worker = command.argv[:8]
        Path(target).write_text(busy if worker == "--worker=10" else "")
        return Result(0, "")

    watched.run = copy
    watched._collect(1)
    assert watched._after(1, Ending.FAILED, "", 0.0)[0] is Ending.CHIP_HELD
    assert "\nhost 10: another process has the chips" in f"\n{capsys.readouterr().out}"


@pytest.mark.parametrize("quiet", [False, True])
def test_a_command_that_runs_past_its_time_is_ended_with_what_it_has_started(quiet):
    """gcloud leaves its ssh behind, which would keep the output open."""
    began = time.monotonic()
    result = run_command(Command("a", ("bash", "-c", "echo begun; sleep 50 & sleep 60; true"), 1, quiet))
    assert result.status == 124 and result.output.startswith("begun") and "within 1 s" in result.last_line
    assert time.monotonic() - began < 30


def test_output_that_is_no_text_is_read():
    for quiet in (False, True):
        assert run_command(Command("a", ("printf", r"\377 [/x]"), 10, quiet)).output == "\ufffd [/x]"


def test_two_checkouts_of_a_machine_are_two_launchers_of_one_slice(monkeypatch, tmp_path):
    one = Login.here("me@example.org")
    monkeypatch.chdir(tmp_path)
    other = Login.here("me@example.org")
    assert one.machine != other.machine and one.label("gs://b/runs/r") == other.label("gs://b/runs/r")
