"""What training, evaluation and prediction ask of a model, whichever Levanter decoder it is: hidden states, head, mask.

What only `DensityDecoder` has (an environment, products in int8) is None for all others.
"""

from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import haliax as hax
from haliax import NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmConfig, LmHeadModel

from tomat.base.errors import TomatError
from tomat.model.embedding import with_float32_sums
from tomat.model.environment import EnvironmentTables, FieldShape
from tomat.model.nearby_atoms import AtomsRead, NearbyAtoms, PatchAtoms

if TYPE_CHECKING:
    # Levanter's decoders import transformers, which takes an eighth of a field model's start.
    from tomat.model.decoder import DensityDecoderConfig, Int8Matmuls


def is_density_decoder(config: LmConfig) -> "TypeGuard[DensityDecoderConfig]":
    """Whether `config` is that of tomat's own decoder; to ask this of a field model, no decoder is imported."""
    return config.get_choice_name(type(config)) == "density_decoder"


def build_mask(config: LmConfig) -> AttentionMask:
    """The attention mask of a decoder: causal, with the sliding window of its configuration."""
    if is_density_decoder(config):
        return AttentionMask.causal(sliding_window=config.window)
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return AttentionMask.causal()
    kind = config.get_choice_name(type(config))
    if kind in ("olmo3", "snowball"):  # these mask by themselves, layer by layer
        return AttentionMask.causal()
    if kind in ("qwen3", "mistral"):  # one window for all layers, which Levanter accepts and does not apply
        return AttentionMask.causal(sliding_window=window)
    said = f"model.type {kind} has sliding_window {window}, which Levanter does not apply layer by layer"
    raise TomatError(f"{said}; unset it, or use model.type density_decoder.")


def causal_activations(
    model: LmHeadModel, tokens: NamedArray, *, key=None, added: NamedArray | None = None
) -> NamedArray:
    """The last hidden states, [batch, position, embed]. Each is computed from the tokens, int [batch, position], up to
    its own position. `added`, with the axes of the result, is added to the embedding of the tokens (`DensityDecoder`
    alone). The gradient of the embedding is summed in float32 (`embedding.py`), whatever the model computes in."""
    more = {} if added is None else {"added": added}
    activations = with_float32_sums(model).activations(tokens, attn_mask=build_mask(model.config), key=key, **more)
    if isinstance(activations, tuple):
        said = f"model.type {model.config.get_choice_name(type(model.config))} is a mixture of experts"
        raise TomatError(f"{said}, whose router loss tomat does not add; choose a dense decoder.")
    return hax.auto_sharded(activations.rearrange((..., "position", model.Embed.name)))


def environment_of(config: LmConfig) -> AtomsRead | None:
    """What a configuration says of the atoms that the model reads: `model.environment`, or a field model's own keys.
    None also for models that cannot read any."""
    return getattr(config, "environment", None)


def is_field(config: LmConfig) -> bool:
    """Whether `config` is that of a field model; for a decoder `field.py` need not be imported."""
    return config.get_choice_name(type(config)) == "field"


def field_of(config: LmConfig) -> FieldShape | None:
    """`model.field` of a configuration; None also for models that cannot have it."""
    return config.field if is_density_decoder(config) else None


def int8_matmuls_of(config: LmConfig) -> "Int8Matmuls | None":
    """`model.int8_matmuls` of a configuration; None also for models that cannot have it."""
    return config.int8_matmuls if is_density_decoder(config) else None


class HiddenHead(NamedTuple):
    """A model's output after each token."""

    hidden: NamedArray
    """[batch, position, embed]; `embed` is longer than the model's where there is a prior."""
    head: NamedArray
    """[vocab, embed]: the product of both is the logits."""
    scale: NamedArray | None = None
    """float32 [batch, position], e/Å³: with a relative codec, the scale of the voxel that a position predicts."""


def hidden_and_head(
    model: LmHeadModel,
    tokens: NamedArray,
    atoms: NearbyAtoms | None = None,
    tables: EnvironmentTables | None = None,
    *,
    key=None,
) -> HiddenHead:
    """The model's output after each token, with what it knows of the atoms if it has an `environment`."""
    from tomat.model.decoder import DensityDecoder  # no field model comes here

    if not isinstance(model, DensityDecoder) or (environment := model.environment) is None:
        return HiddenHead(causal_activations(model, tokens, key=key), model.get_lm_head())
    if atoms is None or tables is None:
        raise TomatError("the model has model.environment and was given no atoms; read them with the rows.")
    if not isinstance(atoms, PatchAtoms):
        raise TomatError("the model reads patches and was given scattered voxels; train it on a set in a patch layout.")
    sums = model.atom_sums(tokens, atoms, tables)
    embedding = environment.embedding(tokens, sums, tables)
    hidden = causal_activations(model, tokens, key=key, added=embedding.vector)
    return HiddenHead(*environment.with_prior(hidden, model.get_lm_head(), embedding, sums, tables), sums.scale)
