"""Rows of the lab that plans are held against: those that ran on a TPU slice, as measurements of that slice."""

from pathlib import Path

import pytest

from tomat.app.plan_verbs import _measurements
from tomat.base.errors import TomatError
from tomat.base.reporting import write_json
from tomat.measure.lab.measurements import measured_steps
from tomat.measure.lab.messages import MEASURED
from tomat.measure.lab.record import LabRow, Window
from tomat.perf.plan.calibration import Calibration

RECIPE = Path(__file__).parents[3] / "configs" / "train" / "30m-v6e4.yaml"


def row(name, devices="4 x TPU v6 lite", seconds=(0.2, 0.3, 0.1), **overrides):
    windows = [Window(0, one, 128 * 2048 / one) for one in seconds]
    setup = {"devices": devices, "platform": "tpu"}
    asked = {"name": name, "key": "key", "config_file": str(RECIPE), "overrides": overrides, "base": None}
    return LabRow(**asked, status=MEASURED, windows=windows, setup=setup)


def recorded(folder, *rows):
    path = folder / "sweep.json"
    told = {"record_format": 1, "sweep": "sweep", "title": "", "introduction": ""}
    write_json(path, told | {"rows": [one.to_dict() for one in rows]})
    return path


def test_a_row_on_its_slice_is_a_measurement_that_can_be_planned(tmp_path):
    path = recorded(tmp_path, row("base"), row("wide", **{"model.num_heads": 2, "model.num_kv_heads": 2}))
    found, refused = measured_steps(path)
    assert refused == {} and [one.name for one in found] == ["sweep: base", "sweep: wide"]
    assert found[0].slice == "v6e-4" and found[0].measured == {"fits": True, "step_seconds": 0.2}
    assert found[1].training_config().model.num_heads == 2
    Calibration(tuple(found)).save(tmp_path)
    assert Calibration.load(tmp_path).rows == tuple(found)


def test_a_row_measures_the_slice_that_it_ran_on_and_others_are_left_out_with_the_reason(tmp_path, capsys):
    rows = [row("base"), row("more", "8 x TPU v6 lite"), row("any", "8 x TPU v6 lite", slice=None)]
    others = row("fewer", "2 x TPU v6 lite"), row("none", "1 x NVIDIA H200", slice=None), row("begun", seconds=())
    path = recorded(tmp_path, *rows, *others)
    found, refused = measured_steps(path)
    assert [one.slice for one in found] == ["v6e-4", "v6e-8", "v6e-8"]
    assert ["was asked for" in one.source for one in found] == [False, True, False]
    assert refused == {
        "fewer": "it ran on 2 x TPU v6 lite, but v6e-4 was asked for: no TPU slice, and plans are for TPU slices only",
        "none": "it ran on 1 x NVIDIA H200: no TPU slice, and plans are for TPU slices only",
        "begun": "it has no step time (measured)",
    }
    # The verb takes a record for what it is.
    assert _measurements(path) == found and "left out: fewer: it ran on" in capsys.readouterr().out
    with pytest.raises(TomatError, match=r"config.yaml does not exist; expected the folder of a run"):
        _measurements(tmp_path)


def test_a_record_without_a_measurement_is_refused(tmp_path):
    with pytest.raises(TomatError, match=r"none of 1 row is a step of a TPU slice; 'base': it ran on 1 x cpu, but"):
        measured_steps(recorded(tmp_path, row("base", "1 x cpu")))
    with pytest.raises(TomatError, match=r"no.json does not exist; expected the record of `tomat lab run`"):
        measured_steps(tmp_path / "no.json")


def test_a_row_of_another_configuration_under_the_same_name_is_left_out(tmp_path):
    other = row("other")
    other.setup["config_hash"] = "of another"
    found, refused = measured_steps(recorded(tmp_path, row("base"), other))
    assert [one.name for one in found] == ["sweep: base"]
    assert "is not the configuration that was measured" in refused["other"]
