"""The error that an estimate carries, from what pods measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tomat.base.errors import TomatError
from tomat.perf.plan.calibration import Calibration, CalibrationRow, read_measurements, row_of_run
from tomat.train.runs.history import append_event
from tomat.train.settings.config import load_config

TRACKING = Path(__file__).parents[3] / "docs" / "tracking"


def row(name: str, measured: float, modelled: float, slice_name: str = "v6e-16") -> CalibrationRow:
    return CalibrationRow(
        name=name, slice=slice_name, source="a test", measured={"fits": True, "step_seconds": measured},
        predicted={"fits": True, "model_seconds": modelled}, config_path="x.yaml",
    )  # fmt: skip


def test_pods_say_what_no_plan_sees():
    record = Calibration((row("a", 2.0, 1.9), row("b", 8.0, 8.4), row("c", 3.0, 1.0, "v5p-8")))
    assert record.step_ratios("v6e") == [pytest.approx(2.0 / 1.9), pytest.approx(8.0 / 8.4)]
    (note,) = record.notes("v6e")
    assert "2 pods on record took 0.95 to 1.05 of what was planned" in note and "host" in note
    (none,) = record.notes("v4")
    assert "no pod of v4 is on record" in none


def test_a_record_survives_the_disk(tmp_path):
    record = Calibration((row("a", 2.0, 1.0), replace(row("b", 3.0, 1.0), overrides=("--x", "1"))))
    record.save(tmp_path)
    assert Calibration.load(tmp_path) == record


def test_the_record_of_the_repository_belongs_to_its_measurements():
    kept, notes = read_measurements(TRACKING)
    record = {r.name: r for r in Calibration.load(TRACKING).rows}
    assert notes
    for measured in kept:
        assert measured.training_config().slice == "v6e-16" or "1B" in measured.name
        found = record[measured.name]
        assert dict(found.measured) == dict(measured.measured)
        assert found.predicted["fits"] == measured.measured["fits"]


def write_steps(folder: Path, seconds: list[float]) -> None:
    rows = [{"step": n, "step_seconds": s, "wall_seconds": s, "compile_seconds": 0} for n, s in enumerate(seconds)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def test_a_run_of_the_users_becomes_a_measurement(tmp_path):
    config = load_config(None, ["--run_name", "mine", "--slice", "v6e-4"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    write_steps(tmp_path, [5, 2, 2, 2, 9])
    with pytest.raises(TomatError, match="which devices ran is not on record .* no measurement of v6e-4"):
        row_of_run(tmp_path)  # as an earlier version, or a run whose history is lost, has left it
    append_event(tmp_path, "start", 0, devices="4 x TPU v6 lite", hosts=1)
    found = row_of_run(tmp_path)
    assert found.slice == "v6e-4" and found.measured == {"fits": True, "step_seconds": 2.0}
    assert found.training_config() == config and "asked" not in found.source


@pytest.mark.parametrize(
    "asked, devices, hosts, slice_name",
    [("v6e-16", "8 x TPU v6 lite", 1, "v6e-8"), (None, "8 x TPU v5", 2, "v5p-16"), ("v6e-16", "2 x cpu", 1, None)],
)
def test_a_run_measures_the_tpu_slice_that_it_ran_on(tmp_path, asked, devices, hosts, slice_name):
    words = ["--slice", asked, "--run_elsewhere", "true"] if asked else []
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(load_config(None, words).to_dict()))
    write_steps(tmp_path, [2] * 5)
    append_event(tmp_path, "start", 0, devices=devices, hosts=hosts)
    if slice_name is None:
        with pytest.raises(TomatError, match=f"it ran on {devices} on 1 host, but v6e-16 was asked for: no TPU slice"):
            row_of_run(tmp_path)
        return
    found = row_of_run(tmp_path)
    assert found.slice == slice_name
    assert (f"slice {asked} was asked for, and {devices}" in found.source) == (asked is not None)


@pytest.mark.parametrize(
    ("row", "figures", "said"),
    [
        ({"slice": "v99-3"}, {}, "'v99-3' is not known"),
        ({"doubted": {"matmul_share": "not measured"}}, {}, "doubted has matmul_share, which is no measured share"),
        ({"doubted": {"step_seconds": "it cannot be"}}, {"step_seconds": 2.0}, "doubted has step_seconds"),
        ({}, {"step_seconds": 2080.0}, "expected a number from 0.0001 to 600, seconds"),  # milliseconds
        ({}, {"step_seconds": 2.08, "attention_share": 47.0}, "expected .* a fraction of the step"),
        ({}, {"hbm_required_gib": 6.1e9}, "expected .* GiB of one device"),  # bytes
        ({}, {"step_ms": 2080}, "has the unknown figure 'step_ms'"),
    ],
)
def test_a_row_that_cannot_be_is_one_clear_error_of_either_file(tmp_path, row, figures, said):
    """Other damage: `tests/fuzz/test_result_files.py`."""
    kept = {"name": "a", "config_path": "x.yaml", "source": "a test", "measured": {"fits": True} | figures} | row
    predicted = {"fits": True, "model_seconds": 1.75, "hbm_required_gib": 5.7}
    planned = {"slice": "v6e-16", "overrides": [], "config": None, "compiler": "", "predicted": predicted} | kept
    (tmp_path / "calibration.json").write_text(json.dumps({"rows": [planned]}))
    (tmp_path / "calibration.yaml").write_text(yaml.safe_dump({"measurements": [kept]}))
    for name, read in (("calibration.json", Calibration.load), ("calibration.yaml", read_measurements)):
        with pytest.raises(TomatError, match=f"{name}.*{said}") as refused:
            read(tmp_path)
        assert "\n" not in str(refused.value)


def test_a_measurement_far_from_its_plan_is_refused():
    with pytest.raises(TomatError, match="206 times the 1.75 seconds"):
        row("a", 361.0, 1.75).checked("a file")
    assert row("a", 3.61, 1.75).checked("a file").step_ratio == pytest.approx(3.61 / 1.75)
