"""Every test runs on two CPU devices, so that sharding is exercised wherever a mesh is used; and the bucket server."""

import atexit
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Read by JAX when its first device is touched, which is after this file.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

# Many tests train the same tiny model in processes of their own. What one has compiled serves the others of this run:
# 10 tests of kills and restores took 110 s instead of 174 s. The workers inherit the folder from the process that
# starts them, which removes it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.mkdtemp(prefix="tomat-tests-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Shells start background jobs with Ctrl-C ignored, which the processes of the tests would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def bucket() -> Iterator[Any]:
    """A bucket server: `gs://bucket/` for a process with the environment `bucket.environment`."""
    spec = importlib.util.spec_from_file_location("gcs_server", Path(__file__).parent / "gcs_server.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up by name
    spec.loader.exec_module(module)
    with module.BucketServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
