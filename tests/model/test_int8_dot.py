"""Products in int8: their formula, what they are off by, their gradients, and a decoder that trains with them."""

import dataclasses

import draccus
import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.models.lm_model import LmConfig
from tiny_run import DEMO
from traced_operations import operations, shapes_of

from tomat.base.errors import TomatError
from tomat.model import int8_dot
from tomat.model.decoder import DensityDecoderConfig
from tomat.model.int8_dot import Int8DotGeneral, int8_dot_general
from tomat.predict.weights.arrays import check_compressible
from tomat.train.settings.config import load_config

VOCAB = Axis("vocab", 50)
MODES = ("forward", "forward_and_inputs")
# Shapes of input and weights, and the axes that are contracted: of an MLP, of queries, of the output of attention.
LAYERS = {
    "mlp": ((2, 6, 32), (24, 32), ((2,), (1,))),
    "queries": ((2, 6, 32), (2, 3, 4, 32), ((2,), (3,))),
    "output": ((2, 3, 6, 4), (32, 3, 4), ((1, 3), (1, 2))),
    "axes in another order": ((2, 3, 6, 4), (4, 32, 3), ((1, 3), (2, 0))),
}


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def in_steps(x: np.ndarray, over: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers of a slice, and what one of them stands for."""
    step = np.abs(x).max(over, keepdims=True) / np.float32(127)
    return np.rint(x / step).astype(np.int64), step


def formula(lhs: np.ndarray, rhs: np.ndarray, over) -> np.ndarray:
    """The product, in float64 after the whole numbers."""
    (a, step_a), (b, step_b) = in_steps(lhs, over[0]), in_steps(rhs, over[1])
    return np.tensordot(a * step_a.astype(np.float64), b * step_b.astype(np.float64), over)


def gradients(lhs: np.ndarray, rhs: np.ndarray, over, mode: str):
    """Result, its gradient, and the gradients of both operands."""
    product = Int8DotGeneral.init(mode)
    out, back = jax.vjp(lambda lhs, rhs: product(lhs, rhs, (over, ((), ()))), jnp.asarray(lhs), jnp.asarray(rhs))
    of_out = gaussian(*out.shape, seed=2)
    return np.asarray(out), of_out, *(np.asarray(each) for each in back(jnp.asarray(of_out)))


@pytest.mark.parametrize("layer", LAYERS)
def test_the_product_is_its_formula(layer):
    shape, weights, over = LAYERS[layer]
    lhs, rhs = gaussian(*shape), gaussian(*weights, seed=1)
    found = int8_dot_general(jnp.asarray(lhs), jnp.asarray(rhs), (over, ((), ())), jnp.float32)
    np.testing.assert_allclose(found, formula(lhs, rhs, over), rtol=1e-5, atol=1e-5)
    none = int8_dot_general(jnp.zeros(shape), jnp.asarray(rhs), (over, ((), ())), jnp.float32)
    np.testing.assert_array_equal(none, np.zeros_like(found))  # a slice of zeros has no largest magnitude


@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_are_straight_through(layer):
    shape, weights, over = LAYERS[layer]
    lhs, rhs = gaussian(*shape), gaussian(*weights, seed=1)
    exact = jax.vjp(
        lambda lhs, rhs: jax.lax.dot_general(lhs, rhs, (over, ((), ()))), jnp.asarray(lhs), jnp.asarray(rhs)
    )
    out, of_out, of_lhs, of_rhs = gradients(lhs, rhs, over, "forward")
    expected_lhs, expected_rhs = exact[1](jnp.asarray(of_out))
    np.testing.assert_array_equal(of_lhs, expected_lhs)
    np.testing.assert_array_equal(of_rhs, expected_rhs)

    both, _, of_lhs, of_rhs = gradients(lhs, rhs, over, "forward_and_inputs")
    np.testing.assert_array_equal(both, out)
    np.testing.assert_array_equal(of_rhs, expected_rhs)
    # The axes of the weights that the result has, last in it, and what is left in the order of the input.
    given = [axis for axis in range(len(weights)) if axis not in over[1]]
    found = formula(of_out, rhs, (tuple(range(of_out.ndim - len(given), of_out.ndim)), tuple(given)))
    kept = [axis for axis in range(len(shape)) if axis not in over[0]]
    order = kept + [over[0][over[1].index(axis)] for axis in sorted(over[1])]
    np.testing.assert_allclose(of_lhs, np.transpose(found, np.argsort(order)), rtol=1e-4, atol=1e-4)
    assert not np.array_equal(of_lhs, expected_lhs)


def test_without_qwix_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(int8_dot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TomatError, match="model.int8_matmuls is forward.*extra `compress`"):
        decoder(int8_matmuls="forward").build(VOCAB, key=jax.random.PRNGKey(0))


def decoder(**fields) -> DensityDecoderConfig:
    shape = dict(hidden_dim=32, intermediate_dim=48, num_layers=2, num_heads=4, num_kv_heads=2)
    return DensityDecoderConfig(**{"max_seq_len": 64, "attn_backend": "vanilla", **shape, **fields})


def linears(config: LmConfig) -> dict[str, hnn.Linear]:
    found = jax.tree_util.tree_leaves_with_path(
        shapes_of(config, VOCAB), is_leaf=lambda leaf: isinstance(leaf, hnn.Linear)
    )
    return {jax.tree_util.keystr(path): leaf for path, leaf in found if isinstance(leaf, hnn.Linear)}


def test_it_is_the_projections_alone_and_nothing_is_added_to_the_model():
    fields = dict(tie_word_embeddings=False, environment={"channels": 4}, int8_matmuls="forward")
    config = draccus.decode(DensityDecoderConfig, {"max_seq_len": 64, "num_layers": 2, **fields})
    for scan_layers in (True, False):
        found = linears(draccus.decode(DensityDecoderConfig, {**draccus.encode(config), "scan_layers": scan_layers}))
        narrow = {name for name, linear in found.items() if isinstance(linear.dot_general, Int8DotGeneral)}
        projections = {name.rpartition(".")[2] for name in narrow}
        assert projections == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
        assert {name for name in found if ".layers." in name and "transformer" in name} == narrow
        assert ".lm_head" in found.keys() - narrow and any("environment" in name for name in found.keys() - narrow)

    def sizes(config: LmConfig) -> list:
        leaves = jax.tree_util.tree_leaves_with_path(shapes_of(config, VOCAB))
        return [(path, leaf.shape) for path, leaf in leaves if hasattr(leaf, "shape")]

    assert sizes(decoder(int8_matmuls="forward")) == sizes(decoder())


def test_of_a_layer_the_weights_have_the_float_gradient():
    # Haliax's einsum decides which operand comes first; what the gradient of the input is shows that it is the input.
    x = hax.named(gaussian(2, 6, 32), ("batch", "position", "embed"))
    Out = (Axis("kv_head", 2), Axis("q_heads_per_group", 3), Axis("head_size", 4))
    linear = hnn.Linear.init(Axis("embed", 32), Out, key=jax.random.PRNGKey(0), use_bias=False)
    weigh = hax.named(gaussian(2, 6, 2, 3, 4, seed=3), ("batch", "position", *Out))
    gradient = eqx.filter_grad(lambda both: hax.sum(both[0](both[1]) * weigh).scalar())
    exact, forward, both = (
        gradient((linear if mode is None else dataclasses.replace(linear, dot_general=Int8DotGeneral.init(mode)), x))
        for mode in (None, *MODES)
    )
    for found in (forward, both):
        np.testing.assert_array_equal(found[0].weight.array, exact[0].weight.array)
    np.testing.assert_array_equal(forward[1].array, exact[1].array)
    assert 0 < np.linalg.norm(both[1].array - exact[1].array) < 0.03 * np.linalg.norm(exact[1].array)


def test_checkpoint_policies_keep_what_they_keep_without_it():
    tokens = hax.named(jnp.zeros((1, 64), jnp.int32), ("batch", "position"))
    for policy in ("off", "nested"):
        none, forward, both = (
            operations(decoder(gradient_checkpointing=policy, int8_matmuls=mode), VOCAB, tokens)
            for mode in (None, *MODES)
        )
        assert none["dot_general"] == forward["dot_general"] == both["dot_general"], policy
        # The seven products of a layer, those that are computed again, and, if asked for, the inputs' gradients.
        assert both["dot_general int8"] == forward["dot_general int8"] + 7
        assert policy != "off" or forward["dot_general int8"] == 7


def test_what_it_cannot_be_together_with_is_refused_by_name():
    narrow = ["--model.int8_matmuls", "forward"]
    distils = ["--distillation", "{teacher: a, quantised: b}", "--sharding", "replicated"]
    for words in (["--trainer.quantization", "{int8: true}"], distils):
        with pytest.raises(TomatError, match=words[0].removeprefix("--")) as caught:
            load_config(DEMO, [*narrow, *words])
        assert "model.int8_matmuls is forward" in str(caught.value)
    with pytest.raises(TomatError, match="tomat export"):
        check_compressible(load_config(DEMO, narrow), "runs/demo")
    with pytest.raises(TomatError, match="model.int8_matmuls"):
        load_config(DEMO, ["--model.int8_matmuls", "backward"])
