"""The decoder that reads densities: Levanter's Qwen3 with knobs that act.

`DensityDecoderConfig` is the default `model.type`. It differs from Levanter's `qwen3` in that `use_qk_norm`,
`sliding_window` and `gradient_checkpointing` with unrolled layers do what they say, and in that every tile size of the
TPU attention kernels is in the configuration. Its classes override `init`, since Levanter's return classes that are
fixed in them. Any other Levanter decoder works too, through `any_decoder.py`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import equinox as eqx
import haliax.nn as hnn
import jax
import jax.random as jrandom
from haliax import Axis, NamedArray
from haliax.jax_utils import maybe_rng_split, named_call, shaped_rng_split, tree_checkpoint_name
from haliax.nn.scan import BlockFoldable, BlockSeq, ScanCheckpointPolicy, Stacked
from levanter.layers.attention import AttentionMask
from levanter.layers.rotary import Llama3RotaryEmbeddingsConfig, RotaryEmbeddingsConfig
from levanter.models.llama import LlamaDecoderLayer, LlamaEmbedding, LlamaLMHeadModel, LlamaMlp, LlamaTransformer
from levanter.models.lm_model import LmConfig
from levanter.models.qwen import Qwen3Config

from tomat.base.config_keys import check_range, key
from tomat.base.errors import TomatError
from tomat.model.attention import (
    BACKENDS,
    Backend,
    DensityAttention,
    DensityAttentionConfig,
    can_join,
    joined_product,
    parts,
)
from tomat.model.causal_blocks import MAX_QUERY_BLOCKS, flash_block
from tomat.model.checkpoint_policies import (
    MLP_PROJECTIONS,
    PolicyName,
    chosen_policy,
    keeps_mlp_projections,
    unrolled_policies,
)
from tomat.model.environment import Environment, EnvironmentConfig, EnvironmentTables, FieldShape, Sums
from tomat.model.nearby_atoms import PatchAtoms
from tomat.model.tiles import QkRotaryConfig, SplashBlockSizes, WholeHeadConfig

if TYPE_CHECKING:
    from tomat.model.field import FieldModel
    from tomat.model.kv_cache import KvCache

Int8Matmuls = Literal["forward", "forward_and_inputs"]
"""Which products of a linear layer are in int8 (`int8_dot.py`): the layer's own; or this and the product that gives the
gradient of its input. The product for the gradient of the weights never is."""


@LmConfig.register_subclass("density_decoder")
@dataclass(frozen=True)
class DensityDecoderConfig(Qwen3Config):
    """Levanter's Qwen3 with knobs that act. Fields not described here are Levanter's (`LlamaConfig`)."""

    max_seq_len: int = 0
    """Tokens per sequence, filled in from the data; 0: not known yet."""
    tie_word_embeddings: bool = True
    """One matrix for embedding and logits."""
    rope: RotaryEmbeddingsConfig = field(default_factory=Llama3RotaryEmbeddingsConfig)
    """Rotary embedding; Llama-3's by default."""
    initializer_range: float = key(
        0.02, unused="weights begin with Haliax's own scale, 1/sqrt(inputs of the matrix); leave it out"
    )
    reference_checkpoint: str = key(
        "Qwen/Qwen3-0.6B",
        free="nothing",
        unused="no weights of Hugging Face are loaded; `--warm_start` takes those of another run",
    )
    tokenizer: str | None = key(
        None, free="nothing", unused="densities have tokens of their own; data.layout and the codec decide them"
    )
    flash_attention_block_size: int | None = key(None, free="rounding")
    """Number of queries and of keys in a block of attn_backend jax_flash."""
    scan_layers: bool = key(True, free="rounding")
    """One compiled layer for all, instead of one after another; the layers' arrays are stacked."""
    use_qk_norm: bool = True
    """RMS norm over each head's queries and keys."""
    hybrid_norm: bool = False
    """Also normalise the output of attention and that of the MLP, before each is added to the residual stream."""
    sliding_window: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Each position sees itself and `sliding_window` - 1 positions before it, in every layer; None: all before it."""
    use_sliding_window: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """False turns `sliding_window` off, as in a Hugging Face configuration; None: on if `sliding_window` is set."""
    # A string that names no backend is refused with their list, which draccus would not give.
    attn_backend: Backend | str | None = key(None, free="rounding")  # pyright: ignore[reportIncompatibleVariableOverride]
    """vanilla, jax_flash, splash or cudnn; None: splash where the step is compiled for TPUs, cudnn on NVIDIA GPUs that
    have it, jax_flash elsewhere."""
    query_blocks: int = key(1, free="rounding")
    """Number of blocks of queries of attn_backend vanilla, each against the keys up to its last: with 4, ten sixteenths
    of the scores are computed. Faster on a CPU. 1: all scores at once."""
    splash: SplashBlockSizes = SplashBlockSizes()
    """Tile sizes of the splash attention kernels."""
    whole_head: WholeHeadConfig | None = None
    """Sizes of tomat's own kernels, with all positions of a head in VMEM. None: the splash kernels."""
    qk_rotary: QkRotaryConfig = QkRotaryConfig()
    """What computes the norm and the rotary embedding of queries and keys."""
    fused_qkv: bool = key(False, free="rounding")
    """Queries, keys and values are one product. Parameters and checkpoints are as without."""
    fused_gate_up: bool = key(False, free="rounding")
    """The two projections into the MLP are one product. Parameters and checkpoints are as without."""
    flat_mlp: bool = key(False, free="rounding")
    """Batch and position are one axis in the MLP's products. For CPUs: with two axes, XLA's compiler (jaxlib 0.11.1)
    copies gradients into another order, in loops without vectors. Parameters and checkpoints are as without."""
    # tomat's names stand first: Haliax gives some of them to other policies.
    gradient_checkpointing: bool | PolicyName | ScanCheckpointPolicy = key("full", free="rounding", entries=True)
    """A name in `checkpoint_policies.py`, true (full), false (off), or the fields of a `ScanCheckpointPolicy`."""
    save_mlp_layers: int = key(0, free="rounding")
    """Number of last layers, which must be unrolled, that also keep what the MLP's two input projections give."""
    embedding_skip: float = key(0.0, added=True)
    """The embedding (with what the atoms add to it), times this, is added to the input of each layer; 0: nothing is."""
    value_mix: float = key(0.0, added=True)
    """The values v of every layer become (1 - value_mix) v + value_mix v1, v1 those of the first (arXiv:2410.17897)."""
    paired_heads: bool = key(False, added=True)
    """Two neighbouring heads of keys, and their queries, attend to one another's keys and values as well: the first of
    a pair to the second's before its own position, the second to the first's up to its own. Both heads of a position
    are rotated alike. Attention takes twice as many products."""
    int8_matmuls: Int8Matmuls | None = None
    """Products of the projections of attention and of the MLP that are in int8: the layers' own (`forward`), or also
    those that give the gradients of their inputs (`forward_and_inputs`); None: none."""
    environment: EnvironmentConfig | None = None
    """What a position knows of the atoms around its voxel, and the logits' prior; None: only the preamble has atoms."""
    field: FieldShape | None = key(None, added=True)
    """A field model. The prior and the residual that is read start from its density, not from the sum of atoms. It has
    the `model` keys of the run whose weights `--warm_start` gives it; these are not trained."""

    def __post_init__(self) -> None:
        check_range("model.", self, hidden_dim=1, intermediate_dim=1, num_layers=1, num_heads=1, num_kv_heads=1)
        for wrong, said in self._impossible():
            if wrong:
                raise TomatError(f"model.{said}.")
        if self.field is not None:
            self.field.check("model.field.")
        self.qk_rotary.check_head_size(self.actual_head_size)
        self._check_kernels(2 * self.max_seq_len if self.paired_heads else self.max_seq_len)

    def _impossible(self) -> Iterator[tuple[object, str]]:
        """Conditions that are refused, each with its message; each may rely on those before it."""
        heads, kv_heads, layers, window = self.num_heads, self.num_kv_heads, self.num_layers, self.sliding_window
        both_heads = f"num_heads is {heads} and num_kv_heads is {kv_heads}"
        yield heads % kv_heads, f"{both_heads}; expected num_heads to be a multiple of num_kv_heads"
        if self.head_dim is None:
            width = f"hidden_dim is {self.hidden_dim} and num_heads is {heads}"
            yield self.hidden_dim % heads, f"{width}; expected a multiple of num_heads, or head_dim set"
        size = self.actual_head_size
        yield size % 2, f"head_dim: the head size is {size}; the rotary embedding expects an even one"
        yield window is not None and window < 1, f"sliding_window is {window}; expected at least 1, or null for none"
        no_window = self.use_sliding_window and window is None
        yield no_window, "use_sliding_window is true, but sliding_window is not set; give its length"
        window, backend, blocks = self.window, self.attn_backend, self.query_blocks
        unknown = backend not in (None, Backend.DEFAULT, *BACKENDS)
        yield unknown, f"attn_backend is {backend}; expected one of {', '.join(BACKENDS)}, or null"

        policy, mlp = self.checkpoint_policy, self.save_mlp_layers  # refuses an unknown policy
        yield not 0 <= mlp <= layers, f"save_mlp_layers is {mlp}; expected 0 to num_layers, {layers}"
        all_keep = mlp and keeps_mlp_projections(policy)
        same = f"save_mlp_layers is {mlp} and scan_layers is true, where all layers keep the same"
        yield mlp and self.scan_layers, f"{same}: set scan_layers: false, or gradient_checkpointing: save_attention_mlp"
        yield all_keep, f"save_mlp_layers is {mlp}, but gradient_checkpointing keeps that in all layers; leave one out"

        in_vmem = self.whole_head is not None
        windowed = f"whole_head is set and sliding_window is {window}; its kernels have no window"
        yield in_vmem and window is not None, f"{windowed}: leave whole_head unset, which takes the splash kernels"
        unrotated = "qk_rotary.kernel is attention and model.whole_head is not set; only its kernels rotate"
        rotates = not in_vmem and self.qk_rotary.kernel == "attention"
        yield rotates, f"{unrotated}: set model.whole_head ({{}} for its own sizes), or qk_rotary.kernel: pallas"
        mix = self.value_mix
        yield not 0 <= mix <= 1, f"value_mix is {mix}; expected a share, 0 (none) to 1"
        one_layer = f"value_mix is {mix} and num_layers is 1"
        yield mix and layers == 1, f"{one_layer}; there is no layer after the first to mix into"
        paired = self.paired_heads
        yield paired and kv_heads % 2, f"paired_heads is true and num_kv_heads is {kv_heads}; expected an even number"
        both = f"and sliding_window is {window}; leave one of them out"
        yield paired and window is not None, f"paired_heads is true {both}"
        yield not 1 <= blocks <= MAX_QUERY_BLOCKS, f"query_blocks is {blocks}; expected 1 to {MAX_QUERY_BLOCKS}"
        other = f"query_blocks is {blocks} and attn_backend is {backend or 'not set'}; only vanilla has them"
        elsewhere = blocks > 1 and backend != Backend.VANILLA
        yield elsewhere, f"{other}: set model.attn_backend: vanilla, or leave them out"
        yield blocks > 1 and window is not None, f"query_blocks is {blocks} {both}"
        if self.field is not None:
            around = self.environment
            yield around is None, "field is set and model.environment is not: set it, because it has the prior"
            other = f"field.basis is {self.field.basis} and model.environment.basis {around and around.basis}"
            yield around and around.basis != self.field.basis, f"{other}; expected the same"

    def check_chip(self, device_kind: str) -> None:
        """Refuse TPU kernels whose arrays a chip, by JAX's name of it, cannot hold in VMEM."""
        from tomat.hardware.executed import COMPUTE_BYTES
        from tomat.model.vmem import check_rotary, head_tiles

        if self.attn_backend not in (None, Backend.DEFAULT, Backend.SPLASH) or not self.max_seq_len:
            return
        size, kernel = self.actual_head_size, self.qk_rotary.kernel
        if self.whole_head is not None:
            positions = 2 * self.max_seq_len if self.paired_heads else self.max_seq_len
            rotate = kernel == "attention"
            head_tiles(self.whole_head, positions, size, COMPUTE_BYTES, rotate=rotate, device_kind=device_kind)
        if kernel == "pallas":
            check_rotary(self.qk_rotary, self.max_seq_len, size, COMPUTE_BYTES, device_kind)

    def _check_kernels(self, positions: int) -> None:
        """Refuse sizes of kernels that cannot attend over so many positions; 0: not known yet."""
        try:
            if positions and self.attn_backend == Backend.SPLASH:
                if self.whole_head is None:
                    self.splash.for_sequence(positions)
                else:
                    from tomat.hardware.executed import COMPUTE_BYTES
                    from tomat.model.vmem import head_tiles

                    rotate = self.qk_rotary.kernel == "attention"
                    head_tiles(self.whole_head, positions, self.actual_head_size, COMPUTE_BYTES, rotate=rotate)
            if positions and self.attn_backend == Backend.JAX_FLASH:
                flash_block(positions, self.flash_attention_block_size)
        except TomatError as error:
            if not self.paired_heads:
                raise
            said = f"model.paired_heads is true, which doubles positions to {positions}"
            raise TomatError(f"{said}, and {error}") from error

    @property
    def model_type(self) -> type["DensityDecoder"]:
        return DensityDecoder

    @property
    def window(self) -> int | None:
        """The sliding window in force, in positions; None: there is none."""
        return None if self.use_sliding_window is False else self.sliding_window

    @property
    def checkpoint_policy(self) -> ScanCheckpointPolicy:
        return chosen_policy(self.gradient_checkpointing)

    def attention_config(self) -> DensityAttentionConfig:
        values = vars(super().attention_config()) | {
            "qk_norm": self.norm_config if self.use_qk_norm else None,
            "sliding_window": self.window,
        }
        own = ("splash", "whole_head", "qk_rotary", "fused_qkv", "value_mix", "paired_heads", "query_blocks")
        return DensityAttentionConfig(**values, **{name: getattr(self, name) for name in own})

    def total_trainable_params(self, vocab_size: int) -> float:
        return parameter_count(self, vocab_size)

    def to_hf_config(self, vocab_size: int, config_overrides: dict | None = None):
        """Refused: Qwen3's would be another model, and what `tomat export` writes needs no counterpart there."""
        raise TomatError("Hugging Face has no density_decoder; `tomat export` writes its weights as a folder.")


def _norm(config: DensityDecoderConfig) -> hnn.RmsNorm:
    """A new norm over `embed`; Levanter declares the base class of what it builds."""
    return cast(hnn.RmsNorm, config.mk_LayerNorm(config.Embed))


def _with_int8[M: eqx.Module](module: M, products: Int8Matmuls | None) -> M:
    """`module` with the products of the linear layers that are its fields in int8; None: as it is."""
    if products is None:
        return module
    from tomat.model.int8_dot import Int8DotGeneral

    product = Int8DotGeneral.init(products)
    linears = {
        field.name: dataclasses.replace(linear, dot_general=product)
        for field in dataclasses.fields(cast(Any, module))
        if isinstance(linear := getattr(module, field.name), hnn.Linear)
    }
    return dataclasses.replace(cast(Any, module), **linears)


class DensityMlp(LlamaMlp):
    """Levanter's SwiGLU block, with names on what its input projections give, for checkpoint policies to keep."""

    fused_gate_up: bool = eqx.field(static=True, default=False)
    flat: bool = eqx.field(static=True, default=False)

    @named_call
    def __call__(self, x: NamedArray, *, key=None) -> NamedArray:
        rows = tuple(axis for axis in x.axes if axis.name != "embed")
        if not self.flat or len(rows) < 2:
            return self._of(x, key)
        return self._of(x.flatten_axes(rows, "row"), key).unflatten_axis("row", rows)

    def _of(self, x: NamedArray, key) -> NamedArray:
        k_gate, k_up, k_down = maybe_rng_split(key, 3)
        if self.fused_gate_up and can_join((self.gate_proj, self.up_proj)):
            joined, sizes = joined_product(x, (self.gate_proj, self.up_proj), "mlp")
            gate, up = parts(tree_checkpoint_name(joined, MLP_PROJECTIONS), "mlp", sizes)
            return self.down_proj(self.act(gate) * up, key=k_down)
        # In Levanter's order, so that without such a policy the program is Levanter's to the letter.
        gate = tree_checkpoint_name(self.gate_proj(x, key=k_gate), MLP_PROJECTIONS)
        hidden = self.act(gate)
        hidden = hidden * tree_checkpoint_name(self.up_proj(x, key=k_up), MLP_PROJECTIONS)
        return self.down_proj(hidden, key=k_down)


class DensityDecoderLayer(LlamaDecoderLayer):
    """One layer: Levanter's Llama layer around `DensityAttention`."""

    def __call__(
        self,
        x: NamedArray,
        mask: NamedArray | AttentionMask | None,
        *,
        key=None,
        pos_ids: NamedArray | None = None,
        skip: NamedArray | None = None,
        first_values: NamedArray | None = None,
    ) -> NamedArray:
        """`skip`, with the axes of `x`, is first added to `x`; the layer's values are mixed with `first_values`."""
        if skip is not None:
            x = x + skip
        layer = self.mixing(first_values)
        return super(DensityDecoderLayer, layer).__call__(x, mask, key=key, pos_ids=pos_ids)

    def mixing(self, first_values: NamedArray | None) -> "DensityDecoderLayer":
        """The layer for one call, with its values mixed with those of the first layer; None: the layer as it is."""
        if first_values is None:
            return self
        attention = dataclasses.replace(cast(DensityAttention, self.self_attn), first_values=first_values)
        return dataclasses.replace(self, self_attn=attention)

    @staticmethod
    def init(config: DensityDecoderConfig, *, key) -> "DensityDecoderLayer":
        k_attention, k_mlp = jrandom.split(key, 2)
        attention = DensityAttention.init(config.attention_config(), key=k_attention)
        plain = LlamaMlp.init(config.Embed, config.Mlp, config.activation_function, key=k_mlp, use_bias=config.use_bias)
        mlp = DensityMlp(
            plain.gate_proj, plain.up_proj, plain.down_proj, plain.act, config.fused_gate_up, config.flat_mlp
        )
        attention, mlp = _with_int8(attention, config.int8_matmuls), _with_int8(mlp, config.int8_matmuls)
        norms = [_norm(config) for _ in range(4 if config.hybrid_norm else 2)]
        return DensityDecoderLayer(config, attention, mlp, *norms)


class DensityTransformer(LlamaTransformer):
    config: DensityDecoderConfig = eqx.field(static=True)

    @staticmethod
    def init(config: DensityDecoderConfig, *, key) -> "DensityTransformer":
        container = Stacked if config.scan_layers else BlockSeq
        layers = container.init(config.Layers, DensityDecoderLayer, gradient_checkpointing=config.checkpoint_policy)(
            config, key=shaped_rng_split(key, config.num_layers)
        )
        return DensityTransformer(config, cast(BlockFoldable[LlamaDecoderLayer], layers), _norm(config))

    @named_call
    def __call__(
        self, x: NamedArray, attn_mask: NamedArray | AttentionMask | None, *, key, pos_ids: NamedArray | None = None
    ) -> NamedArray:
        skip = self.skip_of(x)
        given = {"skip": skip, "first_values": self.first_values_of(x, skip)}
        more: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if isinstance(self.layers, Stacked):
            if not more:
                return super().__call__(x, attn_mask, key=key, pos_ids=pos_ids)
            keys = maybe_rng_split(key, self.config.num_layers) if key is not None else None
            x = cast(NamedArray, self.layers.fold(x, mask=attn_mask, key=keys, pos_ids=pos_ids, **more))
            return self.norm(x)
        config = self.config
        keys = maybe_rng_split(key, config.num_layers)
        policies = unrolled_policies(config.checkpoint_policy, config.num_layers, config.save_mlp_layers)

        def run_layer(carry, layer, key):
            carry = tree_checkpoint_name(carry, "layer_input")
            return layer(carry, mask=attn_mask, key=key, pos_ids=pos_ids, **more)

        # Haliax's BlockSeq stores the policy and does not apply it.
        for layer, layer_key, policy in zip(self.layers.unstacked(), keys, policies, strict=True):
            x = policy.checkpoint("layer_input", "layer_parameters", run_layer)(x, layer, layer_key)
        return self.norm(x)

    def skip_of(self, x: NamedArray) -> NamedArray | None:
        """The part of the embedding `x` that is added to the input of each layer; None: nothing is added."""
        return self.config.embedding_skip * x if self.config.embedding_skip else None

    def first_values_of(self, x: NamedArray, skip: NamedArray | None) -> NamedArray | None:
        """Values of the first layer, [batch, position, kv_head, head_size], which are mixed into those of each layer;
        None: they are not. The first layer computes them again: what a scan carries would be kept for every layer."""
        if self.config.value_mix == 0:
            return None
        first = self.layers.get_layer(0)
        return first.self_attn.v_proj(first.input_layernorm(x if skip is None else x + skip))

    def unrolled(self) -> "DensityTransformer":
        """The same model with its layers one by one: a loop around it then slices no stack at each turn."""
        blocks = BlockSeq(self.layers.unstacked(), self.config.Layers, self.config.checkpoint_policy)
        return dataclasses.replace(self, layers=cast(BlockFoldable[LlamaDecoderLayer], blocks))

    @named_call
    def decode_kept(
        self, x: NamedArray, caches: "Sequence[KvCache]", position: jax.Array
    ) -> "tuple[NamedArray, list[KvCache]]":
        """The last hidden state, from the caches, and the caches after it; arrays as for `DensityAttention.decode`."""
        kept = []
        skip = self.skip_of(x)
        first_values = self.first_values_of(x, skip)
        for layer, cache in zip(self.layers.unstacked(), caches, strict=True):
            if skip is not None:
                x = x + skip
            x, cache = cast(Any, layer).mixing(first_values).decode(x, cache, position, None)
            kept.append(cache)
        return self.norm(x), kept


class DensityDecoder(LlamaLMHeadModel):
    transformer: DensityTransformer
    environment: Environment | None = None
    field: "FieldModel | None" = None

    @classmethod
    def init(cls, Vocab: Axis, config: DensityDecoderConfig, *, key) -> "DensityDecoder":
        if config.max_seq_len < 1:
            raise TomatError(f"model.max_seq_len is {config.max_seq_len}; give the sequence length to build a model.")
        k_transformer, k_embedding = jrandom.split(key, 2)
        transformer = DensityTransformer.init(config, key=k_transformer)
        embeddings = LlamaEmbedding.init(Vocab, config, key=k_embedding)
        head = environment = None
        if not config.tie_word_embeddings:
            head = hnn.Linear.init(In=config.Embed, Out=Vocab, key=k_embedding, use_bias=False, out_first=True)
        if config.environment is not None:
            # A random key of its own, so that all other weights are those of the model without it.
            environment = Environment.init(config.environment, config.Embed, key=jrandom.fold_in(key, 1))
        known = None
        if config.field is not None:
            from tomat.model.field import field_model

            known = field_model(Vocab, config.field, key=jrandom.fold_in(key, 2))
        return cls(transformer, embeddings, head, environment, known)

    def atom_sums(self, tokens: NamedArray, atoms: PatchAtoms, tables: EnvironmentTables) -> Sums:
        """What the environment and the field model, if there is one, know at each position."""
        assert self.environment is not None
        return self.environment.sums(tokens, atoms, tables, self.field and self.field.of_patches)

    def activations(
        self,
        input_ids: NamedArray,
        attn_mask: AttentionMask | NamedArray | None = None,
        *,
        key=None,
        pos_ids: NamedArray | None = None,
        added: NamedArray | None = None,
    ) -> NamedArray:
        """The last hidden state; `added`, [batch, position, embed], is added to the embedding of the ids."""
        x = self.embeddings.embed(input_ids)
        if added is not None:
            x = x + added.rearrange(x.axes)
        return self.transformer(x, attn_mask=attn_mask, key=key, pos_ids=pos_ids)


def parameter_count(config: LmConfig, vocab_size: int) -> int:
    """Parameters of the model that `config` builds, counted from its shapes; nothing is allocated."""
    if config.max_seq_len < 1:
        config = dataclasses.replace(config, max_seq_len=1)
    Vocab = Axis("vocab", vocab_size)
    shapes = eqx.filter_eval_shape(lambda key: config.build(Vocab, key=key), jrandom.PRNGKey(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes) if isinstance(leaf, jax.ShapeDtypeStruct))


PRESETS = {
    # 3.4 M parameters, 4 heads of 32: small enough that two CPU cores train it in minutes.
    "demo": {"hidden_dim": 128, "num_layers": 4, "num_heads": 4, "intermediate_dim": 512},
    # 34.7 M parameters, 4 heads of 128.
    "30m": {"hidden_dim": 512, "num_layers": 6, "num_heads": 4, "intermediate_dim": 2048},
    # 220.4 M parameters, 16 heads of 64: the shape of the runs on v6e-16. Wider heads (8 of 128) do the same sums with
    # fewer attention steps: the compiler's estimate outside attention falls from 0.71 s to 0.51 s a step.
    "200m": {"hidden_dim": 1024, "num_layers": 12, "num_heads": 16, "intermediate_dim": 4096},
    # 1,065.7 M parameters, 16 heads of 128: the shape of the runs on v6e-32.
    "1b": {"hidden_dim": 2048, "num_layers": 20, "num_heads": 16, "intermediate_dim": 5632},
}
"""Model keys by the name of a size. Parameters are counted with 18,570 ids, of which 16,384 are density bins."""


def preset_model(name: str) -> dict[str, Any]:
    """Model keys, fields of Levanter's `LlamaConfig` and its relatives; each head has its own keys and values."""
    if name not in PRESETS:
        raise TomatError(f"preset is '{name}'; expected one of {', '.join(PRESETS)}.")
    own = PRESETS[name]
    return {**own, "num_kv_heads": own["num_heads"], "tie_word_embeddings": True, "rope": {"type": "llama3"}}
