import json
from pathlib import Path

from parse_speed import build_parser

from tomat.app.cli import main

HLO = Path(__file__).parents[1] / "fixtures" / "profiles" / "v6e_step.hlo.pb.gz"


def run(*words: object) -> int:
    return main(["--hlo", str(HLO), *map(str, words)], build_parser())


def test_a_small_bench(tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert run("--events", 20_000, "--json", out) == 0
    figures = json.loads(out.read_text())
    assert figures["events"] == figures["events_parsed"] >= 20_000
    assert figures["cpu_seconds"] > 0 and figures["peak_memory_bytes"] < 2e9
    assert "peak memory" in " ".join(capsys.readouterr().out.split())
