"""A `gcloud` whose TPU slices are folders of this machine: a home directory a host, where ssh really runs commands.

Everything lies in a world, the folder named by FAKE_GCLOUD_WORLD: `calls.jsonl` records every command line,
`machines/NAME/host-I` are the homes, `buckets` the buckets, `preempted` takes every machine away, `dead` its first
host, `create.json` and `describe.json` hold answers that are still to be given, `asked.json` those of `--check`.
"""

import contextlib
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
    if "impersonate" in " ".join(words):
        return ask(words)
    if words[:3] == ["storage", "ls", "--recursive"]:
        below = WORLD / "buckets" / words[3].removeprefix("gs://").removesuffix("/**")
        print(*(f"gs://{path.relative_to(WORLD / 'buckets')}" for path in below.rglob("*") if path.is_file()), sep="\n")
        return 0
    if words[:2] == ["storage", "ls"] and (WORLD / "buckets" / words[2].removeprefix("gs://")).is_dir():
        print("\n".join(os.listdir(WORLD / "buckets" / words[2].removeprefix("gs://"))))
        return 0
    if words[:2] in (["storage", "cp"], ["storage", "cat"]):
        return storage(words[1], [word for word in words[2:] if not word.startswith("--")], "=0" in str(words))
    if words[:2] != ["compute", "tpus"] or words[3] in ("accelerator-types", "versions", "list"):
        return ask(words)
    verb, *rest = words[3:]
    flags = dict(word[2:].split("=", 1) if "=" in word else (word[2:], "") for word in rest if word.startswith("--"))
    names = [word for word in rest if not word.startswith("--")]
    return tpu_vm(verb, names, flags)


def ask(words: list[str]) -> int:
    """A question of `--check`: what `asked.json` says for the first of its keys that the words hold, else `yes`."""
    path = WORLD / "asked.json"
    answers = json.loads(path.read_text()) if path.exists() else {}
    status, text = next((answers[key] for key in answers if key in " ".join(words)), (0, "yes"))
    print(text, file=sys.stderr if status else sys.stdout)
    return status


def storage(verb: str, places: list[str], only_new: bool) -> int:
    """Buckets are folders of the world; `storage.json` holds refusals that are still to be given."""
    if error := answer("storage.json"):
        print(f"ERROR: (gcloud.storage.{verb}) {error}", file=sys.stderr)
        return 1
    paths = [WORLD / "buckets" / place[5:] if place.startswith("gs://") else Path(place) for place in places]
    source, target = paths[0], paths[-1]
    if places[-1].endswith("/"):
        target /= source.name
    if only_new and target.exists():
        told = "HTTPError 412: At least one of the pre-conditions you specified did not hold."
        print(f"ERROR: (gcloud.storage.{verb}) {told}", file=sys.stderr)
        return 1
    if places[0] == "-":
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(sys.stdin.read())
        return 0
    if not source.exists():
        told = "The following URLs matched no objects or files"
        print(f"ERROR: (gcloud.storage.{verb}) {told}:\n{places[0]}", file=sys.stderr)
        return 1
    if verb == "cat":
        print(source.read_text())
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return 0


def tpu_vm(verb: str, names: list[str], flags: dict[str, str]) -> int:
    if verb == "create":
        return create(names[0], flags)
    if verb == "scp":
        return copy(names, flags["worker"])
    if verb == "describe" and (error := answer("describe.json")) is not None:
        if error.isalpha():
            print(f"{error}\t{label(WORLD / 'machines' / names[0])}")
            return 0
        print(f"ERROR: (gcloud.compute.tpus.tpu-vm.describe) {error}", file=sys.stderr)
        return 1
    machine = WORLD / "machines" / names[0]
    if not machine.exists():
        told = f"NOT_FOUND: Resource 'projects/p/locations/us-east5-b/nodes/{names[0]}' was not found"
        print(f"ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) {told}", file=sys.stderr)
        return 1
    if verb == "describe":
        if (WORLD / "preempted").exists():
            end_processes(machine)
        print("PREEMPTED" if (WORLD / "preempted").exists() else "READY", label(machine), sep="\t")
    elif verb == "delete":
        if (WORLD / "powerless").exists() and str(WORLD) in os.environ["HOME"]:
            told = "PERMISSION_DENIED: Permission 'tpu.nodes.delete' denied"
            print(f"ERROR: (gcloud.compute.tpus.tpu-vm.delete) {told}", file=sys.stderr)
            return 1
        delete(machine)
        for gone in ("preempted", "dead"):
            (WORLD / gone).unlink(missing_ok=True)
    elif verb == "ssh":
        homes = hosts(machine, flags["worker"])
        dead = {home for home in homes if (WORLD / "dead").exists() and home.name == "host-0"}
        running = [
            subprocess.Popen(["bash", "-c", flags["command"]], cwd=home, env={**os.environ, "HOME": str(home)})
            for home in homes
            if home not in dead
        ]
        return max([process.wait() for process in running] + [255 for _ in dead])
    return 0


def create(name: str, flags: dict[str, str]) -> int:
    if error := answer("create.json"):
        print(f"ERROR: (gcloud.compute.tpus.tpu-vm.create) {error}", file=sys.stderr)
        return 1
    machine = WORLD / "machines" / name
    script = Path(flags["metadata-from-file"].removeprefix("startup-script="))
    for host in range(N_HOSTS[flags["accelerator-type"]]):
        home = machine / f"host-{host}"
        home.mkdir(parents=True)
        boot(home, script.read_text())
    (machine / "label").write_text(dict(one.split("=") for one in flags["labels"].split(","))["tomat_launch"])
    return 0


def boot(home: Path, script: str) -> None:
    """Run a start-up script as a host does, with the host's folders in the place of those of the system."""
    disk = home.parent / "system" / home.name
    disk.mkdir(parents=True, exist_ok=True)
    script = script.replace("/var/lib/", f"{disk}/").replace("/home/*/", f"{home}/")
    with (disk / "startup.log").open("w") as log:
        process = subprocess.Popen(["bash", "-c", script], stdout=log, stderr=log, start_new_session=True, cwd=home)
    (disk / "startup.pid").write_text(str(process.pid))


def label(machine: Path) -> str:
    path = machine / "label"
    return path.read_text() if path.exists() else ""


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


def delete(machine: Path) -> None:
    """At once for whoever looks; its start-up script ends last, which may be who asks for it."""
    gone = WORLD / f"gone-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        machine.rename(gone)
    end_processes(gone)
    scripts = [int(path.read_text()) for path in gone.glob("system/*/startup.pid")]
    shutil.rmtree(gone, ignore_errors=True)
    end_groups(scripts)


def end_processes(machine: Path) -> None:
    end_groups([int(path.read_text()) for path in machine.glob("host-*/tomat-launch/pid")])


def end_groups(groups: list[int]) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


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
