"""Shardings and microbatches leave the numbers of a step as they are; the optimizer's state in a type of its own.

That each setting changes the step is shown in `test_every_key.py`.
"""

import re
from types import SimpleNamespace
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax.quantization import quantize_linear_layers
from levanter.tracker import NoopConfig
from memory_back import give_back
from tiny_run import ONE_STEP

from tomat.base.errors import TomatError
from tomat.base.ports.levanter import settle
from tomat.data.density.promolecule import Promolecule
from tomat.data.tokens.vocabulary import DENSITY_BLOCK_START
from tomat.model.any_decoder import environment_of
from tomat.model.environment import environment_tables
from tomat.model.nearby_atoms import Room, filled, named_atoms, stacked_atoms
from tomat.perf.plan.compile.lowering import lower_step, stand_in_table
from tomat.train.loader import TokenExample
from tomat.train.loop import count_parameters
from tomat.train.restore import model_initialiser
from tomat.train.settings.config import TrainConfig, load_config
from tomat.train.step import build_trainer, check_quantised, with_state_dtype

TINY = [
    *ONE_STEP, "--model.num_layers", "2", "--trainer.train_batch_size", "8", "--data.seq_len", "256",
    "--loss.block_positions", "128",
]  # fmt: skip


def tiny(*words: str) -> TrainConfig:
    return load_config(None, [*TINY, *words])


def example(config: TrainConfig) -> TokenExample:
    """A batch with a preamble, density tokens and padding in every row."""
    vocabulary = config.data.vocabulary
    rng = np.random.default_rng(0)
    tokens = np.zeros((config.batch_size, config.seq_len), np.int32)
    tokens[:, :40] = rng.integers(1, 1000, (config.batch_size, 40))
    first = vocabulary.size - config.data.n_density_tokens
    tokens[:, 40:200] = rng.integers(first, vocabulary.size, (config.batch_size, 160))
    atoms = None
    if (environment := environment_of(config.model)) is not None:
        tokens[:, 39] = DENSITY_BLOCK_START
        steps = np.eye(3) * 0.3
        rows = [
            filled(rng.choice([9, 11, 12], 7), rng.uniform(-1, 3, (7, 3)), steps, (5, 5, 6), Room.of(environment), "")
            for _ in range(config.batch_size)
        ]
        atoms = named_atoms(stacked_atoms(rows))
    return TokenExample(tokens=hax.named(jnp.asarray(tokens), ("batch", "position")), atoms=atoms)


def losses(*words: str) -> list[float]:
    """Of three steps of the trainer, on the two CPU devices of the test run."""
    config = tiny(*words)
    trainer_config = config.trainer_config()
    trainer_config.tracker = NoopConfig()
    trainer_config.load_checkpoint = False
    settle(trainer_config)
    table, tables = np.linspace(0, 1, config.data.n_density_tokens, dtype=np.float32), None
    if (environment := environment_of(config.model)) is not None:
        falling = np.linspace(0.9, 0.0, environment.basis.n)
        tables = environment_tables(Promolecule(environment.basis, {z: falling for z in (9, 11, 12)}, 1, {}), table)
    result = []
    with build_trainer(config, trainer_config, table, tables) as trainer:
        key = jax.random.PRNGKey(0)
        state = trainer.initial_state(key, model_init=model_initialiser(config, key))
        for _ in range(3):
            info = trainer.train_step(state, example(config))
            state = info.state
            result.append(float(info.loss))
    return result


ATOMS = ["--model.environment.channels", "4", "--model.environment.max_atoms", "8"]
"""Of a model that knows its atoms, which has every kind of parameter."""


@pytest.fixture(scope="module")
def reference() -> list[float]:
    result = losses(*ATOMS)
    give_back(compiled=True)
    return result


@pytest.mark.parametrize(
    "words",
    [
        ["--sharding", "fsdp", "--model.gradient_checkpointing", "save_attention"],
        ["--sharding", "zero1", "--model.gradient_checkpointing", "off", "--trainer.per_device_parallelism", "2"],
    ],
    ids=["fsdp", "zero1"],
)
def test_sharding_checkpointing_and_microbatches_change_no_number(reference, words):
    assert reference[-1] < reference[0]
    np.testing.assert_allclose(losses(*ATOMS, *words), reference, rtol=2e-5)


def test_products_in_int8_train_split_parameters_as_whole_ones():
    words = ["--model.int8_matmuls", "forward_and_inputs"]
    reference = losses(*words)
    assert reference[-1] < reference[0]
    np.testing.assert_allclose(losses(*words, "--sharding", "fsdp"), reference, rtol=1e-4)


def test_a_bad_batch_cannot_be_skipped_where_it_leaves_its_mark_in_the_scales_of_fp8():
    config = tiny("--trainer.quantization.fp8", "true", "--guards.on_bad_loss", "skip")
    with pytest.raises(TomatError, match="whose scales a bad batch changes"):
        build_trainer(config, config.trainer_config(), stand_in_table(config))


@pytest.mark.parametrize("targets", ["q_proj", "[q_prj, k_proj]", "[]"])
def test_targets_that_name_no_layer_are_refused(targets):
    """Without a word they gave the run that has no products in few bits."""

    def check(targets: str) -> Any:
        config = tiny("--trainer.quantization.fp8", "true", "--trainer.quantization.targets", targets)
        quantization = config.trainer_config().quantization
        assert quantization is not None
        model = eqx.filter_eval_shape(
            lambda: quantize_linear_layers(model_initialiser(config, jax.random.PRNGKey(0))(), quantization)
        )
        check_quantised(config, model)
        return model

    for right in ("[q_proj]", ".*q_proj"):
        model = check(right)
        plain = eqx.filter_eval_shape(model_initialiser(tiny(), jax.random.PRNGKey(0)))
        counted = [count_parameters(cast(Any, SimpleNamespace(trainable_model=each))) for each in (model, plain)]
        assert counted[0] == counted[1]  # the scales of fp8 are no parameters
    with pytest.raises(TomatError, match="names no linear layer; expected a list of .*q_proj"):
        check(targets)


@pytest.mark.parametrize("word", ["--optimizer.warmup -3", "--optimizer.cycle_length 0"])
def test_a_schedule_that_cannot_be_is_one_error(word):
    config = tiny(*word.split())
    with pytest.raises(TomatError, match="no optimizer can be built for trainer.num_train_steps"):
        build_trainer(config, config.trainer_config(), stand_in_table(config))


def test_zero1_gathers_the_parameters_once():
    """The split parameters are gathered whole before the layers, so no gather lies in the loop over layers."""
    config = tiny("--sharding", "zero1")
    text = lower_step(config, config.trainer_config().device_mesh, stand_in_table(config)).compile().as_text()
    assert "all-gather" in text
    body = _while_bodies(text)
    assert body, "the layers are expected to be a loop"
    assert not any("all-gather" in part for part in body)


def _while_bodies(text: str) -> list[str]:
    """The text of every computation that is the body of a while loop."""
    names = set(re.findall(r"body=%?([\w.-]+)", text))
    computations = re.findall(r"^%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    return [body for name, body in computations if name in names]


# The optimizer's state in a type of its own.

PARAMETERS = {"a": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float32)}


def steps(optimizer, parameters, number: int = 3):
    """Updates and states of some steps, in which the gradient is the cube of the parameters."""
    found = []
    state = optimizer.init(parameters)
    for _ in range(number):
        updates, state = optimizer.update(jax.tree.map(lambda x: x**3, parameters), state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        found.append((updates, state))
    return found


def moments(state):
    return [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 0]


@pytest.mark.parametrize("build", [optax.adam, optax.adafactor], ids=lambda build: build.__name__)
def test_in_the_parameters_type_nothing_changes(build):
    parameters = jax.tree.map(jnp.asarray, PARAMETERS)
    plain, kept = (
        steps(optimizer, parameters) for optimizer in (build(1e-2), with_state_dtype(build(1e-2), "float32"))
    )
    jax.tree.map(np.testing.assert_array_equal, plain, kept)


def test_moments_are_rounded_between_steps_and_nothing_else_is():
    """The formula of Adam, with its moments rounded to bfloat16 after each step."""
    optimizer = with_state_dtype(optax.adam(0.1, b1=0.9, b2=0.95, eps=1e-8), "bfloat16")
    parameters = {"a": jnp.asarray(PARAMETERS["a"])}
    mu = nu = np.zeros((3, 4), np.float32)
    value = PARAMETERS["a"]
    for number, (updates, state) in enumerate(steps(optimizer, parameters), 1):
        gradient = value**3
        mu, nu = 0.9 * mu + 0.1 * gradient, 0.95 * nu + 0.05 * gradient**2
        update = -0.1 * (mu / (1 - 0.9**number)) / (np.sqrt(nu / (1 - 0.95**number)) + 1e-8)
        np.testing.assert_allclose(updates["a"], update, rtol=1e-4)
        mu, nu = (np.asarray(jnp.asarray(one, jnp.bfloat16), np.float32) for one in (mu, nu))
        assert all(leaf.dtype == jnp.bfloat16 for leaf in moments(state)) and len(moments(state)) == 2
        assert updates["a"].dtype == jnp.float32 and state[0].count.dtype == jnp.int32 and int(state[0].count) == number
        value = value + np.asarray(updates["a"])


def test_more_digits_than_the_parameters_have_are_kept():
    parameters = {"a": jnp.asarray(PARAMETERS["a"], jnp.bfloat16)}
    (updates, state), *_ = steps(with_state_dtype(optax.adam(0.1), "float32"), parameters)
    assert all(leaf.dtype == jnp.float32 for leaf in moments(state)) and updates["a"].dtype == jnp.bfloat16
