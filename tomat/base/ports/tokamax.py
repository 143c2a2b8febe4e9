"""Private names of tokamax 0.0.12, whose programs timed kernels are.

Its public interface lists no operation by name, and its calls choose an implementation by the device that is there,
where tomat compiles for a chip that is not. So the classes of its operations are imported from where they lie, and made
from the arguments that its files of timings hold with the adapters that wrote them.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

VERSION = "0.0.12"

OPS = {
    "dot_product_attention": ("attention.base", "DotProductAttention"),
    "dot_product_attention_vjp": ("attention.base", "DotProductAttentionVjp"),
    "xla_chunked_dot_product_attention": ("attention.xla_chunked", "XlaChunkedDotProductAttention"),
    "pallas_mosaic_tpu_flash_attention": ("attention.pallas_mosaic_tpu", "PallasMosaicTpuFlashAttention"),
    "pallas_mosaic_tpu_flash_attention_vjp": ("attention.pallas_mosaic_tpu_vjp", "PallasMosaicTpuFlashAttentionVjp"),
    "linear_softmax_cross_entropy_loss": ("linear_softmax_cross_entropy_loss.base", "LinearSoftmaxCrossEntropyLoss"),
    "linear_softmax_cross_entropy_loss_vjp": (
        "linear_softmax_cross_entropy_loss.base", "LinearSoftmaxCrossEntropyLossVjp",
    ),
    "pallas_mosaic_tpu_linear_softmax_cross_entropy_loss": (
        "linear_softmax_cross_entropy_loss.pallas_mosaic_tpu", "PallasMosaicTpuLinearSoftmaxCrossEntropyLoss",
    ),
    "pallas_mosaic_tpu_linear_softmax_cross_entropy_loss_vjp": (
        "linear_softmax_cross_entropy_loss.pallas_mosaic_tpu", "PallasMosaicTpuLinearSoftmaxCrossEntropyLossVjp",
    ),
    "gated_linear_unit": ("gated_linear_unit.base", "GatedLinearUnit"),
    "normalization": ("normalization.base", "Normalization"),
    "normalization_vjp": ("normalization.base", "NormalizationVjp"),
    "triangle_multiplication": ("triangle_multiplication.base", "TriangleMultiplication"),
}  # fmt: skip
"""Operation, as files of timings name it -> module below `tokamax._src.ops`, and class."""


def class_of(op: str) -> Any:
    """The class of one of `OPS`."""
    module, name = OPS[op]
    return getattr(importlib.import_module(f"tokamax._src.ops.{module}"), name)


def bound(
    cls: type, fields: Mapping[str, Any], settings: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """An operation with its settings, and its arguments as arrays to be.

    Args:
        cls: Of the operation, or derived from it.
        fields: Of the operation, where they are not its own.
        settings: Its tiles and layouts; empty: none are set.
        arguments: Of its call, as a file of timings has them.

    Raises:
        ValueError: tokamax refuses them (pydantic's).
    """
    from tokamax._src import pydantic as adapters
    from tokamax._src.ops.op import _get_arg_spec_adapter

    operation: Any = cls(**fields)
    if settings:
        config = adapters.get_adapter(operation.config_cls).validate_python(dict(settings))
        operation = dataclasses.replace(operation, config=config)
    return operation, dict(_get_arg_spec_adapter(operation).validate_python(dict(arguments)))
