"""What runs on each host of a slice: shell text for starting, asking after and stopping the training there.

Everything of a launch lies in one folder of the home directory: the checkout, the configuration, the log, and `lock`,
held as long as any process of the training lives, so that neither a recycled process id nor a reboot is mistaken for a
running one; `pid`, its process group; `status`, written when it ends by itself.
"""

import re
import shlex
from collections.abc import Sequence

FOLDER = "tomat-launch"
"""Below the home directory of every host; only its owner may look into it."""
ENV_FILE = "env"
"""What `--env_file` becomes there. The shell that starts the training reads it; no command line holds its values."""
UV_VERSION = "0.13.9"
"""Of uv on the hosts: another one may resolve `pyproject.toml` to other packages."""
LOG_FILE = "train.log"
DISK_LABEL = "tomat-data"
"""Of the file system on a disk of one's own. The device's name differs between chips and kinds of disks."""
DISK_FOLDER = f"/mnt/{DISK_LABEL}"
MOUNT_SCRIPT = (
    f"mountpoint -q {DISK_FOLDER} || {{ sudo mkdir -p {DISK_FOLDER} && "
    f"sudo mount -t ext4 -o ro,noload LABEL={DISK_LABEL} {DISK_FOLDER}; }}"
)
"""A disk that is attached read-only to many hosts: its journal cannot be replayed, hence `noload`."""
MAKE_FOLDER_SCRIPT = f"mkdir -p {FOLDER} && chmod 700 {FOLDER}"
_STATUS_LINE = re.compile(r"^tomat-status (\S+) (\S+)$", re.MULTILINE)


INSTALL_SCRIPT = (
    f"set -e; cd {FOLDER}; rm -rf checkout; mkdir checkout; tar -xzf checkout.tgz -C checkout; cd checkout; "
    f"python3 -m pip install --quiet --user uv=={UV_VERSION}; python3 -m uv sync --quiet --extra tpu --no-dev"
)
"""Unpacks the checkout that was sent, and installs it with the TPU's packages."""

STATUS_SCRIPT = (
    f"state=absent; if cd {FOLDER} 2>/dev/null && [ -f lock ]; then if ! flock -n lock true; then state=running; "
    "elif [ -f status ]; then state=$(cat status); else state=gone; fi; fi; "
    'echo "tomat-status $(hostname) $state"'
)
"""Prints `tomat-status HOST STATE`: `running`, `absent` (never started), `gone` (killed) or an exit status."""


def start_script(overrides: Sequence[str], *, with_environment: bool = False) -> str:
    """Start the training, with the variables of `ENV_FILE` if asked, in a session of its own, unless it runs already;
    its end leaves its status behind. The shell around it takes SIGTERM without ending, so that a training that is
    stopped in good order still has its status written; the child's own handling of the signal is untouched."""
    command = shlex.join([".venv/bin/python", "train_tomat_tpu.py", "--config_path", "../config.yaml", *overrides])
    environment = f"set -a; . ../{ENV_FILE}; set +a; " if with_environment else ""
    supervised = (
        f"echo $$ > ../pid; trap : TERM; {environment}{command} > ../{LOG_FILE} 2>&1; "
        "echo $? > ../status.new; mv ../status.new ../status"
    )
    return (
        f"cd {FOLDER}/checkout || exit 1; exec 9>../lock; "
        'flock -n 9 || { echo "already running on $(hostname)"; exit 0; }; rm -f ../status; '
        f"setsid nohup bash -c {shlex.quote(supervised)} </dev/null >/dev/null 2>&1 & "
        'echo "started on $(hostname)"'
    )


def stop_script(grace_seconds: int) -> str:
    """Ask the training to stop in good order, and after the grace end it."""
    return (
        f"group=-$(cat {FOLDER}/pid) || exit 0; kill -TERM -- $group 2>/dev/null; "
        f"for second in $(seq {grace_seconds}); do kill -0 -- $group 2>/dev/null || exit 0; sleep 1; done; "
        "kill -KILL -- $group 2>/dev/null; true"
    )


def parse_statuses(output: str) -> list[str]:
    """The states that `STATUS_SCRIPT` printed, one a host, whatever else ssh said between them."""
    return [state for _, state in _STATUS_LINE.findall(output)]
