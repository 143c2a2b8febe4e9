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
    parser = build_parser()
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "timings.csv"
    file.write_text("chip\n")
    words = ["--kernels", str(file), "--tracking_dir", str(tmp_path / "tracking")]
    assert main([*words, "--libtpu", str(tmp_path)], parser) == 2
    assert "holds no libtpu" in capsys.readouterr().err
    assert main([*words, "--libtpu", str(other)], parser) == 2
    told = capsys.readouterr().err
    assert str(file) in told and told.count("\n") == 1
    words[1] = str(TIMINGS)
    assert main([*words, "--libtpu", f"of_nobody={other}"], parser) == 2
    assert "--libtpu names the operation of_nobody; the rows are of chunked_xla_" in capsys.readouterr().err
    assert not (tmp_path / "tracking").exists()
