"""The shape of every class that is counted, against the model that it builds, Levanter's own figures and XLA's."""

import dataclasses
from typing import Any

import haliax as hax
import haliax.nn as hnn
import jax
import pytest
from levanter.layers.attention import AttentionBackend
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig
from levanter.models.mistral import MistralConfig
from levanter.models.mixtral import MixtralConfig
from levanter.models.qwen import Qwen3Config, QwenConfig
from levanter.models.qwen3_moe import Qwen3MoeConfig
from levanter.models.snowball import SnowballConfig
from levanter.utils.flop_utils import lm_flops_per_token
from traced_operations import shapes_of, xla_flops

from tomat.base.errors import TomatError
from tomat.hardware.executed import Recomputation, attention_kernels, executed_head_flops, executed_training_products
from tomat.hardware.flops import ModelShape, attention_pairs, levanter_training_flops, training_products
from tomat.model.any_decoder import build_mask
from tomat.model.decoder import DensityDecoderConfig, parameter_count
from tomat.model.shape import COUNTED, decoder_shape

VOCAB, SEQ_LEN, BATCH = 128, 64, 2
Vocab = hax.Axis("vocab", VOCAB)
SIZES: dict[str, Any] = dict(
    max_seq_len=SEQ_LEN, hidden_dim=128, intermediate_dim=320, num_layers=4, num_heads=4, num_kv_heads=2,
    attn_backend=AttentionBackend.VANILLA, scan_layers=False,
)  # fmt: skip


def small(kind: str, **changes: Any) -> LmConfig:
    if kind == "olmo2":  # which asks for flash attention beside its backend
        changes["use_flash_attention"] = False
    return COUNTED[kind](**SIZES | changes)


def is_matrix(module: Any) -> bool:
    return isinstance(module, hnn.Linear | hnn.Embedding)


def matrix_parameters(shape: ModelShape) -> int:
    """All of them, the embedding's among them: tied, it is the head's."""
    return shape.matmul_parameters + (0 if shape.tied_embeddings else shape.head_weights)


@pytest.mark.parametrize("kind", COUNTED)
def test_the_matrices_are_those_of_the_built_model(kind):
    """Whatever the class makes of `head_dim`, of tied embeddings and of a gate."""
    for changes in ({"tie_word_embeddings": True}, {"tie_word_embeddings": False, "head_dim": 48}):
        if kind == "olmo2":
            changes.pop("head_dim", None)
        config = small(kind, **changes)
        modules = jax.tree.leaves(shapes_of(config, Vocab), is_leaf=is_matrix)
        matrices = sum(module.weight.size for module in modules if is_matrix(module))
        shape = decoder_shape(config, VOCAB)
        assert matrix_parameters(shape) == matrices
        # Levanter's own count of FLOPs, which knows of no `head_dim`.
        per_token = config.flops_per_token(VOCAB, SEQ_LEN)
        assert levanter_training_flops(shape, SEQ_LEN) == pytest.approx(3 * per_token * SEQ_LEN, rel=1e-12)
    config = small(kind)
    shape = decoder_shape(config, VOCAB)
    total = config.total_trainable_params(VOCAB)
    if total is not None:
        # And of parameters: besides matrices norms and biases, of which Levanter leaves out some (of queries and keys).
        assert 0 < total - matrix_parameters(shape) < 0.01 * total
        assert total == pytest.approx(parameter_count(config, VOCAB), rel=2e-3)


@pytest.mark.parametrize("kind", COUNTED)
def test_a_forward_pass_is_what_xla_counts(kind):
    config = small(kind, num_layers=1, gradient_checkpointing=False)
    shape = dataclasses.replace(decoder_shape(config, VOCAB), sliding_window=None, full_attention_layers=0)
    expected = BATCH * training_products(shape, SEQ_LEN).total / 3  # vanilla attention multiplies what a window hides
    assert expected < xla_flops(config, Vocab, BATCH, SEQ_LEN, gradient=False) < 1.12 * expected


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES | {"scan_layers": True}),
        small("olmo2", scan_layers=True),  # a norm on what the MLP gives needs it again
        LlamaConfig(**SIZES | {"num_layers": 2}),  # unrolled, where Levanter applies no policy
        small("olmo3", num_layers=2, scan_layers=True, layer_types=["sliding_attention", "full_attention"]),
    ],
    ids=["scanned", "normed", "unrolled", "layers that differ"],
)
def test_recomputation_of_levanters_layers_is_what_xla_counts(config):
    shape = decoder_shape(config, VOCAB)
    kernels = attention_kernels(config, SEQ_LEN, "cpu")
    again = Recomputation.from_config(config, shape, kernels.backend)
    if config.scan_layers and not shape.full_attention_layers:
        shape = dataclasses.replace(shape, num_layers=1)  # XLA counts the body of a loop once
    head = executed_head_flops(shape, SEQ_LEN, VOCAB, None)
    expected = BATCH * executed_training_products(shape, SEQ_LEN, kernels, again, head).total
    assert expected < xla_flops(config, Vocab, BATCH, SEQ_LEN, gradient=True) < 1.1 * expected


def test_windows_in_three_of_four_layers():
    config = small("olmo3", sliding_window=16)
    shape = decoder_shape(config, VOCAB)
    assert (shape.sliding_window, shape.full_attention_layers) == (16, 1)
    per_token = lm_flops_per_token(
        128, 320, 4, 2, 4, SEQ_LEN, VOCAB, glu=True, sliding_window=16, num_full_attention_layers=1
    )
    masks = 3 * 4 * (3 * 16 + SEQ_LEN)  # Levanter's for mask and softmax
    assert training_products(shape, SEQ_LEN).total / 3 == pytest.approx((per_token - masks) * SEQ_LEN, rel=1e-12)
    pairs = 3 * attention_pairs(SEQ_LEN, "causal", 16) + attention_pairs(SEQ_LEN, "causal")
    assert training_products(shape, SEQ_LEN, "causal").attention == 3 * 4 * 4 * 32 * pairs
    # The kernel that leaves out tiles does so in those three alone.
    kernels = attention_kernels(dataclasses.replace(config, attn_backend=AttentionBackend.SPLASH), 2048, "tpu")
    none = dataclasses.replace(shape, sliding_window=None, full_attention_layers=0)
    every = dataclasses.replace(shape, full_attention_layers=0)
    flops = [kernels.flops(each, 2048, kernels.forward) for each in (every, shape, none)]
    assert flops[1] == pytest.approx(flops[0] * 3 / 4 + flops[2] / 4)
    for types, found in ((["full_attention"] * 4, (None, 0)), (["sliding_attention"] * 4, (16, 0))):
        shape = decoder_shape(dataclasses.replace(config, layer_types=types), VOCAB)
        assert (shape.sliding_window, shape.full_attention_layers) == found


def test_a_window_counts_where_the_mask_has_it():
    for config, window in (
        (DensityDecoderConfig(**SIZES, sliding_window=16), 16),
        (Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=16), 16),
        (Qwen3Config(**SIZES, sliding_window=16), None),
        (MistralConfig(**SIZES, sliding_window=16), 16),
        (LlamaConfig(**SIZES), None),
    ):
        assert decoder_shape(config, VOCAB).sliding_window == build_mask(config).sliding_window == window
    with pytest.raises(TomatError, match="sliding_window 16"):
        decoder_shape(QwenConfig(**SIZES, use_sliding_window=True, sliding_window=16), VOCAB)


@dataclasses.dataclass(frozen=True)
class WiderLlama(LlamaConfig):
    """A decoder of somebody's own, in whose layers anything may be."""


def test_all_others_are_refused_by_name():
    mixtures = MixtralConfig(**SIZES, n_routed_experts=8, num_experts_per_tok=2), Qwen3MoeConfig(**SIZES)
    for config in (*mixtures, SnowballConfig(), Gpt2Config(), WiderLlama(**SIZES), object()):
        with pytest.raises(TomatError, match=f"FLOPs of {type(config).__name__} are not known.*density_decoder, llama"):
            decoder_shape(config, VOCAB)
