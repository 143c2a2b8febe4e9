"""The pages of the runs before tomat are kept by hand: their figures are still what tomat computes."""

import json
import shutil
from pathlib import Path

import pytest

from tomat.base.report.formats import percent
from tomat.hardware.chips import slice_named
from tomat.hardware.flops import ModelShape, levanter_training_flops, training_flops
from tomat.report.pages.report import write_index

TRACKING = Path(__file__).parents[3] / "docs" / "tracking"
SHAPES = {
    "200M": ModelShape(1024, 4096, 12, 16, 16, 64, 18570),
    "1B": ModelShape(2048, 5632, 20, 16, 16, 128, 18570),
}


def test_the_mfu_of_the_timed_runs_is_what_tomat_computes_of_their_steps(tmp_path):
    page = (TRACKING / "archive" / "reference-runs.md").read_text()
    records = [json.loads(path.read_text()) for path in sorted((TRACKING / "data").glob("*.json"))]
    timed = [record for record in records if record["kind"] == "reference" and record["step_seconds"]]
    assert len(timed) == 2
    for record in timed:
        shape, length = SHAPES[record["model"]], record["sequence_tokens"]
        flops = {
            "mfu_levanter": levanter_training_flops(shape, length),
            "mfu_full": training_flops(shape, length, "full"),
            "mfu_causal": training_flops(shape, length, "causal"),
        }
        peak = slice_named(record["slice"]).peak_bf16_flops_per_second * record["step_seconds"]
        (row,) = [line for line in page.splitlines() if record["run"] in line]
        for key, value in flops.items():
            assert record[key] == pytest.approx(record["batch_sequences"] * value / peak)
            assert f"| {percent(record[key], 2)} |" in row
        stated = float(record["verdict"].split()[1]) / 100
        assert record["mfu_levanter"] == pytest.approx(stated, abs=0.001)
    for folder in ("data", "archive"):
        shutil.copytree(TRACKING / folder, tmp_path / folder)
    assert write_index(tmp_path).read_text().count("(archive/reference-runs.md) | reference |") == 4
