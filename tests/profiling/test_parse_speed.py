from pathlib import Path

from parse_speed import build_parser
from reported import reported

HLO = Path(__file__).parents[1] / "fixtures" / "profiles" / "v6e_step.hlo.pb.gz"


def test_a_small_bench(tmp_path, capsys):
    figures = reported(tmp_path, "--hlo", HLO, "--events", 20_000, parser=build_parser())
    assert figures["events"] == figures["events_parsed"] >= 20_000
    assert figures["cpu_seconds"] > 0 and figures["peak_memory_bytes"] < 2e9
    assert "peak memory" in " ".join(capsys.readouterr().out.split())
