"""The Iris form, and that the installed `iris job run` takes it."""

import importlib
import json
import shutil
import tempfile
from pathlib import Path

import pytest

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.base.shipped import PACK_FILE, PACK_HASH_FILE
from tomat.launch.iris import iris_command
from tomat.launch.pack import Pack

PACK = Pack(Path("pack.tar.gz"), "0" * 64, "abc", False, "tomat-launch/200m-v6e16.yaml", ("--data.train", "gs://b/x"))
SETTINGS = {"cluster": "marin", "run_name": "a", "slice_name": "v6e-16", "pack": PACK}


def test_the_job_is_this_command():
    command = iris_command(**SETTINGS, zone="us-east5-b", spot=True, max_hours=2.0)
    assert command.line == (
        f"(cd {tempfile.gettempdir()}/tomat-pack-0000000000000000 && "
        "iris --cluster=marin job run --enable-extra-resources --tpu=v6e-16 --cpu=90 --memory=360g --disk=50g "
        "--extra=tpu --job-name=a --max-retries=5 --timeout=7200 --zone=us-east5-b --preemptible -- "
        "python train_tomat_tpu.py --config_path tomat-launch/200m-v6e16.yaml --data.train gs://b/x)"
    )


def test_a_yaml_is_a_cluster_too_and_a_gpu_no_slice(world, capsys):
    words = ["launch", "--config_path", "run.yaml", "--iris", "c.yaml", "--trainer.num_train_steps", "7"]
    assert main(words) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert f"iris --config={world.checkout}/c.yaml job run" in line and line.endswith("--trainer.num_train_steps 7)")
    # What is sent is the pack, where no git says otherwise.
    folder = Path(line[len("(cd ") :].partition(" && ")[0])
    assert json.loads((folder / PACK_FILE).read_text())["commit"] and len((folder / PACK_HASH_FILE).read_text()) == 65
    assert (folder / "train_tomat_tpu.py").exists() and not (folder / ".git").exists()
    shutil.rmtree(folder)
    with pytest.raises(TomatError, match="not offered"):
        iris_command(**{**SETTINGS, "slice_name": "h100x8"})


def test_iris_parses_it():
    try:
        job = importlib.import_module("iris.cli.job")
    except ImportError as error:
        pytest.skip(f"the command line of Iris needs the development group's finelog: {error}")
    argv = list(iris_command(**SETTINGS, spot=True, max_hours=2.0).argv)
    parsed = job.run.make_context("run", argv[argv.index("run") + 1 :]).params
    assert parsed["tpu"] == "v6e-16" and parsed["preemptible"] is True and parsed["max_retries"] == 5
    assert parsed["cmd"][-2:] == ("--data.train", "gs://b/x") and parsed["timeout"] == 7200
    # Iris finds the number of hosts by itself; it must be the slice's.
    assert job.resolve_multinode_defaults("v6e-16", None, None)[0] == 4
