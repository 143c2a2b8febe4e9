import dataclasses
from collections import Counter
from dataclasses import replace
from pathlib import Path

import draccus
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import traced_operations
from haliax import Axis
from haliax.nn.scan import ScanCheckpointPolicy
from levanter.layers.attention import AttentionBackend
from levanter.models.gemma import GemmaConfig
from levanter.models.lm_model import LmConfig
from levanter.models.mistral import MistralConfig
from levanter.models.mixtral import MixtralConfig
from levanter.models.qwen import Qwen3Config
from traced_operations import random_model, shapes_of

from tomat.base.errors import TomatError
from tomat.model.any_decoder import build_mask, causal_activations
from tomat.model.checkpoint_policies import NAMED_POLICIES
from tomat.model.decoder import DensityDecoderConfig, parameter_count, preset_model
from tomat.model.tiles import QkRotaryConfig, SplashBlockSizes, WholeHeadConfig
from tomat.train.settings.config import load_config

VOCAB = Axis("vocab", 50)
SHAPE = dict(hidden_dim=32, intermediate_dim=48, num_layers=2, num_heads=2, num_kv_heads=1)
BACKENDS = {
    "vanilla": dict(attn_backend=AttentionBackend.VANILLA),
    "jax_flash": dict(attn_backend=AttentionBackend.JAX_FLASH, flash_attention_block_size=64),
    "splash": dict(attn_backend=AttentionBackend.SPLASH, splash=SplashBlockSizes(128, 128, interpret=True)),
}


def decoder(seq_len: int = 64, **fields) -> DensityDecoderConfig:
    return DensityDecoderConfig(**{"max_seq_len": seq_len, **SHAPE, **fields})


def build(config: LmConfig):
    return random_model(config, VOCAB)


def random_tokens(seq_len: int, batch: int = 1) -> hax.NamedArray:
    ids = np.random.default_rng(0).integers(0, VOCAB.size, (batch, seq_len))
    return hax.named(jnp.asarray(ids), (Axis("batch", batch), Axis("position", seq_len)))


def logits(config: LmConfig):
    """Function of tokens [batch, position] that gives logits [batch, position, vocab] as NumPy, and compiles once."""
    model = build(config)
    head = model.get_lm_head()

    @eqx.filter_jit
    def run(model, tokens):
        return hax.dot(causal_activations(model, tokens), head, axis="embed").rearrange(("batch", "position", "vocab"))

    return lambda tokens: np.asarray(run(model, tokens).array)


def assert_influence(run, seq_len: int, changed: int, last: int) -> None:
    """Changing the token at `changed` alters the logits from there to `last`, and leaves all others bit-identical."""
    tokens = random_tokens(seq_len)
    others = tokens.array.at[:, changed].set((tokens.array[:, changed] + 1) % VOCAB.size)
    before, after = run(tokens), run(hax.named(others, tokens.axes))
    differs = (before != after).any(axis=(0, 2))
    assert np.isfinite(before).all()
    expected = np.zeros(seq_len, bool)
    expected[changed : last + 1] = True
    np.testing.assert_array_equal(differs, expected)


PAIRED: dict = dict(num_heads=4, num_kv_heads=2, paired_heads=True)


@pytest.mark.parametrize(
    "fields", [*BACKENDS.values(), *({**PAIRED, **BACKENDS[backend]} for backend in ("vanilla", "splash"))]
)
def test_a_later_token_leaves_earlier_logits_bit_identical(fields):
    """What it changes is multiplied with 0 or not at all."""
    seq_len = 256 if fields["attn_backend"] == AttentionBackend.SPLASH else 128
    run = logits(decoder(seq_len, **fields))
    for changed in (0, 70, seq_len - 1):
        assert_influence(run, seq_len, changed, last=seq_len - 1)


@pytest.mark.parametrize(("backend", "layers"), [("vanilla", 1), ("jax_flash", 3), ("splash", 1)])
def test_a_token_beyond_the_windows_of_all_layers_has_no_influence(backend, layers):
    seq_len = 256 if backend == "splash" else 128
    run = logits(decoder(seq_len, num_layers=layers, sliding_window=20, **BACKENDS[backend]))
    for changed in (0, 50):
        assert_influence(run, seq_len, changed, last=changed + 19 * layers)


@pytest.mark.parametrize(
    ("config", "last"),
    [
        (GemmaConfig(num_layers=2), 31),
        (Qwen3Config(num_layers=1, use_sliding_window=True, sliding_window=4), 14),
        (MistralConfig(num_layers=1, sliding_window=4), 14),
    ],
)
def test_any_levanter_decoder_is_causal_and_its_window_acts(config, last):
    config = dataclasses.replace(config, max_seq_len=32, **{**SHAPE, "num_layers": config.num_layers})
    assert_influence(logits(config), 32, 11, last)


def test_mixture_of_experts_is_refused():
    config = MixtralConfig(max_seq_len=16, **SHAPE, n_routed_experts=2, num_experts_per_tok=1, sliding_window=None)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), hax.axis_mapping({"batch": "data"}), pytest.raises(TomatError, match="mixture of experts"):
        eqx.filter_eval_shape(lambda model: causal_activations(model, random_tokens(16, batch=2)), build(config))


def parameter_names(config: DensityDecoderConfig) -> set[str]:
    return {jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(shapes_of(config, VOCAB))}


def gradient_function(config: LmConfig, tokens: hax.NamedArray):
    return traced_operations.gradient_function(config, VOCAB, tokens)


def operations(config: LmConfig) -> Counter:
    return traced_operations.operations(config, VOCAB, random_tokens(config.max_seq_len))


def gradients(config: LmConfig) -> list[tuple[str, jax.Array]]:
    """By path of the parameter, which is its name in a checkpoint."""
    gradient, _ = gradient_function(config, random_tokens(config.max_seq_len))
    found = jax.jit(gradient)(eqx.filter(build(config), eqx.is_array))
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(found)]


@pytest.mark.parametrize("scan_layers", [True, False])
def test_checkpoint_policies_recompute_what_they_say(scan_layers):
    layers, copies = (4, 1) if scan_layers else (2, 2)
    fields = dict(num_layers=layers, scan_layers=scan_layers, **BACKENDS["jax_flash"])
    counts = {name: operations(decoder(128, gradient_checkpointing=name, **fields)) for name in NAMED_POLICIES}
    matmuls = {name: count["dot_general"] for name, count in counts.items()}
    loops = {name: count["while"] for name, count in counts.items()}
    # A layer's forward pass has 7 projections, and 2 products in attention's 2 nested loops; the output of the last
    # projection is not needed again.
    assert matmuls["full"] - matmuls["off"] == 8 * copies
    assert loops["full"] - loops["off"] == 2 * copies
    assert loops["save_attention"] == loops["save_qkv_attention"] == loops["off"]
    assert matmuls["full"] - matmuls["save_attention"] == 2 * copies
    assert matmuls["save_attention"] - matmuls["save_attention_mlp"] == 2 * copies
    assert matmuls["save_qkv_attention"] - matmuls["save_matmuls"] == 2 * copies
    assert loops["save_qkv"] == loops["full"]
    assert matmuls["save_qkv"] < matmuls["full"]
    assert matmuls["save_qkv_attention"] < min(matmuls["save_qkv"], matmuls["save_attention"])
    assert counts["offload"]["device_put"] == 2 * copies  # to the host and back
    assert counts["full"]["device_put"] == 0
    assert counts["nested"]["scan"] > counts["full"]["scan"] or not scan_layers


def test_kept_mlp_layers_are_computed_once_and_the_others_twice():
    def matmuls(**fields):
        config = decoder(128, scan_layers=False, **BACKENDS["jax_flash"], **fields)
        return operations(config)["dot_general"]

    for name in ("full", "offload"):
        saved = [matmuls(gradient_checkpointing=name, save_mlp_layers=layers) for layers in (0, 1, 2)]
        assert [saved[0] - count for count in saved] == [0, 2, 4], name  # gate and up of each such layer
    every_layer = matmuls(gradient_checkpointing="save_attention", save_mlp_layers=2)
    assert every_layer == matmuls(gradient_checkpointing="save_attention_mlp")


VANILLA = BACKENDS["vanilla"]
FUSED = {"fused_qkv": True, "fused_gate_up": True}
IN_VMEM = dict(
    max_seq_len=128, num_layers=1, head_dim=128, attn_backend=AttentionBackend.SPLASH,
    whole_head=WholeHeadConfig(128, 128, 128, 128, interpret=True), qk_rotary=QkRotaryConfig("attention"),
    gradient_checkpointing="save_matmuls",
)  # fmt: skip
NO_CHANGE: dict[str, tuple[dict, ...]] = {
    "layers one by one": (dict(scan_layers=False, **VANILLA), dict(save_mlp_layers=1, query_blocks=3)),
    "biases and shared heads": (
        dict(num_heads=4, num_kv_heads=2, use_bias=True, gradient_checkpointing="off", **VANILLA),
        dict(gradient_checkpointing="save_attention_mlp", flat_mlp=True, query_blocks=3, **FUSED),
    ),
    "paired heads with mixed values, no norm of queries": (
        dict(value_mix=0.3, use_qk_norm=False, gradient_checkpointing="off", **PAIRED, **VANILLA),
        dict(gradient_checkpointing="save_attention", query_blocks=2, **FUSED),
        dict(gradient_checkpointing="nested", flat_mlp=True),
    ),
    "heads in VMEM": (IN_VMEM, FUSED),
}
"""Fields of a decoder, and changes of it."""


@pytest.mark.parametrize("case", NO_CHANGE)
def test_what_is_only_computed_otherwise_has_the_same_gradients_and_parameters(case):
    fields, *changes = NO_CHANGE[case]
    expected = gradients(decoder(**fields))
    for change in changes:
        within = 1e-4 if "fused_qkv" in change else 1e-5
        for (path, one), (other_path, other) in zip(expected, gradients(decoder(**fields | change)), strict=True):
            assert path == other_path
            np.testing.assert_allclose(other, one, atol=within * float(jnp.abs(one).max()) + 1e-12, err_msg=path)


def test_products_of_one_input_as_one_are_fewer():
    counts = {
        names: operations(decoder(gradient_checkpointing="off", **BACKENDS["vanilla"], **dict.fromkeys(names, True)))
        for names in ((), ("fused_qkv",), ("fused_gate_up",), tuple(FUSED))
    }
    fewer = {names: counts[()]["dot_general"] - count["dot_general"] for names, count in counts.items()}
    # Each product has two more in the backward pass.
    assert fewer == {(): 0, ("fused_qkv",): 2 * 3, ("fused_gate_up",): 3, tuple(FUSED): 3 * 3}


def test_on_a_tpu_mesh_alone_it_is_splash_whose_kernel_save_attention_runs_forward_once():
    device = jax.sharding.AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=axis_types, abstract_device=device)

    def kernels(policy):
        gradient, arrays = gradient_function(decoder(256, gradient_checkpointing=policy), random_tokens(256))
        text = jax.jit(gradient).trace(arrays).lower(lowering_platforms=("tpu",)).as_text()
        return Counter(name for name in ("fwd", "dkv", "dq") for _ in range(text.count(f'"splash_mha_{name}')))

    with jax.sharding.use_abstract_mesh(mesh):
        assert kernels("full") == {"fwd": 2, "dkv": 1, "dq": 1}
        assert kernels("save_attention") == {"fwd": 1, "dkv": 1, "dq": 1}
    assert operations(decoder(256))["pallas_call"] == 0


SPLASH, FLASH = AttentionBackend.SPLASH, AttentionBackend.JAX_FLASH


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads is 4 and num_kv_heads is 3"),
        ({"num_heads": 3, "num_kv_heads": 1}, "hidden_dim is 32 and num_heads is 3"),
        ({"head_dim": 5}, "head size is 5"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"use_sliding_window": True}, "sliding_window is not set"),
        ({"gradient_checkpointing": "most"}, "'most'.*save_attention"),
        ({"save_mlp_layers": 3, "num_layers": 2}, "save_mlp_layers is 3"),
        ({"save_mlp_layers": 1}, "save_mlp_layers is 1 and scan_layers is true"),
        *(
            ({"save_mlp_layers": 1, "scan_layers": False, "gradient_checkpointing": policy}, "save_mlp_layers is 1")
            for policy in ("save_matmuls", ScanCheckpointPolicy(offload_block_internals=["mlp_projections"]))
        ),
        ({"attn_backend": AttentionBackend.NVTE}, "nvte.*vanilla, jax_flash, splash"),
        ({"attn_backend": SPLASH, "max_seq_len": 640, "splash": SplashBlockSizes(block_q=512)}, "block_q is 512"),
        ({"attn_backend": FLASH, "flash_attention_block_size": 50}, "is 50 and .* is 64"),
        ({"query_blocks": 4}, "attn_backend is not set"),
        ({"attn_backend": FLASH, "query_blocks": 4}, "query_blocks is 4 and attn_backend"),
        ({**VANILLA, "query_blocks": 17}, "query_blocks is 17"),
        ({**VANILLA, "query_blocks": 2, "sliding_window": 9}, "query_blocks .*sliding_window"),
        ({"value_mix": 1.5}, "value_mix is 1.5"),
        ({"value_mix": 0.1, "num_layers": 1}, "value_mix is 0.1 and num_layers is 1"),
        ({"paired_heads": True}, "paired_heads is true and num_kv_heads is 1"),
        ({"paired_heads": True, "num_kv_heads": 2, "sliding_window": 9}, "paired_heads .*sliding_window"),
        ({"paired_heads": True, "num_kv_heads": 2, "attn_backend": SPLASH, "max_seq_len": 96}, "192.*multiple of 128"),
    ],
)
def test_impossible_configurations_are_refused(fields, message):
    with pytest.raises(TomatError, match=message):
        build(decoder(**fields))


@pytest.mark.parametrize(
    ("scan_layers", "fields"),
    [(False, {}), (True, {"fused_qkv": True, "embedding_skip": 0.25})],
    ids=["one by one", "in a loop, fused, with the embedding added to each"],
)
def test_the_values_of_the_first_layer_are_mixed_into_those_of_every_layer(scan_layers, fields):
    """The plain way: what the first layer's projection gave is handed on, and the embedding is added to each input."""
    config = decoder(value_mix=0.3, num_layers=3, scan_layers=scan_layers, **fields, **BACKENDS["vanilla"])
    plain = dataclasses.replace(config, value_mix=0.0)
    model, unmixed, tokens = build(config), build(plain), random_tokens(64)

    def plainly(tokens):
        x = embedding = model.embeddings.embed(tokens)
        first = None
        for layer, alone in zip(
            model.transformer.layers.unstacked(), unmixed.transformer.layers.unstacked(), strict=True
        ):
            x = x + config.embedding_skip * embedding
            normed = layer.input_layernorm(x)
            values = layer.self_attn.v_proj(normed)
            first = values if first is None else first
            # Attention is linear in its values, and values in their weights.
            mixed = 0.7 * values + 0.3 * first
            given = dataclasses.replace(alone.self_attn, v_proj=lambda _, key=None, mixed=mixed: mixed)
            x = x + given(normed, build_mask(config))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return model.transformer.norm(x)

    found, expected = eqx.filter_jit(
        lambda tokens: (model.activations(tokens, attn_mask=build_mask(config)), plainly(tokens))
    )(tokens)
    np.testing.assert_allclose(found.array, expected.rearrange(found.axes).array, rtol=3e-4, atol=3e-5)
    assert parameter_count(config, VOCAB.size) == parameter_count(plain, VOCAB.size)
    assert parameter_names(config) == parameter_names(plain)
    with pytest.raises(TomatError, match="value_mix is 0.3, and attention was called without"):
        layer = model.transformer.layers.get_layer(1)
        layer(model.embeddings.embed(tokens), build_mask(config))


@pytest.mark.parametrize("backend", BACKENDS)
def test_paired_heads_see_one_anothers_keys_and_values(backend):
    """The formula, head by head: of its own position a pair's first head sees its own key alone."""
    config = decoder(128, **PAIRED, hidden_dim=64, num_layers=1, **BACKENDS[backend])
    attention = build(config).transformer.layers.get_layer(0).self_attn
    x = hax.random.normal(jax.random.PRNGKey(1), (Axis("batch", 2), Axis("position", 128), config.Embed))
    found, qkv = eqx.filter_jit(lambda x: (attention(x, build_mask(config)), attention._compute_qkv(x, key=None)))(x)
    q, k, v = (np.asarray(each.rearrange(axes).array, np.float64) for each, axes in zip(
        qkv,
        (("batch", "kv_head", "q_heads_per_group", "position", "head_size"),)
        + (("batch", "kv_head", "position", "head_size"),) * 2,
        strict=True,
    ))  # fmt: skip
    before = np.tril(np.ones((128, 128), bool))
    read = np.zeros_like(q)
    for head in range(2):
        # All keys of both heads; those of the second head only of earlier positions, for the first.
        both = np.concatenate([k[:, 0], k[:, 1]], axis=1)
        values = np.concatenate([v[:, 0], v[:, 1]], axis=1)
        seen = np.concatenate([before, before if head == 1 else np.tril(before, -1)], axis=1)
        scores = np.einsum("bgqd,bkd->bgqk", q[:, head], both) / np.sqrt(q.shape[-1])
        weights = np.where(seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
        read[:, head] = np.einsum("bgqk,bkd->bgqd", weights / weights.sum(axis=-1, keepdims=True), values)
    named = hax.named(
        jnp.asarray(read.reshape(2, 4, 128, -1), jnp.float32), ("batch", "heads", "position", "head_size")
    )
    expected = attention.o_proj(named)
    np.testing.assert_allclose(found.array, expected.rearrange(found.axes).array, rtol=1e-3, atol=1e-4)


def test_paired_heads_and_kernels_that_rotate_agree():
    """Heads in VMEM: rotated before attention or within it, with the angles of t for both heads of a pair."""
    wide = dict(
        max_seq_len=128, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=128, paired_heads=True, value_mix=0.2
    )
    plain = logits(decoder(**wide, **BACKENDS["vanilla"]))(random_tokens(128))
    in_vmem: dict = dict(
        attn_backend=AttentionBackend.SPLASH, whole_head=WholeHeadConfig(128, 128, 128, 128, interpret=True)
    )
    for kernel in ("pallas", "attention"):
        rotary = QkRotaryConfig(kernel, block_positions=64, interpret=True)
        found = logits(decoder(**wide, **in_vmem, qk_rotary=rotary))(random_tokens(128))
        np.testing.assert_allclose(found, plain, rtol=2e-3, atol=2e-3 * np.abs(plain).max(), err_msg=kernel)


CONFIGS = Path(__file__).parents[2] / "configs" / "train"


@pytest.mark.parametrize(
    ("name", "heads", "head_size", "millions"),
    [("demo", 4, 32, 3.4), ("30m", 4, 128, 34.7), ("200m", 16, 64, 220.4), ("1b", 16, 128, 1065.7)],
)
def test_presets_have_the_size_they_are_named_for(name, heads, head_size, millions):
    config = draccus.decode(LmConfig, {"type": "density_decoder", **preset_model(name)})
    assert round(parameter_count(config, 18_570) / 1e6, 1) == millions
    assert isinstance(config, DensityDecoderConfig) and config.tie_word_embeddings
    assert (config.num_kv_heads, config.actual_head_size) == (heads, head_size)


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
