"""What the soak holds a killed run to. Kills at every moment: `tests/train/test_kill.py`."""

import shutil
from pathlib import Path

import pytest
import tensorstore as ts
from preemption_soak import build_parser, compare_runs

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.train.runs.checkpoints import array_shapes

UNBROKEN = Path(__file__).parents[1] / "fixtures" / "before" / "run"


def test_any_difference_is_seen(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(UNBROKEN, run)
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    assert compare_runs(run, UNBROKEN)["log_lines"] == len(lines)
    for changed, message in (
        (lines[:-1], "holes"),
        ([*lines, lines[-1]], "step twice"),
        ([*lines[:-1], lines[-1].replace('"train/loss": ', '"train/loss": 1')], "train/loss of step 1"),
    ):
        metrics.write_text("".join(changed))
        with pytest.raises(TomatError, match=message):
            compare_runs(run, UNBROKEN)
    [checkpoint] = (run / "checkpoints").iterdir()
    name = max(array_shapes(str(checkpoint)))
    kept = {"driver": "ocdbt", "base": f"file://{checkpoint}/", "path": f"{name}/"}
    array = ts.open({"driver": "zarr3", "kvstore": kept}).result()
    array.write(array.read().result() + 1).result()
    (checkpoint / "checksums.json").unlink()
    with pytest.raises(TomatError, match=f"{name} differs between"):
        compare_runs(run, UNBROKEN)
    shutil.rmtree(checkpoint)
    with pytest.raises(TomatError, match="ends at None, the unbroken run at 1"):
        compare_runs(run, UNBROKEN)


def test_a_soak_without_kills_is_refused(capsys):
    assert main(["--kills", "0"], build_parser()) == 2
