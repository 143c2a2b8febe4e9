import shutil
from pathlib import Path

import pytest
import yaml

from tomat.base.errors import TomatError
from tomat.tracking.reference_pages import DATA_FILE, PAGES, utilisation, write_reference_pages
from tomat.tracking.report import write_index

TRACKING = Path(__file__).parents[2] / "docs" / "tracking"


@pytest.fixture
def docs(tmp_path):
    shutil.copy(TRACKING / DATA_FILE, tmp_path / DATA_FILE)
    return tmp_path


def test_the_committed_pages_are_those_of_the_data(docs):
    write_reference_pages(docs)
    for name in PAGES:
        assert (docs / f"{name}.md").read_text() == (TRACKING / f"{name}.md").read_text()


def test_the_stated_mfu_is_levanters_formula():
    data = yaml.safe_load((TRACKING / DATA_FILE).read_text())
    timed = [run for run in data["runs"] if run.get("step_seconds")]
    assert len(timed) == 2
    for run in timed:
        figures = utilisation(data, run)
        assert figures["mfu_levanter"] == pytest.approx(run["mfu_stated"], abs=0.001)
        assert figures["mfu_causal"] < figures["mfu_full"] <= figures["mfu_levanter"]


def test_the_arithmetic_of_the_corrections():
    data = yaml.safe_load((TRACKING / DATA_FILE).read_text())
    shares = [sum(row["share"] for row in table["rows"]) for table in data["bottlenecks"]]
    assert shares[0] == pytest.approx(1.015) and 1 - shares[1] == pytest.approx(0.409)
    capacity = data["oom"]["capacity_gib"]
    for row in data["oom"]["rows"][1:]:
        assert abs(row["compiled_gb"] / row["used_gb"] - 1) < 0.01
        assert f"{row['used_gb'] - capacity:.3g}" in row["stated_overshoot"]


def test_the_index_lists_the_reference_runs(docs):
    write_reference_pages(docs)
    text = write_index(docs).read_text()
    assert text.count("(reference-runs.md) | reference |") == 4


def test_no_data_no_pages_and_damaged_data_is_refused(tmp_path):
    assert write_reference_pages(tmp_path) == []
    (tmp_path / DATA_FILE).write_text("runs: [{name: x}]")
    with pytest.raises(TomatError, match="cannot be read as the reference's tables"):
        write_reference_pages(tmp_path)
    assert not list(tmp_path.glob("*.md"))
