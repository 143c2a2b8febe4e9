import dataclasses
import json

import pytest

from tomat.app.eval_verbs import read_report
from tomat.base.errors import TomatError
from tomat.base.report import terminal
from tomat.base.reporting import plain_console, write_json
from tomat.predict.evaluation.result import LABEL, MaterialResult, PartialResults, TeacherForcedResult

SETTINGS = {
    "run": "demo", "materials_from": "embedded validation", "layout": "v3-p7", "codec_sha256": "0",
    "patches_per_material": 8, "whole_cell": False, "seed": 0, "seq_len": 512,
}  # fmt: skip


def material(name: str, model: float, lorenzo: float) -> MaterialResult:
    """A row whose other figures are 0.5."""
    floats = {f.name: 0.5 for f in dataclasses.fields(MaterialResult) if f.type is float}
    own = {"teacher_forced_nmae_median": model, "lorenzo_nmae": lorenzo}
    return MaterialResult(material_id=name, patches=8, voxels=2744, **{**floats, **own})


@pytest.fixture
def result() -> TeacherForcedResult:
    rows = (material("LiF-0", 0.02, 0.01), material("Si-0", 0.01, 0.015), material("ZnS-0", 0.04, 0.02))
    return TeacherForcedResult(SETTINGS, rows)


def test_json_round_trip_with_label_and_units(result, tmp_path):
    write_json(tmp_path / "eval.json", result.to_dict())
    content = json.loads((tmp_path / "eval.json").read_text())
    assert content["label"] == LABEL == "teacher-forced diagnostic, not a prediction"
    assert content["over_materials"]["teacher_forced_nmae_median"]["median"] == 0.02
    assert content["over_materials"]["lorenzo_nmae"]["median"] == 0.015
    assert content["paired_nmae_median_minus_lorenzo"]["first_better"] == 1
    assert "electrons" in content["units"]["charge_e"] and "reference_charge_e" not in content["over_materials"]
    assert TeacherForcedResult.from_dict(content, "here") == result


def test_the_table_has_the_baselines_beside_the_model_and_cuts_no_figure_in_80_columns(monkeypatch):
    rows = [material(f"GaP-zinc-blende-compressed-{i}", model, 0.0066) for i, model in enumerate((0.9876, 3.77, 0.5))]
    found = TeacherForcedResult(SETTINGS, tuple(rows))
    console = plain_console(width=80)
    monkeypatch.setattr(terminal, "console", console)
    with console.capture() as captured:
        terminal.show(found.table(2))
    text = captured.get()
    for word in ("Lorenzo", "previous", "constant", "floor", "median", "1 more", "98.76", " 377.00 "):
        assert word in text
    assert "…" not in text and text.count(" 0.66") == 4, "two rows, mean and median"
    assert LABEL in found.summary() and "better one on 0 of 3 materials" in found.summary()
    assert [row[0] for row in found.table().rows] == [*(row.material_id for row in rows), "mean over materials"]


def test_comparison_needs_the_same_voxels(result):
    better = tuple(
        dataclasses.replace(m, teacher_forced_nmae_median=m.teacher_forced_nmae_median / 2) for m in result.materials
    )
    other = TeacherForcedResult({**SETTINGS, "run": "other"}, better)
    assert result.compare(other).second_better == 3
    for key, value in (("seed", 1), ("whole_cell", True), ("layout", "v3-p12"), ("materials_from", "1 input(s)")):
        with pytest.raises(TomatError, match=f"differ in {key}"):
            result.compare(TeacherForcedResult({**SETTINGS, key: value}, better))
    # Files of the same names may hold other densities.
    for key, value in (("voxels", 2743), ("reference_charge_e", 0.5001)):
        changed = (better[0], dataclasses.replace(better[1], **{key: value}), better[2])
        with pytest.raises(TomatError, match="differ in the density of Si-0 .* electrons in 2,744 voxels"):
            result.compare(TeacherForcedResult(SETTINGS, changed))
    near = (dataclasses.replace(better[0], reference_charge_e=0.5000001), *better[1:])
    assert result.compare(TeacherForcedResult(SETTINGS, near)).second_better == 3


def test_partial_results_survive_a_kill_and_no_damage(result, tmp_path):
    path = tmp_path / "eval.json.partial"
    first = PartialResults(path, SETTINGS)
    assert first.done == {}
    first.add(result.materials[0])
    first.add(result.materials[1])
    with path.open("a") as file:
        file.write('{"material_id": "ZnS-0", "pat')  # killed in the middle of a line
    again = PartialResults(path, SETTINGS)
    assert again.done == {m.material_id: m for m in result.materials[:2]}
    again.add(result.materials[2])
    assert list(PartialResults(path, SETTINGS).done.values()) == list(result.materials)
    assert PartialResults(path, {**SETTINGS, "step": 7}).done == {}
    # A whole line that is damaged is refused.
    path = tmp_path / "e.json.partial"
    for row in result.materials:
        PartialResults(path, SETTINGS).add(row)
    damaged = path.read_text().replace('"lorenzo_nmae": 0.015', '"lorenzo_nmae": NaN')
    path.write_text(damaged)
    with pytest.raises(TomatError, match="e.json.partial, line 3, is damaged: lorenzo_nmae .* Delete the file"):
        PartialResults(path, SETTINGS)
    assert path.read_text() == damaged


@pytest.mark.parametrize("other", ["weights_sha256", "files_sha256"])
def test_partial_results_are_not_those_of_other_weights_or_files(result, tmp_path, other):
    path, of = tmp_path / "eval.json.partial", {"weights_sha256": "1", "files_sha256": "2"}
    PartialResults(path, SETTINGS).add(result.materials[0])
    # An older file has no hashes, and goes on.
    for _ in range(2):
        assert list(PartialResults(path, SETTINGS, of).done.values()) == [result.materials[0]]
    assert PartialResults(path, SETTINGS, {**of, other: "3"}).done == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["materials"][1].update(lorenzo_nmae=float("inf")), "lorenzo_nmae"),
        (lambda c: c["materials"].append(c["materials"][0]), "1 of its 4 materials stand in it more than once"),
        (lambda c: c.update(label="mfu"), "is not a report"),
    ],
)
def test_a_damaged_report_is_refused_by_name(result, tmp_path, change, message):
    content = json.loads(json.dumps(result.to_dict()))
    change(content)
    (tmp_path / "e.json").write_text(json.dumps(content))
    with pytest.raises(TomatError, match=f"e.json .*{message}"):
        read_report(tmp_path / "e.json")
