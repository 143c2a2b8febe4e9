"""Sweeps whose rows are pretended: what is paired with what, what a failure leaves, what a stopped lab goes on with."""

import json

import pytest

from tomat.base.errors import TomatError
from tomat.base.records import typed
from tomat.measure.lab.log import log_probe, log_row
from tomat.measure.lab.max_batch import Probe
from tomat.measure.lab.messages import FAILED, OUT_OF_MEMORY, TOO_LONG, Limits, RowError
from tomat.measure.lab.record import LabRow, record_path
from tomat.measure.lab.run import Lab, LabConfig
from tomat.perf.tuning.sweep_config import load_sweep
from tomat.perf.tuning.sweep_record import rows_on_record
from tomat.report.pages.sweep_pages import write_lab_page
from tomat.train.runs.run_log import Asked, read_log

SWEEP = """
name: small
config_path: train.yaml
introduction: Pretended.
rows:
  - name: base
  - {name: fast, overrides: {trainer.train_batch_size: 16}}
  - {name: same, overrides: {model.num_layers: 1}}
  - {name: large, overrides: {trainer.train_batch_size: 999}}
"""
MIB = 2**20


class Machine:
    """Starts pretended rows: `fast` has twice the speed of the others, `large` too much memory."""

    def __init__(self, memory_source: str = "process", watts: float | None = None):
        self.memory_source, self.watts = memory_source, watts
        self.alive: list[str] = []
        self.events: list[str] = []
        self.fails: dict[tuple[str, str], RowError | type[BaseException]] = {}
        """(name, `start` or `window`) -> what happens there."""
        self.drift = 1.0
        self.devices = "1 x cpu"
        self.compiled: set[str] = set()

    def start(self, request, on_stage):
        on_stage("starting")
        words = dict(zip(request.words[::2], request.words[1::2], strict=True))
        batch = words.get("--trainer.train_batch_size", "8")
        name = {"16": "fast", "999": "large"}.get(batch, "same" if "--model.num_layers" in words else "base")
        return Row(self, name, int(batch))

    def trouble(self, name, where):
        if (found := self.fails.get((name, where))) is not None:
            raise found


class Row:
    def __init__(self, machine, name, batch):
        self.machine, self.name, self.batch = machine, name, batch
        machine.events.append(f"start {name}")
        machine.trouble(name, "start")
        if name == "large":
            raise RowError(OUT_OF_MEMORY, "used 9 GiB")
        cold = name not in machine.compiled
        machine.compiled.add(name)
        self.start_seconds, self.waited_seconds = 1.0, 1.0
        self.described = {
            "config_hash": "same" if name in ("base", "same") else name, "platform": "cpu",
            "devices": machine.devices, "batch_sequences": batch, "sequence_tokens": 512, "accumulations": 1,
            "dispatch_ahead": 1, "shuffle_rows": 64, "shuffle": "feistel", "compute_dtype": "float32",
            "optimizer": "adam", "parameters": 100, "train_rows": 1000, "first_step_seconds": 5.0,
            "compile_seconds": 4.0 if cold else 0.5, "compile_saved_seconds": 0.0 if cold else 3.5,
            "compiled_programs": 3 if cold else 0, "start_memory_bytes": MIB, "warm_loss": 4.0, "warm_loss_step": 4,
            "first_loss": 5.0, "peak_memory_bytes": 900 * MIB, "memory_source": machine.memory_source,
            "energy_source": "the boards" if machine.watts else "a cpu tells none",
        }  # fmt: skip
        machine.alive.append(name)

    def window(self):
        machine = self.machine
        machine.trouble(self.name, "window")
        machine.events.append(f"window {self.name}")
        machine.drift *= 1.1  # the machine gets slower all the time
        rate = (2000.0 if self.name == "fast" else 1000.0) / machine.drift
        return {
            "step_seconds": self.batch * 512 / rate, "tokens_per_second": rate, "waiting_for_data_seconds": 0.0,
            "others_busy_share": 0.3, "loss": 3.0, "peak_memory_bytes": self.batch * 100 * MIB,
            "step_joules": machine.watts and machine.watts * self.batch * 512 / rate,
        }  # fmt: skip

    def extend(self):
        pass

    def close(self):
        if self.name in self.machine.alive:
            self.machine.alive.remove(self.name)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.yaml").write_text("{}")
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return tmp_path


def lab_of(folder, machine, **config):
    config = LabConfig(**{"rounds": 2, "repeats": 4, **config})
    return Lab(load_sweep(folder / "sweep.yaml"), folder / "track", folder / "work", config, start=machine.start)


def rows_of(record):
    return {row.name: row for row in typed(record["rows"], list[LabRow], "the record", "")}


def test_energy_has_columns_where_the_devices_tell_it(folder):
    record = lab_of(folder, Machine(watts=100.0)).run()
    rows = rows_of(record)
    assert rows["fast"].step_joules / rows["fast"].step_seconds == pytest.approx(100.0, rel=0.3)  # medians of a drift
    assert rows["fast"].tokens_per_joule == pytest.approx(rows["fast"].tokens_per_second / 100.0, rel=0.3)
    text = write_lab_page(record, folder / "track").read_text()
    assert "| J a step | tokens a J |" in text and "J a step: of the boards." in text


def test_windows_stand_beside_their_base_and_a_drift_cancels(folder):
    machine = Machine()
    rows = rows_of(lab_of(folder, machine).run())
    # Now the base first and now the row.
    turns = [event for event in machine.events if event.startswith("window")][4:12]
    assert turns == [f"window {name}" for name in ("base", "fast", "fast", "base") * 2]
    assert rows["fast"].ratio.mean == pytest.approx(2.0) and rows["fast"].ratio.verdict == "faster"
    assert rows["same"].ratio.mean == pytest.approx(1.0) and rows["same"].ratio.verdict == "within noise"
    assert [len(rows[name].windows) for name in ("base", "fast")] == [8, 8]
    assert not machine.alive
    # A start that compiled is not timed, and memory is that of starts from the cache.
    row = rows["fast"]
    assert [start["compiled_programs"] for start in row.starts] == [3, 0, 0]
    assert (row.compile_cold_seconds, row.compile_cached_seconds) == (4.0, 0.5)
    assert row.peak_memory_bytes == 1600 * MIB


def test_a_row_without_an_answer_is_a_row_with_its_reason(folder):
    machine = Machine()
    machine.fails["same", "window"] = RowError(TOO_LONG, "took longer than 3 s, measuring")
    record = lab_of(folder, machine).run()
    rows = rows_of(record)
    assert (rows["large"].status, rows["large"].reason) == (OUT_OF_MEMORY, "used 9 GiB")
    assert rows["same"].status == TOO_LONG and rows["fast"].measured
    assert record["n_measured"] == 2
    # It is not tried again in the next round.
    assert machine.events.count("start large") == 1
    assert not machine.alive
    # Rows are measured without their base where it fails.
    machine = Machine()
    machine.fails["base", "start"] = RowError(FAILED, "it cannot be built")
    rows = rows_of(lab_of(folder, machine).run(again=True))
    assert rows["base"].reason == "it cannot be built"
    assert rows["fast"].measured and rows["fast"].ratio is None


def test_again_replaces_what_is_on_record(folder):
    first = rows_of(lab_of(folder, Machine()).run())
    unasked, asked = Machine(), Machine()
    assert rows_of(lab_of(folder, unasked).run()) == first and "start fast" not in unasked.events
    record = lab_of(folder, asked).run(["fast"], again=True)
    # One that compiles, and two that are measured; what is on record of the others stays.
    assert asked.events.count("start fast") == 3 and record["n_rows"] == 4
    assert all(rows_of(record)[name].windows == first[name].windows for name in ("base", "same"))
    anew = Machine()
    assert len(rows_of(lab_of(folder, anew).run(again=True))["same"].windows) == 8 and "start same" in anew.events


def test_where_nothing_is_left_to_measure_the_time_of_a_start_stays_on_record(folder):
    key = "overhead_seconds_per_start"
    measured = lab_of(folder, Machine()).run()
    assert lab_of(folder, Machine()).run(["fast"])[key] == measured[key]


def test_on_an_accelerator_the_base_has_ended_before_its_rows_begin(folder):
    machine = Machine(memory_source="device")
    rows = rows_of(lab_of(folder, machine, rounds=1).run())
    own = ["start base", *["window base"] * 4]
    row = ["start fast", "start fast", *["window fast"] * 4]
    # The first base compiles, and the next one is measured by itself; then one is for each row.
    assert machine.events[: 1 + 2 * len(own) + len(row)] == ["start base", *own, *own, *row]
    assert rows["fast"].ratio.pairs == 4


def test_with_minutes_an_accelerators_base_is_measured_once_and_no_start_begins_too_late(folder, monkeypatch):
    machine = Machine(memory_source="device")
    now = [0.0]
    monkeypatch.setattr("tomat.measure.lab.run.time.monotonic", lambda: now[0])
    start = machine.start

    def slow_start(request, on_stage):
        now[0] += 100.0
        return start(request, on_stage)

    machine.start = slow_start
    lab = lab_of(folder, machine, rounds=1, minutes=5)
    rows = rows_of(lab.run())
    # What compiled is timed; after the base and `fast` 100 s are left, enough for one more, after `same` none.
    assert machine.events == [
        each for name in ("base", "fast", "same") for each in (f"start {name}", *[f"window {name}"] * 4)
    ]
    assert rows["fast"].ratio.pairs == 4 and "large" not in rows


def test_each_row_has_a_base_of_its_own_and_now_the_row_is_started_first_and_now_the_base(folder):
    """A process keeps its speed for its life: one base of all would be in all ratios. The later of two was faster."""
    machine = Machine()
    lab_of(folder, machine, rounds=1).run()
    starts = [event.removeprefix("start ") for event in machine.events if event.startswith("start")]
    assert starts == ["base"] * 3 + ["fast"] * 2 + ["base", "same", "same", "base", "large"]
    machine.events.clear()
    lab_of(folder, machine, rounds=2).run(["fast"])
    assert [event for event in machine.events if event.startswith("start")] == [
        "start base", "start fast", "start base",
    ]  # fmt: skip


def test_a_stopped_lab_keeps_what_it_measured_and_goes_on(folder):
    machine = Machine()
    machine.fails["same", "window"] = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        lab_of(folder, machine).run()
    assert not machine.alive
    path = record_path(folder / "track", "small")
    assert set(rows_on_record(path, LabRow)) == {"base", "fast"}

    # Two starts were asked for, and no row has more than one yet.
    text = write_lab_page(json.loads(path.read_text()), folder / "track").read_text()
    assert "| 2, so far fewer of 2 rows |" in text and "With one start, intervals leave out" in text

    machine = Machine()
    machine.compiled = {"base", "fast"}
    rows = rows_of(lab_of(folder, machine).run())
    # Of the first round what was missing, of the second all.
    assert [machine.events.count(f"start {name}") for name in ("fast", "same")] == [1, 3]
    assert [row.rounds_done for row in rows.values() if row.measured] == [2, 2, 2]
    # More rounds later measure only those.
    machine = Machine()
    machine.compiled = {"base", "fast", "same"}
    assert rows_of(lab_of(folder, machine, rounds=3).run())["fast"].rounds_done == 3
    assert machine.events.count("start fast") == 1


def test_a_changed_question_is_measured_anew_and_a_record_of_other_devices_refused(folder):
    lab_of(folder, Machine()).run()
    sweep = folder / "sweep.yaml"
    sweep.write_text(sweep.read_text().replace("{model.num_layers: 1}", "{model.num_layers: 2}"))
    machine = Machine()
    rows = rows_of(lab_of(folder, machine).run())
    assert machine.events.count("start same") == 3 and "start fast" not in machine.events
    assert len(rows["same"].windows) == 8
    # Rows were measured beside a base that asked something else.
    sweep.write_text(sweep.read_text().replace("- name: base", "- {name: base, overrides: {trainer.seed: 7}}"))
    machine = Machine()
    rows = rows_of(lab_of(folder, machine).run())
    assert all(f"start {name}" in machine.events for name in ("base", "fast", "same"))
    assert [len(rows[name].windows) for name in ("base", "fast", "same")] == [8, 8, 8]
    other = Machine()
    other.devices = "4 x TPU v6 lite"
    with pytest.raises(TomatError, match="measured on 1 x cpu, but here is 4 x TPU v6 lite"):
        lab_of(folder, other, rounds=3).run()
    assert not other.alive


def test_the_page_has_every_column_and_says_what_is_noise(folder):
    record = lab_of(folder, Machine(), limits=Limits(10.0, 4096 * MIB)).run()
    text = write_lab_page(record, folder / "track", epoch_rows=1_000_000).read_text()
    assert "| 1 | fast | 16 | 1 | 512 | 1 | 64 | adam | float32 |" in text
    assert "| 4.0 | 0.5 | 1,600 | 4,096 | 4.0000 | True | 2.000 (" in text
    assert "| OOM | – | out of memory: used 9 GiB | `trainer.train_batch_size 999` |" in text
    assert "`base` and `same` are one setting and differ by noise: of 1 comparison of it with itself, 1 has 1" in text
    assert "other processes used 30 % of its processors" in text
    assert "J a step" not in text and "Energy: a cpu tells none." in text
    assert "1,000,000 sequences of 512 tokens (512,000,000 an epoch)" in text
    assert (folder / "track" / "figures" / "small-pareto.svg").exists()


def test_rows_are_in_the_log_of_a_folder_of_runs(folder):
    asked, runs, lab = Asked("tomat lab run", "train.yaml"), str(folder / "runs"), lab_of(folder, Machine())
    lab.on_done = lambda row: log_row(runs, "small", "Small", row, asked)
    lab.run()
    probe, limits = Probe(4, 8, OUT_OF_MEMORY, "used 9 GiB"), Limits(1.0, MIB)
    log_probe(runs, "largest", "checkpointing off, batch 8", probe, asked, limits, {"devices": "1 x cpu"})
    entries = {entry.name: entry for entry in read_log(runs, 0.0).entries}
    assert set(entries) == {"base", "fast", "same", "large", "checkpointing off, batch 8"}
    # A line a round, and one entry with the figures of both.
    fast = entries["fast"]
    assert len(fast.pieces) == 2 and fast.figures["windows"] == 8 and fast.about("command") == "tomat lab run"
    assert fast.figures["against_base_mean"] == pytest.approx(2.0) and fast.figures["verdict"] == "faster"
    assert fast.about("settings") == {"trainer.train_batch_size": 16}
    assert (entries["large"].status, entries["large"].detail) == (OUT_OF_MEMORY, "used 9 GiB")
    assert entries["checkpointing off, batch 8"].figures["memory_limit_bytes"] == MIB


def test_windows_of_other_settings_are_not_said_to_be_of_those_asked_for(folder):
    lab_of(folder, Machine()).run()
    before = record_path(folder / "track", "small").read_bytes()
    with pytest.raises(TomatError, match=r"measured with window_seconds 1.0, but 5.0 is asked for; give --again"):
        lab_of(folder, Machine(), window_seconds=5.0).run()
    assert record_path(folder / "track", "small").read_bytes() == before
    # The starts that are on record were two.
    record = lab_of(folder, Machine(), rounds=1).run()
    page = write_lab_page(record, folder / "track").read_text()
    assert record["measured_with"]["rounds"] == 2 and "With one start" not in page
    assert lab_of(folder, Machine(), window_seconds=5.0).run(again=True)["measured_with"]["window_seconds"] == 5.0
