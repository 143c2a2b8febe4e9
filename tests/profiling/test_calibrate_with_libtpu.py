"""Which libtpu compiles which operation."""

from pathlib import Path

import pytest
from another_libtpu import another_libtpu
from calibrate_with_libtpu import build_parser, libtpu_in, read_compilers

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.perf.plan.compile.topology import compiler_version
from tomat.report.pages.kernels_page import _compiled_by

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: uv sync --extra plan")

TIMINGS = Path(__file__).parents[1] / "fixtures" / "kernels" / "timings.csv"


@pytest.fixture
def other(tmp_path):
    return another_libtpu(tmp_path / "other")


def test_each_operation_may_have_a_compiler_of_its_own(other, tmp_path):
    assert read_compilers(()) == {}
    assert read_compilers([str(other), f"normalization={other}"]) == dict.fromkeys(
        ("", "normalization"), libtpu_in(other)
    )
    assert compiler_version() != compiler_version(libtpu_in(other)) == "libtpu 0.0.1"
    assert _compiled_by({"a": "libtpu 0.0.2", "b": "libtpu 0.0.1", "c": "libtpu 0.0.2"}) == (
        "libtpu 0.0.2; b: libtpu 0.0.1"
    )
    with pytest.raises(TomatError, match="--libtpu gives two compilers of normalization"):
        read_compilers([f"normalization={other}", f"normalization={other}"])
    with pytest.raises(TomatError, match="--libtpu gives two compilers of all operations"):
        read_compilers([str(other), str(other)])
    (tmp_path / "odd=name").mkdir()
    with pytest.raises(TomatError, match="odd=name holds no libtpu"):
        read_compilers([str(tmp_path / "odd=name")])  # a path, not an operation


def test_the_script_reads_its_flags_before_anything_is_compiled(other, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "timings.csv").write_text("chip\n")
    for kernels, libtpu, message in (
        ("timings.csv", tmp_path, "holds no libtpu"),
        ("timings.csv", other, "timings.csv"),
        (str(TIMINGS), f"of_nobody={other}", "--libtpu names the operation of_nobody; the rows are of chunked_xla_"),
    ):
        words = ["--kernels", kernels, "--tracking_dir", "tracking", "--libtpu", str(libtpu)]
        assert main(words, build_parser()) == 2
        told = capsys.readouterr().err
        assert message in told and told.count("\n") == 1
    assert not (tmp_path / "tracking").exists()
