"""The error that an estimate carries, from what pods measured."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tomat.base.errors import TomatError
from tomat.base.report.markdown import markdown, section_markdown
from tomat.perf.plan.calibration import Calibration, CalibrationRow, read_measurements, row_of_run
from tomat.report.calibration import calibration_report, shares_parts
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
    with pytest.raises(TomatError, match="which devices ran is not on record .* no measurement of v6e-4"):
        row_of_run(tmp_path)  # as an earlier version, or a run whose history is lost, has left it
    append_event(tmp_path, "start", 0, devices="4 x TPU v6 lite", hosts=1)
    found = row_of_run(tmp_path)
    assert found.slice == "v6e-4" and found.measured == {"fits": True, "step_seconds": 2.0}
    assert found.training_config() == config and "asked" not in found.source


@pytest.mark.parametrize(
    "asked, devices, hosts, slice_name",
    [("v6e-16", "8 x TPU v6 lite", 1, "v6e-8"), (None, "32 x TPU v6 lite", 8, "v6e-32"),
     ("v6e-16", "8 x TPU v5", 2, "v5p-16")],
)  # fmt: skip
def test_a_run_measures_the_slice_that_it_ran_on(tmp_path, asked, devices, hosts, slice_name):
    words = ["--slice", asked, "--run_elsewhere", "true"] if asked else []
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(load_config(None, words).to_dict()))
    rows = [{"step": n, "step_seconds": 2.0, "wall_seconds": 2.0, "compile_seconds": 0} for n in range(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    append_event(tmp_path, "start", 0, devices=devices, hosts=hosts)
    found = row_of_run(tmp_path)
    assert found.slice == slice_name
    assert (f"slice {asked} was asked for, and {devices}" in found.source) == (asked is not None)


@pytest.mark.parametrize("devices", ["2 x cpu", "8 x NVIDIA H200", "3 x TPU v6 lite"])
def test_a_run_on_no_tpu_slice_measures_none(tmp_path, devices):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(load_config(None, ["--slice", "v6e-16"]).to_dict()))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "step_seconds": 2.0, "wall_seconds": 2.0}\n')
    append_event(tmp_path, "start", 0, devices=devices, hosts=1)
    with pytest.raises(TomatError, match=f"it ran on {devices} on 1 host, and v6e-16 was asked for: no TPU slice"):
        row_of_run(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", '{"rows": 3}', '{"rows": [3]}', '{"rows": [{"name": "a"}]}', "[" * 100_000, "\x00",
        '{"rows": [{"name": 1, "slice": 2, "source": 3, "measured": {"fits": true}, "overrides": []}]}',
        '{"rows": [{"name": "a", "slice": "v99-3", "source": "", "measured": {"fits": true}, "overrides": []}]}',
        '{"rows": [{"name": "a", "slice": "v6e-4", "source": "", "measured": [], "overrides": []}]}',
        '{"rows": [{"name": "a", "slice": "v6e-4", "source": "", "measured": {}, "overrides": []}]}',
        '{"rows": [{"name": "a", "slice": "v6e-4", "source": "", "measured": {"fits": 1}, "overrides": []}]}',
        '{"rows": [{"name": "a", "slice": "v6e-4", "source": "", "measured": {"fits": true}, "overrides": [],'
        ' "doubted": {"matmul_share": "not measured"}}]}',
        '{"rows": [{"name": "a", "slice": "v6e-4", "source": "", "measured": {"fits": true, "step_seconds": 2.0},'
        ' "overrides": [], "doubted": {"step_seconds": "it cannot be"}}]}',
        '{"rows": [{"name": "a", "slice": "v6e-4", "source": "", "measured": {"fits": true, "matmul_share": 0.2},'
        ' "overrides": [], "doubted": {"matmul_share": 3}}]}',
    ],
)  # fmt: skip
def test_a_damaged_record_is_one_clear_error(tmp_path, text):
    (tmp_path / "calibration.json").write_text(text)
    with pytest.raises(TomatError) as refused:
        Calibration.load(tmp_path)
    assert len(str(refused.value)) < 1000
    assert "\n" not in str(refused.value) and "calibration.json" in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "", "3", "measurements: 3", "measurements: [3]", "measurements: [{name: a}]", "a: [", "\x00",
        "measurements: [{name: a, config_path: x, source: 3, measured: {fits: true}}]",
        "measurements: [{name: a, config_path: x, source: y, measured: 3}]",
        "measurements: [{name: a, config_path: x, source: y, measured: {fits: true}, overrides: 3}]",
        "measurements: [{name: a, config_path: x, source: y, measured: {fits: true}, doubted: 3}]",
        "measurements: [{name: a, config_path: x, source: y, measured: {fits: true}}]\nnotes: 3",
        "measurements: [{name: a, config_path: [x], source: y, measured: {fits: true}}]",
    ],
)  # fmt: skip
def test_damaged_measurements_are_one_clear_error(tmp_path, text):
    (tmp_path / "calibration.yaml").write_text(text)
    with pytest.raises(TomatError, match="calibration.yaml"):
        read_measurements(tmp_path)
    (tmp_path / "calibration.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TomatError, match="calibration.yaml"):
        read_measurements(tmp_path)


IMPOSSIBLE = {
    "NaN": {"step_seconds": math.nan},
    "infinity": {"step_seconds": math.inf},
    "0 s": {"step_seconds": 0.0},
    "-2.08 s": {"step_seconds": -2.08},
    "2,080 s for 2,080 ms": {"step_seconds": 2080.0},
    "text": {"step_seconds": "2.08"},
    "a share of 47": {"step_seconds": 2.08, "attention_share": 47.0},
    "a share of NaN": {"attention_share": math.nan},
    "bytes for GiB": {"hbm_required_gib": 6.1e9},
    "an unknown figure": {"step_ms": 2080},
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_figures_that_cannot_be_are_taken_from_no_file(name, tmp_path):
    said = {"name": "a", "config_path": "x.yaml", "source": "a test", "measured": {"fits": True} | IMPOSSIBLE[name]}
    row = said | {"slice": "v6e-16", "overrides": [], "config": None, "compiler": "libtpu 0.0.46",
                  "predicted": {"fits": True, "model_seconds": 1.75, "hbm_required_gib": 5.7}}  # fmt: skip
    (tmp_path / "calibration.json").write_text(json.dumps({"rows": [row]}))
    (tmp_path / "calibration.yaml").write_text(yaml.safe_dump({"measurements": [said]}))
    with pytest.raises(TomatError, match="calibration.json"):
        Calibration.load(tmp_path)
    with pytest.raises(TomatError, match="calibration.yaml"):
        read_measurements(tmp_path)


def test_a_measurement_far_from_its_plan_is_refused():
    with pytest.raises(TomatError, match="206 times the 1.75 seconds"):
        row("a", 361.0, 1.75).checked("a file")
    assert row("a", 3.61, 1.75).checked("a file").step_ratio == pytest.approx(3.61 / 1.75)


def test_a_doubted_share_is_shown_with_its_reason():
    sure = CalibrationRow("d", "v6e-16", "a test", {"fits": True, "attention_share": 0.17},
                          {"fits": True, "attention_share": 0.29})  # fmt: skip
    assert "+12.0 |" in markdown(shares_parts([sure]))
    text = markdown(shares_parts([replace(sure, doubted={"attention_share": "it cannot be."})]))
    assert "+12.0 (doubted) |" in text and "it cannot be." in text


def test_the_page_says_how_far_off_each_row_is():
    rows = (
        row("a", 2.0, 1.0),
        row("b", 8.0, 4.0),
        CalibrationRow("c", "v6e-16", "a test", {"fits": False, "hbm_required_gib": 40.0},
                       {"fits": False, "hbm_required_gib": 39.0}),
        CalibrationRow("d", "v6e-16", "a test", {"fits": True, "attention_share": 0.47},
                       {"fits": True, "hbm_required_gib": 3.0, "attention_share": 0.5}),
    )  # fmt: skip
    text = "".join(section_markdown(section) for section in calibration_report(rows).sections)
    assert text.count("-50.0 %") == 2 and "| -2.50 % |" in text and "+3.0" in text
