"""libtpu's dumps are those that their readers were written for: of another version, look at each of them again."""

import importlib.metadata

import pytest

from tomat.base.ports.libtpu import VERSION

pytest.importorskip("libtpu")


def test_the_version_is_the_one_that_this_was_written_for():
    """The dumps in `tests/perf/cost/data` are of it, and plans compile with it (`tests/perf/plan`)."""
    assert importlib.metadata.version("libtpu") == VERSION
