"""xprof's table of operations is what it was: of another version, look at it again."""

import importlib.metadata

import pytest

from tomat.base.ports.xprof import VERSION

pytest.importorskip("xprof")


def test_the_version_is_the_one_that_this_was_written_for():
    """`tests/perf/profile/test_xprof_check.py` holds the table against tomat's own."""
    assert importlib.metadata.version("xprof") == VERSION
