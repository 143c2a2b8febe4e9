import yaml
from decode_speed import build_parser
from reported import reported
from tiny_run import DEMO, ONE_LAYER

from tomat.train.settings.config import load_config


def test_both_pairs_are_timed_and_decode_the_same(tmp_path, capsys):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(load_config(DEMO, ONE_LAYER).to_dict()))
    report = reported(tmp_path, "--config_path", path, "--rounds", 1, "--grid", 7, parser=build_parser())
    assert report["same_bins"] > 0.99 and report["cell_patches"] == 1 and report["positions"] == 512
    times = report["times_with_cache"]
    assert 1 < times["min"] <= times["median"] <= times["max"]
    assert report["parallel_seconds_per_cell"]["min"] > 0
    assert "tokens/s with the cache" in capsys.readouterr().out
