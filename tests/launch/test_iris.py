"""The Iris form, and that the installed `iris job run` takes it."""

import importlib
import shlex

import pytest

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.launch.iris import iris_command

SETTINGS = {"cluster": "marin", "run_name": "a", "slice_name": "v6e-16", "config_path": "configs/train/200m-v6e16.yaml"}


def test_the_job_is_this_command():
    command = iris_command(**SETTINGS, overrides=["--data.train", "gs://b/x"], zone="us-east5-b", spot=True)
    assert command.line == (
        "iris --cluster=marin job run --enable-extra-resources --tpu=v6e-16 --cpu=90 --memory=360g --disk=50g "
        "--extra=tpu --job-name=a --max-retries=5 --zone=us-east5-b --preemptible -- "
        "python train_tomat_tpu.py --config_path configs/train/200m-v6e16.yaml --data.train gs://b/x"
    )


def test_a_yaml_is_a_cluster_too_and_a_gpu_no_slice(world, capsys):
    words = ["launch", "--config_path", "run.yaml", "--iris", "c.yaml", "--trainer.num_train_steps", "7"]
    assert main(words) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("iris --config=c.yaml job run") and line.endswith("--trainer.num_train_steps 7")
    with pytest.raises(TomatError, match="not offered"):
        iris_command(**{**SETTINGS, "slice_name": "h100x8"}, overrides=[])


def test_iris_parses_it():
    try:
        job = importlib.import_module("iris.cli.job")
    except ImportError as error:
        pytest.skip(f"the command line of Iris needs the development group's finelog: {error}")
    argv = shlex.split(iris_command(**SETTINGS, overrides=["--a.b", "1"], spot=True).line)
    parsed = job.run.make_context("run", argv[argv.index("run") + 1 :]).params
    assert parsed["tpu"] == "v6e-16" and parsed["preemptible"] is True and parsed["max_retries"] == 5
    assert parsed["cmd"][-2:] == ("--a.b", "1")
    # Iris finds the number of hosts by itself; it must be the slice's.
    assert job.resolve_multinode_defaults("v6e-16", None, None)[0] == 4
