from dataclasses import replace
from pathlib import Path

import draccus
import pytest
from levanter.models.lm_model import LmConfig

from tomat.base.errors import TomatError
from tomat.model.decoder import DensityDecoderConfig, parameter_count, preset_model
from tomat.train.settings.config import load_config

VOCAB_SIZE = 18_570
CONFIGS = Path(__file__).parents[2] / "configs" / "train"


def config_of(name: str) -> LmConfig:
    return draccus.decode(LmConfig, {"type": "density_decoder", **preset_model(name)})


@pytest.mark.parametrize(
    ("name", "hidden", "layers", "heads", "head_size", "ffn", "millions"),
    [
        ("demo", 128, 4, 4, 32, 512, 3.4),
        ("30m", 512, 6, 4, 128, 2048, 34.7),
        ("200m", 1024, 12, 16, 64, 4096, 220.4),
        ("1b", 2048, 20, 16, 128, 5632, 1065.7),
    ],
)
def test_presets_have_the_size_they_are_named_for(name, hidden, layers, heads, head_size, ffn, millions):
    count = parameter_count(config_of(name), VOCAB_SIZE)
    attention = 4 * hidden * hidden + 2 * head_size
    layer = attention + 3 * hidden * ffn + 2 * hidden
    assert count == VOCAB_SIZE * hidden + layers * layer + hidden
    assert round(count / 1e6, 1) == millions
    config = config_of(name)
    assert isinstance(config, DensityDecoderConfig)
    assert (config.num_kv_heads, config.actual_head_size) == (heads, head_size)
    assert config.tie_word_embeddings


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(TomatError, match="'2b'.*demo, 30m, 200m, 1b"):
        preset_model("2b")


@pytest.mark.parametrize("name", ["200m-v6e16", "1b-v6e32"])
def test_the_fast_recipe_trains_the_same_thing(name):
    reference, fast = (load_config(CONFIGS / f"{name}{suffix}.yaml") for suffix in ("", "-fast"))
    n_reference, n_fast = (
        parameter_count(config.model_config(), config.data.vocabulary.size) for config in (reference, fast)
    )
    assert abs(n_fast / n_reference - 1) < 0.02
    for same in ("slice", "data", "optimizer"):
        assert getattr(fast, same) == getattr(reference, same), same
    # In how many parts a chip takes its sequences changes no batch.
    assert replace(fast.trainer, per_device_parallelism=-1) == reference.trainer
    assert (fast.loss.kind, fast.loss.vocabulary) == (reference.loss.kind, reference.loss.vocabulary)
    assert fast.model_config().max_seq_len == reference.model_config().max_seq_len == 8192
    assert fast.sharding != reference.sharding
