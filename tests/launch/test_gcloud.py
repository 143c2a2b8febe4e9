"""The commands of a launch, word by word."""

import re

import pytest

from tomat.base.errors import TomatError
from tomat.hardware.chips import TPU_SLICES, slice_named
from tomat.launch.gcloud import RUNTIME_VERSIONS, TpuLaunch, accelerator_type, runtime_version, tpu_name_for


def launch(**settings) -> TpuLaunch:
    values = {
        "run_name": "a",
        "slice_name": "v6e-4",
        "zone": "us-east5-b",
        "tpu_name": "tomat-a",
        "config_path": "c.yaml",
    }
    return TpuLaunch(**{**values, **settings})


def test_a_launch_is_these_commands():
    made = launch(overrides=("--data.train", "gs://b/it's"), project="p", spot=True)
    lines = [command.line for command in made.commands()]
    place = "--zone=us-east5-b --project=p"
    gcloud = "gcloud compute tpus tpu-vm"
    assert [line for line in lines if "--command=" not in line] == [
        f"{gcloud} create tomat-a --accelerator-type=v6e-4 --version=v2-alpha-tpuv6e --spot {place}",
        f"{gcloud} describe tomat-a '--format=value(state)' {place}",
        "mkdir -p runs/a/launch",
        "git archive --format=tar.gz --output=runs/a/launch/checkout.tgz HEAD",
        "cp c.yaml runs/a/launch/config.yaml",
        f"{gcloud} scp runs/a/launch/checkout.tgz runs/a/launch/config.yaml tomat-a:tomat-launch/ --worker=all {place}",
        f"{gcloud} scp tomat-a:tomat-launch/train.log runs/a/launch/attempt-1-host-0.log --worker=0 {place}",
        f"{gcloud} delete tomat-a --quiet {place}",
    ]
    assert all("--worker=all" in line for line in lines if "--command=" in line)
    assert ".venv/bin/python train_tomat_tpu.py --config_path ../config.yaml --data.train" in made.start.argv[7]


def test_a_queued_resource_is_these_commands():
    made = launch(queued_resource=True, slice_name="v5e-16")
    queued = [command.line for command in made.commands() if "queued-resources" in command.line]
    assert queued == [
        "gcloud compute tpus queued-resources create tomat-a-qr --node-id=tomat-a --accelerator-type=v5litepod-16 "
        "--runtime-version=v2-alpha-tpuv5-lite --zone=us-east5-b",
        "gcloud compute tpus queued-resources describe tomat-a-qr '--format=value(state.state)' --zone=us-east5-b",
        "gcloud compute tpus queued-resources delete tomat-a-qr --force --quiet --zone=us-east5-b",
    ]


@pytest.mark.parametrize("name", [name for name in TPU_SLICES if not name.startswith("tpu7x")])
def test_every_slice_has_its_software_and_a_log_a_host(name):
    made = launch(slice_name=name)
    assert runtime_version(made.slice) == RUNTIME_VERSIONS[made.slice.chip.name]
    assert "v5e" not in accelerator_type(made.slice)
    workers = [re.search(r"--worker=(\d+)", command.line) for command in made.logs(3)]
    assert [int(found.group(1)) for found in workers if found] == list(range(slice_named(name).n_hosts))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slice_name": "v9-4"}, "not known"),
        ({"slice_name": "tpu7x-8"}, "GKE"),
        ({"slice_name": "h100x8"}, "not offered as TPU VMs"),
        ({"zone": "us-east5"}, "us-east5-b"),
        ({"tpu_name": "Tomat_1"}, "lower-case"),
    ],
)
def test_what_cannot_be_launched_is_refused(settings, message):
    with pytest.raises(TomatError, match=message):
        launch(**settings)


def test_names_of_runs_become_names_of_machines():
    assert tpu_name_for("200M_v6e.16") == "tomat-200m-v6e-16"
    assert launch(tpu_name=tpu_name_for("a" * 200)).tpu_name.startswith("tomat-aaa")
