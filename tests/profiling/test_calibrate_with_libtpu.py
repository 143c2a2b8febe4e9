"""Which libtpu compiles which operation."""

import pytest
from another_libtpu import another_libtpu
from calibrate_with_libtpu import build_parser, libtpu_in, read_compilers

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.perf.plan.compile.topology import compiler_version
from tomat.perf.timed_kernels.compile import Compilers

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: uv sync --extra plan")


@pytest.fixture
def other(tmp_path):
    return another_libtpu(tmp_path / "other")


def test_each_operation_may_have_a_compiler_of_its_own(other, tmp_path):
    assert read_compilers(()) == Compilers()
    both = read_compilers([str(other), f"normalization={other}"])
    assert both.other == both.by_op["normalization"] == both.of("gated_linear_unit") == libtpu_in(other)
    one = read_compilers([f"normalization={other}"])
    assert one.of("gated_linear_unit") is None
    assert one.name_of("gated_linear_unit") == compiler_version() != one.name_of("normalization") == "libtpu 0.0.1"
    with pytest.raises(TomatError, match="--libtpu names the operation normalization; the rows are of a, b"):
        one.require(["b", "a", "b"])
    for twice in (f"normalization={other}", str(other)):
        with pytest.raises(TomatError, match="--libtpu gives two compilers of"):
            read_compilers([twice, twice])
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
    assert str(file) in told and told.count("\n") == 1 and not (tmp_path / "tracking").exists()
