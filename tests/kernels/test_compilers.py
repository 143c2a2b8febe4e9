"""Which libtpu compiles which operation."""

import pytest

from tomat.base.errors import TomatError
from tomat.kernels.compilers import Compilers, read_compilers
from tomat.kernels.report import _compiled_by
from tomat.planning.compile.topology import compiler_version, libtpu_in

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: uv sync --extra plan")


def test_each_operation_may_have_a_compiler_of_its_own(another_libtpu, tmp_path):
    assert read_compilers(()) == Compilers()
    both = read_compilers([str(another_libtpu), f"normalization={another_libtpu}"])
    assert both.other == both.by_op["normalization"] == both.of("gated_linear_unit") == libtpu_in(another_libtpu)
    one = read_compilers([f"normalization={another_libtpu}"])
    assert one.of("gated_linear_unit") is None
    assert one.name_of("gated_linear_unit") == compiler_version() != one.name_of("normalization") == "libtpu 0.0.1"
    assert _compiled_by({"a": "libtpu 0.0.2", "b": "libtpu 0.0.1", "c": "libtpu 0.0.2"}) == (
        "libtpu 0.0.2; b: libtpu 0.0.1"
    )
    with pytest.raises(TomatError, match="--libtpu names the operation normalization; the rows are of a, b"):
        one.require(["b", "a", "b"])
    with pytest.raises(TomatError, match="--libtpu gives two compilers of normalization"):
        read_compilers([f"normalization={another_libtpu}", f"normalization={another_libtpu}"])
    with pytest.raises(TomatError, match="--libtpu gives two compilers of all operations"):
        read_compilers([str(another_libtpu), str(another_libtpu)])
    (tmp_path / "odd=name").mkdir()
    with pytest.raises(TomatError, match="odd=name holds no libtpu"):
        read_compilers([str(tmp_path / "odd=name")])  # a path, not an operation


def test_a_folder_without_one_libtpu_is_refused(another_libtpu, tmp_path):
    with pytest.raises(TomatError, match=r"holds no libtpu and no libtpu/libtpu.so; expected one"):
        libtpu_in(tmp_path)
    (another_libtpu / "libtpu" / "libtpu.so").unlink()
    with pytest.raises(TomatError, match=r"holds libtpu 0.0.1 and no libtpu/libtpu.so"):
        libtpu_in(another_libtpu)
