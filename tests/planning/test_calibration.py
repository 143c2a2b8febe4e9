"""The error that an estimate carries, from what pods measured."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tomat.errors import TomatError
from tomat.planning.calibration import FEW_RUNS, Calibration, CalibrationRow, read_measurements, row_of_run
from tomat.planning.calibration_page import memory_section, shares_section, steps_section
from tomat.training.config import load_config

TRACKING = Path(__file__).parents[2] / "docs" / "tracking"


def row(name: str, measured: float, modelled: float, slice_name: str = "v6e-16") -> CalibrationRow:
    return CalibrationRow(
        name=name, slice=slice_name, source="a test", measured={"fits": True, "step_seconds": measured},
        predicted={"fits": True, "model_seconds": modelled}, config_path="x.yaml",
    )  # fmt: skip


def test_the_correction_is_the_geometric_mean_and_its_own_size_the_error_of_few_runs():
    record = Calibration((row("a", 2.0, 1.0), row("b", 8.0, 1.0)))
    assert record.scale("v6e") == pytest.approx(4.0)
    assert record.scale("v6e", without="a") == pytest.approx(8.0)
    # residuals are a factor of 2 either way, the correction is a factor of 4
    assert record.known_error("v6e") == pytest.approx(3.0)
    low, high = record.factors("v6e")
    assert (low, high) == (pytest.approx(0.25), pytest.approx(4.0))


def test_enough_runs_leave_the_largest_residual():
    rows = tuple(row(f"run {n}", 1.5 * (1.1 if n == 0 else 1.0), 1.0) for n in range(FEW_RUNS))
    record = Calibration(rows)
    expected = max(abs(math.log(r.step_ratio / record.scale("v6e"))) for r in rows if r.step_ratio)
    assert record.known_error("v6e") == pytest.approx(math.exp(expected) - 1)
    assert record.known_error("v6e") < 0.1


def test_a_chip_without_runs_borrows_the_others_and_says_so():
    record = Calibration((row("a", 1.2, 1.0),))
    assert record.scale("v5p") == pytest.approx(1.2)
    assert "none of them on v5p" in record.notes("v5p")[0]
    assert Calibration(()).factors("v6e") == (1.0, 1.0)
    assert "unknown" in Calibration(()).notes("v6e")[0]


def test_a_record_survives_the_disk(tmp_path):
    record = Calibration((row("a", 2.0, 1.0), replace(row("b", 3.0, 1.0), overrides=("--x", "1"))))
    record.save(tmp_path)
    assert Calibration.load(tmp_path) == record
    (tmp_path / "calibration.json").write_text('{"rows": [{"nam')
    with pytest.raises(TomatError, match="--calibrate"):
        Calibration.load(tmp_path)


def test_the_record_of_the_repository_belongs_to_its_measurements():
    kept, notes = read_measurements(TRACKING)
    record = {r.name: r for r in Calibration.load(TRACKING).rows}
    assert notes
    for measured in kept:
        assert measured.training_config().slice == "v6e-16" or "1B" in measured.name
        found = record[measured.name]
        assert dict(found.measured) == dict(measured.measured)
        assert found.predicted["fits"] == measured.measured["fits"]


def test_a_run_of_the_users_becomes_a_measurement(tmp_path):
    config = load_config(None, ["--run_name", "mine", "--slice", "v6e-4"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    rows = [
        {"step": n, "step_seconds": s, "wall_seconds": s, "compile_seconds": 0} for n, s in enumerate([5, 2, 2, 2, 9])
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    found = row_of_run(tmp_path)
    assert found.slice == "v6e-4" and found.measured == {"fits": True, "step_seconds": 2.0}
    assert found.training_config() == config
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**config.to_dict(), "slice": None}))
    with pytest.raises(TomatError, match="slice"):
        row_of_run(tmp_path)


def test_the_page_says_how_far_off_each_row_is():
    rows = (
        row("a", 2.0, 1.0),
        row("b", 8.0, 4.0),
        CalibrationRow("c", "v6e-16", "a test", {"fits": False, "hbm_required_gib": 40.0},
                       {"fits": False, "hbm_required_gib": 39.0}),
        CalibrationRow("d", "v6e-16", "a test", {"fits": True, "attention_share": 0.47},
                       {"fits": True, "hbm_required_gib": 3.0, "attention_share": 0.5}),
    )  # fmt: skip
    steps = steps_section(Calibration(rows))
    assert "met by 2 of 2" in steps and "-50.0 %" in steps and "times 2.000" in steps
    assert "-2.50 %" in memory_section(rows) and "right for 4 of 4" in memory_section(rows)
    assert "+3.0" in shares_section(rows) and "met by 1 of 1" in shares_section(rows)
