"""Two processes under `jax.distributed` train what one process trains. About a minute, most of it imports."""

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from tomat.training.tracking import read_metrics

DEMO = Path(__file__).parents[2] / "configs" / "train" / "demo.yaml"
TINY = [
    "--model.num_layers", "1", "--model.hidden_dim", "32", "--model.intermediate_dim", "64", "--model.num_heads", "2",
    "--model.num_kv_heads", "2", "--data.n_density_tokens", "64", "--data.patches_per_material", "4",
    "--trainer.train_batch_size", "4", "--trainer.num_train_steps", "3", "--trainer.max_eval_batches", "0",
    "--evaluation.patches_per_material", "0",
]  # fmt: skip


def start(output_dir: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tomat.cli", "train", "--config_path", str(DEMO), "--output_dir", str(output_dir)]
    return subprocess.Popen([*command, *TINY, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    return output


def losses(output_dir: Path) -> list[float]:
    return [row["train/loss"] for row in read_metrics(output_dir / "demo" / "metrics.jsonl")]


def test_two_processes_train_what_one_does(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    # Of the two, each has its own disk, as hosts do; only the first writes the log.
    distributed = "{{coordinator_address: '{}', num_processes: 2, process_id: {}}}"
    hosts = [
        start(tmp_path / f"host{i}", "--trainer.distributed", distributed.format(address, i), "--sharding", "zero1")
        for i in (0, 1)
    ]
    outputs = [finish(host) for host in hosts]
    finish(start(tmp_path / "alone"))
    # This test's environment gives each process two CPU devices (conftest.py).
    assert "4 x cpu" in outputs[0]
    np.testing.assert_allclose(losses(tmp_path / "host0"), losses(tmp_path / "alone"), rtol=2e-5)
    assert not (tmp_path / "host1" / "demo" / "metrics.jsonl").exists()
