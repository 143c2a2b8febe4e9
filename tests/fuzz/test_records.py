"""Records that tomat writes, damaged, and read through what a user calls: a correct result or one TomatError.

Each starts from a real one: those of `docs/tracking`, and small ones that are written here.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fitted_codec import fitted_codec
from fuzz_damage import VALUE_DAMAGE, damaged_document, damaged_file, fuzz_file, fuzz_json, fuzz_lines
from hypothesis import strategies as st
from pwscf import RECORD, _kept
from saved_checkpoint import save_checkpoint
from small_promolecule import skewed_density

from tomat.base.errors import TomatError
from tomat.base.records import read_typed
from tomat.base.report.markdown import markdown
from tomat.data.codec.files import load_codec, write_codec
from tomat.data.codec.report import codec_figures, draw_codec
from tomat.data.dataset.survey import Material, _answers
from tomat.data.density.espresso import ReciprocalList, read_coefficients, write_charge_density
from tomat.data.density.geometry import BOHR_A
from tomat.hardware.chips import slice_named
from tomat.measure.lab.max_batch import MaxBatchRecord
from tomat.measure.lab.record import LabRow
from tomat.perf.cost.chip_model import ChipModel
from tomat.perf.cost.memory import read_memory
from tomat.perf.tuning.sweep_record import rows_on_record
from tomat.perf.tuning.sweep_rows import RowRecord
from tomat.predict.inference.folder import LINES_FILE, _is_whole, _read_lines
from tomat.predict.weights.folder import WEIGHTS_FILE, read_weights, write_weights
from tomat.predict.weights.record import read_weights_record
from tomat.report.html.density import predictions_page
from tomat.report.html.document import page_html
from tomat.report.html.kinds import page_of
from tomat.report.pages.calibration_page import _kept as kept_kernels
from tomat.report.pages.calibration_page import kernels_report
from tomat.report.pages.max_batch_page import probes_parts
from tomat.report.pages.report import write_index
from tomat.report.sweep import epochs_parts, measured_table
from tomat.train.runs.checkpoints import array_shapes, examine

TRACKING = Path(__file__).parents[2] / "docs" / "tracking"


def shortened(path: Path, key: str, rows: int) -> dict[str, Any]:
    """A record of `docs/tracking` with its first rows alone, so that damage finds what is not in a row too."""
    record = json.loads(path.read_text())
    return record | {key: record[key][:rows]}


def test_lab_record(tmp_path: Path):
    def read(path: Path) -> None:
        page_html(page_of(str(path)))
        rows = [row for row in rows_on_record(path, LabRow).values() if row.is_whole]  # what a lab goes on with
        assert markdown([measured_table(rows), *epochs_parts(rows, None)])

    record = shortened(TRACKING / "lab" / "lab-demo.json", "rows", 2)
    fuzz_json(tmp_path / "lab" / "lab-demo.json", record, read, 120)


def test_max_batch_record(tmp_path: Path):
    def read(path: Path) -> None:
        searches = read_typed(path, MaxBatchRecord, "", version=("record_format", 1)).searches
        assert markdown(probes_parts(searches))

    record = shortened(TRACKING / "lab" / "max-batch-demo.json", "searches", 2)
    fuzz_json(tmp_path / "max-batch.json", record, read, 150)


def test_sweep_record(tmp_path: Path):
    def read(path: Path) -> None:
        assert page_html(page_of(str(path))) and rows_on_record(path, RowRecord)
        write_index(tmp_path)

    record = shortened(TRACKING / "sweeps" / "tracking-issue.json", "rows", 3)
    fuzz_json(tmp_path / "sweeps" / "tracking-issue.json", record, read, 120)


def test_kernels_record(tmp_path: Path):
    def read(path: Path) -> None:
        ChipModel.load(path.parent, slice_named("v6e-1").chip)
        chips, refused = kept_kernels(path.parent, ())
        assert page_html(kernels_report({"chips": chips, "refused": refused}))

    record = json.loads((TRACKING / "kernels.json").read_text())
    record = {"chips": {"v6e": record["chips"]["v6e"]}, "refused": record["refused"][:2]}
    fuzz_json(tmp_path / "kernels.json", record, read, 150)


def test_memory_report(tmp_path: Path):
    buffer = {"hbm_bytes": 9, "logical_bytes": 8, "shape": "f32[2]", "instruction": "a", "opcode": "add",
              "op_name": "", "source": ""}  # fmt: skip
    report = {"fits": False, "required_bytes": 9, "capacity_bytes": 5, "largest": [buffer], "largest_are": "x",
              "timeline": [[0.1, 5], [0.9, 3]], "notes": ["a"], "argument_bytes": 2}  # fmt: skip
    plan = {"program_key": "k", "breakdown": None, "memory": report, "slice": "v6e-1", "nearest_fits": []}

    def read(path: Path) -> None:
        page_html(page_of(str(path)))
        read_memory(json.loads(path.read_text())["memory"], path).by_kind()

    fuzz_json(tmp_path / "plan.json", plan, read, 150)


def prediction(name: str) -> dict[str, Any]:
    return {
        "name": name, "structure": f"{name}.cif", "formula": "NaCl", "atoms": 2, "grid": [4, 4, 4], "seconds": 0.5,
        "electrons_before": 7.9, "electrons": 8.0, "electrons_from": "valences", "flags": [{"kind": "x", "text": "y"}],
        "output": f"{name}.vasp", "output_bytes": 3, "format": "qe", "inputs_sha256": "0" * 64,
        "output_sha256": "1" * 64, "spread_share": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize("form", ["page", "predict"])
def test_predictions(tmp_path: Path, form: str):
    rows = [prediction("a"), prediction("b"), {"name": "c", "structure": "c.cif", "error": "no"}]
    seen = json.dumps(rows[0])

    def read(path: Path) -> None:
        if form == "page":
            page_html(predictions_page(path.parent))
            return
        lines = _read_lines(path)
        for line in lines.values():
            assert "error" in line or not _is_whole(path.parent, line)  # its density is not there
        if seen not in map(json.dumps, lines.values()):
            raise TomatError("predicted again")

    fuzz_lines(tmp_path / LINES_FILE, rows, read, 150)


def test_run_of_pwscf(tmp_path: Path):
    said = {"version": "6.7", "iterations": 3, "reason": "", "accuracy_ry": [1.0, 1e-9], "energy_ry": -17.0,
            "wall_seconds": 2.0, "cpu_seconds": 1.9, "fft_shape": [27, 27, 27], "k_points": 10}  # fmt: skip
    fuzz_json(tmp_path / RECORD, {"said": said, "facts": {"nmae": 0.1}}, lambda path: _kept(path.parent), 100)


def test_weights(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("a: 1\n")
    arrays = {"model.a": np.ones((4, 3), np.float32)}
    write_weights(run, arrays, 3, "last", tmp_path / "w")

    def read(path: Path) -> None:
        found = read_weights(path.parent)
        assert np.array_equal(found.arrays["model.a"], arrays["model.a"])
        assert read_weights_record(path.parent).step >= 0

    record = json.loads((tmp_path / "w" / WEIGHTS_FILE).read_text())
    fuzz_json(tmp_path / "w" / WEIGHTS_FILE, record, read, 100)
    del record["content_sha256"]  # as before there was one
    fuzz_json(tmp_path / "w" / WEIGHTS_FILE, record, read, 100)


def test_codec_figures(tmp_path: Path):
    write_codec(fitted_codec(8, np.geomspace(1e-4, 10, 4000)), tmp_path / "codec.json")
    record = json.loads((tmp_path / "codec.json").read_text())
    whole, tables = load_codec(tmp_path / "codec.json"), record["sha256"]

    def read(path: Path) -> None:
        codec = load_codec(path)
        assert codec.sha256 == tables and np.array_equal(codec.edges, whole.edges)
        json.dumps(codec_figures(codec, path), allow_nan=False)
        draw_codec(codec, path.with_suffix(".svg"), path)

    del record["content_sha256"]
    fuzz_json(tmp_path / "codec.json", record, read, 20)
    fits = VALUE_DAMAGE.map(lambda steps: damaged_document(record["fit"], steps))
    inputs = fits.map(lambda fit: json.dumps(record | {"fit": fit}).encode())
    fuzz_file(tmp_path / "codec.json", json.dumps(record).encode(), inputs, read, 40)


def test_survey(tmp_path: Path):
    one = Material.of(skewed_density(), "a", "2" * 64)
    rows = [{"file_sha256": "2" * 64, "found": asdict(one)}, {"file_sha256": "3" * 64, "found": "no density"}]

    def read(path: Path) -> None:
        answers = _answers(path)
        for found in answers.values():
            assert isinstance(found, str) or (
                found.is_same(found) and not (found.is_same(one) and found.atoms != one.atoms)
            )
        if len(answers) < 2:
            raise TomatError("read again")

    fuzz_lines(tmp_path / "survey.jsonl", rows, read, 200)


def test_charge_density_of_quantum_espresso(tmp_path: Path):
    density = skewed_density()
    miller = np.array([[i, j, k] for i in (-1, 0, 1) for j in (-1, 0, 1) for k in (-1, 0, 1)], np.int32)
    reciprocal = 2 * np.pi * np.linalg.inv(density.lattice / BOHR_A).T
    path = tmp_path / "charge-density.dat"
    write_charge_density(density, path, ReciprocalList(False, reciprocal, miller, "here"))
    whole = path.read_bytes()
    header = 8 * 3 + 4 * 3 + 8 * 9  # records of the numbers, of the vectors

    def read(place: Path) -> None:
        vectors, coefficients = read_coefficients(place)
        assert np.isfinite(coefficients).all() and vectors.miller.shape == (len(coefficients), 3)

    in_header = st.tuples(st.integers(0, header), st.binary(min_size=1, max_size=8)).map(
        lambda at: whole[: at[0]] + at[1] + whole[at[0] + len(at[1]) :]
    )
    inputs = st.one_of(in_header, damaged_file(whole))
    fuzz_file(path, whole, inputs, read, 300)


@pytest.mark.parametrize("name", ["metadata.json", "manifest.json", "checksums.json"])
def test_checkpoint(tmp_path: Path, name: str):
    path = save_checkpoint(tmp_path, 3, {"model/a": (8,)}, checksums=True)
    document = json.loads((path / name).read_text())

    def read(place: Path) -> None:
        found = examine(str(path), 3, read_data=True)
        if not found.whole:
            # What is there but is not what was written is damage, and no save that was cut short.
            assert found.completed or not place.stat().st_size
            raise TomatError(found.reason)
        assert array_shapes(str(path)) == {"model/a": (8,)}

    fuzz_json(path / name, document, read, 100)
