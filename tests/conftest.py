"""Every test runs on two CPU devices, so that sharding is exercised wherever a mesh is used; and the bucket server."""

import atexit
import ctypes
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

import psutil
import pytest
from gcs_server import BucketServer, serve_bucket

# Read by JAX when its first device is touched, which is after this file. The programs are small and run a few times:
# two variants of a step and their baseline took 63 s of processor time optimised, 28 s as they are compiled here.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=2",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)

# Container images forbid Python to keep what it compiled: each of some hundred processes would compile JAX anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Many tests train the same tiny model in processes of their own. What one has compiled serves the others of this run:
# 10 tests of kills and restores took 110 s instead of 174 s. The workers inherit the folder from the process that
# starts them, which removes it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.mkdtemp(prefix="tomat-tests-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Shells start background jobs with Ctrl-C ignored, which the processes of the tests would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


MOST_KEPT_BYTES = 2**30
"""A worker that holds more gives back its compiled programs between two modules: the largest of three grew to 4.1 GB
without, and to 2.7 with. What another module needs of them is in the cache on disk."""


@pytest.fixture(autouse=True, scope="module")
def memory_given_back() -> Iterator[None]:
    """No module leaves more to the next than JAX and its libraries."""
    yield
    if "jax" in sys.modules and psutil.Process().memory_info().rss > MOST_KEPT_BYTES:
        sys.modules["jax"].clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def bucket() -> Iterator[BucketServer]:
    """`gs://bucket/` for a process with the environment `bucket.environment`."""
    with serve_bucket() as server:
        yield server
