"""What runs on each host of a slice: shell text for starting, asking after and stopping the training there.

Everything of a launch lies in one folder of the home directory: the checkout, the configuration, the log, and three
small files. `lock` is held by the training as long as any process of it lives, so that neither a recycled process id
nor a reboot is mistaken for a running training; `pid` names its process group; `status` is written when it ends by
itself.
"""

import re
import shlex
from collections.abc import Sequence

FOLDER = "tomat-launch"
"""Below the home directory of every host."""
LOG_FILE = "train.log"
_STATUS_LINE = re.compile(r"^tomat-status (\S+) (\S+)$", re.MULTILINE)


INSTALL_SCRIPT = (
    f"set -e; cd {FOLDER}; rm -rf checkout; mkdir checkout; tar -xzf checkout.tgz -C checkout; cd checkout; "
    "python3 -m pip install --quiet --user uv; python3 -m uv sync --quiet --extra tpu --no-dev"
)
"""Unpacks the checkout that was sent, and installs it with the TPU's packages."""

STATUS_SCRIPT = (
    f"state=absent; if cd {FOLDER} 2>/dev/null && [ -f lock ]; then if ! flock -n lock true; then state=running; "
    "elif [ -f status ]; then state=$(cat status); else state=gone; fi; fi; "
    'echo "tomat-status $(hostname) $state"'
)
"""Prints `tomat-status HOST STATE`: `running`, `absent` (never started), `gone` (killed) or an exit status."""


def training_command(overrides: Sequence[str]) -> str:
    """The command line of the training, the same on every host, as seen from the checkout there."""
    return shlex.join([".venv/bin/python", "train_tomat_tpu.py", "--config_path", "../config.yaml", *overrides])


def start_script(command: str) -> str:
    """Start `command` in a session of its own, unless it runs already; its end leaves its status behind.

    The shell around it takes SIGTERM without ending, so that a training that is stopped in good order still has its
    status written; the child's own handling of the signal is untouched.
    """
    supervised = (
        f"echo $$ > ../pid; trap : TERM; {command} > ../{LOG_FILE} 2>&1; "
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
