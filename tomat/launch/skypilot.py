"""The SkyPilot form of a launch: a managed job, which SkyPilot supervises from a machine of its own.

SkyPilot recovers from preemptions, asks other zones, and tells exit statuses apart. It counts neither steps nor money,
so a cap is required, and the hosts enforce it. The fields are those of skypilot 0.14.1
(https://docs.skypilot.co/en/latest/reference/yaml-spec.html), whose schema is in the tests.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml

from tomat.base.errors import TomatError
from tomat.base.layout import HUNG_STATUS, LOST_STATUS, REFUSED_STATUS, RETRY_STATUS, STOPPED_STATUS
from tomat.base.reporting import write_text
from tomat.launch import remote
from tomat.launch.command import Command
from tomat.launch.gcloud import TpuLaunch, accelerator_type
from tomat.launch.prices import MARGIN_SECONDS, Caps

VERSION = "0.14.1"
"""Version of skypilot that has these fields."""
TASK_FILE = "skypilot.yaml"
RECOVERED = (1, RETRY_STATUS, LOST_STATUS, HUNG_STATUS, STOPPED_STATUS, 137)
"""Exit statuses after which the same command is started again: a crash, a storage fault, a lost host, a hang, an
orderly stop, a kill. Not among them: a refused input (2), which the cap uses too."""


class _Blocks(yaml.SafeDumper):
    """Writes scripts as YAML block texts, which are readable."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Blocks.add_representer(str, _block)


def run_script(launch: TpuLaunch, cap_seconds: float, least_seconds: int = 60) -> str:
    """Script that every host runs at each start: it trains the pack until the cap. The first start writes its time into
    the bucket under the job's id, which stays the same after recoveries, so waiting between two machines counts too. No
    training starts with `least_seconds` or less left."""
    words = launch.pack.config_path, launch.pack.overrides
    capped = f'{{ echo "error: the cap of {cap_seconds / 3600:.2f} h is reached."; exit {REFUSED_STATUS}; }}'
    began = f'"{launch.run_url}/packs/$SKYPILOT_TASK_ID.began"'
    return f"""\
cd ~/{remote.FOLDER}/checkout || exit 1
date +%s > ../began
gcloud storage cp --quiet --if-generation-match=0 ../began {began} 2>/dev/null
gcloud storage cp --quiet {began} ../began || exit {RETRY_STATUS}
end=$(( $(cat ../began) + {int(cap_seconds)} )); left=$(( end - $(date +%s) ))
[ $left -gt {least_seconds} ] || {capped}
timeout --signal=TERM --kill-after={launch.stop_grace_seconds} $left {remote.training_command(*words)}
status=$?
[ $(date +%s) -lt $end ] || {capped}
exit $status
"""


def skypilot_task(launch: TpuLaunch, zones: Sequence[str], caps: Caps, secrets: Sequence[str] = ()) -> dict[str, Any]:
    """The YAML content of the managed job. `secrets` are names; SkyPilot takes their values from the environment."""
    hours = caps.hours(launch.slice)
    if hours is None:
        said = "--engine skypilot counts neither steps nor money, and would restart a crashing run for ever"
        raise TomatError(f"{said}; give --max_hours or --max_cost.")
    own = ("service_account", "network", "subnetwork", "data_disk", "reserved", "queued_resource", "internal_ips")
    for flag in (flag for flag in own if getattr(launch, flag)):
        said = f"--{flag} is for slices that tomat makes itself"
        raise TomatError(f"{said}; with --engine skypilot set it in ~/.sky/config.yaml (its `gcp` section).")
    infra = [f"gcp/{zone.rpartition('-')[0]}/{zone}" for zone in zones]
    resources: dict[str, Any] = {
        "accelerators": f"tpu-{accelerator_type(launch.slice)}:1",
        "accelerator_args": {"runtime_version": launch.software},
        "use_spot": launch.spot,
        "job_recovery": {
            "strategy": "FAILOVER" if len(zones) == 1 else "EAGER_NEXT_REGION",
            "max_restarts_on_errors": 0,
            "recover_on_exit_codes": list(RECOVERED),
        },
    }
    if caps.price is not None:
        # SkyPilot does not take a slice that costs more than the stated price (plus a cent for rounding).
        resources["max_hourly_cost"] = round(caps.price * launch.slice.n_chips + 0.01, 2)
    if launch.labels:
        resources["labels"] = dict(label.split("=", 1) for label in launch.labels)
    resources |= {"infra": infra[0]} if len(infra) == 1 else {"any_of": [{"infra": one} for one in infra]}
    install = remote.install_script(launch.pack_url, launch.pack.sha256)
    task = {
        "name": launch.tpu_name,
        "resources": resources,
        "num_nodes": 1,
        "setup": f"cd ~\n{remote.MAKE_FOLDER_SCRIPT}\n{install}\n",
        "run": run_script(launch, hours * 3600 - MARGIN_SECONDS),
    }
    return task | ({"secrets": {name: None for name in secrets}} if secrets else {})


def skypilot_commands(
    launch: TpuLaunch, zones: Sequence[str], caps: Caps, secrets: Sequence[str] = (), execute: bool = False
) -> list[Command]:
    missing = [name for name in secrets if name not in os.environ]
    if execute and missing:
        raise TomatError(
            f"not in the environment, from which sky takes secrets: {', '.join(missing)} of {launch.env_file}; "
            f"run `set -a; . {launch.env_file}; set +a` first."
        )
    # The label is only for tomat's own slices; SkyPilot has names.
    task = skypilot_task(replace(launch, label=""), zones, caps, secrets)
    path = launch.folder / TASK_FILE
    write_text(path, yaml.dump(task, Dumper=_Blocks, sort_keys=False, width=120))
    words = ["sky", "jobs", "launch", "--yes", "--detach-run", *(f"--secret={name}" for name in secrets), str(path)]
    purpose = f"train on {launch.slice.n_chips} chips as a managed job (skypilot {VERSION}); `sky jobs logs` follows it"
    return [launch.send_pack, Command(purpose, tuple(words), 3600)]
