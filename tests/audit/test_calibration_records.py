"""A9: a calibration takes figures that can be, and no others."""

import json
import math

import pytest
import yaml

from tomat.base.errors import TomatError
from tomat.perf.plan.calibration import Calibration, read_measurements

GOOD = {
    "name": "a", "slice": "v6e-16", "source": "a test", "measured": {"fits": True, "step_seconds": 2.08},
    "predicted": {"fits": True, "model_seconds": 1.75, "hbm_required_gib": 5.7}, "config_path": "x.yaml",
    "overrides": [], "config": None, "compiler": "libtpu 0.0.46",
}  # fmt: skip

BAD = {
    "NaN": {"step_seconds": math.nan},
    "infinity": {"step_seconds": math.inf},
    "0 s": {"step_seconds": 0.0},
    "-2.08 s": {"step_seconds": -2.08},
    "2,080 s for 2,080 ms": {"step_seconds": 2080.0},
    "361 s for 361 ms": {"step_seconds": 361.0},
    "text": {"step_seconds": "2.08"},
    "a share of 47": {"step_seconds": 2.08, "attention_share": 47.0},
    "a share of NaN": {"attention_share": math.nan},
    "bytes for GiB": {"hbm_required_gib": 6.1e9},
    "an unknown figure": {"step_ms": 2080},
}


def outcome(read) -> str:
    """`refused`, or what is said of pods."""
    try:
        record = read()
    except TomatError:
        return "refused"
    if isinstance(record, Calibration):
        try:
            return f"taken, ratios {record.step_ratios('v6e')}"
        except (TypeError, ValueError) as error:
            return f"taken, then {type(error).__name__}"
    return "taken"


@pytest.mark.parametrize("name", BAD)
def test_a_record_takes_figures_that_can_be(name, tmp_path, figure):
    row = {**GOOD, "measured": {"fits": True} | BAD[name]}
    (tmp_path / "calibration.json").write_text(json.dumps({"rows": [row]}))
    found = outcome(lambda: Calibration.load(tmp_path))
    figure("A9", f"calibration.json with {name}", found)
    assert found == "refused"


@pytest.mark.parametrize("name", [name for name in BAD if name != "361 s for 361 ms"])
def test_a_measurement_by_hand_takes_figures_that_can_be(name, tmp_path, figure):
    item = {"name": "a", "config_path": "x.yaml", "source": "a test", "measured": {"fits": True} | BAD[name]}
    (tmp_path / "calibration.yaml").write_text(yaml.safe_dump({"measurements": [item]}))
    found = outcome(lambda: read_measurements(tmp_path))
    figure("A9", f"calibration.yaml with {name}", found)
    assert found == "refused"


def test_the_good_row_is_taken(tmp_path):
    (tmp_path / "calibration.json").write_text(json.dumps({"rows": [GOOD]}))
    assert Calibration.load(tmp_path).step_ratios("v6e") == [pytest.approx(2.08 / 1.75)]
