"""Every test runs on two CPU devices, so that sharding is exercised wherever a mesh is used; and the bucket server."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from gcs_server import BucketServer, serve_bucket
from memory_back import give_back

# Read by JAX when its first device is touched, which is after this file. The programs are small and run a few times:
# two variants of a step and their baseline took 63 s of processor time optimised, 28 s as they are compiled here. Of
# three gradients of a decoder 4.8 s and 287 MB with the emitters of fusions by MLIR, 1.4 s and 114 MB without, and of
# three whole files of tests of models 35.6 s and 25.7. But without, two programs may round the same sum differently:
# see `as_users_fuse` in `support/forked.py`.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=2",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    ]
)

# A worker and what it starts have a core at most: the threads of OpenBLAS wait for one another in a loop, and a fit of
# the promolecule took 28 s of processor time beside other processes, 8 s with one thread.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Container images forbid Python to keep what it compiled: each of some hundred processes would compile JAX anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Many tests train the same tiny model in processes of their own. What one has compiled serves the others of this run:
# 10 tests of kills and restores took 110 s instead of 174 s. The workers inherit the folder from the process that
# starts them, which removes it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _kept = tempfile.mkdtemp(prefix="tomat-tests-")
    atexit.register(shutil.rmtree, _kept, ignore_errors=True)
    os.environ["TOMAT_TESTS_FOLDER"] = _kept  # also of the process in `support/forked.py`
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{_kept}/compiled"
    os.mkdir(f"{_kept}/compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Threads of XLA that each free into an arena of their own leave what no other thread takes. Read by the workers' and
# their children's C library when they start.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")

# Shells start background jobs with Ctrl-C ignored, which the processes of the tests would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Folders whose tests train or compile in the worker.
COMPILING = ("train", "model", "predict", "measure", "profiling", "app")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each worker begins with its share of the files that compile, and the short ones fill the end.

    In the order of the folders the last files, all of them trainings, came on top of what the allocator had kept of
    all others: the largest worker had 2.3 GiB. The notebooks, whose processes are the largest, come before all.
    """

    def turn(path: Path) -> tuple[bool, bool]:
        return path.name != "test_notebooks.py", path.relative_to(root).parts[0] not in COMPILING

    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    root = Path(__file__).parent
    # xdist gives each worker a run of tests from the list, as long as the others', to begin with.
    shares: list[list[pytest.Item]] = [[] for _ in range(getattr(config, "workerinput", {}).get("workercount", 1))]
    for path in sorted(files, key=turn):
        min(shares, key=len).extend(files[path])
    items[:] = [item for share in shares for item in share]


def pytest_collection_finish() -> None:
    """What was imported stays: no later collection goes through it."""
    gc.collect()
    gc.freeze()


MOST_KEPT_BYTES = 750 * 2**20
MOST_GROWN_BYTES = {"pieces": 60 * 2**20, "programs": 150 * 2**20}
_kept_bytes = {"pieces": 0, "programs": 0}


@pytest.fixture(autouse=True, scope="session")
def data_are_kept() -> None:
    """Beside what is compiled; imported here, since it imports NumPy."""
    from kept_data import keep_data

    keep_data()


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """A worker above `MOST_KEPT_BYTES` gives back what it can, each time that it has grown since the last.

    What another test needs of the programs is in the cache on disk. After each module above the bound, the largest of
    three grew to 2.1 GB within a module, and most modules paid a second for what they had not brought.
    """
    yield
    process = psutil.Process()
    used = process.memory_info().rss
    grown = {what for what, kept in _kept_bytes.items() if used > max(MOST_KEPT_BYTES, kept + MOST_GROWN_BYTES[what])}
    if grown:
        give_back(compiled="programs" in grown)
        _kept_bytes.update(dict.fromkeys(grown, process.memory_info().rss))


@pytest.fixture
def bucket() -> Iterator[BucketServer]:
    """`gs://bucket/` for a process with the environment `bucket.environment`."""
    with serve_bucket() as server:
        yield server
