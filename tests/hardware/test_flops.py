"""FLOPs against what XLA counts in the compiled step, against Levanter, and against the published convention; the least
time of products.

Time: nearly all of it XLA compiling eleven small steps.
"""

import dataclasses
import math
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from haliax.nn.scan import ScanCheckpointPolicy
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from levanter.layers.attention import AttentionBackend
from levanter.models.llama import LlamaConfig
from traced_operations import xla_flops

from tomat.base.errors import TomatError
from tomat.data.density.promolecule import Promolecule
from tomat.hardware.chips import CHIPS
from tomat.hardware.executed import (
    ATTENTION_NAME,
    MLP_NAME,
    OUTPUT_NAME,
    QKV_NAME,
    KernelPass,
    Recomputation,
    attention_kernels,
    executed_head_flops,
    executed_training_products,
)
from tomat.hardware.flops import (
    ModelShape,
    OperandTypes,
    Products,
    UsefulTokens,
    attention_pairs,
    field_training_products,
    levanter_training_flops,
    training_products,
    useful_training_products,
)
from tomat.model.checkpoint_policies import ATTENTION_OUTPUT, ATTENTION_PROJECTION, MLP_PROJECTIONS, QKV
from tomat.model.decoder import DensityDecoderConfig
from tomat.model.environment import environment_tables
from tomat.model.field import FieldConfig
from tomat.model.nearby_atoms import Room, ScatteredAtoms
from tomat.model.shape import decoder_shape, field_shape
from tomat.model.tiles import SplashBlockSizes

BATCH, SEQ_LEN, VOCAB = 2, 256, 512
SIZED = hax.Axis("vocab", VOCAB), BATCH, SEQ_LEN
SIZES: dict[str, Any] = dict(
    max_seq_len=SEQ_LEN,
    hidden_dim=128,
    intermediate_dim=384,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=48,  # not hidden_dim / num_heads
    tie_word_embeddings=True,
    attn_backend=AttentionBackend.VANILLA,
    scan_layers=False,  # XLA counts the body of a loop once
)

SHAPES = st.builds(
    ModelShape,
    hidden_dim=st.integers(1, 256),
    intermediate_dim=st.integers(1, 512),
    num_layers=st.integers(1, 4),
    num_heads=st.integers(1, 8),
    num_kv_heads=st.integers(1, 8),
    head_dim=st.integers(1, 64),
    vocab_size=st.integers(1, 1000),
    gated_mlp=st.booleans(),
    sliding_window=st.none() | st.integers(1, 300),
)
"""Without paired heads, which the published formulas do not have."""


# Elementwise work is left out of the formulas, so XLA counts more: here, where a layer is 128 wide, norms, softmax,
# rotary embedding and activations come to 2 % of its matrix multiplications (at a width of 1,024 to an eighth of
# that).
ELEMENTWISE = 0.03


def test_training_step_without_checkpointing_is_what_xla_counts():
    config = LlamaConfig(**SIZES, gradient_checkpointing=False)
    expected = BATCH * training_products(decoder_shape(config, VOCAB), SEQ_LEN).total
    assert expected < xla_flops(config, *SIZED, gradient=True) < (1 + ELEMENTWISE) * expected


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": "full", "hybrid_norm": True},
        {"gradient_checkpointing": "save_matmuls"},
        {"paired_heads": True},
        {"gradient_checkpointing": "save_attention", "query_blocks": 4},
        {"num_layers": 2, "gradient_checkpointing": "save_attention", "save_mlp_layers": 1},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_recomputation_is_what_xla_counts(changes):
    config = DensityDecoderConfig(**SIZES | changes)
    _assert_executed_is_what_xla_counts(config, decoder_shape(config, VOCAB))


def test_blocks_of_queries_leave_out_what_is_above_the_diagonal():
    one, several = (DensityDecoderConfig(**SIZES, query_blocks=n) for n in (1, 8))
    pairs, of_all = (attention_kernels(each, SEQ_LEN, "cpu").forward.pairs(SEQ_LEN, None) for each in (several, one))
    assert pairs / of_all == 9 / 16


@pytest.mark.parametrize("scan_layers, passes", [(True, 3), (False, 2)])
def test_the_first_layers_values_are_projected_again(scan_layers, passes):
    sizes = SIZES | {"num_layers": 2, "scan_layers": scan_layers}
    plain, mixed = (DensityDecoderConfig(**sizes, value_mix=mix) for mix in (0.0, 0.1))
    shape, kernels = decoder_shape(plain, VOCAB), attention_kernels(plain, SEQ_LEN, "cpu")
    again = [Recomputation.from_config(config, shape, kernels.backend) for config in (plain, mixed)]
    executed = [executed_training_products(shape, SEQ_LEN, kernels, each, 0.0).total for each in again]
    expected = passes * 2 * SEQ_LEN * 128 * 48 * 2
    assert executed[1] - executed[0] == expected
    measured = xla_flops(mixed, *SIZED, gradient=True) - xla_flops(plain, *SIZED, gradient=True)
    # And the mixture itself, number by number.
    assert BATCH * expected < measured < 1.15 * BATCH * expected
    assert training_products(shape, SEQ_LEN).total == training_products(decoder_shape(mixed, VOCAB), SEQ_LEN).total


def test_paired_heads_cost_attention_twice_and_nothing_else():
    plain = ModelShape(128, 384, 2, 4, 2, 48, VOCAB)
    paired = dataclasses.replace(plain, paired_heads=True)
    layers, heads, width, length = 2, 4, 48, 256
    full = 3 * 2 * 2 * layers * heads * width * length**2
    assert training_products(paired, length).total - training_products(plain, length).total == full
    # Of half the heads each the pairs of 2 S positions, where S (S + 1) / 2 were seen: S^2 more for two heads.
    more = training_products(paired, length, "causal").total - training_products(plain, length, "causal").total
    assert more == 3 * 2 * 2 * layers * heads * width * length**2 // 2
    assert levanter_training_flops(paired, length) > levanter_training_flops(plain, length)
    for backend in (AttentionBackend.VANILLA, AttentionBackend.SPLASH):
        kernels = [
            attention_kernels(DensityDecoderConfig(**SIZES | {"attn_backend": backend}, paired_heads=on), 256, "tpu")
            for on in (True, False)
        ]
        flops = [each.flops(shape, length, each.forward) for each, shape in zip(kernels, (paired, plain), strict=True)]
        # Whole score matrices, and one tile on the diagonal of 512 positions for one of 256.
        assert flops[0] == 2 * flops[1]


def test_nested_recomputation_is_what_xla_counts():
    config = DensityDecoderConfig(**SIZES | {"scan_layers": True, "num_layers": 4}, gradient_checkpointing="nested")
    shape = decoder_shape(config, VOCAB)
    # Of two groups of two layers. Haliax unrolls the groups; the layers of a group run in a loop, whose body XLA counts
    # once.
    _assert_executed_is_what_xla_counts(config, dataclasses.replace(shape, num_layers=2))


def _assert_executed_is_what_xla_counts(config, shape):
    kernels = attention_kernels(config, SEQ_LEN, "cpu")
    recomputation = Recomputation.from_config(config, shape, kernels.backend)
    head = executed_head_flops(shape, SEQ_LEN, VOCAB, None)
    expected = BATCH * executed_training_products(shape, SEQ_LEN, kernels, recomputation, head).total
    measured = xla_flops(config, *SIZED, gradient=True)
    assert expected < measured < (1 + ELEMENTWISE) * expected
    # The tolerance is tight enough to tell the policy from no checkpointing.
    assert measured > 1.05 * BATCH * training_products(shape, SEQ_LEN).total


@pytest.mark.parametrize(
    "policy, backend, expected",
    [
        (False, "splash", (0, 0, 0, 0, 0, 0)),
        ("offload", "splash", (1, 1, 1, 1, 0, 0)),
        ("save_attention", "splash", (1, 0, 1, 1, 0, 0)),
        ("save_attention", "vanilla", (1, 0.5, 1, 1, 0, 0)),
        ("save_attention", "query_blocks", (1, 0, 1, 1, 0, 0)),
        ("save_qkv", "splash", (6 / 8, 1, 1, 1, 0, 0)),
        ("nested", "splash", (2, 2, 2, 2, 1, 0)),
    ],
)
def test_policies(policy, backend, expected):
    assert recomputed(DensityDecoderConfig(**SIZES, gradient_checkpointing=policy), backend) == expected


def recomputed(config, backend):
    return dataclasses.astuple(Recomputation.from_config(config, decoder_shape(config, VOCAB), backend))


def test_what_is_offloaded_by_name_is_not_computed_again():
    names = [QKV_NAME, OUTPUT_NAME]
    policy = ScanCheckpointPolicy(save_carries="offload", offload_block_internals=names)
    config = DensityDecoderConfig(**SIZES, gradient_checkpointing=policy, use_qk_norm=False)
    assert recomputed(config, "splash") == (0, 1, 0, 1, 0, 0)


def test_checkpoint_names_are_the_decoders():
    names = (QKV_NAME, ATTENTION_NAME, OUTPUT_NAME, MLP_NAME)
    assert names == (QKV, ATTENTION_OUTPUT, ATTENTION_PROJECTION, MLP_PROJECTIONS)


@given(st.integers(1, 80), st.integers(1, 20), st.integers(1, 20), st.none() | st.integers(1, 90))
@settings(max_examples=60, deadline=None)
def test_pairs_and_tiles_are_those_of_the_mask(seq_len, block_q, block_kv, window):
    seen = [(q, k) for q in range(seq_len) for k in range(q + 1) if window is None or q - k < window]
    assert attention_pairs(seq_len, "causal", window) == len(seen)
    assert attention_pairs(seq_len, "full", window) == seq_len * min(seq_len, window or seq_len)
    tiles = {(q // block_q, k // block_kv) for q, k in seen}
    assert KernelPass(2, block_q, block_kv).pairs(seq_len, window) == len(tiles) * block_q * block_kv


@given(shape=SHAPES, seq_len=st.integers(1, 512))
@settings(max_examples=50, deadline=None)
def test_published_formula_and_order_of_the_conventions(shape, seq_len):
    full, causal = training_products(shape, seq_len).total, training_products(shape, seq_len, "causal").total
    assert causal <= full
    if shape.sliding_window is None:
        # PaLM, appendix B: 6 N + 12 L H Q T a token.
        palm = 6 * shape.matmul_parameters + 12 * shape.num_layers * shape.num_heads * shape.head_dim * seq_len
        assert full == seq_len * palm
    whole = UsefulTokens(n_preamble=0, n_density=seq_len, head_rows=shape.vocab_size)
    assert useful_training_products(shape, whole).total == causal
    part = UsefulTokens(n_preamble=seq_len // 3, n_density=seq_len // 3, head_rows=1)
    assert useful_training_products(shape, part).total < causal or seq_len == 1


def test_useful_tokens_count_logits_only_where_there_is_a_loss():
    shape = ModelShape(64, 128, 2, 4, 4, 16, 1000)
    row = UsefulTokens(n_preamble=20, n_density=100, head_rows=800)
    layers = training_products(shape, 120, "causal").total - 3 * 2 * 64 * 1000 * 120
    assert useful_training_products(shape, row).total == layers + 3 * 2 * 64 * 800 * 100
    with_preamble = dataclasses.replace(row, head_rows=1000, loss_on_preamble=True)
    assert useful_training_products(shape, with_preamble).total == layers + 3 * 2 * 64 * 1000 * 119


def test_splash_kernels():
    shape = ModelShape(128, 384, 1, 1, 1, 64, VOCAB)
    unfused = attention_kernels(DensityDecoderConfig(), 1024, "tpu")
    # Two of 2 x 2 tiles of 512 lie on the diagonal, one below it.
    assert unfused.flops(shape, 1024, unfused.forward) == 2 * 2 * 64 * 3 * 512**2
    assert unfused.flops(shape, 1024, *unfused.backward) == 2 * 7 * 64 * 3 * 512**2
    blocks = SplashBlockSizes(block_q=1024, block_kv=256, block_q_dkv=256, block_kv_dkv=256, use_fused_bwd=True)
    fused = attention_kernels(DensityDecoderConfig(splash=blocks), 1024, "tpu")
    assert fused.flops(shape, 1024, fused.forward) == 2 * 2 * 64 * 1024**2
    assert fused.flops(shape, 1024, *fused.backward) == 2 * 5 * 64 * 10 * 256**2
    windowed = dataclasses.replace(shape, sliding_window=256)
    assert fused.flops(windowed, 1024, *fused.backward) == 2 * 5 * 64 * 7 * 256**2
    # Levanter's own splash call, and the kernel away from TPUs.
    assert attention_kernels(LlamaConfig(), 1024, "tpu") == unfused
    assert attention_kernels(LlamaConfig(), 1024, "gpu").backend == "jax_flash"
    assert attention_kernels(DensityDecoderConfig(), 1024, "gpu").backend == "cudnn"
    assert attention_kernels(DensityDecoderConfig(), 1024, "cpu").backend == "jax_flash"
    cudnn = attention_kernels(DensityDecoderConfig(attn_backend="cudnn"), 1024, "gpu")
    assert cudnn.flops(shape, 1024, cudnn.forward) == 2 * 2 * 64 * 36 * 128**2
    assert cudnn.flops(windowed, 1024, *cudnn.backward) == 2 * 5 * 64 * (1 + 2 + 3 * 6) * 128**2


def test_ragged_loss_blocks_are_rounded_up():
    shape = ModelShape(64, 128, 2, 4, 4, 16, 1000)
    assert executed_head_flops(shape, 1000, 7, 256) == 3 * 2 * 64 * 7 * 1024
    assert executed_head_flops(shape, 100, 7, 256) == 3 * 2 * 64 * 7 * 100


OPERANDS = st.sampled_from(["bf16", "int8", "fp8", "f32"])
FLOPS = st.floats(0, 1e18)


@given(
    flops=st.tuples(*[FLOPS] * 5), types=st.tuples(*[OPERANDS] * 5), chip=st.sampled_from(sorted(CHIPS)),
    count=st.integers(1, 9),
)  # fmt: skip
def test_each_product_at_the_peak_of_its_operands(flops, types, chip, count):
    products, operands, peak_of = Products(*flops), OperandTypes(*types), CHIPS[chip].peak_of
    seconds = sum(done / peak_of(kind) for done, kind in zip(flops, types, strict=True))
    assert products.least_seconds(operands, peak_of) == pytest.approx(seconds)
    assert products.times(count).least_seconds(operands, peak_of) == pytest.approx(count * seconds)
    assert sum(products.by_operand(operands).values()) == pytest.approx(products.total)
    # Of one type: FLOPs over its peak, as every table of MFU has it.
    assert products.least_seconds(OperandTypes(), peak_of) == pytest.approx(products.total / peak_of("bf16"))


def test_nonsense_is_refused():
    with pytest.raises(TomatError, match="hidden_dim is 0"):
        ModelShape(0, 1, 1, 1, 1, 1, 1)
    with pytest.raises(TomatError, match="full_attention_layers is 2; expected 0 to 1"):
        ModelShape(1, 1, 1, 1, 1, 1, 1, sliding_window=4, full_attention_layers=2)


def _multiplied(jaxpr) -> float:
    """FLOPs of the products of a program, those of a loop as often as it turns; of ways by platform, the last one's."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            sides = [equation.invars[0].aval.shape[axis] for axis in contracted]
            total += 2 * math.prod(sides) * math.prod(equation.outvars[0].aval.shape)
        turns = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        inside = list(jaxprs_in_params(equation.params))
        total += turns * sum(map(_multiplied, inside[-1:] if equation.primitive.name == "cond" else inside))
    return total


def test_a_field_models_step_is_what_its_program_multiplies():
    config = FieldConfig(max_seq_len=2048, channels=6, products=10, hidden_dim=48, members=2, max_atoms=24, max_l=2)
    room = Room.of(config).shapes(ScatteredAtoms, config.max_seq_len)
    batch = hax.Axis("batch", 2)
    given = {key: jax.ShapeDtypeStruct((batch.size, *sizes), dtype) for key, (dtype, *sizes) in room.items()}
    model = eqx.filter_eval_shape(lambda: config.build(hax.Axis("vocab", 10), key=jax.random.PRNGKey(0)))
    weights, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    one = Promolecule(config.basis, {8: np.ones(config.basis.n)}, 1, {8: 6.0})
    tables = environment_tables(one, np.zeros(2, np.float32))

    def loss(weights, arrays):
        found, _ = eqx.combine(weights, static).densities(ScatteredAtoms.of(arrays, batch), tables)
        return sum(hax.sum(each).scalar() for each in found)

    program = jax.make_jaxpr(jax.grad(loss))(weights, given)
    counted = field_training_products(field_shape(config), batch.size * config.max_seq_len).total
    # What is multiplied once a row alone is not counted.
    assert counted <= _multiplied(program.jaxpr) < 1.01 * counted
