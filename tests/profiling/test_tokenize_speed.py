from functools import partial

import pytest
import tokenize_speed
from reported import reported

from tomat.data.tokens.pipeline.config import RetokenizeConfig


@pytest.mark.slow
def test_bench_writes_figures_beside_what_they_are_compared_with(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_speed, "RetokenizeConfig", partial(RetokenizeConfig, bins=64))  # fitted in a second
    figures = reported(tmp_path, "--materials", 1, "--folder", tmp_path, parser=tokenize_speed.build_parser())
    ratio = figures["write_patches_per_cpu_second"] / figures["numpy_searchsorted_patches_per_cpu_second"]
    assert figures["write_over_numpy_searchsorted_cpu_ratio"] == pytest.approx(ratio)
    assert figures["training_set_core_hours"] > 0
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
