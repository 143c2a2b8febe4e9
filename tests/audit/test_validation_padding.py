"""A1: the validation figures of 20 rows and one set of weights, by batch and number of devices.

Each number of devices needs a process of its own.
"""

import json
import os
import re
import subprocess
import sys

import pytest

SCRIPT = """
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

from tomat.data.codec.lloyd_max import LloydMaxCodec
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.shards import open_shards
from tomat.data.tokens.writer import write_shards
from tomat.train.settings.config import load_config
from tomat.train.folder import RunFolder
from tomat.train.hooks import Evaluation
from tomat.data.tokens.shuffle import BlockShuffleConfig
from tomat.train.loader import ShardDataset
from tomat.train.preemption import StopRequest
from tomat.train.restore import model_initialiser
from tomat.train.step import build_trainer
from tomat.train.tracking import JsonLinesTrackerConfig

folder, per_device_batches = Path(sys.argv[1]), json.loads(sys.argv[2])
WORDS = [
    "--preset", "demo", "--data.source", "embedded", "--data.layout", "v3-p7", "--data.n_density_tokens", "64",
    "--trainer.mp", "compute=float32,params=float32,output=float32", "--loss.preamble_weight", "0.25",
    "--model.num_layers", "1", "--model.hidden_dim", "32", "--model.intermediate_dim", "64", "--model.num_heads", "2",
    "--model.num_kv_heads", "2", "--model.head_dim", "16", "--data.seq_len", "256", "--loss.block_positions", "128",
    "--trainer.train_batch_size", "4",
]


def density(name):
    rng = np.random.default_rng(int(name[1:]))
    atoms = 1 + int(name[1:])
    return DensityGrid(rng.random((9, 9, 9)), np.eye(3) * 8.0, np.full(atoms, 6), rng.random((atoms, 3)), name)


config = load_config(None, WORDS)
values = np.concatenate([[0.0], np.linspace(0.01, 1.0, 63)]).astype(np.float32)
codec = LloydMaxCodec("e_per_A3", "absolute", (values[1:] + values[:-1]) / 2, values, values, 1.0)
shards = folder / "set"
write_shards(
    shards, [f"m{i}" for i in range(5)], density, layout=config.data.sequence_layout, codec=codec,
    patches_per_material=4, seed=0, block_rows=8,
)
shards = open_shards(shards)
assert shards.rows == 20
found, model = {}, None
for per_device in per_device_batches:
    trainer_config = config.trainer_config()
    log = folder / f"{per_device}.jsonl"
    trainer_config.tracker = JsonLinesTrackerConfig(str(log))
    trainer_config.load_checkpoint = False
    trainer_config.per_device_eval_parallelism = per_device
    trainer_config._validate_and_set_defaults()
    with build_trainer(config, trainer_config, values) as trainer:
        if model is None:
            key = jax.random.PRNGKey(0)
            model = trainer.initial_state(key, model_init=model_initialiser(config, key)).model
        rows = ShardDataset(shards, BlockShuffleConfig(8, 4), seed=2, seq_len=config.seq_len, epochs=1)
        evaluation = Evaluation(trainer, rows, RunFolder(config, folder), StopRequest(30.0))
        evaluation(SimpleNamespace(step=0, next_step=1, eval_model=model, emit_event=lambda event: None))
        trainer.tracker.finish()
    row = json.loads(log.read_text().splitlines()[-1])
    batch = per_device * jax.device_count()
    found[batch] = {name: value for name, value in row.items() if "validation" in name and "timing" not in name}
print(json.dumps(found))
"""

DEVICES = {1: [1, 3, 64], 4: [1, 3, 16]}
"""Number of devices: sequences a batch on each."""


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict[tuple[int, int], dict[str, float]]:
    """(devices, batch) -> what is logged."""
    found = {}
    for devices, per_device in DEVICES.items():
        flags = re.sub(r"(?<=device_count=)\d+", str(devices), os.environ["XLA_FLAGS"])
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("rows")), json.dumps(per_device)],
            capture_output=True,
            text=True,
            timeout=900,
            env=os.environ | {"XLA_FLAGS": flags},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        by_batch = json.loads(done.stdout.splitlines()[-1])
        found |= {(devices, int(batch)): row for batch, row in by_batch.items()}
    return found


def test_validation_does_not_depend_on_the_batch_or_the_devices(figures, figure):
    assert sorted(figures) == [(1, 1), (1, 3), (1, 64), (4, 4), (4, 12), (4, 64)]
    for (devices, batch), row in sorted(figures.items()):
        loss, top1 = row["eval/validation/loss"], row["eval/validation/top1_accuracy"]
        figure("A1", f"loss of 20 rows, batch {batch:2}, {devices} device(s)", f"{loss:.6f}")
        figure("A1", f"top-1 of 20 rows, batch {batch:2}, {devices} device(s)", f"{top1:.6f}")
    alone = figures[1, 1]
    names = {
        "loss", "density_loss", "cross_entropy_nats", "top1_accuracy", "emd_e_per_A3", "rho_mean_e_per_A3",
        "density_positions", "preamble_cross_entropy_nats", "sequences_without_density",
    }  # fmt: skip
    assert {name.removeprefix("eval/validation/") for name in alone} >= names
    for case, row in figures.items():
        assert row.keys() == alone.keys()
        for name, value in row.items():
            assert value == pytest.approx(alone[name], rel=1e-6), (case, name)
