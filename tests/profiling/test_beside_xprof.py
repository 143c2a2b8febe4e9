import importlib.metadata
from pathlib import Path

import pytest
from beside_xprof import VERSION, build_parser
from reported import reported
from trace_builder import build_xspace, serialise_program

from tomat.app.cli import main
from tomat.perf.profile.hlo_files import load_program

PROFILES = Path(__file__).parents[1] / "fixtures" / "profiles"


def test_self_times_are_xprofs(tmp_path, capsys):
    assert importlib.metadata.version("xprof") == VERSION  # of the converter that its page alone describes
    program = load_program(PROFILES / "v6e_step.hlo.pb.gz")
    session = tmp_path / "plugins" / "profile" / "s"
    session.mkdir(parents=True)
    trace = build_xspace(program, "TPU v6 Lite", lambda one: 1e-6 + 1e-9 * len(one.name), 3, serialise_program(program))
    (session / "host0.xplane.pb").write_bytes(trace)
    older = tmp_path / "plugins" / "profile" / "r"  # of several sessions both read the newest
    older.mkdir()
    (older / "host1.xplane.pb").write_bytes(trace)
    check = reported(tmp_path, "--profile", tmp_path, parser=build_parser())
    assert check["n_operations"] > 400 and check["occurrences_differ"] == 0
    # xprof sums float64 microseconds; nothing but that rounding may differ
    assert check["largest_difference_seconds"] < 1e-12
    assert check["tomat_self_seconds"] == pytest.approx(check["xprof_self_seconds"], rel=1e-12)
    assert not list(tmp_path.rglob("*op_stats*"))  # xprof's caches went elsewhere
    (tmp_path / "empty").mkdir()
    assert main(["--profile", str(tmp_path / "empty")], build_parser()) == 2
    assert "xprof reads nothing else" in capsys.readouterr().err
