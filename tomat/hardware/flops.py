"""Floating-point operations of a decoder, counted from its shape.

What is counted: the matrix multiplications, two FLOP for each multiply-add. Norms, rotary embedding, softmax,
activation functions, the optimizer and everything else that is done element by element are not: they are a few per
cent of the FLOPs, run on other units than the peak is given for, and no published MFU has them (Chowdhery et al. 2022,
PaLM, appendix B, arXiv:2204.02311; Kaplan et al. 2020, arXiv:2001.08361, section 2.1).

With D hidden, F intermediate, H query heads, K key-value heads, d head size, L layers, V vocabulary, a token costs
forward

    projections  2 L (D H d + 2 D K d + H d D + n_mlp D F)      n_mlp = 3 with a gated MLP, 2 without
    attention    2 L H d * 2 * (keys that its query sees)       scores, and their product with the values; twice with
                                                                paired heads, whose queries see two heads' keys
    head         2 D V                                          tied or not: the matrix is multiplied all the same

PaLM's `6 N + 12 L H Q T` per token is three times that: N are the matrix parameters (the tied head once), Q is d, T the
length of the sequence. The backward pass multiplies twice for each multiplication of the forward pass (by the
activations for the weights, by the weights for the activations), so a training step costs three forward passes.

Three conventions differ in what they count as the work:

- *full*: every query sees every key of the sequence (or of the window), although half of them are masked. It is PaLM's
  convention, and with one term more Levanter's (`levanter_training_flops`).
- *causal*: the S (S + 1) / 2 pairs that the mask leaves: MaxText's convention, since its pull request 1988.
- *useful*: as causal, for the tokens that are not padding, with logits only where there is a loss and only for the ids
  that the loss looks at.

`executed.py` counts what the compiled program multiplies instead: whole tiles, and whatever is computed twice.

In a field model no token sees another: `FieldShape` says what a voxel costs. There full and causal are the same; useful
counts each atom with one element instead of every element, and only one half of the symmetric products.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from tomat.base.errors import TomatError
from tomat.hardware.chip_table import Operand

AttentionCount = Literal["full", "causal"]

TRAINING_PASSES = 3
"""Forward passes that a training step costs: one forward, two backward."""


@dataclass(frozen=True)
class ModelShape:
    """Everything about a decoder that its FLOPs depend on."""

    hidden_dim: int
    intermediate_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool = True
    """One matrix for embedding and head."""
    gated_mlp: bool = True
    """Gate, up and down projections (Llama, Qwen); without: up and down."""
    hybrid_norm: bool = False
    """A norm on the outputs of attention and of the MLP, before they are added to the residual stream."""
    sliding_window: int | None = None
    """Most keys that a query sees, its own included; None: all up to its own."""
    full_attention_layers: int = 0
    """Layers without the limit of `sliding_window`."""
    paired_heads: bool = False
    """Attention takes two heads as one of twice as many positions (`model.paired_heads`)."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < 1 and name != "full_attention_layers":
                raise TomatError(f"ModelShape.{name} is {value}; expected at least 1.")
        full, layers = self.full_attention_layers, self.num_layers
        if not 0 <= full <= layers:
            raise TomatError(f"ModelShape.full_attention_layers is {full}; expected 0 to {layers}.")

    @property
    def heads_in_one(self) -> int:
        """Heads that attention takes as one head, with as many times the positions."""
        return 2 if self.paired_heads else 1

    @property
    def qkv_weights(self) -> int:
        """Weights of one layer's query, key and value projections."""
        return self.hidden_dim * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)

    @property
    def output_weights(self) -> int:
        return self.num_heads * self.head_dim * self.hidden_dim

    @property
    def mlp_in_weights(self) -> int:
        """Weights of one layer's gate and up projections."""
        return (2 if self.gated_mlp else 1) * self.hidden_dim * self.intermediate_dim

    @property
    def mlp_out_weights(self) -> int:
        return self.intermediate_dim * self.hidden_dim

    @property
    def layer_matmul_weights(self) -> int:
        return self.qkv_weights + self.output_weights + self.mlp_in_weights + self.mlp_out_weights

    @property
    def head_weights(self) -> int:
        """Weights of the output head, tied or not."""
        return self.hidden_dim * self.vocab_size

    @property
    def matmul_parameters(self) -> int:
        """Parameters that multiply each token: all layers, and the head (also if it is the embedding's matrix)."""
        return self.num_layers * self.layer_matmul_weights + self.head_weights

    @property
    def windows(self) -> tuple[tuple[int, int | None], ...]:
        """(number of layers, their window), for all layers."""
        if self.sliding_window is None:
            return ((self.num_layers, None),)
        return (self.num_layers - self.full_attention_layers, self.sliding_window), (self.full_attention_layers, None)


def attention_pairs(seq_len: int, count: AttentionCount, sliding_window: int | None = None) -> int:
    """Query-key pairs of one head in one sequence: for `full` S min(S, w), for `causal` the sum of min(i, w), i = 1..S.
    S is `seq_len`, and w is `sliding_window`: the most keys that a query sees, its own included; None: no limit."""
    window = seq_len if sliding_window is None else min(sliding_window, seq_len)
    if count == "full":
        return seq_len * window
    return window * (window + 1) // 2 + (seq_len - window) * window


def training_products(
    shape: ModelShape,
    seq_len: int,
    count: AttentionCount = "full",
    *,
    head_positions: int | None = None,
    head_rows: int | None = None,
) -> "Products":
    """FLOPs of a training step over one sequence, by what is multiplied. `head_positions` and `head_rows` (ids) are
    those with logits; None: all."""
    rows = shape.vocab_size if head_rows is None else head_rows
    positions = seq_len if head_positions is None else head_positions
    pairs = sum(
        layers * attention_pairs(shape.heads_in_one * seq_len, count, window) for layers, window in shape.windows
    )
    projections = 2 * seq_len * shape.num_layers * shape.layer_matmul_weights
    attention = 2 * 2 * pairs * shape.num_heads * shape.head_dim // shape.heads_in_one
    head = 2 * positions * shape.hidden_dim * rows
    return Products(projections, projections, projections, TRAINING_PASSES * attention, TRAINING_PASSES * head)


@dataclass(frozen=True)
class UsefulTokens:
    """The tokens of a sequence that are not padding, and the logits that the loss looks at."""

    n_preamble: int
    """Tokens that are neither density nor padding: cell, atoms, markers."""
    n_density: int
    head_rows: int
    """Ids over which the loss normalises."""
    loss_on_preamble: bool = False
    """Whether tokens of the preamble are predicted too."""

    @property
    def n_tokens(self) -> int:
        """Tokens that are not padding."""
        return self.n_preamble + self.n_density

    @property
    def loss_positions(self) -> int:
        """Positions whose next token is predicted; nothing predicts the first token."""
        return max(0, self.n_tokens - 1) if self.loss_on_preamble else self.n_density


def useful_training_products(shape: ModelShape, row: UsefulTokens) -> "Products":
    """FLOPs of a training step over one sequence on which its result depends: no padding, no masked pairs, no logits
    that the loss leaves out."""
    return training_products(shape, row.n_tokens, "causal", head_positions=row.loss_positions, head_rows=row.head_rows)


def levanter_training_flops(shape: ModelShape, seq_len: int) -> float:
    """FLOPs of a training step over one sequence as Levanter counts them: 3 x `lm_flops_per_token` x S.

    `levanter.utils.flop_utils.lm_flops_per_token` (marin-levanter 0.2.227.dev40316220070) is the *full* convention
    with 3 FLOP more for each entry of the score matrix (mask and softmax, after Megatron-LM), and takes D / H for the
    head size whatever the configuration says. It is the convention of the runs in the tracking issue. With 918
    TFLOP/s, 18,570 ids and as many key-value heads as heads it gives 8.73 % for 200M (v6e-16, batch 128, context
    8,192, 2.08 s) and 12.94 % for 1B (v6e-32, batch 256, 5.76 s), where these runs say about 8.7 % and about 13 %. The
    plain full convention gives 8.68 % and 12.92 %.
    """
    head_dim = shape.hidden_dim / shape.num_heads
    dense = (shape.mlp_in_weights + shape.mlp_out_weights) + shape.hidden_dim**2
    dense += shape.hidden_dim * head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
    attention = shape.heads_in_one * seq_len * shape.num_heads * (4 * head_dim + 3)
    forward = shape.num_layers * (2 * dense + attention) + 2 * shape.head_weights
    return TRAINING_PASSES * forward * seq_len


@dataclass(frozen=True)
class OperandTypes:
    """The type of both operands in each kind of product."""

    projections: Operand = "bf16"
    """The forward products of the layers' projections, in attention and in the MLP."""
    input_gradients: Operand = "bf16"
    weight_gradients: Operand = "bf16"
    attention: Operand = "bf16"
    """Scores, their product with the values, and the gradients of both."""
    head: Operand = "bf16"
    """Logits and their gradients."""
    sums: Operand = "f32"
    """A field model's sums over atoms, whatever the type of its other products."""


@dataclass(frozen=True)
class Products:
    """FLOPs of a training step by the kinds of `OperandTypes`. A share of the peak is a share of the time that the
    products would take, each at the peak for the type of its own operands (`chip_table.py`)."""

    projections: float
    input_gradients: float
    weight_gradients: float
    attention: float
    head: float
    sums: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def times(self, count: int) -> "Products":
        """The FLOPs of `count` sequences."""
        return Products(**{name: count * flops for name, flops in vars(self).items()})

    def by_operand(self, types: OperandTypes) -> dict[Operand, float]:
        """FLOPs by the type of the operands; types without FLOPs are left out."""
        found: dict[Operand, float] = {}
        for field in fields(self):
            if flops := getattr(self, field.name):
                operand = getattr(types, field.name)
                found[operand] = found.get(operand, 0.0) + flops
        return found

    def least_seconds(self, types: OperandTypes, peak_of: Callable[[Operand], float]) -> float:
        """The time that the products take, each at the peak for its operands. `peak_of` gives FLOP/s of all chips
        together."""
        return sum(flops / peak_of(operand) for operand, flops in self.by_operand(types).items())


@dataclass(frozen=True)
class FieldShape:
    """Everything about a field model (`model/field.py`) that its FLOPs depend on."""

    radial: int
    """Radial functions of the sums without angles."""
    angular_radial: int
    """Radial functions of the sums with harmonics."""
    max_l: int
    channels: int
    products: int
    hidden_dim: int
    hidden_layers: int
    members: int
    invariants: int
    max_atoms: int
    """Room for atoms, each of which is summed at every voxel."""
    max_elements: int

    @property
    def harmonics(self) -> int:
        """Spherical harmonics above l = 0."""
        return (self.max_l + 1) ** 2 - 1

    @property
    def network_weights(self) -> int:
        """Weights of one member's network, whose output is one number: a layer takes in the invariants, and
        `hidden_layers` more follow."""
        return self.hidden_dim * (self.invariants + self.hidden_layers * self.hidden_dim + 1)

    @property
    def matmul_parameters(self) -> int:
        """Parameters that multiply each voxel: the networks, and the projections of the sums."""
        projections = self.max_l * self.angular_radial * self.channels * self.products
        return self.members * (self.network_weights + projections)


def field_training_products(shape: FieldShape, voxels: int, *, useful: bool = False) -> Products:
    """FLOPs of a training step over `voxels` voxels. With N atoms, E elements, K and J radial functions without and
    with angles, M harmonics, C channels, Q products and a network of W weights, a voxel costs forward

        sums         2 N E (K + M J) + 2 K E                 with the promolecule
        invariants   2 E K C + 2 E M J Q + 2 M Q Q           of each member: channels, projections, all pairs
        network      2 W                                     of each member

    The sums have no gradient. As they are constant, the invariants only have gradients with respect to what is learnt;
    pairs have them with respect to both factors. With `useful`, an atom has one element, and the pairs that differ cost
    M Q (Q + 1). The projections times what is learnt about an element are computed once per row, and not counted.
    """
    elements, harmonics, pairs = shape.max_elements, shape.harmonics, shape.products**2
    per_atom = shape.radial + harmonics * shape.angular_radial
    sums = 2 * shape.max_atoms * per_atom * (1 if useful else elements) + 2 * shape.radial * elements
    linear = 2 * elements * (shape.radial * shape.channels + harmonics * shape.angular_radial * shape.products)
    spectrum = harmonics * (shape.products * (shape.products + 1) if useful else 2 * pairs)
    network = 2 * shape.network_weights
    each = voxels * shape.members
    return Products(
        projections=each * (linear + spectrum + network),
        input_gradients=each * (2 * spectrum + network),
        weight_gradients=each * (linear + network),
        attention=0,
        head=0,
        sums=voxels * sums,
    )
