"""The benchmark of loading, over a data set of 256 rows: every figure is there and counts something."""

import math
from functools import partial
from types import SimpleNamespace
from typing import cast

import loader_readers
import loader_readers_measure
import pytest
from loader_readers import READERS, RESUME_STEPS, build_parser
from loader_readers_measure import Reader
from reported import reported

from tomat.data.codec.ratios import fit_codec
from tomat.data.tokens.shuffle import BlockShuffleConfig


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


def test_an_index_has_a_cost_in_batches_larger_than_what_it_is_averaged_over(monkeypatch):
    monkeypatch.setattr(loader_readers_measure, "INDEX_POSITIONS", 16)
    shuffle = BlockShuffleConfig(8, 2, "feistel")
    reader = SimpleNamespace(shards=SimpleNamespace(rows=64), batch_rows=32, shuffle=shuffle, by_levanter=False)
    reader._levanter_shuffled = lambda rows: rows
    assert Reader._index_cost_us(cast(Reader, reader)) > 0
