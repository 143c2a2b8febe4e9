"""A `gcloud` whose TPU slices are folders of this machine: a home directory a host, where ssh really runs commands.

Everything lies in a world, the folder named by FAKE_GCLOUD_WORLD: `calls.jsonl` records every command line,
`machines/NAME/host-I` are the homes, `preempted` takes every machine away, `queue.json`,
`create.json`, `describe.json` and `ssh.json` hold answers that are still to be given, `asked.json` those of `--check`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

WORLD = Path(os.environ["FAKE_GCLOUD_WORLD"])
N_HOSTS = {"v6e-4": 1, "v6e-16": 4}


def main(words: list[str]) -> int:
    with (WORLD / "calls.jsonl").open("a") as file:
        file.write(json.dumps(words) + "\n")
    if words[:2] != ["compute", "tpus"] or words[2] == "accelerator-types" or words[3] in ("versions", "list"):
        return ask(words)
    group, verb, *rest = words[2:]
    flags = dict(word[2:].split("=", 1) if "=" in word else (word[2:], "") for word in rest if word.startswith("--"))
    names = [word for word in rest if not word.startswith("--")]
    return {"tpu-vm": tpu_vm, "queued-resources": queued}[group](verb, names, flags)


def ask(words: list[str]) -> int:
    """A question of `--check`: what `asked.json` says for the first of its keys that the words hold, else `yes`."""
    path = WORLD / "asked.json"
    answers = json.loads(path.read_text()) if path.exists() else {}
    status, text = next((answers[key] for key in answers if key in " ".join(words)), (0, "yes"))
    print(text, file=sys.stderr if status else sys.stdout)
    return status


def tpu_vm(verb: str, names: list[str], flags: dict[str, str]) -> int:
    if verb == "create":
        return create(names[0], flags)
    if verb == "scp":
        return copy(names, flags["worker"])
    if verb == "describe" and (error := answer("describe.json")) is not None:
        if error.isalpha():
            print(error)
            return 0
        print(f"ERROR: (gcloud.compute.tpus.tpu-vm.describe) {error}", file=sys.stderr)
        return 1
    machine = WORLD / "machines" / names[0]
    if not machine.exists():
        print(f"ERROR: (gcloud) NOT_FOUND: Resource '{names[0]}' was not found", file=sys.stderr)
        return 1
    if verb == "describe":
        if (WORLD / "preempted").exists():
            end_processes(machine)
        print("PREEMPTED" if (WORLD / "preempted").exists() else "READY")
    elif verb == "delete":
        end_processes(machine)
        shutil.rmtree(machine)
        (WORLD / "preempted").unlink(missing_ok=True)
    elif verb == "ssh":
        if (error := answer("ssh.json")) is not None:
            (WORLD / "preempted").touch()
            print(f"ERROR: (gcloud.compute.tpus.tpu-vm.ssh) {error}", file=sys.stderr)
            return 1
        running = [
            subprocess.Popen(["bash", "-c", flags["command"]], cwd=home, env={**os.environ, "HOME": str(home)})
            for home in hosts(machine, flags["worker"])
        ]
        return max(process.wait() for process in running)
    return 0


def queued(verb: str, names: list[str], flags: dict[str, str]) -> int:
    resource = WORLD / f"queue-{names[0]}"
    if verb == "create":
        resource.write_text(json.dumps([flags["node-id"], flags]))
        return 0
    if not resource.exists():
        print("ERROR: (gcloud) NOT_FOUND: no such queued resource", file=sys.stderr)
        return 1
    node, created_with = json.loads(resource.read_text())
    if verb == "delete":
        resource.unlink()
        shutil.rmtree(WORLD / "machines" / node, ignore_errors=True)
        return 0
    state = answer("queue.json") or "ACTIVE"
    if state == "ACTIVE" and not (WORLD / "machines" / node).exists():
        create(node, created_with)
    print(state)
    return 0


def create(name: str, flags: dict[str, str]) -> int:
    if (error := answer("create.json")) is not None:
        print(f"ERROR: (gcloud.compute.tpus.tpu-vm.create) {error}", file=sys.stderr)
        return 1
    for host in range(N_HOSTS[flags["accelerator-type"]]):
        (WORLD / "machines" / name / f"host-{host}").mkdir(parents=True)
    return 0


def copy(names: list[str], worker: str) -> int:
    *sources, target = names
    to_hosts = ":" in target
    name, _, path = (target if to_hosts else sources[0]).partition(":")
    for home in hosts(WORLD / "machines" / name, worker):
        for source in sources:
            shutil.copy(source if to_hosts else home / path, home / path if to_hosts else target)
    return 0


def hosts(machine: Path, worker: str) -> list[Path]:
    homes = sorted(machine.glob("host-*"))
    return homes if worker == "all" else [homes[int(worker)]]


def end_processes(machine: Path) -> None:
    for pid in machine.glob("host-*/tomat-launch/pid"):
        try:
            os.killpg(int(pid.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            pass


def answer(name: str) -> str | None:
    """The next answer of a list that the test wrote; None when it is used up."""
    path = WORLD / name
    answers = json.loads(path.read_text()) if path.exists() else []
    if not answers:
        return None
    path.write_text(json.dumps(answers[1:]))
    return answers[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
