"""Sweeps whose plans are made of two real compiles (data/scan_fits, data/scan_oom), stretched by what the row sets."""

import dataclasses
import gzip
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hlo_text import OUT_OF_MEMORY, counted_loop, program_of

from tomat.base.errors import TomatError
from tomat.base.records import typed
from tomat.base.report.document import find_sections
from tomat.base.reporting import dump_json
from tomat.hardware.chips import Slice
from tomat.perf.cost.chip_model import ChipModel, Parameters, Support
from tomat.perf.cost.estimate import StepEstimate
from tomat.perf.cost.memory import memory_of_compiled, memory_of_oom
from tomat.perf.plan.calibration import Calibration, CalibrationRow
from tomat.perf.plan.compile.compiler import CompiledStep
from tomat.perf.plan.plan import Plan
from tomat.perf.plan.plan_cache import PROGRAM_FILE, SCHEDULE_FILE
from tomat.perf.profile.hlo_files import load_program
from tomat.perf.profile.program_breakdown import breakdown_from_program
from tomat.perf.tuning.changes import override_words
from tomat.perf.tuning.sweep import record_path, run_sweep
from tomat.perf.tuning.sweep_config import SweepConfig, SweepRow, load_sweep
from tomat.perf.tuning.sweep_record import ranked, rows_on_record
from tomat.perf.tuning.sweep_rows import FAILED, FITS, OOM, RowRecord, windowed_einsums
from tomat.report.pages.sweep_pages import write_sweep_page
from tomat.report.sweep import front
from tomat.train.mfu import step_work
from tomat.train.settings.config import TrainConfig, load_config
from tomat.train.settings.keys import check_words

DATA = Path(__file__).parents[1] / "cost" / "data"
SWEEPS = Path(__file__).parents[3] / "configs" / "sweeps"
CAPACITY = round(31.24 * 2**30)

SWEEP = """
name: small
title: A small sweep
introduction: Two settings.
config_path: train.yaml
slice: v6e-4
rows:
  - {name: base, explain: "Why is base slow?"}
  - name: whole
    question: Does it help to keep the parameters whole?
    overrides: [--sharding, replicated]
  - name: large
    question: Does a large batch fit?
    overrides: {trainer.train_batch_size: 1024}
  - {name: broken, question: "Is a broken row kept apart?", overrides: {model.num_heads: 3}}
grid:
  sharding: [fsdp, replicated]
  trainer.seed: [1, 2]
exclude: [{sharding: replicated, trainer.seed: 2}]
"""


MEASURED = CalibrationRow(
    name="pod", slice="v6e-4", source="a test", measured={"fits": True, "step_seconds": 1.1},
    predicted={"fits": True, "model_seconds": 1.0},
)  # fmt: skip


class StoredPlanner:
    """Plans from the stored compiles: batches above 512 do not fit, whole parameters take a third of the time."""

    def __init__(self, folder: Path):
        self.planned: list[TrainConfig] = []
        self.interrupted_after: int | None = None
        self.folder = folder
        shutil.copy(DATA / "scan_fits.hlo.pb.gz", folder / PROGRAM_FILE)
        (folder / SCHEDULE_FILE).write_bytes(gzip.compress(b"{}"))
        fits, oom = (gzip.decompress((DATA / f"scan_{name}.hlo.pb.gz").read_bytes()) for name in ("fits", "oom"))
        self.memory, self.oom = memory_of_compiled(fits, CAPACITY), memory_of_oom(OUT_OF_MEMORY, oom)
        self.breakdown = breakdown_from_program(load_program(folder / PROGRAM_FILE), device_kind="TPU v6 lite")

    def __call__(self, config: TrainConfig, slice_: Slice, on_stage) -> Plan:
        """A plan as `make_plan` would return it; its step takes what the breakdown says, +/- 10 %."""
        if len(self.planned) == self.interrupted_after:
            raise KeyboardInterrupt
        self.planned.append(config)
        on_stage("compiling")
        fits, whole = config.batch_size <= 512, config.sharding == "replicated"
        memory, model = self.memory if fits else self.oom, ChipModel("v6e", Parameters())
        assert memory is not None
        if fits and whole:
            memory = dataclasses.replace(memory, required_bytes=2 * memory.required_bytes)
        result = {"status": "fits" if fits else "oom", "memory": memory.to_dict(), "compile_seconds": 100.0}
        compiled = CompiledStep(self.folder, result | {"compiler": "libtpu 0"}, cached=False)
        plan = Plan(config, slice_, compiled, Calibration((MEASURED,)), model, step_work(config, "tpu"))
        # What is computed once, and then kept, is kept already.
        vars(plan)["step"] = None
        if fits:
            factor = 1 / 3 if whole else 1.0
            ops = tuple(dataclasses.replace(op, seconds=factor * op.seconds) for op in self.breakdown.ops)
            seconds = factor * self.breakdown.step_seconds
            breakdown = dataclasses.replace(self.breakdown, ops=ops, step_seconds=seconds)
            step = vars(plan)["step"] = StepEstimate({}, {}, breakdown, model)
            hbm = Support("hbm", 0.75 * seconds, 0.75, 0.1 / 0.75, measured_kernels=40)
            vars(step)["supports"] = (hbm, Support("interconnect", 0.25 * seconds, 0.25, 0.0, measured_kernels=0))
        return plan


@pytest.fixture
def planner(tmp_path, monkeypatch) -> StoredPlanner:
    (tmp_path / "program").mkdir()
    monkeypatch.setattr("tomat.perf.plan.plan.make_plan", found := StoredPlanner(tmp_path / "program"))
    return found


@pytest.fixture
def sweep_file(tmp_path) -> Path:
    config = {"data": {"source": "embedded", "layout": "v3-p7"}, "preset": "demo", "sharding": "fsdp"}
    (tmp_path / "train.yaml").write_text(json.dumps(config | {"trainer": {"train_batch_size": 8}}))
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return tmp_path / "sweep.yaml"


def test_rows_and_grid_are_read(sweep_file):
    sweep = load_sweep(sweep_file)
    grid = ["fsdp, seed=1", "fsdp, seed=2", "replicated, seed=1"]
    assert [row.name for row in sweep.rows] == ["base", "whole", "large", "broken", *grid]
    assert [row.base for row in sweep.rows] == [None, *["base"] * 6]
    config, slice_ = sweep.rows[1].load()
    assert (config.sharding, slice_.name) == ("replicated", "v6e-4")
    assert sweep.rows[-1].load()[0].trainer.seed == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("title:", "titel:"), "unknown key 'titel'"),
        (("config_path: train.yaml", ""), "has no config_path"),
        (("name: whole", "name: base"), "more than one row is called 'base'"),
        (("  - {name: base,", "  - {name: base, base: other,"), "base 'other', which is no row"),
        (("name: small", "name: a/b"), "names files"),
        (("trainer.seed: 2}]", "trainer.seed: 3}]"), "exclude has trainer.seed: 3"),
        (("[--sharding, replicated]", "[sharding, replicated]"), r"sweep\.yaml: row 2: found 'sharding'.* of the form"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(sweep_file, change, message):
    assert change[0] in SWEEP
    sweep_file.write_text(SWEEP.replace(*change))
    with pytest.raises(TomatError, match=message):
        load_sweep(sweep_file)


def test_a_row_with_a_slice_of_its_own_is_not_of_the_sweeps(sweep_file):
    own = "overrides: {slice: v6e-8}"
    sweep_file.write_text(SWEEP.replace("overrides: [--sharding, replicated]", own))
    assert [row.load()[1].name for row in load_sweep(sweep_file).rows[:2]] == ["v6e-4", "v6e-8"]
    sweep_file.write_text(SWEEP.replace("overrides: [--sharding, replicated]", f"slice: v6e-1\n    {own}"))
    with pytest.raises(TomatError, match="row 2 'whole' has slice: v6e-1, and v6e-8 in its overrides"):
        load_sweep(sweep_file)


def test_an_override_that_cannot_be_is_refused_with_file_and_row(sweep_file):
    for override, said in (
        ("[--shardin, zero1]", " sets shardin, which is no setting; did you mean sharding?"),
        ("[--slice, v6e-5]", ": slice 'v6e-5' is not known; expected one of"),
        ("[--guards.max_skips, -1]", ": guards.max_skips is -1; expected at least 0"),
    ):
        sweep_file.write_text(SWEEP.replace("[--sharding, replicated]", override))
        row = load_sweep(sweep_file).rows[1]
        with pytest.raises(TomatError) as refused:
            check_words(row.config_path, override_words(row.overrides), words_of=row.words_of)
            row.load()
        assert str(refused.value).startswith(f"row 'whole' of {sweep_file}{said}")


REFUSED_ROWS = {"5 heads"}
"""Rows that shall show how a refusal looks."""
AGAIN = re.compile(r".*, again|copy \d+")
"""Names of rows that are another's setting, to show noise."""


@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_sweeps_hold_configurations_that_load(path):
    sweep = load_sweep(path)
    distinct = set()
    for row in sweep.rows:
        assert row.question or row.explain or path.stem != "tracking-issue", f"{row.name} answers nothing"
        if row.name in REFUSED_ROWS:
            continue
        config = load_config(row.config_path, override_words(row.overrides))
        distinct.add(json.dumps(config.to_dict(), sort_keys=True, default=str))
        if config.slice is not None and config.slice.startswith("v"):
            assert row.load()[1].name == (row.slice or config.slice)
    left_out = sum(row.name in REFUSED_ROWS or AGAIN.fullmatch(row.name) is not None for row in sweep.rows)
    assert len(distinct) == len(sweep.rows) - left_out


def test_a_grid_of_millions_is_refused_before_it_is_expanded(tmp_path):
    axes = "\n".join(f"  trainer.seed{n}: [{', '.join(map(str, range(40)))}]" for n in range(5))
    (tmp_path / "s.yaml").write_text(f"name: s\nconfig_path: x.yaml\nrows: [{{name: a}}]\ngrid:\n{axes}\n")
    with pytest.raises(TomatError, match="102,400,001 rows .* at most 1,000"):
        load_sweep(tmp_path / "s.yaml")


def test_single_rows_leave_the_others_as_they_are(sweep_file, planner, tmp_path):
    sweep = load_sweep(sweep_file)
    whole = run_sweep(sweep, tmp_path)
    planner.planned.clear()
    again = run_sweep(sweep, tmp_path, only=[sweep.rows[0].name])
    assert len(planner.planned) == 1 and again == whole
    with pytest.raises(TomatError, match="has no row 'nobody'"):
        run_sweep(sweep, tmp_path, only=["nobody"])
    recipe = sweep.rows[0].config_path
    text = recipe.read_text()
    recipe.write_text(text + "\nrun_name: another\n")  # which the plans of the others are not
    assert {row["name"] for row in run_sweep(sweep, tmp_path, only=["base"])["rows"]} == {"base", "broken"}
    planner.planned.clear()
    recipe.write_text(text)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "small.json").write_text("{}")  # of a run of the same name, whose page the sweep would take
    with pytest.raises(TomatError, match="rename the sweep"):
        run_sweep(sweep, tmp_path)
    assert not planner.planned


def test_chosen_rows_come_with_what_they_are_compared_with():
    bases = {"a": None, "b": "a", "c": "b", "d": "a"}
    sweep = SweepConfig("s", tuple(SweepRow(name, Path("demo.yaml"), {}, None, base) for name, base in bases.items()))
    for only, kept in ((["c"], ["a", "b", "c"]), (["d", "b"], ["a", "b", "d"]), ([], ["a", "b", "c", "d"])):
        assert [row.name for row in sweep.with_rows(only).rows] == kept
    with pytest.raises(TomatError, match="has no row 'e'; rows: a, b, c, d"):
        sweep.with_rows(["a", "e"])


def test_every_row_is_recorded_and_failures_stand_alone(sweep_file, planner, tmp_path):
    sweep, docs = load_sweep(sweep_file), tmp_path / "docs"
    record = run_sweep(sweep, docs, workers=3)
    assert record == json.loads(record_path(docs, "small").read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == [row.name for row in sweep.rows]
    others = {name: row["status"] for name, row in rows.items() if row["status"] != FITS}
    assert others == {"large": OOM, "broken": FAILED}
    assert "num_heads is 3" in rows["broken"]["error"]
    assert rows["large"]["hbm_required_bytes"] > rows["large"]["hbm_capacity_bytes"]
    assert {row.get("untimed_step_share") for row in rows.values() if row["status"] == FITS} == {0.25}
    base, tokens = rows["base"], 8 * 512 / 4
    assert base["tokens_per_second_per_chip"]["low"] == pytest.approx(tokens / base["step_seconds"]["high"])
    assert sum(group["seconds"] for group in base["categories"]) == pytest.approx(base["step_seconds"]["estimate"])
    found = typed(record["rows"], list[RowRecord], "the record", "")
    order = [row.name for row in ranked(found)]
    assert order[0] in ("whole", "replicated, seed=1") and order[-2:] == ["large", "broken"]
    assert {one.name for one in front(found)} == {"base", "replicated, seed=1"}


def test_the_page_answers_with_the_figures_and_twice_changes_nothing(sweep_file, planner, tmp_path):
    sweep, docs = load_sweep(sweep_file), tmp_path / "docs"
    text = write_sweep_page(run_sweep(sweep, docs), docs).read_text()
    assert set(find_sections(text, "page")) == {"introduction", "ranking", "pareto", "shares", "answers"}
    [base] = [line for line in text.splitlines() if "| base | v6e-4 | 8 | 512 |" in line]
    assert "| 25.0 % |" in base
    answers = dict(part.split("\n", 1) for part in text.split("## Answers")[1].split("### ")[1:])
    whole, large, broken, why = answers.values()
    assert "faster than `base`: 3.00x tokens/s/chip, beyond the intervals. What changed most" in whole
    assert "of 31.24 GiB): does not fit: 29." in large and "The largest buffer is" in large
    assert "`broken` failed: " in broken and "| matmul |" in why and "No matmul is cut" in why
    assert (docs / "figures" / "small-pareto.svg").read_text().startswith("<?xml")
    assert "[A small sweep](small.md)" in (docs / "index.md").read_text()
    files = [f for f in docs.rglob("*") if f.is_file()]
    before = {file: file.stat().st_mtime_ns for file in files}
    write_sweep_page(run_sweep(sweep, docs), docs)
    assert {file: file.stat().st_mtime_ns for file in files} == before


@pytest.mark.parametrize("path", sorted((SWEEPS.parents[1] / "docs" / "tracking" / "sweeps").glob("*.json")))
def test_records_on_disk_are_read_and_written_without_a_change(path):
    record = json.loads(path.read_text())
    rows = [row.to_dict() for row in typed(record["rows"], list[RowRecord], str(path), "")]
    assert dump_json({**record, "rows": rows}) == path.read_text()


def test_an_interrupted_sweep_keeps_its_rows_and_goes_on(sweep_file, planner, tmp_path):
    sweep, docs = load_sweep(sweep_file), tmp_path / "docs"
    planner.interrupted_after = 2
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, docs)
    planner.interrupted_after = None
    assert list(rows_on_record(record_path(docs, "small"), RowRecord)) == ["base", "whole"]
    record = run_sweep(sweep, docs)
    assert [row["name"] for row in record["rows"]] == [row.name for row in sweep.rows]

    # A row that means something else now is not taken from the record.
    sweep_file.write_text(SWEEP.replace("trainer.train_batch_size: 1024", "trainer.train_batch_size: 16"))
    changed = load_sweep(sweep_file)
    planner.planned.clear()
    planner.interrupted_after = 2
    with pytest.raises(KeyboardInterrupt):
        run_sweep(changed, docs)
    kept = rows_on_record(record_path(docs, "small"), RowRecord)
    assert list(kept) == [row.name for row in changed.rows if row.name != "large"]


def test_a_row_is_told_where_the_stages_are(sweep_file, planner, tmp_path, capsys):
    """Not on standard output, where a terminal's live display would wipe it."""
    record = run_sweep(load_sweep(sweep_file), tmp_path / "docs", workers=2, only=["base", "whole"])
    assert [row["name"] for row in record["rows"]] == ["base", "whole"]
    told = capsys.readouterr()
    assert all(f" s] {number} of 2, " in told.err for number in (1, 2)) and " of 2, " not in told.out
    assert "base: base" in told.err


def test_an_interrupt_ends_the_compiles_in_progress(sweep_file, tmp_path, monkeypatch):
    """A compiler ignores an interrupt for minutes; the sweep must not wait for it, nor call its end a failure."""
    sweep, docs, started = load_sweep(sweep_file), tmp_path / "docs", threading.Event()
    command = [sys.executable, "-c", "import time; time.sleep(300)", "tomat.perf.plan.compile.compiler"]

    def compiling(config, slice_, on_stage):
        if config.sharding == "replicated":
            assert started.wait(20)
            raise KeyboardInterrupt
        with subprocess.Popen(command) as child:
            started.set()
            raise TomatError(f"the compiling process ended with status {child.wait()}")

    monkeypatch.setattr("tomat.perf.plan.plan.make_plan", compiling)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, docs, workers=2)
    assert time.monotonic() - began < 60
    assert not record_path(docs, "small").exists()


def test_windowed_einsums_are_told_by_their_loops():
    elements = {"i": "s32[]", "x": "f32[8,64]{1,0}", "w": "f32[64,32]{1,0}"}
    body = "product = f32[8,32]{1,0} dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    entry = """a = f32[8,64]{1,0} parameter(0)
  b = f32[64,32]{1,0} parameter(1)
  zero = s32[] constant(0)
  start = CARRY tuple(zero, a, b)
  loop = CARRY while(start), condition=windowed_dot_general_cond, body=windowed_dot_general_body
  ROOT out = f32[64,32]{1,0} get-tuple-element(loop), index=2""".replace("CARRY", f"({', '.join(elements.values())})")
    program = program_of(entry, counted_loop("windowed_dot_general", elements, body, "4", i="next"))
    found = windowed_einsums(program, {"product": 3.0, "next": 1.0, "start": 1.0}, 8.0)
    assert found is not None
    assert (found.n_loops, found.steps, found.narrowest_contraction) == (1, 4.0, 64)
    assert (found.seconds, found.share) == (4.0, 0.5)
    assert windowed_einsums(load_program(DATA / "scan_fits.hlo.pb.gz"), {}, 1.0) is None
