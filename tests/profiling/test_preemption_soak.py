"""The soak in short: a kill, and what it must not change; `tests/train` has kills at every other moment."""

import json
import shutil
from pathlib import Path

import pytest
from forked import instead_of_starting
from preemption_soak import RUN_NAME, SoakSettings, build_parser, compare_runs, report_table, soak

from tomat.app.cli import main
from tomat.base.errors import TomatError

SETTINGS = SoakSettings(steps=24, save_every=4, eval_every=9, profile_start=14, profile_steps=2)
AIMS = ("sigkill commit",)


@pytest.fixture(scope="module")
def soaked(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("soak")
    with pytest.MonkeyPatch.context() as patch:
        instead_of_starting(patch)
        return folder, soak(folder, len(AIMS), 0, SETTINGS, AIMS, warm=False)


@pytest.mark.slow
def test_a_run_killed_is_the_run_nobody_killed(soaked):
    _, report = soaked
    assert report["kills"] == 1 and report["runs"] == report["runs_bit_identical"] >= 1
    assert report["log_lines_compared"] == SETTINGS.steps * report["runs"]
    assert report["steps_lost_max"] <= SETTINGS.steps
    assert report_table(report).row_count == 7


def test_any_difference_is_seen(soaked, tmp_path):
    unbroken = soaked[0] / "unbroken" / RUN_NAME
    run = tmp_path / RUN_NAME
    shutil.copytree(unbroken, run, ignore=shutil.ignore_patterns("data", "profiler"))
    assert compare_runs(run, unbroken)["log_lines"] == SETTINGS.steps
    metrics, last = run / "metrics.jsonl", run / "checkpoints" / "step-23"
    lines = metrics.read_text().splitlines(keepends=True)
    for changed, message in (
        ([*lines[:7], *lines[8:]], "holes"),
        ([*lines, lines[-1]], "step twice"),
        ([*lines[:-1], lines[-1].replace('"train/loss": ', '"train/loss": 1')], "train/loss of step 23"),
    ):
        metrics.write_text("".join(changed))
        with pytest.raises(TomatError, match=message):
            compare_runs(run, unbroken)
    metrics.write_text("".join(lines))
    metadata = json.loads((last / "metadata.json").read_text())
    shutil.rmtree(last)
    with pytest.raises(TomatError, match="ends at"):
        compare_runs(run, unbroken)
    # Step 20 under the name of the last step holds other weights.
    (run / "checkpoints" / "step-20").rename(last)
    (last / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(TomatError, match="differs between"):
        compare_runs(run, unbroken)


def test_another_soak_in_the_folder_is_refused(soaked, capsys):
    assert main(["--folder", str(soaked[0]), "--kills", "4", "--seed", "9"], build_parser()) == 2
    assert "belongs to another soak" in capsys.readouterr().err
    assert main(["--kills", "0"], build_parser()) == 2
