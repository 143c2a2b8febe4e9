"""Shell scripts that run on each host of a slice: they start, query and stop the training there.

Everything of a launch lies in one folder of the home directory: the pack, its checkout, the log, `lock`, `pid` (the
training's process group) and `status` (written when the training ends by itself). `lock` is held as long as any
process of the training lives, so that neither a recycled process id nor a reboot looks like a running training.
"""

import re
import shlex
from collections.abc import Sequence

from tomat.base.shipped import PACK_HASH_FILE

FOLDER = "tomat-launch"
"""Folder in the home directory on every host, readable only by its owner."""
ENV_FILE = "env"
"""Name of the `--env_file` on a host. The shell that starts the training reads it; no command line has its values."""
UV_VERSION = "0.13.9"
"""Version of uv on the hosts: another version may resolve `pyproject.toml` to other packages."""
LOG_FILE = "train.log"
ALIVE_FILE = "alive"
"""File that every question of a launcher touches."""
PACK = "pack.tar.gz"
DISK_LABEL = "tomat-data"
"""Label of the file system on a user's data disk. Device names differ between chips and kinds of disks."""
DISK_FOLDER = f"/mnt/{DISK_LABEL}"
MOUNT_SCRIPT = (
    f"mountpoint -q {DISK_FOLDER} || {{ sudo mkdir -p {DISK_FOLDER} && "
    f"sudo mount -t ext4 -o ro,noload LABEL={DISK_LABEL} {DISK_FOLDER}; }}"
)
"""Mounts a disk that is attached read-only to many hosts. Its journal cannot be replayed, hence `noload`."""
MAKE_FOLDER_SCRIPT = f"mkdir -p {FOLDER} && chmod 700 {FOLDER} && touch {FOLDER}/{ALIVE_FILE}"
_STATUS_LINE = re.compile(r"^tomat-status (?P<host>\S+) (?P<state>\S+)(?P<steps>(?: \d+)*)$", re.MULTILINE)


def install_script(pack_url: str, sha256: str) -> str:
    """Script that copies the pack from the bucket with the host's account and installs it with the TPU packages. Images
    newer than Ubuntu 22.04 need PIP_BREAK_SYSTEM_PACKAGES; as a variable, since older pips do not know the flag."""
    return (
        f"set -e; cd {FOLDER}; gcloud storage cp --quiet {shlex.quote(pack_url)} {PACK}; "
        f'echo "{sha256}  {PACK}" | sha256sum --check --quiet -; '
        f"rm -rf checkout; mkdir checkout; tar -xzf {PACK} -C checkout; cd checkout; "
        f"sha256sum < ../{PACK} > {PACK_HASH_FILE}; "
        f"PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv=={UV_VERSION}; "
        "python3 -m uv sync --quiet --extra tpu --no-dev"
    )


STATUS_SCRIPT = (
    f"state=absent; if cd {FOLDER} 2>/dev/null && touch {ALIVE_FILE} && [ -f lock ]; then "
    "if ! flock -n lock true; then state=running; elif [ -f status ]; then state=$(cat status); else state=gone; fi; "
    f"steps=$(grep -aoE '^step [0-9]+/' {LOG_FILE} 2>/dev/null | tr -dc '0-9\\n' | sed -n '1p;$p'); fi; "
    'echo "tomat-status $(hostname) $state" $steps'
)
"""Prints `tomat-status HOST STATE [FIRST LAST]`. STATE is `running`, `absent` (never started), `gone` (killed) or an
exit status. FIRST and LAST are the first and last step in the attempt's log; only the first host logs steps."""


def training_command(config_path: str, overrides: Sequence[str]) -> str:
    return shlex.join([".venv/bin/python", "train_tomat_tpu.py", "--config_path", config_path, *overrides])


PACK_SCRIPT = f'echo "tomat-pack $(hostname) $(cat {FOLDER}/checkout/{PACK_HASH_FILE} | cut -d" " -f1)"'
"""Prints `tomat-pack HOST SHA256`."""


def give_back_script(delete: Sequence[str]) -> str:
    """A host deletes its own slice, as its start-up script would. The deletion outlives the ssh session."""
    return f"nohup {shlex.join(delete)} </dev/null >/dev/null 2>&1 & sleep 1"


_SIGNAL = (
    "if [ ! -e ../signalled ]; then ( exec 9>&-; until grep -qa '^step ' ../{log} 2>/dev/null; do sleep 0.1; done; "
    "touch ../signalled; kill -TERM -- -$$ ) & fi; "
)
"""Sends one SIGTERM to the training on the first host (the one whose log has steps), after its first step."""


def start_script(
    config_path: str, overrides: Sequence[str], *, with_environment: bool = False, with_signal: bool = False
) -> str:
    """Script that starts the training in its own session unless it runs already, and writes its exit status when it
    ends. `with_environment` adds the variables of `ENV_FILE`. The shell around the training survives SIGTERM, so that
    the status is also written after an orderly stop. The training itself handles the signal as usual."""
    command = training_command(config_path, overrides)
    environment = f"set -a; . ../{ENV_FILE}; set +a; " if with_environment else ""
    signal = _SIGNAL.format(log=LOG_FILE) if with_signal else ""
    supervised = (
        f"echo $$ > ../pid; trap : TERM; {environment}{signal}{command} > ../{LOG_FILE} 2>&1; "
        f"echo $? > ../status.new; mv ../status.new ../status{'; kill $! 2>/dev/null' if with_signal else ''}"
    )
    return (
        f"cd {FOLDER}/checkout || exit 1; exec 9>../lock; "
        f'flock -n 9 || {{ echo "already running on $(hostname)"; exit 0; }}; rm -f ../status ../{LOG_FILE}; '
        f"setsid nohup bash -c {shlex.quote(supervised)} </dev/null >/dev/null 2>&1 & "
        'echo "started on $(hostname)"'
    )


def stop_script(grace_seconds: int) -> str:
    return (
        f"group=-$(cat {FOLDER}/pid) || exit 0; kill -TERM -- $group 2>/dev/null; "
        f"for second in $(seq {grace_seconds}); do kill -0 -- $group 2>/dev/null || exit 0; sleep 1; done; "
        "kill -KILL -- $group 2>/dev/null; true"
    )


def parse_statuses(output: str) -> list[str]:
    return [found["state"] for found in _STATUS_LINE.finditer(output)]


def parse_steps(output: str) -> int:
    """Steps of the attempt, from the first to the last that `STATUS_SCRIPT` found (there is a line every 10 s)."""
    spans = [list(map(int, found["steps"].split())) for found in _STATUS_LINE.finditer(output)]
    return max((span[-1] - span[0] + 1 for span in spans if span), default=0)


ENDED_SECONDS = 900
"""A slice whose training has ended is given back after so long without a launcher; collecting logs takes less time."""
SCRIPT_FILE = "give-back.sh"
BEGUN_FILE = "/var/lib/tomat-begun"
"""File on a host with the Unix time of its first boot."""


def watchdog_script(
    delete: Sequence[str],
    *,
    cap_seconds: float | None,
    unwatched_seconds: float | None,
    grace_seconds: int,
    poll_seconds: float = 60,
    ended_seconds: float = ENDED_SECONDS,
) -> str:
    """Script that gives a slice back when nobody else does. Google's own `--max-run-duration` (alpha, and only for
    queued resources; November 2026) does not notice that a launcher is gone. The hosts' service account needs
    `tpu.nodes.delete`, which `roles/tpu.admin` includes. Root runs the script at every boot through the metadata
    `startup-script`, as in Google's sample `tpu_vm_create_startup_script` (GoogleCloudPlatform/python-docs-samples
    12690). `cap_seconds`: limit since the first boot, whose time is kept on the disk. `unwatched_seconds`: limit
    without a launcher's sign of life. None: no such limit. `grace_seconds`: time for a training to save and stop."""
    watched, cap = unwatched_seconds is not None, max(1, int(cap_seconds)) if cap_seconds is not None else 0
    return f"""#!/bin/bash
# Gives this slice back at its cap, after its training, or when no launcher has looked for long.
export PATH=$PATH:/snap/bin:/usr/bin:/bin
[ -s {BEGUN_FILE} ] || date +%s > {BEGUN_FILE}
begun=$(date +%s)
while sleep {poll_seconds:g}; do
  now=$(date +%s); seen=$begun; ended=; running=; why=
  for folder in /home/*/{FOLDER}; do
    [ -e "$folder/{ALIVE_FILE}" ] && at=$(stat -c %Y "$folder/{ALIVE_FILE}") && [ "$at" -gt "$seen" ] && seen=$at
    [ -e "$folder/lock" ] || continue
    if flock -n "$folder/lock" true; then ended=1; else running=1; fi
  done
  silent=$((now - seen))
  if [ {cap} -gt 0 ] && [ $((now - $(cat {BEGUN_FILE}))) -ge {cap} ]; then why="the cap is reached"
  elif [ {int(watched)} = 1 ] && [ $silent -ge {int(unwatched_seconds or 0)} ]; then why="no launcher for $silent s"
  elif [ {int(watched)} = 1 ] && [ -n "$ended" ] && [ -z "$running" ] && [ $silent -ge {int(ended_seconds)} ]; then
    why="the training has ended, and no launcher for $silent s"
  fi
  [ -n "$why" ] || continue
  echo "tomat gives the slice back: $why"
  for folder in /home/*/{FOLDER}; do
    [ -e "$folder/pid" ] || continue
    flock -n "$folder/lock" true && continue
    group=$(cat "$folder/pid")
    kill -TERM -- "-$group" 2>/dev/null
    for second in $(seq {grace_seconds}); do flock -n "$folder/lock" true && break; sleep 1; done
    kill -KILL -- "-$group" 2>/dev/null
  done
  {shlex.join(delete)}
done
"""
