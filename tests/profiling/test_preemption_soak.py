"""What the soak holds a killed run to. Kills at every moment: `tests/train/test_kill.py`."""

import shutil
from pathlib import Path

import preemption_soak
import pytest
import tensorstore as ts
from preemption_soak import SoakSettings, Start, Unbroken, build_parser, compare_runs, soak

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


def test_a_kill_that_cost_too_much_is_not_forgotten_by_the_next_command(tmp_path, monkeypatch):
    def start(again: int, status: int) -> Start:
        return Start("sigkill", ("steps",) if status else (), status, again, 5, None)

    starts = iter([start(9, -9), start(0, 0)])
    monkeypatch.setattr(preemption_soak, "run_unbroken", lambda *_: Unbroken(1.0, (), 0.1, 0.1))
    monkeypatch.setattr(preemption_soak, "start_and_kill", lambda *_: next(starts))
    monkeypatch.setattr(preemption_soak, "compare_runs", lambda *_: {"arrays": 1, "bytes": 1, "log_lines": 1})
    for _ in range(2):
        with pytest.raises(TomatError, match="a kill cost 9 steps, and at most 5 were allowed"):
            soak(tmp_path, 1, 0, SoakSettings())
