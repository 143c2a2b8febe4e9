"""The page of a run that has ended says what its files say."""

import json
import re
import shutil

import numpy as np
import pytest
from html_reader import read_page, values_of
from small_promolecule import skewed_density

from tomat.base.documents import flatten
from tomat.base.errors import TomatError
from tomat.base.layout import PREDICTED_DENSITY, REFERENCE_DENSITY
from tomat.base.overrides import read_yaml
from tomat.base.shipped import shipped_configurations
from tomat.data.density.outputs import write_density
from tomat.predict.evaluation.free_running import COLUMNS
from tomat.report.html import run as module
from tomat.report.html.document import page_html
from tomat.report.html.metrics import read_curves
from tomat.report.html.run import recipes_beside, run_page
from tomat.train.runs.history import append_event

SHOWN = {name: 0.01 * place for place, (_, name) in enumerate(COLUMNS, 1)} | {"seconds": 2.5}
MATERIAL = SHOWN | {"voxels": 8, "electrons_before": 8.0, "electrons": None}


def test_a_run_says_what_it_ran_on_what_was_asked_for_and_how_its_traces_are_opened(run):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"(?m)^slice: .*\n", "", config) + "\nslice: v6e-16\n")
    html = page_html(run_page(str(run)))
    assert "1 x cpu (asked for: v6e-16)" in html and "xprof server" not in html
    (run / "profiler").mkdir()
    append_event(run, "resume", 1, devices="8 x TPU v6 lite", hosts=1)
    html = page_html(run_page(str(run)))
    assert "8 x TPU v6 lite (asked for: v6e-16)" in html and "from step 1 on, as it ran last" in html
    assert f"xprof server --logdir {run}/profiler" in html


def test_a_run_that_went_on_without_a_known_peak_has_no_mfu(run):
    rows = [{"step": step, "train/loss": 2.0, "step_seconds": 1.0} for step in range(4)]
    lines = [json.dumps(row | ({"mfu_full": 0.3} if row["step"] < 2 else {})) for row in rows]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / "history.jsonl").unlink()
    append_event(run, "start", 0, devices="8 x TPU v6 lite", hosts=1)
    append_event(run, "resume", 2, devices="1 x cpu", hosts=1)
    text = read_page(page_html(run_page(str(run)))).text
    assert "MFU, full attention" not in text


def test_curves_tables_and_densities_are_those_of_the_files(run):
    reference, prediction = skewed_density(seed=1), skewed_density(seed=2)
    write_density(reference, run / REFERENCE_DENSITY, "cube")
    write_density(prediction, run / PREDICTED_DENSITY, "cube")
    found = {"materials": [{"material_id": "<Si>", **MATERIAL}], "settings": {"materials_from": "here", "step": 1999}}
    (run / "evaluation.json").write_text(json.dumps({"free_running": found}))
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config + "\nnote_of_the_user: '<script>alert(1)</script>'\n")
    page = run_page(str(run))
    reader = read_page(page_html(page))
    curves = read_curves(str(run)).curves
    drawn = {trace["name"]: trace for figure in reader.figures for trace in figure["data"]}
    assert "train/loss" in drawn and set(drawn) <= set(curves)
    for name, trace in drawn.items():
        assert np.array_equal(values_of(trace["x"]), curves[name].steps)
        assert np.array_equal(values_of(trace["y"]), curves[name].values)
    material, _ = next(rows for rows in reader.tables if rows and rows[0][0][0] == "<Si>")
    assert [float(key) for _, key in material[1:]] == list(SHOWN.values())
    # What it achieved comes before all else, then the density, then the curves.
    assert "NMAE, weights of step 1,999: " in reader.text
    assert reader.text.index("1.00 %") < reader.text.index("2.00 %") < reader.text.index("Slice across")
    assert reader.text.index("Slice across") < reader.text.index("train/loss")
    shown = reader.data["density-data"]["items"][0]["values"]
    assert np.allclose(values_of(shown["reference"]), reference.rho.ravel(), rtol=1e-5)
    assert np.allclose(values_of(shown["density"]), prediction.rho.ravel(), rtol=1e-5)
    assert "<script>alert(1)</script>" in reader.text  # as text, and nowhere as an element
    assert page.figures["steps_done"] == read_curves(str(run)).steps_done


def test_a_long_curve_has_its_means_over_it(run):
    rows = [{"step": step, "train/loss": 2.0 - 1e-3 * step} for step in range(1000)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (figure,) = (one for one in read_page(page_html(run_page(str(run)))).figures if len(one["data"]) > 1)
    raw, means = figure["data"]
    assert means["name"] == "train/loss, means of 10" and len(values_of(means["y"])) == 100
    np.testing.assert_allclose(values_of(means["y"]), 2.0 - 1e-3 * (values_of(means["x"]) - 0.5), atol=1e-12)
    assert raw["opacity"] < 1


def test_a_run_without_evaluation_or_log_has_a_page_that_says_so(run):
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "checkpoints")
    reader = read_page(page_html(run_page(str(run))))
    assert "holds no line yet" in reader.text and "holds no densities" in reader.text
    assert reader.figures == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "holds a list"),
        ('{"free_running": {"materials": [{"material_id": "Si"}]}}', "expected an object with the key"),
        ('{"materials": []}', "not a report of `tomat eval --json`"),
    ],
)
def test_a_damaged_evaluation_is_refused_in_one_line(run, content, words):
    (run / "evaluation.json").write_text(content)
    with pytest.raises(TomatError, match=words):
        run_page(str(run))


def test_a_shipped_configuration_is_nearest_to_itself_and_what_is_changed_is_what_differs(monkeypatch):
    shipped = {name: read_yaml(path) for name, path in shipped_configurations("train").items()}
    monkeypatch.setattr(module, "read_yaml", lambda path: shipped[path.stem])
    for name, settings in ((name, flatten(its)) for name, its in shipped.items()):
        beside = recipes_beside(settings | {"run_name": "another", "seed_of_nothing": 1})
        assert beside[0] == (name, len(settings), {})
        key = next(key for key, value in settings.items() if type(value) is int)
        [changed] = [one for one in recipes_beside(settings | {key: 12345}) if one[0] == name]
        assert changed[2] == {key: (settings[key], 12345)}
    monkeypatch.setattr(module, "shipped_configurations", lambda kind: {})
    assert recipes_beside({"a": 1}) == []
