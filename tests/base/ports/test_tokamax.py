"""What tomat takes from inside tokamax is there: of another version, look at each of it again."""

import dataclasses
import importlib.metadata
import inspect

import pytest

pytest.importorskip("tokamax")

from tomat.base.ports.tokamax import OPS, VERSION, bound, class_of  # noqa: E402


def test_the_version_is_the_one_that_this_was_written_for():
    assert importlib.metadata.version("tokamax") == VERSION


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_operation_has_what_is_taken_from_it(op):
    cls = class_of(op)
    assert dataclasses.is_dataclass(cls) and callable(cls.bind) and callable(cls.supported_on)
    assert inspect.signature(cls._fwd).parameters and hasattr(cls, "config_cls")


def test_an_operation_is_made_of_what_files_of_timings_hold():
    arguments = {"x": "bf16[8,128]", "scale": "f32[128]", "offset": None}
    operation, found = bound(class_of("normalization"), {}, {}, arguments)
    assert isinstance(operation, class_of("normalization"))
    assert found["x"].shape == (8, 128) and str(found["x"].dtype) == "bfloat16"
    with pytest.raises(ValueError):
        bound(class_of("normalization"), {}, {}, {"x": "nothing"})
