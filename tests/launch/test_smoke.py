"""`tomat launch --smoke` from begin to end against the fake gcloud, and how each promise is judged."""

import json
from pathlib import Path

import pytest
from json_keys import assert_keys_of_before

from tomat.app.cli import main
from tomat.launch.command import Result
from tomat.launch.gcloud import TpuLaunch
from tomat.launch.machine import Clock
from tomat.launch.pack import Pack
from tomat.launch.policy import Ending, RestartPolicy
from tomat.launch.record import Login
from tomat.launch.smoke import STEPS, Smoke, smoke_words
from tomat.launch.supervisor import Supervisor
from tomat.train.settings.config import load_config

WORDS = ["launch", "--config_path", "run.yaml", "--zone", "us-east5-b", "--smoke", "--poll_seconds", "0.2"]


@pytest.mark.parametrize("powerless", [False, True])
def test_a_smoke_run_says_of_each_promise_whether_it_held(world, capsys, monkeypatch, powerless):
    """Four hosts, of which one gets SIGTERM. Where the hosts may not give the slice back, that is found, and the
    launcher does."""
    monkeypatch.setattr("tomat.launch.smoke.GIVE_BACK_SECONDS", 1.0 if powerless else 30.0)
    monkeypatch.setattr("tomat.launch.smoke.POLL_SECONDS", 0.2)
    world.behave("smoke", "smoke")
    if powerless:
        (world.folder / "powerless").touch()
    assert main([*WORDS, "--execute", "--json", "smoke.json"]) == (1 if powerless else 0)
    report = json.loads((world.checkout / "smoke.json").read_text())
    assert_keys_of_before("launch --smoke", report)
    failed = [one["name"] for one in report["promises"] if one["held"] is False]
    assert failed == (["the hosts give the slice back themselves"] if powerless else [])
    assert report["endings"] == ["was stopped in good order", "finished"] and report["held"] is not powerless
    assert world.machines() == [] and report["run"] == "soak_1-smoke"
    said = capsys.readouterr().out
    assert "SIGTERM to one host stops all in good order" in said and ("NOT HELD" in said) is powerless


def test_a_dry_run_says_the_price_and_asks_nobody(world, capsys):
    assert main([*WORDS, "--spot"]) == 0
    said = capsys.readouterr().out
    assert "at most 0.42 h with a slice, $8.10" in said and "../signalled" in said and world.calls() == []
    assert main([*WORDS, "--keep"]) == 2 and "does not go with --keep" in capsys.readouterr().err


def test_a_smoke_run_is_of_twenty_steps_whatever_else_is_asked_for(world):
    words = smoke_words("a", ["--run_name", "b", "--optimizer.learning_rate", "0.1", "--trainer.num_train_steps", "9"])
    config = load_config("run.yaml", words)
    assert (config.run_name, config.trainer.num_train_steps) == ("a-smoke", STEPS)
    profiler = config.trainer.profiler
    assert profiler.enabled and 3 < profiler.start_step < profiler.start_step + profiler.num_steps < STEPS
    assert words[:2] == ["--optimizer.learning_rate", "0.1"] and words.count("--run_name") == 1


PACK = Pack(Path("pack.tar.gz"), "a" * 64, "abc1234", False, "tomat-launch/c.yaml", ())
LAUNCH = TpuLaunch("r", "v6e-16", "us-east5-b", "t", "gs://b/runs", PACK)
START = {"event": "start", "step": 0, "hosts": 4, "pack": "a" * 64, "commit": "abc1234"}
RESUME = {"event": "resume", "step": 3, "steps_again": 0}
PREEMPTED = {"event": "preempted", "step": 3}
FILES = ["config.yaml", "README.md", "checkpoints/step-19/metadata.json", "profiler/p/t.xplane.pb"]


def judged(
    history=(START, PREEMPTED, RESUME), steps=range(STEPS), files=FILES, packs=("a" * 64,) * 4, hours=0.3, cost=1.0
) -> list[str]:
    """Promises that did not hold."""
    lines = {
        "history.jsonl": [json.dumps({"time": "t", **event}) for event in history],
        "metrics.jsonl": [json.dumps({"step": step}) for step in steps],
    }

    def run(command):
        name = command.argv[-1].rpartition("/")[2]
        listed = [f"gs://b/runs/r/{file}" for file in files]
        return Result(0, "\n".join(listed if name == "**" else lines[name]))

    smoke = Smoke(LAUNCH, run, Clock(), list(packs), given_back=True)
    watched = Supervisor(LAUNCH, RestartPolicy(), run, print, Login("a", "b", "c"))
    watched.endings = [Ending.PREEMPTED.value, Ending.FINISHED.value]
    watched.machine.held_seconds = hours * 3600
    return [promise.name for promise in smoke.promises(watched, cost, 2.0) if promise.held is False]


@pytest.mark.parametrize(
    ("found", "failed"),
    [
        ({}, None),
        ({"packs": ("a" * 64,) * 3 + ("b" * 64,)}, "every host has the pack"),
        ({"packs": ("a" * 64,) * 3}, "every host has the pack"),
        ({"history": ({**START, "pack": "b"}, PREEMPTED, RESUME)}, "every host has the pack"),
        ({"history": ({**START, "commit": ""}, PREEMPTED, RESUME)}, "the history has the commit"),
        ({"history": ({**START, "hosts": 1}, PREEMPTED, RESUME)}, "hosts are compared"),
        ({"history": (START, RESUME)}, "SIGTERM to one host"),
        ({"history": (START, PREEMPTED)}, "the run resumes"),
        ({"history": (START, PREEMPTED, {**RESUME, "steps_again": 2})}, "the run resumes"),
        ({"steps": [*range(4), *range(3, STEPS)]}, "20 steps, each once"),
        ({"steps": range(STEPS - 1)}, "20 steps, each once"),
        ({"files": FILES[:2] + FILES[3:]}, "a save is whole"),
        ({"files": FILES[:3]}, "the profile"),
        ({"files": FILES[1:]}, "configuration and page"),
        ({"hours": 0.5}, "it ends in time"),
        ({"cost": 2.5}, "it costs no more"),
    ],
)
def test_each_promise_is_judged_by_what_is_left(found, failed):
    names = judged(**found)
    assert [name.startswith(failed or "-") for name in names] == ([True] if failed else [])
