"""The page of the calibration on record."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from html_reader import read_page

from tomat.base.report.markdown import update_page
from tomat.perf.plan.calibration import Calibration
from tomat.report.calibration import _compared, calibration_report
from tomat.report.html.document import page_html
from tomat.report.html.kinds import page_of
from tomat.report.pages import calibration_page

RECORD = Path(__file__).parents[2] / "docs" / "tracking" / "calibration.json"


def test_every_measurement_stands_beside_its_plan():
    rows = json.loads(RECORD.read_text())["rows"]
    reader = read_page(page_html(page_of(str(RECORD))))
    assert [row[0][0] for row in reader.tables[-1]] == [row["name"] for row in rows]
    timed = [row for row in rows if "step_seconds" in row["measured"]]
    [equal, points] = reader.figures[0]["data"]
    assert points["x"] == [row["predicted"]["model_seconds"] for row in timed]
    assert points["y"] == [row["measured"]["step_seconds"] for row in timed]
    assert equal["x"] == equal["y"]
    sized = [row for row in rows if "hbm_required_gib" in row["measured"]]
    assert reader.figures[1]["data"][1]["y"] == [row["measured"]["hbm_required_gib"] for row in sized]


def test_a_note_that_is_taken_back_leaves_the_page(tmp_path):
    rows = Calibration.load(RECORD.parent).rows
    for notes in (["the clock was low"], []):
        text = update_page(tmp_path / "calibration.md", calibration_report(rows, notes)).read_text()
        assert ("the clock was low" in text) == bool(notes) and text.count("## What differs") == 1


def test_a_measurement_kept_by_hand_is_planned_again_if_its_configuration_changes(tmp_path, monkeypatch):
    planned = []

    def plan(config, slice_, **how):
        planned.append(config.batch_size)
        memory, made = SimpleNamespace(required_bytes=2**30), SimpleNamespace(fits=False, compiler="libtpu")
        made.memory = memory
        return SimpleNamespace(compiled=made, step=None, slice_=slice_)

    monkeypatch.setattr(calibration_page, "make_plan", plan)
    kept = {"name": "a", "source": "a test", "measured": {"fits": False}, "config_path": "200m-v6e16"}
    for batch in ("64", "64", "32"):
        kept["overrides"] = ["--trainer.train_batch_size", batch]
        (tmp_path / "calibration.yaml").write_text(yaml.safe_dump({"measurements": [kept]}))
        calibration_page.calibrate(tmp_path, only_new=True)
    assert planned == [64, 32]
    assert Calibration.load(tmp_path).rows[0].overrides == ("--trainer.train_batch_size", "32")


def test_the_bar_of_a_plan_is_its_range():
    chart = _compared([("a run", 0.423, 0.45, 0.194)], "step", "s")[0]
    # `Interval.of`: from 1 / 1.194 of the plan to 1.194 times it.
    ((low, high),) = next(one.x_ranges for one in chart.series if one.x_ranges)
    assert (low, high) == (pytest.approx(0.423 / 1.194), pytest.approx(0.423 * 1.194))
