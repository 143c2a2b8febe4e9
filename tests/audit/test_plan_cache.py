"""A5: the plan cache answers for the program, packages and environment that it was asked about, and ends clean."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tomat
from tomat.base.checked_json import with_checksum
from tomat.perf.plan.compile import compiler, process
from tomat.perf.plan.compile.topology import planned_slice
from tomat.perf.plan.plan_cache import evict, keep
from tomat.train.settings.config import load_config

PACKAGE = Path(tomat.__file__).parent
KEY = (
    "from tomat.perf.plan.compile.compiler import _request_key; "
    "print(_request_key({'config': {}, 'slice': 'v6e-4'}, None))"
)
CONFIG = [
    "--preset", "demo", "--data.source", "embedded", "--data.layout", "v3-p7", "--data.n_density_tokens", "256",
    "--trainer.train_batch_size", "8",
]  # fmt: skip


def key_of(*path: Path) -> str:
    """The name of a request, as a new process with `path` before its packages gives it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-P", "-c", KEY]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def test_every_file_that_the_step_compiles_is_in_the_key(tmp_path, figure):
    shutil.copytree(PACKAGE, tmp_path / "tomat", ignore=shutil.ignore_patterns("demo_data", "__pycache__"))
    before = key_of(tmp_path)
    unnoticed = []
    for name in ("train/guards/loss.py", "train/settings/guards.py", "model/loss/density_loss.py"):
        file = tmp_path / "tomat" / name
        text = file.read_text()
        file.write_text(text + "\nCHANGED = 1\n")
        if key_of(tmp_path) == before:
            unnoticed.append(name)
        file.write_text(text)
    figure("A5", "changed files of the step that the plan cache does not notice", unnoticed or "none")
    assert unnoticed == []
    assert key_of(tmp_path) == before


def test_every_package_that_traces_the_step_is_in_the_key(tmp_path, figure):
    before, unnoticed = key_of(PACKAGE.parent), []
    for name in ("jax", "jaxlib", "equinox", "jmp", "haliax"):
        name = {"haliax": "marin_haliax"}.get(name, name)
        other = tmp_path / name / f"{name}-99.0.dist-info"
        other.mkdir(parents=True)
        (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 99.0\n")
        if key_of(PACKAGE.parent, tmp_path / name) == before:
            unnoticed.append(name)
    figure("A5", "packages whose version the plan cache does not notice", unnoticed or "none")
    assert unnoticed == []


class Started(Exception):
    """Instead of the compiling process."""


def environment_of_the_child(monkeypatch, cache: Path) -> dict[str, str]:
    """What the compiling process would be started with."""
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: uv sync --extra plan")
    seen: dict[str, str] = {}

    def start(*args, env, **kwargs):
        seen.update(env)
        raise Started

    config = load_config(None, CONFIG)
    with monkeypatch.context() as patched:
        patched.setattr(process.subprocess, "Popen", start)
        with pytest.raises(Started):
            compiler.compile_step(config, planned_slice(config, "v6e-4"), cache_dir=cache)
    return seen


def test_nothing_inherited_reaches_the_compile(tmp_path, monkeypatch, figure):
    foreign = {
        "JAX_DEFAULT_MATMUL_PRECISION": "highest", "JAX_ENABLE_X64": "1", "EQX_ON_ERROR": "nan",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path), "LIBTPU_INIT_ARGS": "--foreign", "XLA_FLAGS": "--foreign",
        "OF_NOBODY": "1",
    }  # fmt: skip
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)
    seen = environment_of_the_child(monkeypatch, tmp_path)
    reached = sorted(name for name, value in foreign.items() if value in seen.get(name, ""))
    figure("A5", "variables of the caller that reach the compile", reached or "none")
    assert reached == []
    assert seen["PATH"] == os.environ["PATH"] and seen["TPU_ACCELERATOR_TYPE"] == "v6e-4"


def test_an_answer_that_is_being_read_is_not_replaced(tmp_path, figure):
    folder, failed, stop = tmp_path / "programs" / "key", [], threading.Event()
    files = ["result.json", *(f"program{n}" for n in range(20))]

    def make(number: int) -> Path:
        part = tmp_path / f"part{number}"
        part.mkdir(parents=True)
        for name in files:
            (part / name).write_text(json.dumps(with_checksum({"status": "fits"})))
        return part

    folder.parent.mkdir()
    keep(make(0), folder)

    def read() -> None:
        while not stop.is_set():
            try:
                for name in files:
                    (folder / name).read_text()
            except FileNotFoundError as error:
                failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 300):
        keep(make(number), folder)
    stop.set()
    reader.join()
    figure("A5", "readers that found half an answer, while it was compiled again 299 times", len(failed))
    assert failed == []


@pytest.mark.slow
def test_what_a_killed_compile_leaves_is_removed_by_the_next(tmp_path, monkeypatch, figure):
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: uv sync --extra plan")
    code = (
        "from pathlib import Path; from tomat.perf.plan.compile.compiler import compile_step; "
        "from tomat.perf.plan.compile.topology import planned_slice; "
        "from tomat.train.settings.config import load_config\n"
        f"config = load_config(None, {CONFIG!r})\n"
        f"compile_step(config, planned_slice(config, 'v6e-4'), cache_dir=Path({str(tmp_path)!r}))"
    )
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    planner = subprocess.Popen([sys.executable, "-P", "-c", code], env=environment)
    deadline = time.monotonic() + 300
    while not any(path.is_dir() and any(path.iterdir()) for path in tmp_path.glob(".work-*")):
        assert time.monotonic() < deadline and planner.poll() is None
        time.sleep(0.1)
    planner.send_signal(signal.SIGKILL)
    planner.wait()
    environment_of_the_child(monkeypatch, tmp_path)
    left = len(list(tmp_path.glob(".work-*")))
    figure("A5", "working folders of killed compiles after the next compile", left)
    assert left == 0


def test_the_cache_is_bounded(tmp_path, figure):
    for number in range(8):
        folder = tmp_path / "programs" / f"key{number}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(with_checksum({"status": "fits"})))
        (folder / "program.hlo.pb.gz").write_bytes(bytes(2**20))
        os.utime(folder / "result.json", (number, number))
    evict(tmp_path, 4 * 2**20)
    held = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    figure("A5", "MiB held by a cache of 8 plans of 1 MiB that may hold 4", round(held / 2**20, 1))
    assert held <= 4 * 2**20
    assert sorted(path.name for path in (tmp_path / "programs").iterdir()) == ["key5", "key6", "key7"]
