"""A checkout with a training that does what a test asks of it, and a `gcloud` whose machines are folders."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

FAKE_GCLOUD = Path(__file__).parent / "fake_gcloud.py"

TRAINING = '''
"""Does what the next line of the world's behaviours says: exit statuses of the hosts, `wait`, `held` or `preempt`."""
import json, os, pathlib, signal, sys, time

home = pathlib.Path.home()
world = pathlib.Path(os.environ["FAKE_GCLOUD_WORLD"])
host, hosts = int(home.name.split("-")[1]), len(list(home.parent.glob("host-*")))
counter = world / f"attempts-host-{host}"
attempt = int(counter.read_text()) if counter.exists() else 0
new = counter.with_suffix(".new")
new.write_text(str(attempt + 1))
new.replace(counter)
behaviour = json.loads((world / "behaviours.json").read_text())[attempt]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print(f"host {host} attempt {attempt + 1}: {' '.join(sys.argv[1:])}", flush=True)
if "A_SECRET" in os.environ:
    (world / f"secret-host-{host}").write_text(os.environ["A_SECRET"])
if behaviour == "held":
    if host == hosts - 1:
        print("TPU initialization failed: open(/dev/vfio/0): Device or resource busy: Device or resource busy")
    sys.exit(1)
if behaviour == "preempt" and host == 0:
    # Once all have begun: a host that never counted this start would be one behaviour behind for good.
    others = [world / f"attempts-host-{index}" for index in range(hosts)]
    deadline = time.monotonic() + 60
    while not all(path.exists() and int(path.read_text()) > attempt for path in others):
        if time.monotonic() > deadline:
            sys.exit("the other hosts have not begun within 60 s")
        time.sleep(0.01)
    (world / "preempted").touch()
if isinstance(behaviour, list):
    behaviour = behaviour[host]
if isinstance(behaviour, int):
    if behaviour == 2:
        print("error: data.train does not exist.", flush=True)
    sys.exit(behaviour)
time.sleep(60)
'''

PYTHON3 = """#!/bin/sh
# On a host: `python3 -m uv sync` makes the environment's interpreter, here this one.
case "$*" in "-m uv sync"*) mkdir -p .venv/bin && ln -s {python} .venv/bin/python ;; esac
"""

CONFIG = """
run_name: soak_1
slice: v6e-16
output_dir: gs://bucket/runs
data: {source: embedded, layout: v3-p7, n_density_tokens: 128}
preset: demo
"""


@dataclass(frozen=True)
class World:
    """What is outside tomat."""

    folder: Path
    checkout: Path

    def behave(self, *behaviours: object) -> None:
        """What the training does at each start: an exit status, one a host, `wait`, `held` or `preempt`."""
        (self.folder / "behaviours.json").write_text(json.dumps(behaviours))

    def answer(self, name: str, *answers: str) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(answers))

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verbs(self) -> list[str]:
        """`create`, `ssh`, `delete`, ... without the questions."""
        told = (words for words in self.calls() if "tomat-status" not in str(words))
        return [words[3] for words in told if words[3] not in ("describe", "scp")]

    def machines(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "machines").glob("*"))


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    folder, checkout, programs = (tmp_path / name for name in ("world", "checkout", "bin"))
    for path in (folder, checkout, programs):
        path.mkdir()
    for name, text in (
        ("gcloud", f'#!/bin/sh\nexec {sys.executable} -S {FAKE_GCLOUD} "$@"\n'),
        ("python3", PYTHON3.format(python=sys.executable)),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (checkout / "train_tomat_tpu.py").write_text(TRAINING)
    (checkout / "run.yaml").write_text(CONFIG)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], cwd=checkout, check=True)
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_GCLOUD_WORLD", str(folder))
    made = World(folder, checkout)
    yield made
    for name in made.machines():
        subprocess.run(["gcloud", "compute", "tpus", "tpu-vm", "delete", name], check=False, capture_output=True)
