"""A key that is none and a value that it does not take are named before JAX is imported; no valid one is refused."""

from pathlib import Path

import pytest
import yaml
from levanter.trainer import DEFAULT_JAX_CONFIG

from tomat.base.config_keys import fields_below
from tomat.base.errors import TomatError
from tomat.data.tokens.pipeline.config import RetokenizeConfig
from tomat.train.settings.keys import check_keys, check_words
from tomat.train.settings.schema import RunSchema
from tomat.train.settings.trainer import TrainerSettings

CONFIGS = Path(__file__).parents[3] / "configs"


def test_the_keys_that_are_looked_up_are_those_of_the_configuration():
    """`TrainConfig` narrows types of its light schema, and has no field that the schema has not; nor its YAML a key."""
    from tomat.train.settings.config import TrainConfig, load_config

    assert list(fields_below(RunSchema)) == list(fields_below(TrainConfig))
    assert TrainerSettings().jax_config == DEFAULT_JAX_CONFIG
    for path in (CONFIGS / "train").glob("*.yaml"):
        check_keys(load_config(path).to_dict(), "the whole configuration")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("t*/*.yaml")), ids=lambda path: path.stem)
def test_what_ships_passes(path):
    check_words(path, [], RunSchema if path.parent.name == "train" else RetokenizeConfig)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run_nam: x", "a test sets run_nam, which is no setting; did you mean run_name?"),
        ("trainer: {mesh: {axis: 1}}", "trainer.mesh.axis"),
        ("data: {shuffle: {windows: 3}}", "data.shuffle.windows"),
        ("data: {zzz: 3}", "there are accept, codec_floor, codec_objective"),
        ("3: 4", "sets 3"),
        ("trainer: {num_train_steps: sixty}", "trainer.num_train_steps to 'sixty'; expected a whole number"),
        ("loss: {kind: mse}", "loss.kind to 'mse'; expected one of cross_entropy, soft_cross_entropy"),
        ("optimizer: {type: adamw}", "optimizer.type to 'adamw'; expected one of adafactor, adam, "),
        ("model: {type: llma}", "model.type to 'llma'; expected one of"),
        ("slice: v6e-17", "slice 'v6e-17' is not known; expected one of"),
        ("optimizer_state_dtype: float16", "expected one of bfloat16, float32 or null"),
        ("density_dropout: much", "density_dropout to 'much'; expected a number"),
        ("trackers: {tensorboard: maybe}", "trackers.tensorboard to 'maybe'; expected true or false"),
        ("trainer: {seed: [1]}", "trainer.seed to [1]; expected a whole number"),
    ],
)
def test_a_key_that_is_none_and_a_value_that_no_such_key_takes_are_named(text, message):
    with pytest.raises(TomatError) as refused:
        check_keys(yaml.safe_load(text), "a test")
    assert message in str(refused.value)


def test_the_choices_are_those_that_are_registered():
    """`cautious` needs its module imported to be there; what is imported by default must be among the choices."""
    from levanter.models.lm_model import LmConfig
    from levanter.optim.config import OptimizerConfig

    from tomat.train.settings.config import TrainConfig

    assert TrainConfig is not None
    for field, cls in (("optimizer", OptimizerConfig), ("model", LmConfig)):
        for name in cls.get_known_choices():
            check_keys({field: {"type": name}}, "a test")


@pytest.mark.parametrize(
    "text",
    [
        "trainer: {num_train_steps: '60'}",
        "optimizer: {learning_rate: 1}",
        "slice: null",
        "density_dropout: 0",
        "trainer: {log_jaxprs: false, watch: {interval: 10}}",
        "optimizer: {learning_rate: '1e-3'}",
        "data: {seq_len: null}",
        "{model: {type: llama, whatever: 1}, optimizer: {type: muon, other: 2}}",  # left to the loader
        "trainer: {jax_config: {any_flag: true}, mesh: {axes: {model: 2}}}",
    ],
)
def test_what_draccus_reads_passes(text):
    check_keys(yaml.safe_load(text), "a test")
