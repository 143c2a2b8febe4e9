"""The validation figures of 20 rows and one set of weights are the same by every batch, filled up or not."""

from types import SimpleNamespace

import jax
import levanter.tracker
import numpy as np
import pytest
from levanter.tracker import NoopConfig
from levanter.tracker.tracker import DictTracker
from tiny_run import ONE_STEP

from tomat.base.ports.levanter import settle
from tomat.data.codec.lloyd_max import LloydMaxCodec
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.layouts import BlockShuffleConfig
from tomat.data.tokens.pipeline.driver import write_shards
from tomat.data.tokens.shards import ShardSet, open_shards
from tomat.train.folder import RunFolder
from tomat.train.loader import ShardDataset
from tomat.train.loop import Evaluation
from tomat.train.preemption import StopRequest
from tomat.train.restore import model_initialiser
from tomat.train.settings.config import load_config
from tomat.train.step import build_trainer

WORDS = [
    *ONE_STEP, "--loss.preamble_weight", "0.25", "--data.seq_len", "256", "--loss.block_positions", "128",
    "--trainer.train_batch_size", "4",
]  # fmt: skip
VALUES = np.concatenate([[0.0], np.linspace(0.01, 1.0, 63)]).astype(np.float32)
FIGURES = {
    "loss", "density_loss", "cross_entropy_nats", "top1_accuracy", "emd_e_per_A3", "rho_mean_e_per_A3",
    "density_positions", "preamble_cross_entropy_nats", "sequences_without_density",
}  # fmt: skip


def density(name: str) -> DensityGrid:
    """As many atoms as its number says, so that the rows differ in what they hold of the density."""
    rng = np.random.default_rng(int(name[1:]))
    atoms = 1 + int(name[1:])
    return DensityGrid(rng.random((9, 9, 9)), np.eye(3) * 8.0, np.full(atoms, 6), rng.random((atoms, 3)), name)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> ShardSet:
    codec = LloydMaxCodec("e_per_A3", "absolute", (VALUES[1:] + VALUES[:-1]) / 2, VALUES, VALUES, 1.0)
    place = tmp_path_factory.mktemp("rows") / "set"
    layout = load_config(None, WORDS).data.sequence_layout
    names = [f"m{number}" for number in range(5)]
    write_shards(place, names, density, layout=layout, codec=codec, patches_per_material=4, seed=0, block_rows=8)
    return open_shards(place)


def validation(shards: ShardSet, folder, per_device: int, mesh: str) -> dict[str, float]:
    """What is logged with `per_device` rows of a batch on each device."""
    config = load_config(None, [*WORDS, "--trainer.mesh.axes", mesh])
    trainer_config = config.trainer_config()
    trainer_config.tracker = NoopConfig()
    trainer_config.load_checkpoint = False
    trainer_config.per_device_eval_parallelism = per_device
    settle(trainer_config)
    log = DictTracker()
    with build_trainer(config, trainer_config, VALUES) as trainer, levanter.tracker.current_tracker(log):
        key = jax.random.PRNGKey(0)
        model = trainer.initial_state(key, model_init=model_initialiser(config, key)).model
        rows = ShardDataset(shards, BlockShuffleConfig(8, 4), seed=2, seq_len=config.seq_len, epochs=1)
        evaluation = Evaluation(trainer, rows, RunFolder(config, folder), StopRequest(30.0))
        evaluation(SimpleNamespace(step=0, next_step=1, eval_model=model, emit_event=lambda event: None))
    return {
        name.removeprefix("eval/validation/"): value
        for name, value in log.metrics["step_0"].items()
        if "validation" in name and "timing" not in name
    }


@pytest.fixture(scope="module")
def undivided(shards, tmp_path_factory) -> dict[str, float]:
    """One row at a time, which no device has a share of: the second has a share of the model instead."""
    return validation(shards, tmp_path_factory.mktemp("undivided"), 1, "{data: 1, model: 2}")


# Of 20 rows: a last batch filled up with 4, and one of which a device has no row at all.
@pytest.mark.parametrize("per_device", [3, 32])
def test_validation_does_not_depend_on_the_batch_or_the_devices(shards, undivided, tmp_path, per_device):
    found = validation(shards, tmp_path, per_device, "{data: 2}")
    assert found.keys() == undivided.keys() >= FIGURES
    for name, value in found.items():
        assert value == pytest.approx(undivided[name], rel=1e-6), name
