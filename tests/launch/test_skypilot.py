"""The managed job of SkyPilot: held by its own schema (fields of skypilot 0.14.1), its script run as a host runs it."""

import json
import os
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.launch.gcloud import TpuLaunch
from tomat.launch.pack import Pack
from tomat.launch.prices import caps_of
from tomat.launch.skypilot import RECOVERED, run_script, skypilot_commands, skypilot_task

SCHEMA = json.loads((Path(__file__).parents[1] / "fixtures" / "skypilot_schema.json").read_text())
PACK = Pack(Path("pack.tar.gz"), "0" * 64, "abc", False, "tomat-launch/c.yaml", ("--data.train", "gs://b/it's"))
ZONES = ["us-east5-b", "us-east5-a"]


def launch(**settings) -> TpuLaunch:
    values = {"run_name": "a", "slice_name": "v6e-16", "zone": ZONES[0], "tpu_name": "tomat-a", "spot": True}
    return TpuLaunch(**{**values, "output_dir": "gs://b/runs", "pack": PACK, "labels": ("team=dft",), **settings})


def task(zones=ZONES, hours=3.0, **settings) -> dict:
    made = launch(**settings)
    return skypilot_task(made, zones, caps_of(made.slice, ZONES[0], spot=made.spot, max_hours=hours), ["A_KEY"])


@pytest.mark.parametrize(
    ("zones", "settings", "wanted"),
    [
        (ZONES[:1], {}, {"infra": "gcp/us-east5/us-east5-b", "accelerators": "tpu-v6e-16:1", "use_spot": True}),
        (ZONES, {"slice_name": "v5e-16", "spot": False}, {"accelerators": "tpu-v5litepod-16:1", "use_spot": False}),
        (ZONES, {}, {"any_of": [{"infra": f"gcp/us-east5/{zone}"} for zone in ZONES], "max_hourly_cost": 19.45}),
    ],
)
def test_a_job_is_one_by_skypilots_own_schema(zones, settings, wanted):
    made = task(zones, **settings)
    jsonschema.validate(made, SCHEMA)
    assert {key: made["resources"][key] for key in wanted} == wanted
    recovery = made["resources"]["job_recovery"]
    # A refused input and the cap end with 2, and are not tried again.
    assert 2 not in RECOVERED and recovery["recover_on_exit_codes"] == list(RECOVERED)
    assert recovery["max_restarts_on_errors"] == 0 and made["secrets"] == {"A_KEY": None}
    # The same pack, by hash, as gcloud's engine installs it.
    assert f"packs/{PACK.sha256}.tar.gz" in made["setup"] and f'"{PACK.sha256}  pack.tar.gz"' in made["setup"]


@pytest.mark.parametrize(
    ("now", "ends", "status", "runs"),
    [
        ((1000, 1000), "exit 0", 0, True),
        ((1000, 4000), "exit 75", 75, True),
        ((5000, 5000), "exit 0", 2, False),  # the cap was reached while it waited for machines
        ((4598, 4600), "trap 'exit 143' TERM; sleep 9 & wait", 2, True),  # stopped in good order at the cap
    ],
)
def test_the_script_of_a_host_ends_at_the_cap_and_keeps_the_status(world, now, ends, status, runs):
    """An hour from the job's first start, which was at 1000; `now` is the time before and after the training."""
    checkout = world.folder / "host" / "tomat-launch" / "checkout"
    packs = world.folder / "buckets" / "b" / "runs" / "a" / "packs"
    for folder in (packs, checkout / ".venv" / "bin"):
        folder.mkdir(parents=True)
    for path, text in (
        (checkout / ".venv" / "bin" / "python", f"touch ran; {ends}"),
        (world.folder.parent / "bin" / "date", f"[ -e ran ] && echo {now[1]} || echo {now[0]}"),
    ):
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    if now[0] != 1000:
        (packs / "job-1.began").write_text("1000\n")
    environment = {**os.environ, "HOME": str(world.folder / "host"), "SKYPILOT_TASK_ID": "job-1"}
    script = run_script(launch(), 3600.0, least_seconds=1)
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, (checkout / "ran").exists()) == (status, runs), done.stderr
    assert ("error: the cap of 1.00 h is reached." in done.stdout) is (status == 2)
    assert (packs / "job-1.began").read_text() == "1000\n"


@pytest.mark.parametrize(
    ("hours", "settings", "message"),
    [
        (None, {}, "give --max_hours or --max_cost"),
        (3.0, {"service_account": "t@p"}, "--service_account is for slices that tomat makes itself"),
        (3.0, {"queued_resource": True}, "--queued_resource is for slices"),
    ],
)
def test_what_it_cannot_keep_is_refused(hours, settings, message):
    with pytest.raises(TomatError, match=message):
        task(hours=hours, **settings)


def test_secrets_are_taken_from_the_environment_and_stand_nowhere(world, monkeypatch):
    made = launch(env_file=Path("train.env"))
    caps = caps_of(made.slice, ZONES[0], max_hours=1.0)
    with pytest.raises(TomatError, match="not in the environment, .*: A_KEY of train.env"):
        skypilot_commands(made, ZONES, caps, ["A_KEY"], execute=True)
    monkeypatch.setenv("A_KEY", "s3cr3t")
    commands = skypilot_commands(made, ZONES, caps, ["A_KEY"], execute=True)
    text = (made.folder / "skypilot.yaml").read_text()
    assert "s3cr3t" not in text + " ".join(command.line for command in commands)
    assert commands[1].argv[:6] == ("sky", "jobs", "launch", "--yes", "--detach-run", "--secret=A_KEY")
    jsonschema.validate(yaml.safe_load(text), SCHEMA)


def test_the_verb_prints_what_it_submits(world, capsys):
    words = ["launch", "--config_path", "run.yaml", "--zone", ",".join(ZONES), "--engine", "skypilot"]
    assert main([*words, "--max_cost", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "sky jobs launch --yes --detach-run runs/soak_1/launch/skypilot.yaml"
    assert any("at most 0.46 h with a slice, $20.00" in line for line in lines) and world.calls() == []
    jsonschema.validate(yaml.safe_load(Path("runs/soak_1/launch/skypilot.yaml").read_text()), SCHEMA)
    assert main([*words[:-1], "iris"]) == 2 and "--iris CLUSTER" in capsys.readouterr().err
