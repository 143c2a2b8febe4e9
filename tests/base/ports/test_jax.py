"""Private names of JAX: of another version, look again at what `base/ports/jax.py` touches.

`tests/train/test_checkpointer.py` holds the order of checksums and callback.
"""

import importlib.metadata

from tomat.base.ports.jax import VERSION, kinds_of_cluster


def test_the_version_is_the_one_that_this_was_written_for():
    assert importlib.metadata.version("jax") == VERSION


def test_kinds_of_cluster_say_whether_they_are_here():
    kinds = kinds_of_cluster()
    assert len(kinds) > 3
    assert all(isinstance(kind.is_env_present(), bool) and isinstance(kind.opt_in_only_method, bool) for kind in kinds)
