import argparse
import json
from pathlib import Path

import pytest

from tomat.base.errors import TomatError
from tomat.bench.profile import register_bench

HLO = Path(__file__).parents[1] / "data" / "profiles" / "v6e_step.hlo.pb.gz"


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    register_bench(parser.add_subparsers())
    args = parser.parse_args(["profile", "--hlo", str(HLO), *map(str, words)])
    return args.run(args)


def test_a_small_bench(tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert run("--events", 20_000, "--json", out) == 0
    figures = json.loads(out.read_text())
    assert figures["events"] == figures["events_parsed"] >= 20_000
    assert figures["cpu_seconds"] > 0 and figures["peak_memory_bytes"] < 2e9
    assert "peak memory" in " ".join(capsys.readouterr().out.split())


def test_too_few_events():
    with pytest.raises(TomatError, match="expected at least 1,000"):
        run("--events", 10)
