from functools import partial

import pytest
import retokenize_kills
import retokenize_workers
import tokenize_speed
from reported import reported

from tomat.app.cli import main
from tomat.data.tokens.pipeline.config import RetokenizeConfig


@pytest.mark.slow
def test_bench_writes_figures_beside_what_they_are_compared_with(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_speed, "RetokenizeConfig", partial(RetokenizeConfig, bins=64))  # fitted in a second
    figures = reported(tmp_path, "--materials", 1, "--folder", tmp_path, parser=tokenize_speed.build_parser())
    ratio = figures["write_patches_per_cpu_second"] / figures["numpy_searchsorted_patches_per_cpu_second"]
    assert figures["write_over_numpy_searchsorted_cpu_ratio"] == pytest.approx(ratio)
    assert figures["training_set_core_hours"] > 0
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_what_measures_nothing_and_what_is_no_folder_are_one_line(tmp_path, capsys):
    assert main(["--materials", "0"], tokenize_speed.build_parser()) == 2
    assert "which measures nothing" in capsys.readouterr().err
    (tmp_path / "file").touch()
    for study in (tokenize_speed, retokenize_workers, retokenize_kills):
        assert main(["--folder", str(tmp_path / "file" / "below")], study.build_parser()) == 2
        told = capsys.readouterr().err
        assert "Not a directory" in told and told.count("\n") == 1
    with tokenize_speed.scratch(tmp_path / "new" / "below") as folder:
        assert folder.parent == tmp_path / "new" / "below"
