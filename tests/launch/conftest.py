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
if behaviour == "dies":
    (world / "dead").touch()
    time.sleep(60)
if behaviour == "smoke":
    # What a run of twenty steps leaves that is stopped after its third, and resumed.
    here = pathlib.Path.cwd()
    run = world / "buckets" / "bucket" / "runs" / "soak_1-smoke"
    pack = {"pack": (here / "tomat-pack.sha256").read_text().split()[0]}
    pack["commit"] = json.loads((here / "tomat-pack.json").read_text())["commit"]

    def leave(name, *rows):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        with (run / name).open("a") as file:
            file.writelines(json.dumps({"time": "2026", **row}) + "\\n" for row in rows)

    if attempt == 0:
        if host == 0:
            leave("history.jsonl", {"event": "start", "step": 0, "hosts": hosts, **pack})
            def stop(*_):
                leave("metrics.jsonl", *({"step": step} for step in range(3)))
                leave("history.jsonl", {"event": "preempted", "step": 3})
                (world / "stopped").touch()
                sys.exit(143)
            signal.signal(signal.SIGTERM, stop)
            print("step 1/20  loss 9.8", flush=True)
        deadline = time.monotonic() + 60
        while not (world / "stopped").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        sys.exit(143 if (world / "stopped").exists() else "no signal within 60 s")
    if host == 0:
        leave("history.jsonl", {"event": "resume", "step": 3, "steps_again": 0, **pack})
        leave("metrics.jsonl", *({"step": step} for step in range(3, 20)))
        for name in ("config.yaml", "README.md", "checkpoints/step-19/metadata.json", "profiler/p/x/t.xplane.pb"):
            leave(name)
        print("step 20/20  loss 9.7", flush=True)
    sys.exit(0)
if behaviour not in (2, 75):
    for step in range(1, 2 if not isinstance(behaviour, dict) else behaviour["steps"] + 1):
        print(f"step {step}/9  loss 1.0", flush=True)
    if isinstance(behaviour, dict):
        sys.exit(behaviour["status"])
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
        told = (words for words in self.calls() if words[0] == "compute" and "tomat-status" not in str(words))
        return [words[3] for words in told if words[3] not in ("describe", "scp")]

    def packs(self) -> list[Path]:
        return sorted((self.folder / "buckets").rglob("*.tar.gz"))

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
