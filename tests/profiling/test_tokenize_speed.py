import json
from functools import partial

import pytest
import tokenize_speed

from tomat.app.cli import main
from tomat.data.tokens.pipeline.config import RetokenizeConfig


@pytest.mark.slow
def test_bench_writes_figures_beside_what_they_are_compared_with(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_speed, "RetokenizeConfig", partial(RetokenizeConfig, bins=64))  # fitted in a second
    words = ["--materials", "1", "--folder", str(tmp_path), "--json", str(tmp_path / "b.json")]
    assert main(words, tokenize_speed.build_parser()) == 0
    figures = json.loads((tmp_path / "b.json").read_text())
    ratio = figures["write_patches_per_cpu_second"] / figures["numpy_searchsorted_patches_per_cpu_second"]
    assert figures["write_over_numpy_searchsorted_cpu_ratio"] == pytest.approx(ratio)
    assert figures["training_set_core_hours"] > 0
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
