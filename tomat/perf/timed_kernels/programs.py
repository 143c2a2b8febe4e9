"""Builds the program of a timed kernel as tokamax builds it, for a chip that is not here.

The version is pinned in `pyproject.toml` (extra `calibrate`); what is not public of it is in `base/ports/tokamax.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tomat.base.errors import TomatError
from tomat.base.ports.tokamax import OPS, bound, class_of
from tomat.base.reporting import first_line
from tomat.perf.timed_kernels.formulas import FORMULAS, formula
from tomat.perf.timed_kernels.kept_backward import attention_backward
from tomat.perf.timed_kernels.timings import KernelTiming

if TYPE_CHECKING:
    import jax

RAGGED = ("ragged_dot", "pallas_mosaic_tpu_ragged_dot")
"""Products of groups of rows. Which blocks run, the sizes of the groups decide: they are data, and no row says them."""

STATED = {"xla_chunked_dot_product_attention": {"chunk_size": (512, 1024)}}
"""Fields of an operation that a timing does not say: tokamax's public call has these (0.0.12, `attention/api.py`)."""

DEFAULTS_OF = {
    "dot_product_attention_vjp": "dot_product_attention",
    "pallas_mosaic_tpu_flash_attention_vjp": "pallas_mosaic_tpu_flash_attention",
}
"""Backward passes, and the operation whose call has the defaults of what their rows leave out: bias, soft cap, dropout.
tokamax's backward passes have none of their own (0.0.12, `attention/base.py`)."""

DEFAULT_PRECISION = "BF16_BF16_F32"
"""What `Precision.DEFAULT` of both operands means on a TPU (tokamax 0.0.12, `precision.py`); rows of its first versions
have the pair."""


def no_program(timing: KernelTiming) -> str | None:
    """Why a timing has no program, as far as its operation says; None for the others."""
    if timing.op in RAGGED:
        return "how many of its blocks run depends on the sizes of its groups, which no compile knows"
    if timing.op not in (*OPS, *FORMULAS):
        return f"tokamax 0.0.12 has no operation {timing.op}"
    return None


def lower_kernel(timing: KernelTiming, device: Any) -> jax.stages.Lowered:
    """The program of one timing, for `device`.

    Args:
        timing: The row.
        device: One device of a described chip (`topology_devices`).

    Raises:
        TomatError: tokamax has no such operation, refuses the arguments, or JAX cannot lower them.
    """
    import jax
    from tokamax import benchmarking

    reason = no_program(timing)
    if reason is not None:
        raise TomatError(reason)
    sharding = jax.sharding.SingleDeviceSharding(device)
    # What Pallas kernels ask for the chip that they are traced for.
    described = jax.sharding.AbstractDevice(device.device_kind, device.num_cores, platform="tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=described)
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            if timing.op in FORMULAS:
                function, arrays = formula(timing)
                return jax.jit(function).lower(*_placed(arrays, sharding))
            operation, arguments = _bound(timing)
            function, arrays = benchmarking.standardize_function(operation, kwargs=arguments, seed=None)
            return jax.jit(function).lower(_placed(arrays, sharding))
    except TomatError:
        raise
    except Exception as error:  # whatever the operation and JAX raise while tracing
        raise TomatError(f"it cannot be lowered: {first_line(error)}") from error


def _placed(arrays: Iterable[Any], sharding: Any) -> list[jax.ShapeDtypeStruct]:
    import jax

    return [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array in arrays]


def _bound(timing: KernelTiming) -> tuple[Any, dict[str, Any]]:
    """The operation with its settings, and its arguments as arrays to be."""
    there = class_of(timing.op)
    # It asks whether the device of this process can run it; the chip is not here.
    own: dict[str, Any] = {"supported_on": lambda self, device: True}
    if timing.op == "dot_product_attention_vjp":  # the one operation whose own JAX 0.11 refuses
        own["_fwd"] = attention_backward(there, class_of("dot_product_attention"))
    cls, arguments = type(there.__name__, (there,), own), _with_presets(timing.arguments)
    try:
        operation, arrays = bound(cls, STATED.get(timing.op, {}), timing.settings, arguments)
    except ValueError as error:  # pydantic's
        raise TomatError(f"tokamax refuses its arguments: {first_line(error)}") from None
    return operation, _defaults(timing.op, operation) | arrays


def _defaults(op: str, operation: Any) -> dict[str, Any]:
    """What the call of the forward pass has for arguments that a backward pass demands; {} for other operations."""
    if op not in DEFAULTS_OF:
        return {}
    demanded = inspect.signature(operation._fwd).parameters
    forward = inspect.signature(class_of(DEFAULTS_OF[op]).bind)
    return {
        name: parameter.default
        for name, parameter in forward.parameters.items()
        if parameter.default is not inspect.Parameter.empty
        and name in demanded
        and demanded[name].default is inspect.Parameter.empty
    }


def _with_presets(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` with the precisions of tokamax's first versions as the presets of today."""
    precision = arguments.get("precision")
    if not isinstance(precision, list) or not all(isinstance(pair, list) for pair in precision):
        return dict(arguments)
    if any(pair != ["DEFAULT", "DEFAULT"] for pair in precision):
        raise TomatError(f"precision is {precision}; expected DEFAULT pairs or presets such as BF16_BF16_F32")
    return {**arguments, "precision": [DEFAULT_PRECISION] * len(precision)}
