"""The shape of a decoder or of a field model, for its FLOPs. Only classes are known whose shape has been compared with
what they build."""

from collections.abc import Mapping
from typing import Any

from levanter.models.apertus import ApertusConfig
from levanter.models.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig
from levanter.models.mistral import MistralConfig
from levanter.models.olmo import Olmo2Config
from levanter.models.olmo3 import Olmo3Config
from levanter.models.qwen import Qwen3Config, QwenConfig

from tomat.base.errors import TomatError
from tomat.hardware.flops import FieldShape, ModelShape
from tomat.model.angular import angular_functions
from tomat.model.any_decoder import build_mask
from tomat.model.decoder import DensityDecoderConfig
from tomat.model.field import FieldConfig

_COUNTED = (
    DensityDecoderConfig, LlamaConfig, QwenConfig, Qwen3Config, MistralConfig, ApertusConfig, Olmo2Config, Olmo3Config,
    GemmaConfig, Gemma2Config, Gemma3Config,
)  # fmt: skip
COUNTED: Mapping[str, type[LmConfig]] = {LmConfig.get_choice_name(kind): kind for kind in _COUNTED}
"""`model.type` -> the class whose FLOPs are counted. Subclasses are not: Mixtral is a Mistral to Python."""

_ALWAYS_NORMED = (Olmo2Config, Olmo3Config, Gemma2Config, Gemma3Config)
_CAN_BE_NORMED = (LlamaConfig, Qwen3Config, DensityDecoderConfig)
"""Classes whose layers have a norm after attention and after the MLP: always, or with `hybrid_norm`."""


def decoder_shape(config: LmConfig, vocab_size: int) -> ModelShape:
    """The shape that `config` builds, taken from what the model is built with: several of Levanter's classes have
    fields that they ignore, such as `head_dim` of Mistral, Qwen and Gemma."""
    kind = type(config)
    if kind not in COUNTED.values():
        said = f"FLOPs of {kind.__name__} are not known: its shape has not been checked against the model it builds"
        raise TomatError(f"{said}; expected exactly one of model.type {', '.join(COUNTED)}.")
    known: Any = config  # what these classes have in common is declared nowhere
    attention = known.attention_config()
    window, full_layers = build_mask(config).sliding_window, 0
    if isinstance(config, Olmo3Config):
        layers = config.get_layer_types()
        full_layers = sum(layer != "sliding_attention" for layer in layers)
        window = config.sliding_window if full_layers < len(layers) else None
    return ModelShape(
        hidden_dim=known.hidden_dim,
        intermediate_dim=known.intermediate_dim,
        num_layers=known.num_layers,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_size,
        vocab_size=vocab_size,
        # Mistral has an untied head, whatever the configuration says.
        tied_embeddings=known.tie_word_embeddings and kind is not MistralConfig,
        gated_mlp=kind is not ApertusConfig,
        hybrid_norm=kind in _ALWAYS_NORMED or (kind in _CAN_BE_NORMED and known.hybrid_norm),
        sliding_window=window,
        full_attention_layers=full_layers if window is not None else 0,
        paired_heads=isinstance(config, DensityDecoderConfig) and config.paired_heads,
    )


def field_shape(config: FieldConfig) -> FieldShape:
    return FieldShape(
        radial=config.basis.n,
        angular_radial=angular_functions(config.basis),
        max_l=config.max_l,
        channels=config.channels,
        products=config.products,
        hidden_dim=config.hidden_dim,
        hidden_layers=config.hidden_layers,
        members=config.members,
        invariants=config.invariants,
        max_atoms=config.max_atoms,
        max_elements=config.max_elements,
    )
