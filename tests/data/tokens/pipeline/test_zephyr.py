"""The same units through Zephyr: on threads of this machine, and as jobs of a real Iris cluster on it."""

import importlib
import os
import subprocess
import sys

import pytest
from retokenized import files

from tomat.base.errors import TomatError
from tomat.data.tokens.pipeline.driver import retokenize
from tomat.data.tokens.pipeline.pool import PoolRunner
from tomat.data.tokens.pipeline.zephyr import ZephyrRunner


def local_cluster_missing():
    """Why Iris cannot run a cluster here; empty if it can."""
    try:
        importlib.import_module("iris.cluster.local_cluster")
    except ImportError as error:
        return f"Iris's controller is not installed (marin-iris[controller] with its finelog): {error}"
    return ""


# A process of its own: Iris and Zephyr leave threads, and Iris writes its credentials into the home folder.
ON_IRIS = """
import sys
from pathlib import Path
from fray.current_client import set_current_client
from fray.iris_backend import FrayIrisClient
from iris.cluster.local_cluster import LocalCluster, make_local_cluster_config
from tomat.app.cli import main

if __name__ == "__main__":
    cluster = LocalCluster(make_local_cluster_config(2))
    url = cluster.start()
    try:
        with set_current_client(FrayIrisClient(url, workspace=Path(sys.argv[1]))):
            status = main(["retokenize", *sys.argv[2:], "--runner", "zephyr", "--workers", "2"])
    finally:
        cluster.close()
    sys.exit(status)
"""


@pytest.mark.slow
def test_on_threads_the_bytes_are_those_of_a_pool(tmp_path, retokenize_config, kept_set):
    runner = ZephyrRunner(str(tmp_path / "messages"), workers=2)
    retokenize(retokenize_config(tmp_path / "zephyr"), runner)
    assert files(tmp_path / "zephyr") == files(kept_set)
    assert not (tmp_path / "messages").exists()


@pytest.mark.slow
def test_refusal_of_a_unit_reaches_the_user(tmp_path, retokenize_config):
    runner = ZephyrRunner(str(tmp_path / "messages"), workers=2)
    with pytest.raises(TomatError, match="materials would be skipped"):
        retokenize(retokenize_config(tmp_path / "set", valences={"Si": 5}), runner)


@pytest.mark.slow
@pytest.mark.skipif(bool(local_cluster_missing()), reason=local_cluster_missing())
def test_on_iris_the_bytes_are_those_of_a_pool(tmp_path, tree, retokenize_config):
    config = {"split_file": None, "filelist": None, "patches_per_material": 20, "block_rows": 60}
    retokenize(retokenize_config(tmp_path / "pool", **config), PoolRunner(1))
    (tmp_path / "workspace").mkdir()
    words = ["--input", str(tree), "--output", str(tmp_path / "iris"), "--layout", "v3-p7", "--bins", "200"]
    words += ["--patches_per_material", "20", "--block_rows", "60"]
    script = tmp_path / "on_iris.py"
    script.write_text(ON_IRIS)
    done = subprocess.run(
        [sys.executable, script, str(tmp_path / "workspace"), *words],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert files(tmp_path / "iris") == files(tmp_path / "pool")
