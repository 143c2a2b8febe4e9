"""The benchmark of loading, over a data set of 256 rows: every figure is there and counts something."""

import math
from functools import partial

import loader_readers
import pytest
from loader_readers import READERS, RESUME_STEPS, build_parser
from reported import reported

from tomat.data.codec.ratios import fit_codec


@pytest.mark.slow
def test_every_reader_reads_every_row(tmp_path, monkeypatch):
    # Here and not in processes of their own, each of which imports Levanter for 10 s.
    monkeypatch.setattr(loader_readers, "in_own_process", lambda call, *_: call())
    monkeypatch.setattr(loader_readers, "fit_codec", partial(fit_codec, n_bins=64))
    words = ["--rows", "256", "--batch", "16", "--io_block_size", "64", "--window_blocks", "2"]
    figures = reported(tmp_path, *words, "--data", tmp_path / "data", parser=build_parser())
    assert set(figures["readers"]) == set(READERS)
    for reader in figures["readers"].values():
        assert all(value > 0 and math.isfinite(value) for value in reader.values()), reader
        assert reader["peak_rss_bytes"] >= reader["rss_before_bytes"]
    assert [resume["step"] for resume in figures["resume"]] == list(RESUME_STEPS)
