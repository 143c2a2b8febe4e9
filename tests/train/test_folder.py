"""The files of a run travel to its bucket and back to the machine that takes it over."""

import datetime
import json
import signal

import fsspec
import pytest

from tomat.base.errors import TomatError
from tomat.base.layout import HISTORY_FILE
from tomat.train.folder import RunFolder, fetch, publish, record_for_another
from tomat.train.preemption import StopRequest
from tomat.train.runs.history import read_events
from tomat.train.settings.config import load_config


@pytest.fixture
def bucket():
    memory = fsspec.filesystem("memory")
    yield "memory://bucket/runs/a"
    memory.rm("/bucket", recursive=True)


def test_a_machine_that_takes_over_finds_log_and_configuration(bucket, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, 0.0, 1)
    (first / "config.yaml").write_text("run_name: a\n")
    (first / "checkpoints").mkdir()
    publish(bucket, first)
    assert fetch(bucket, second) == ["config.yaml", "metrics.jsonl", HISTORY_FILE]
    assert (second / "metrics.jsonl").read_text() == '{"step": 0}\n'
    (second / "metrics.jsonl").write_text("newer, longer\n")
    assert fetch(bucket, second) == []
    (first / "README.md").write_text("page")
    publish(bucket, first, ("README.md", "loss.svg"))
    assert fetch(bucket, second) == ["README.md"]


def test_the_history_of_a_host_that_is_lost_is_gone_on_with_by_another(bucket, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, 0.0, 1)
    publish(bucket, first)
    (second / "metrics.jsonl").parent.mkdir()
    (second / "metrics.jsonl").write_text("of an earlier day")
    record_for_another(bucket, second, "stop", 3, reason="host 0 is gone")
    *before, last = read_events(bucket)
    assert before == read_events(first)
    assert (last["event"], last["step"], last["reason"]) == ("stop", 3, "host 0 is gone")
    assert fetch(bucket, first) == ["metrics.jsonl", HISTORY_FILE]
    assert (first / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_what_a_pod_leaves_is_in_the_bucket_before_the_machine_is_gone(bucket, tmp_path, monkeypatch, capsys):
    """Traces of every host, once; and Levanter's log, which the next machine goes on with."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.of(load_config("demo", ["--output_dir", bucket.rpartition("/")[0], "--run_name", "a"]))
    folder.make()
    trace = folder.path / "profiler" / "plugins" / "host-3.xplane.pb"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(b"trace")
    (folder.path / "a.log").write_text("started\n")
    folder.publish()
    folder.publish_tree(folder.path / "profiler", "profiler")
    files = fsspec.filesystem("memory")
    place = "/bucket/runs/a/profiler/plugins/host-3.xplane.pb"
    assert files.cat_file(place) == b"trace" and files.cat_file("/bucket/runs/a/a.log") == b"started\n"
    files.rm(place)
    folder.publish_tree(folder.path / "profiler", "profiler")
    assert not files.exists(place)  # it is sent once
    (folder.path / "a.log").unlink()
    assert folder.fetch() and (folder.path / "a.log").read_text() == "started\n"
    # A place that takes nothing costs the trace, not the run.
    monkeypatch.setattr(type(files), "pipe_file", lambda *_, **__: (_ for _ in ()).throw(PermissionError("no")))
    trace.write_bytes(b"another")
    folder.publish_tree(folder.path / "profiler", "profiler")
    assert "host-3.xplane.pb stays on this machine" in " ".join(capsys.readouterr().out.split())


def test_a_folder_of_a_run_of_that_name_in_another_place_is_left_alone(bucket, tmp_path, monkeypatch):
    """Its log was emptied, and its history taken for that of the run in the bucket, warm start included."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.of(load_config("demo", ["--output_dir", bucket.rpartition("/")[0], "--run_name", "a"]))
    folder.make()
    write(folder.path, 0.0, 3, "start")
    (folder.path / "config.yaml").write_text("run_name: a\noutput_dir: runs\n")
    with pytest.raises(TomatError, match=r"runs/a belongs to run 'a' in runs; output_dir is memory://bucket"):
        folder.fetch()
    publish(bucket, folder.path)  # as one that is copied to another bucket
    assert not folder.fetch()


def write(folder, clock_seconds: float, steps: int, *events: str) -> None:
    """Add events as a machine writes them whose clock is wrong by `clock_seconds`, and have a log of `steps` steps."""
    folder.mkdir(exist_ok=True)
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=clock_seconds)
    with (folder / HISTORY_FILE).open("a") as file:
        for event in events:
            file.write(json.dumps({"time": now.isoformat(), "event": event, "step": 0}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(steps)))


@pytest.mark.parametrize("skew_seconds", [-300.0, 0.0, 300.0])
def test_a_machine_that_was_overtaken_takes_what_the_other_has_done_whatever_its_clock_says(
    bucket, tmp_path, skew_seconds
):
    """The first trains 10 steps, the second goes on to 20, then the first one is there again."""
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, 0.0, 10, "start")
    publish(bucket, first)
    write(first, 0.0, 12, "preempted")  # not published any more
    fetch(bucket, second)
    write(second, skew_seconds, 20, "resume")
    publish(bucket, second)
    assert set(fetch(bucket, first)) == {"metrics.jsonl", HISTORY_FILE}
    for name in ("metrics.jsonl", HISTORY_FILE):
        assert (first / name).read_text() == (second / name).read_text()


@pytest.mark.parametrize("skew_seconds", [-300.0, 300.0])
def test_a_machine_that_is_ahead_of_the_bucket_keeps_what_it_has_and_gets_lines_that_it_lost(
    bucket, tmp_path, skew_seconds
):
    run, log = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    write(run, 0.0, 10, "start")
    publish(bucket, run)
    write(run, 0.0, 4)
    assert fetch(bucket, run) == ["metrics.jsonl"] and len(log.read_text().splitlines()) == 10
    write(run, skew_seconds, 12, "stop")
    before = log.read_text()
    assert fetch(bucket, run) == [] and log.read_text() == before


@pytest.mark.parametrize(("steps", "saved"), [(0, False), (5, True)])
def test_a_run_that_is_stopped_before_its_first_step_has_saved_nothing(tmp_path, steps, saved):
    folder = RunFolder.of(load_config("demo", ["--output_dir", str(tmp_path), "--run_name", "a"]))
    stop = StopRequest()
    stop.step = steps
    with pytest.raises(SystemExit), stop.listening(), folder.recording_early_end(stop):
        signal.raise_signal(signal.SIGTERM)
    [event] = read_events(folder.path)
    assert (event["event"], event["step"], event["saved"]) == ("preempted", steps, saved)
