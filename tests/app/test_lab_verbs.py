"""`tomat lab` on real steps of a tiny model, each row in a process of its own."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
from forked import Forked, until
from json_keys import assert_keys_of_before
from reported import reported
from tiny_run import DEMO, tiny_run

from tomat.app.cli import main
from tomat.measure.lab.run import alone_in
from tomat.measure.lab.session import accumulations
from tomat.train.settings.config import load_config


@pytest.fixture(scope="module", autouse=True)
def server_ended() -> Iterator[None]:
    """The server that rows are forked from would keep its 0.27 GB until the worker ends."""
    yield
    forkserver._forkserver._stop()  # as the tests of CPython do


@pytest.fixture
def work(tmp_path) -> Path:
    """A folder of the lab that shares what the other tests compile."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "compiled").symlink_to(os.environ["JAX_COMPILATION_CACHE_DIR"], target_is_directory=True)
    return tmp_path / "work"


def sweep_file(folder: Path, rows: list[dict]) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(json.dumps({"name": "tiny", "config_path": str(DEMO), "overrides": tiny_run(4, 4), "rows": rows}))
    return path


def words(verb: str, folder: Path, *more: object) -> list[str]:
    return ["lab", verb, "--tracking_dir", str(folder / "track"), "--work_dir", str(folder / "work"), *map(str, more)]


def test_devices_that_share_a_sequence_count_once_in_a_microbatch():
    eight = ["--trainer.train_batch_size", "8", "--trainer.per_device_parallelism", "2"]
    axes = ["--trainer.mesh.axes", "{data: -1, model: 2}"]
    counts = [accumulations(load_config(DEMO, [*eight, *more]), 4) for more in ([], axes)]
    assert counts == [1, 2] and accumulations(load_config(DEMO, eight[:2]), 4) == 1


def test_rows_are_measured_and_failures_are_rows(tmp_path, work, capsys):
    rows = [{"name": "as it is"}, {"name": "the same"}]
    rows.append({"name": "three heads", "base": "three heads", "overrides": {"model.num_heads": 3}})
    sweep = sweep_file(tmp_path, rows)
    options = ("--rounds", 1, "--repeats", 2, "--steps", 2, "--warmup_steps", 1)
    record = reported(tmp_path, *words("run", tmp_path, sweep, *options), status=1)
    assert_keys_of_before("lab run", record)
    found = {row["name"]: row for row in record["rows"]}
    base, same = found["as it is"], found["the same"]
    assert [base["status"], same["status"]] == ["measured", "measured"]
    # Both took the trainer's own steps, from the same weights on the same rows.
    assert base["setup"]["warm_loss"] == same["setup"]["warm_loss"]
    assert [window["loss"] for window in base["windows"]] == [window["loss"] for window in same["windows"]]
    assert record["same_settings"] == [["as it is", "the same"]]
    assert same["against_base"]["low"] < same["against_base"]["mean"] < same["against_base"]["high"]
    assert same["compile_cached_seconds"] > 0 and same["compile_cold_seconds"] > 0
    assert base["setup"]["batch_sequences"] * base["setup"]["sequence_tokens"] == pytest.approx(
        base["tokens_per_second_median"] * base["step_seconds_median"], rel=0.5
    )
    assert "num_heads" in found["three heads"]["reason"]
    assert record["overhead_seconds_per_start"] >= 0
    assert "'as it is' and 'the same' are one setting" in capsys.readouterr().out
    assert not list((work / "scratch").glob("*"))
    # A limit of time ends a row too; one of memory: `test_the_largest_batch_is_searched_with_real_steps`.
    folder = tmp_path / "short"
    folder.mkdir()
    (folder / "work").symlink_to(work, target_is_directory=True)
    assert main(words("run", folder, sweep, "--row", "as it is", "--rounds", 1, "--row_seconds", 0.2)) == 1
    record = json.loads((folder / "track" / "lab" / "tiny.json").read_text())
    assert record["rows"][0]["status"] == "too long", record["rows"][0]["reason"]


def test_a_lab_that_cannot_begin_says_so_and_keeps_the_record(tmp_path, work, capsys):
    sweep = sweep_file(tmp_path, [{"name": "one"}])
    record = tmp_path / "track" / "lab" / "tiny.json"
    record.parent.mkdir(parents=True)
    record.write_text("kept")
    assert main(words("run", tmp_path, sweep, "--again", "--row", "two")) == 2
    assert "sweep tiny has no row 'two'; rows: one." in capsys.readouterr().err
    with alone_in(work):
        assert main(words("run", tmp_path, sweep, "--again")) == 2
    assert "another" in capsys.readouterr().err and record.read_text() == "kept"
    sweep.write_text(json.dumps(json.loads(sweep.read_text()) | {"overrides": ["--data.layuot", "v3-p7"]}))
    assert main(words("run", tmp_path, sweep)) == 2
    said = capsys.readouterr().err
    assert "no setting; did you mean data.layout?" in said and said.count("\n") == 1


def test_the_largest_batch_is_searched_with_real_steps(tmp_path, work):
    options = ("--config_path", DEMO, "--memory_limit_gib", 0.01, "--largest", 8, "--steps", 1, *tiny_run(4, 4))
    record = reported(tmp_path, *words("max_batch", tmp_path, *options), status=1)
    assert_keys_of_before("lab max_batch", record)
    [search] = record["searches"]
    # Nothing runs in 10 MiB: halved down to one sequence a device.
    assert [probe["batch_sequences"] for probe in search["probes"]] == [4, 2]
    assert {probe["status"] for probe in search["probes"]} == {"out of memory"}
    text = (tmp_path / "track" / "max-batch-demo-decoder.md").read_text()
    assert "| off | 1 |" in text or "| as the model has it | 1 |" in text


def test_ctrl_c_stops_at_once_and_leaves_nobody(tmp_path, work):
    sweep = sweep_file(tmp_path, [{"name": "a"}])
    lab = Forked(*words("run", tmp_path, sweep), before="import os; os.setsid()")
    # Not before the row's process is there: one that imports takes longer to notice.
    assert until(lambda: "reading the configuration" in lab.said() or lab.poll() is not None, 120.0)
    os.killpg(lab.pid, signal.SIGINT)
    said = lab.communicate(timeout=60)[0]
    assert lab.returncode == 130, said
    assert "Traceback" not in said
    assert until(lambda: not alive_in(lab.pid), 60.0), alive_in(lab.pid)
    assert not list((work / "scratch").glob("*"))


def alive_in(group: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
