"""What `tomat plan` says and refuses around a compile, without one."""

from pathlib import Path

import pytest
import yaml

from tomat.app.cli import main
from tomat.perf.plan.compile import compiler
from tomat.perf.plan.compile.compiler import compile_step
from tomat.perf.plan.compile.process import Limits
from tomat.perf.plan.compile.topology import planned_slice
from tomat.train.settings.config import load_config

SMALL = [
    "--preset", "demo", "--data.source", "embedded", "--data.layout", "v3-p7", "--data.n_density_tokens", "256",
    "--trainer.train_batch_size", "8", "--slice", "v6e-4",
]  # fmt: skip

CHILD = """
import gzip, sys
from pathlib import Path
from tomat.perf.plan.compile.compiler import is_kept
from tomat.perf.plan.compile.process import answer, keep_answer, say
from tomat.perf.plan.plan_cache import PROGRAM_FILE, SCHEDULE_FILE

def carry_out(request):
    folder, part = Path(request["programs_dir"]) / "key", Path(request["work_dir"]) / "part"
    say("starting")
    if is_kept(folder, request["executable"]):
        return say("cached", key="key")
    say("compiling")
    part.mkdir()
    (part / PROGRAM_FILE).touch()
    (part / SCHEDULE_FILE).write_bytes(gzip.compress(b"{}"))
    keep_answer({"status": "fits"}, part, folder)

answer(sys.argv[1], carry_out)
"""
"""Takes the place of the compiling process: it finds or keeps an answer as that does, and compiles nothing."""


@pytest.fixture
def compiled(tmp_path, monkeypatch, child_module):
    """Compiles a step with `CHILD`; gives what was compiled and the stages that were told."""
    monkeypatch.setattr(compiler, "CHILD_MODULE", child_module(CHILD))
    monkeypatch.setattr(compiler, "compiler_version", lambda: "libtpu 0.0.46")
    config = load_config(None, SMALL)

    def compile_(limits: Limits | None = None):
        stages: list[str] = []
        where = {"cache_dir": tmp_path / "cache", "limits": limits}
        return compile_step(config, planned_slice(config, None), on_stage=stages.append, **where), stages

    return compile_


def test_done_is_the_last_thing_a_compile_says(compiled, tmp_path):
    """Of an answer that the process found, and of one for which the cache was too full, as well."""
    old = tmp_path / "cache" / "programs" / "old"
    old.mkdir(parents=True)
    (old / "result.json").write_text("{}")
    first, stages = compiled(Limits(cache_bytes=0))
    first.lock.close()
    removed = "removed 1 answer (0.00 GiB), the least recently used, from the cache: it may hold 0.00 GiB"
    assert stages == ["starting", "compiling", removed, "done"]
    # A damaged answer is made again.
    (tmp_path / "cache" / "programs" / "key" / "schedule.json.gz").unlink()
    again, stages = compiled()
    assert stages == ["starting", "compiling", "done"] and again.fits
    (request,) = (tmp_path / "cache" / "requests").iterdir()
    request.unlink()
    assert compiled()[1] == ["starting", "cached", "done"]
    assert compiled()[1] == []  # found before a process was started


@pytest.fixture
def config_path(tmp_path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(load_config(None, SMALL).to_dict()))
    return path


@pytest.mark.parametrize(
    "words",
    [["--sweep", "FILE"], ["--calibrate"], ["--record", "FOLDER"], ["--max_batch", "--config_path", "FILE"],
     ["--config_path", "FILE"]],
)  # fmt: skip
def test_every_form_says_what_is_kept_from_the_compile(words, tmp_path, monkeypatch, capsys):
    """Each is refused here for what it is given, after it has said so."""
    monkeypatch.setenv("XLA_FLAGS", "--foreign")
    (tmp_path / "unknown.yaml").write_text("purpose: has no slice\n")
    places = {"FILE": str(tmp_path / "unknown.yaml"), "FOLDER": str(tmp_path)}
    words = [places.get(word, word) for word in words]
    assert main(["plan", *words, "--tracking_dir", str(tmp_path)]) == 2
    told = capsys.readouterr()
    (note,) = [
        line for line in told.err.splitlines() if line.startswith("note: environment variables that the compile")
    ]
    assert "XLA_FLAGS" in note and "XLA_FLAGS" not in told.out


@pytest.mark.parametrize("words", [[], ["--max_batch"]])
def test_the_step_of_a_distillation_is_refused_before_anything_is_started(words, config_path, tmp_path, capsys):
    words = ["plan", "--config_path", str(config_path), "--cache_dir", str(tmp_path / "cache"), *words]
    words += ["--distillation", "{teacher: runs/demo, quantised: demo-2bit}", "--sharding", "replicated"]
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert all(name in said for name in ("distillation", "demo-2bit", "runs/demo", "`tomat train`"))
    assert "--distillation null" in said and not (tmp_path / "cache").exists()


CELL = ["--grid", "8", "8", "8", "--atoms", "2"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--kernels", "small.yaml"], "--kernels is for --calibrate"),
        (["--calibrate", "--chip", "v6e"], "--chip v6e chooses rows of --kernels"),
        (
            ["--sweep", "small.yaml", "--calibrate"],
            "--sweep, --runs and --calibrate or --record each plan rows of their own; give one of them",
        ),
        (["--row", "big"], "--row big is a row of --sweep or --runs; give its file"),
        (["--grid", "8", "8", "8"], "--grid is for --decode"),
        (["--decode", "--grid", "8", "8", "8"], "give --atoms N, or --structure FILE"),
        ([*CELL, "--decode", "--max_batch"], "which has no --max_batch"),
        ([*CELL, "--rounds", "2", "--decode", "autoregressive"], "--rounds is for the parallel decoder"),
        ([*CELL, "--kv_cache_dtype", "int8", "--decode", "parallel"], "--kv_cache_dtype is for the autoregressive"),
        ([*CELL, "--decode"], "has no model.environment"),
    ],
)
def test_words_that_do_not_go_together(words, says, config_path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--config_path", str(config_path), "--cache_dir", str(tmp_path / "cache"), *words]) == 2
    assert says in capsys.readouterr().err.replace("\n", " ")
