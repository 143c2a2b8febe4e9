"""What gives a slice back when nobody else does: a script that every host runs from its first boot on.

Google ends what it lends only with `--max-run-duration`, an alpha flag of queued resources (gcloud's reference of
November 2026), which counts from the creation and knows nothing of a launcher that is gone. So the hosts do it
themselves, with gcloud and the service account that they have anyway (it needs `tpu.nodes.delete`, as `roles/tpu.admin`
has).
"""

import shlex
from collections.abc import Sequence

from tomat.launch.remote import ALIVE_FILE, FOLDER

ENDED_SECONDS = 900
"""After which a slice goes back whose training has ended while no launcher looks; longer than collecting logs takes."""
SCRIPT_FILE = "give-back.sh"
BEGUN_FILE = "/var/lib/tomat-begun"
"""On a host: Unix time of its first boot."""


def watchdog_script(
    delete: Sequence[str],
    *,
    cap_seconds: float | None,
    unwatched_seconds: float | None,
    grace_seconds: int,
    poll_seconds: float = 60,
    ended_seconds: float = ENDED_SECONDS,
) -> str:
    """The start-up script, which root runs at every boot of every host: metadata `startup-script`, as in Google's
    sample `tpu_vm_create_startup_script` (GoogleCloudPlatform/python-docs-samples 12690) and as Iris boots its TPUs.

    Args:
        delete: The command that gives the slice back.
        cap_seconds: From the first boot to the cap; None: no cap. A queued resource may wait for days, so that no time
            of day would do; the begin is kept on the disk, since a reboot is none.
        unwatched_seconds: Without a launcher's sign of life; None: the slice is to be kept.
        grace_seconds: For a training to save and stop.
    """
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
