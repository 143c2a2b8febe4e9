import json

import yaml
from decode_speed import build_parser
from tiny_run import DEMO, ONE_LAYER

from tomat.app.cli import main
from tomat.base.overrides import parse_overrides
from tomat.train.settings.config import load_config


def test_both_pairs_are_timed_and_decode_the_same(tmp_path, capsys):
    words = parse_overrides(ONE_LAYER)
    config = yaml.safe_load(DEMO.read_text())
    for section in ("model", "data"):
        config[section] |= words[section]
    path, report_path = tmp_path / "tiny.yaml", tmp_path / "decode.json"
    path.write_text(yaml.safe_dump(config))
    assert load_config(path).seq_len == 512
    command = ["--config_path", path, "--rounds", "1", "--grid", "7", "--json", report_path]
    assert main([str(word) for word in command], build_parser()) == 0
    report = json.loads(report_path.read_text())
    assert report["same_bins"] > 0.99 and report["cell_patches"] == 1 and report["positions"] == 512
    times = report["times_with_cache"]
    assert 1 < times["min"] <= times["median"] <= times["max"]
    assert report["parallel_seconds_per_cell"]["min"] > 0
    assert "tokens/s with the cache" in capsys.readouterr().out
