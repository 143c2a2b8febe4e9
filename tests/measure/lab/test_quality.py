"""Rows trained over seeds: what is paired, what the verdict says, what a failure leaves. Runs are pretended."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from json_keys import assert_keys_of_before
from tiny_run import DEMO

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.base.layout import STOPPED_STATUS
from tomat.data.density.demo.embedded import demo_materials
from tomat.measure.lab import quality as quality_module
from tomat.measure.lab import quality_runs
from tomat.measure.lab.quality import Quality, QualityRow, against_base, seeds_of
from tomat.measure.lab.quality_runs import FinishedRun, RunFailed, check_judged, share_data, train_run, tuning_overrides
from tomat.measure.lab.run import alone_in
from tomat.perf.tuning.sweep_config import load_sweep
from tomat.report.pages.quality_page import _curve_charts, _same, quality_table, write_quality_page
from tomat.train.settings.config import load_config

SEEDS = (0, 1, 2)


def a_row(name: str, speed: float, error: float, wobble: float = 0.0, loss: str = "ce", seeds=SEEDS) -> QualityRow:
    """Speeds and errors that wobble from seed to seed, each row in its own way."""
    row = QualityRow(name, None, {}, "", {"kind": loss})
    for seed in seeds:
        turn = 1 + wobble * math.cos(2.1 * seed + len(name))
        row.figures[seed] = {
            "tokens_per_second_median": 100.0 * speed * (1 + 0.001 * seed), "validation_loss": 2.0 * error,
            "held_out_nmae_median": 0.1 * error * turn + 0.01 * seed,
        }  # fmt: skip
    return row


@pytest.mark.parametrize(
    ("speed", "error", "wobble", "verdict"),
    [
        (0.5, 0.9, 0.0, "slower, better"),
        (2.0, 1.01, 0.3, "faster, quality within noise; loss worse"),
        (1.0, 2.0, 0.0, "speed within noise, worse"),
        (1.0, 1.0, 0.2, "within noise"),
    ],
)
def test_what_is_faster_and_worse_is_said_to_be(speed, error, wobble, verdict):
    found = against_base(a_row("row", speed, error, wobble), a_row("base", 1.0, 1.0))
    assert found.verdict == verdict and found.seeds == SEEDS
    assert found.speed is not None and found.speed.mean == pytest.approx(speed)
    # What the seeds have in common cancels.
    if wobble == 0:
        difference = found.differences["held_out_nmae_median"]
        assert difference.mean == pytest.approx(0.1 * (error - 1)) and difference.high - difference.low < 1e-12


def test_losses_of_another_kind_are_not_compared_and_one_seed_says_nothing():
    row, base = a_row("row", 1.0, 0.5, loss="emd"), a_row("base", 1.0, 1.0)
    assert set(against_base(row, base).differences) == {"held_out_nmae_median"}
    alone = against_base(a_row("row", 1.0, 0.5, seeds=(1,)), base)
    assert alone.seeds == (1,) and alone.speed is None and alone.verdict == ""
    for text in ("0", "1,1", "1,a", "-1,2", ""):
        with pytest.raises(TomatError, match="--seeds is .*two or more different ones"):
            seeds_of(text)
    assert seeds_of("3,0") == [3, 0]


def test_settings_are_judged_on_training_compounds_alone(tmp_path):
    groups = ["layered"]
    config = load_config(DEMO, ["--data.groups", json.dumps(groups)])
    found = tuning_overrides(config, tmp_path, 0.2, 7)
    folder = Path(found["data.input"])
    names = {path.stem for path in folder.iterdir()}
    assert names == {material.material_id for material in demo_materials("train", groups)} != set()
    assert not names & {material.material_id for material in demo_materials("validation", groups)}
    assert tuning_overrides(config, tmp_path, 0.2, 7) == found
    assert found["data.source"] == "folder" and (found["data.validation_share"], found["data.split_seed"]) == (0.2, 7)
    with pytest.raises(TomatError, match="by their errors on materials"):
        check_judged(load_config(DEMO, ["--evaluation.patches_per_material", "0"]), ("embedded", "folder"))


def test_runs_share_what_is_tokenised_once_where_they_ask_for_the_same(tmp_path):
    config, other = load_config(DEMO), load_config(DEMO, ["--data.n_density_tokens", "64"])
    for missing in (True, False):
        share_data(tmp_path / "a", tmp_path / "b", config, config)
        assert (tmp_path / "b").exists() is not missing
        (tmp_path / "a" / "data" / "train").mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / "data" / "train" / "x").write_text("1")
        (tmp_path / "a" / "data" / "folder.json").write_text("{}")
    assert (tmp_path / "b" / "data" / "train" / "x").read_text() == "1"
    share_data(tmp_path / "a", tmp_path / "c", config, other)
    assert not (tmp_path / "c").exists()


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study whose runs are written, not trained; `outcome` decides what becomes of one."""
    config = yaml.safe_load(DEMO.read_text())
    config["data"]["groups"] = ["metals"]  # of few densities
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(config))
    rows = [{"name": "base"}, {"name": "fast, worse", "overrides": {"model.hidden_dim": 32}}, {"name": "breaks"}]
    values = {"name": "small", "config_path": "demo.yaml", "overrides": {"model.num_layers": 1}, "rows": rows}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(values))
    trained: list[str] = []

    def train(run, output_dir, lock):
        trained.append(run.name)
        if run.name.startswith("breaks"):
            raise RunFailed(f"run {run.name} ended with status 2")
        Path(run.config.run_dir).mkdir(parents=True)

    def finished(run):
        if not Path(run.config.run_dir).exists():
            return None
        fast = run.name.startswith("fast")
        figures = {
            "tokens_per_second_median": 200.0 if fast else 100.0, "validation_loss": 2.0,
            "held_out_nmae_median": (0.2 if fast else 0.1) + 0.01 * run.seed,
        }  # fmt: skip
        return FinishedRun(np.ones(5), figures, ("NaCl",), "1 x cpu")

    monkeypatch.setattr(quality_module, "train_run", train)
    monkeypatch.setattr(quality_module, "read_finished", finished)

    def make() -> Quality:
        sweep = load_sweep(tmp_path / "sweep.yaml")
        return Quality(sweep, SEEDS, tmp_path / "work", tmp_path / "track" / "lab" / "quality-small.json", steps=5)

    return make, trained


def test_every_row_is_trained_with_every_seed_and_a_failure_is_a_row(study, tmp_path):
    make, trained = study
    record = make().run()
    assert_keys_of_before("lab quality", record)
    # Seed by seed, each time in another order.
    assert [name.rsplit("-", 2)[0] for name in trained] == [
        "base", "fast-worse", "breaks", "fast-worse", "breaks", "base", "breaks", "base", "fast-worse",
    ]  # fmt: skip
    base, fast, breaks = record["rows"]
    assert fast["against_base"]["verdict"] == "faster, worse" and fast["materials"] == ["NaCl"]
    assert fast["parameters"] < base["parameters"] and record["steps"] == 5
    assert breaks["failed"] == {str(seed): f"run breaks-seed-{seed} ended with status 2" for seed in SEEDS}
    assert json.loads((tmp_path / "track" / "lab" / "quality-small.json").read_text()) == record

    text = write_quality_page(record, tmp_path / "track").read_text()
    for words in ("| every row has | `model.num_layers 1` |", "| 2.000 (2.000 to 2.000) |", "| faster, worse |",
                  "failed with 3 seeds", "neither trained on nor looked at", "![Speed against error"):  # fmt: skip
        assert words in text
    assert (tmp_path / "track" / "figures" / "quality-small.svg").exists()
    assert len(quality_table(record).rows) == 3

    # What has ended is not trained again; what failed is tried again.
    del trained[:]
    make().run()
    assert [name.rsplit("-", 2)[0] for name in trained] == ["breaks"] * 3
    with alone_in(tmp_path / "work"), pytest.raises(TomatError, match="another process works"):
        make().run()
    alone = make()
    alone.sweep = alone.sweep.with_rows(["base"])
    with pytest.raises(TomatError, match="has one row; expected at least two"):
        alone.run()


def test_a_study_that_is_refused_says_why(study, tmp_path, capsys):
    rows = [{"name": "base"}, {"name": "wider", "exact": True, "overrides": {"model.hidden_dim": 32}}]
    values = {"name": "small", "config_path": "demo.yaml", "rows": rows}
    (tmp_path / "exact.yaml").write_text(yaml.safe_dump(values))
    places = ("--work_dir", str(tmp_path / "work"), "--tracking_dir", str(tmp_path / "track"))
    assert main(["lab", "quality", str(tmp_path / "exact.yaml"), *places]) == 2
    assert "row wider is called exact, but changes what is learnt" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (STOPPED_STATUS, TomatError, "the same command goes on from there"),
        (1, RunFailed, "ended with status 1; .*\nwhy"),
        (-9, RunFailed, "ended with status -9"),
        (0, RunFailed, "without all of its steps"),
    ],
)
def test_a_run_that_was_stopped_has_not_failed(tmp_path, monkeypatch, status, error, words):
    end = f"exit {status}" if status >= 0 else f"kill {status} $$"
    monkeypatch.setattr(quality_runs, "tomat_command", lambda *_: ["sh", "-c", f"echo why; {end}"])
    run = SimpleNamespace(name="base-seed-0", words=(), config=SimpleNamespace(run_dir=str(tmp_path / "run")))
    with (tmp_path / "lock").open("w") as lock, pytest.raises(TomatError, match=words) as raised:
        train_run(run, tmp_path, lock)
    assert raised.type is error


def test_the_record_is_of_what_was_asked_where_nothing_is_left_to_train(tmp_path, monkeypatch):
    import json
    from types import SimpleNamespace

    from tomat.measure.lab.quality import Quality, QualityRow
    from tomat.perf.tuning.sweep_config import SweepConfig

    runs = {"a": [SimpleNamespace(seed=seed) for seed in (0, 1)]}
    monkeypatch.setattr(Quality, "plan", lambda study: runs)
    monkeypatch.setattr(Quality, "_read", lambda *given: None)
    row = QualityRow("a", None, {}, "", {}, figures={0: {}, 1: {}})
    study = Quality(SweepConfig("s", ()), [0, 1], tmp_path, tmp_path / "record.json", rows={"a": row})
    assert study.run() == json.loads((tmp_path / "record.json").read_text())


def test_a_study_whose_base_was_not_trained_has_a_page_without_curves():
    """Drawing no curves at all ended in a traceback, and a row that nobody compared was "not the same"."""
    row = {"name": "base", "exact": True, "loss_window_means": {}, "against_base": None}
    assert _curve_charts({"window_end_steps": [5], "rows": [row], "loss_unit": "nats"}, "tiny") == []
    assert _same(row).text == "not compared"
