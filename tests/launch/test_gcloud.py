"""The commands of a launch, word by word."""

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from tomat.base.errors import TomatError
from tomat.hardware.chips import TPU_SLICES, slice_named
from tomat.launch.check import unfit_places
from tomat.launch.gcloud import RUNTIME_VERSIONS, TpuLaunch, accelerator_type, runtime_version, tpu_name_for
from tomat.launch.pack import Pack
from tomat.launch.remote import MOUNT_SCRIPT

PACK = Pack(Path("runs/a/launch/pack.tar.gz"), "0" * 64, "abc", False, "tomat-launch/c.yaml", ())


WATCHDOG = "--metadata-from-file=startup-script=runs/a/launch/give-back.sh"


def launch(**settings) -> TpuLaunch:
    values = {"label": "x", "run_name": "a", "slice_name": "v6e-4", "zone": "us-east5-b", "tpu_name": "tomat-a"}
    return TpuLaunch(**{**values, "output_dir": "gs://b/runs", "pack": PACK, **settings})


def test_a_launch_is_these_commands():
    pack = dataclasses.replace(PACK, overrides=("--data.train", "gs://b/it's"))
    made = launch(pack=pack, project="p", spot=True)
    lines = [command.line for command in made.commands()]
    place = "--zone=us-east5-b --project=p"
    gcloud = "gcloud compute tpus tpu-vm"
    assert [line for line in lines if "--command=" not in line] == [
        "gcloud storage cat gs://b/runs/a/launch.json",
        f"gcloud storage cp --quiet --no-clobber runs/a/launch/pack.tar.gz gs://b/runs/a/packs/{PACK.sha256}.tar.gz",
        "gcloud storage cp --quiet --if-generation-match=0 - gs://b/runs/a/launch.json",
        f"{gcloud} create tomat-a --accelerator-type=v6e-4 --version=v2-alpha-tpuv6e --spot "
        f"--labels=tomat_launch=x {WATCHDOG} {place}",
        f"{gcloud} describe tomat-a '--format=value(state,labels.tomat_launch)' {place}",
        f"{gcloud} scp tomat-a:tomat-launch/train.log runs/a/launch/attempt-1-host-0.log --worker=0 {place}",
        f"{gcloud} delete tomat-a --quiet {place}",
    ]
    assert all("--worker=all" in line for line in lines if "--command=" in line)
    assert ".venv/bin/python train_tomat_tpu.py --config_path tomat-launch/c.yaml --data.train" in made.start.argv[7]


def test_hosts_are_asked_for_as_they_are_wanted():
    made = launch(
        reserved=True,
        service_account="t@p.iam.gserviceaccount.com",
        network="n",
        subnetwork="s",
        internal_ips=True,
        labels=("team=dft", "run=a"),
        boot_software="v2-beta",
        env_file=Path("secrets.env"),
    )
    wanted = (
        "--reserved --service-account=t@p.iam.gserviceaccount.com --network=n --subnetwork=s "
        f"--labels=team=dft,run=a,tomat_launch=x {WATCHDOG}"
    )
    assert made.create.line == (
        f"gcloud compute tpus tpu-vm create tomat-a --accelerator-type=v6e-4 --version=v2-beta {wanted} --internal-ips "
        "--zone=us-east5-b"
    )
    assert f"--runtime-version=v2-beta {wanted}" in dataclasses.replace(made, queued_resource=True).create.line
    to_hosts = [command.line for command in made.commands() if " ssh " in command.line or " scp " in command.line]
    assert len(to_hosts) == 6 and all("--internal-ip " in line for line in to_hosts)
    [sent] = [line for line in to_hosts if "launch/env " in line]
    assert "launch/env tomat-a:tomat-launch/env --worker=0 --scp-flag=-p" in sent
    assert ". ../env" in made.start.line and ". ../env" not in launch().start.line


DISK = "projects/p/zones/us-east5-b/disks/shards"


def test_a_disk_is_attached_read_only_and_mounted_before_the_training(tmp_path):
    made = launch(data_disk=DISK)
    for create in (made.create, dataclasses.replace(made, queued_resource=True).create):
        assert f"--data-disk=source={DISK},mode=read-only" in create.argv
    purposes = [command.purpose for command in made.commands()]
    mounted = purposes.index("mount the disk on every host")
    assert purposes.index("a folder on every host") < mounted < purposes.index("start the training on every host")
    assert "mount the disk on every host" not in [command.purpose for command in launch().commands()]
    # The script itself, with programs that write down how they are called.
    for name, text in (
        ("mountpoint", "[ -e mounted ]"),
        ("sudo", 'echo "$@" >> calls; [ "$1" = mkdir ] || touch mounted'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for _ in range(2):
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        subprocess.run(["bash", "-c", MOUNT_SCRIPT], check=True, cwd=tmp_path, env=environment)
    assert (tmp_path / "calls").read_text().splitlines() == [
        "mkdir -p /mnt/tomat-data",
        "mount -t ext4 -o ro,noload LABEL=tomat-data /mnt/tomat-data",
    ]
    # Data may be on it, runs may not.
    places = {"data.train": "/mnt/tomat-data/train", "output_dir": "/mnt/tomat-data/runs"}
    assert [line.partition(" ")[0] for line in unfit_places(places, data_disk=True)] == ["output_dir"]
    assert len(unfit_places(places)) == 2


def test_a_queued_resource_is_these_commands():
    made = launch(queued_resource=True, slice_name="v5e-16")
    queued = [command.line for command in made.commands() if "queued-resources" in command.line]
    assert queued == [
        "gcloud compute tpus queued-resources create tomat-a-qr --node-id=tomat-a --accelerator-type=v5litepod-16 "
        f"--runtime-version=v2-alpha-tpuv5-lite --labels=tomat_launch=x {WATCHDOG} --zone=us-east5-b",
        "gcloud compute tpus queued-resources describe tomat-a-qr "
        "'--format=value(state.state,state.failedData.error.message)' --zone=us-east5-b",
        "gcloud compute tpus queued-resources delete tomat-a-qr --force --quiet --zone=us-east5-b",
    ]


@pytest.mark.parametrize("name", [name for name in TPU_SLICES if not name.startswith("tpu7x")])
def test_every_slice_has_its_software_and_a_log_a_host(name):
    made = launch(slice_name=name)
    assert runtime_version(made.slice) == RUNTIME_VERSIONS[made.slice.chip.name]
    assert "v5e" not in accelerator_type(made.slice)
    assert tpu_name_for(f"200M_{name}.a") == f"tomat-200m-{name}-a"
    assert launch(tpu_name=tpu_name_for("a" * 200)).tpu_name.startswith("tomat-aaa")
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
        ({"spot": True, "reserved": True}, "exclude each other"),
        ({"labels": ("Team=x",)}, "KEY=VALUE"),
        ({"service_account": "trainer"}, "its email"),
        ({"data_disk": "shards"}, "full name of a disk in the slice's zone, such as projects/P/zones/us-east5-b/disks"),
        ({"data_disk": DISK.replace("-b", "-a")}, "expected the full name of a disk in the slice's zone"),
    ],
)
def test_what_cannot_be_launched_is_refused(settings, message):
    with pytest.raises(TomatError, match=message):
        launch(**settings)
