"""A model whose matrices stay in few bits predicts as the one that was unpacked, in less memory."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import DEMO, tiny_run

from tomat.model.any_decoder import causal_activations
from tomat.predict.weights.arrays import memory_bytes, model_of, module_name, named_arrays, with_packed
from tomat.predict.weights.quantise import quantise
from tomat.train.restore import model_initialiser
from tomat.train.settings.config import load_config


@pytest.mark.parametrize(("scan_layers", "layers"), [("true", 2), ("false", 1)])
def test_a_model_stays_packed_and_says_the_same(scan_layers, layers):
    words = tiny_run(1, 1, "--model.scan_layers", scan_layers, "--model.num_layers", str(layers))
    config = load_config(DEMO, words)
    model = model_initialiser(config, jax.random.PRNGKey(0))()
    arrays = named_arrays(model)
    names = [name for name, array in arrays.items() if array.ndim == 2]
    quantised = {name: quantise(arrays[name], 3, "lut") for name in names}
    assert len(names) == layers * 7 + 1
    packed = with_packed(model, quantised)
    # 3 bits of 32 and a little: scales, tables, norms.
    assert memory_bytes(packed) < 0.16 * memory_bytes(model)

    whole = {name: quantised[name].values() if name in quantised else array for name, array in arrays.items()}
    trainer = config.trainer_config()
    with trainer.use_device_mesh():
        unpacked = model_of(whole, config, trainer.parameter_axis_mapping, trainer.device_mesh)
    tokens = hax.named(jnp.asarray([[4, 7, 2500, 3, 9, 1]] * 2), ("batch", "position"))
    found, expected = (
        np.asarray(causal_activations(each, tokens).rearrange(("batch", "position", "embed")).array)
        for each in (packed, unpacked)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.array_equal(packed.get_lm_head().rearrange(("vocab", "embed")).array, whole["model.embed_tokens.weight"])
    if scan_layers == "true":
        other = {**quantised, "model.layers.1.mlp.up_proj.weight": quantise(arrays[names[1]], 2, "lut")}
        assert memory_bytes(with_packed(model, other)) > memory_bytes(packed)


def test_layers_have_the_names_of_the_folder():
    assert module_name(".transformer.layers.stacked.mlp.up_proj") == "model.layers.{layer}.mlp.up_proj.weight"
    assert module_name(".transformer.layers.blocks[3].self_attn.q_proj") == "model.layers.3.self_attn.q_proj.weight"
    assert module_name(".embeddings.token_embeddings") == "model.embed_tokens.weight"
    assert module_name(".environment.network.layers[0]") == "environment.network.layers.0.weight"
    assert module_name(".lm_head") == "lm_head.weight"
