import argparse
import json

import pytest

from tomat.base.errors import TomatError
from tomat.bench.loss import measure, register_bench
from tomat.loss.config import LossConfig


def bench_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    register_bench(parser.add_subparsers(required=True))
    return parser


def test_reports_the_logits_that_the_plain_formulas_hold(tmp_path, capsys):
    report_path = tmp_path / "loss.json"
    sizes = "--batch 2 --positions 512 --hidden_dim 16 --density_tokens 1024 --block_positions 32 --dtype float32"
    args = bench_parser().parse_args(["loss", *sizes.split(), "--json", str(report_path)])
    assert args.run(args) == 0
    report = json.loads(report_path.read_text())
    logits_bytes = 2 * 512 * 1024 * 4
    assert report["plain_temp_bytes"] >= logits_bytes
    assert report["blocked_temp_bytes"] < logits_bytes / 2
    assert report["arguments_bytes"] >= 4 * 16 * (2 * 512 + 1024)
    assert "blocks of   32 positions" in capsys.readouterr().out


def test_refuses_an_empty_batch():
    with pytest.raises(TomatError, match="batch is 0; expected at least 1"):
        measure(LossConfig(), batch=0, positions=8, hidden_dim=8, n_density_tokens=8, dtype="float32")
