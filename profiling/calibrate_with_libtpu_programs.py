"""Builds the program of one of tokamax's timings for a chip that is not present. It is also the process that compiles
one (`python -m calibrate_with_libtpu_programs REQUEST.json`).

tokamax is pinned in `pyproject.toml` (extra `calibrate`). The public interface of tokamax 0.0.12 lists no operation by
name, and its calls choose an implementation by the present device. So the operation classes are imported from tokamax's
private modules. Their arguments are read from files of timings with the adapters that wrote these.

Two programs are written here. `chunked_xla_linear_softmax_cross_entropy_loss` was in tokamax when its rows were timed
(its repository at commit 6c65b547, `linear_softmax_cross_entropy_loss/chunked_xla.py`), but is not in 0.0.12, so it is
written from its formula. tokamax 0.0.12 makes the explicit backward pass of attention with `jax.core.DropVar`
(`tokamax/_src/ad.py`), which JAX 0.11 does not have, and the pass cannot be replaced from outside. Here it is the one
that JAX derives, without the recomputation of the forward pass."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Literal, Var, jaxpr_as_fun

from tomat.base.errors import TomatError
from tomat.base.reporting import first_line
from tomat.perf.plan.compile.process import answer
from tomat.perf.timed_kernels.compile import compile_kernel
from tomat.perf.timed_kernels.timings import KernelTiming, described

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
"""Operation, as files of timings name it -> module below `tokamax._src.ops` and class."""


def class_of(op: str) -> Any:
    """The class of one of `OPS`."""
    module, name = OPS[op]
    return getattr(importlib.import_module(f"tokamax._src.ops.{module}"), name)


def bound(
    cls: type, fields: Mapping[str, Any], settings: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """An operation with its settings, and its arguments with arrays as shapes.

    Args:
        cls: Class of the operation, or derived from it.
        fields: Fields of the operation that differ from their defaults.
        settings: Tiles and layouts of the operation; empty: none are set.
        arguments: Arguments of the call, as a file of timings has them.

    Raises:
        ValueError: tokamax refuses the arguments (from pydantic).
    """
    from tokamax._src import pydantic as adapters
    from tokamax._src.ops.op import _get_arg_spec_adapter

    operation: Any = cls(**fields)
    if settings:
        config = adapters.get_adapter(operation.config_cls).validate_python(dict(settings))
        operation = dataclasses.replace(operation, config=config)
    return operation, dict(_get_arg_spec_adapter(operation).validate_python(dict(arguments)))


def kept_backward(forward: Callable[..., tuple[Any, Any]], *inputs: Any) -> Callable[[Any, Any], tuple[Any, ...]]:
    """The backward pass of `forward` as a function of kept values and of the gradients of the outputs.

    Args:
        forward: Returns (outputs, kept values). Kept values may be inputs, outputs, or values in between.
        inputs: Arrays, trees of them, or their shapes.

    Returns:
        `(kept, gradients of the outputs) -> gradients of each input`.
    """

    def both(inputs: tuple[Any, ...], d_out: Any) -> tuple[Any, tuple[Any, ...]]:
        _, backward, kept = jax.vjp(forward, *inputs, has_aux=True)
        return kept, backward(d_out)

    outputs, kept = jax.eval_shape(forward, *inputs)
    closed = jax.make_jaxpr(both)(inputs, outputs)
    whole: Jaxpr = closed.jaxpr
    n_inputs, n_kept = len(jax.tree.leaves(inputs)), len(jax.tree.leaves(kept))
    kept_places, gradients = whole.outvars[:n_kept], whole.outvars[n_kept:]
    # A kept constant, such as a mask, is known anyway.
    number_of = {
        place: number
        for number, place in enumerate(kept_places)
        if isinstance(place, Var) and place not in whole.constvars
    }
    given = [*number_of, *whole.invars[n_inputs:]]
    known = {*given, *whole.constvars}
    equations = []
    for equation in whole.eqns:
        if all(isinstance(place, Literal) or place in known for place in equation.invars):
            # A kept value is not overwritten by the equation that computes it.
            made = [Var(place.aval) if place in number_of else place for place in equation.outvars]
            equations.append(equation.replace(outvars=made))
            known.update(made)
    if not all(isinstance(place, Literal) or place in known for place in gradients):
        raise TomatError("the backward pass needs more than what the forward pass keeps")
    run = jaxpr_as_fun(
        closed.replace(jaxpr=whole.replace(invars=given, outvars=gradients, eqns=equations, debug_info=None))
    )

    def backward(kept: Any, d_out: Any) -> tuple[Any, ...]:
        values = jax.tree.leaves(kept)
        found = run(*(values[number] for number in number_of.values()), *jax.tree.leaves(d_out))
        return jax.tree.unflatten(jax.tree.structure(inputs), found)

    return backward


def attention_backward(backward_op: type, forward_op: type) -> Callable[..., tuple[Any, None]]:
    """A replacement for `_fwd` of tokamax's explicit backward pass of attention."""

    @functools.wraps(backward_op._fwd)  # its signature says which arguments a row may leave out
    def run(self, residuals, out, dout, q, k, v, *, bias, config, return_residuals, **arguments):
        del self, config
        if return_residuals or arguments["paging_info"] is not None:
            raise TomatError("a backward pass of attention has no residuals and no pages")

        def attend(q, k, v, bias):
            made, sums = forward_op()._fwd(q, k, v, bias=bias, return_residuals=True, config=None, **arguments)
            return made, (q, k, v, bias, made, sums)

        d_q, d_k, d_v, d_bias = kept_backward(attend, q, k, v, bias)((q, k, v, bias, out, residuals), dout)
        return {"q": d_q, "k": d_k, "v": d_v, "bias": d_bias}, None

    return run


DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "i32": jnp.int32}


def blockwise_loss(
    x: jax.Array, labels: jax.Array, w: jax.Array, *, block_rows: int, block_columns: int, mean: bool
) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy of `x @ w` (sum or mean), as float32, and the log-normaliser of each row, in `x`'s type.

    Args:
        x: `[rows, width]`.
        labels: The right column of each row, `[rows]`.
        w: `[width, columns]`.
    """
    n_rows, n_columns = x.shape[0], w.shape[1]
    # Padded columns, whose logit is 0, count too, as in tokamax's operation: only the time of this program matters.
    x = jnp.pad(x, ((0, -n_rows % block_rows), (0, 0)))
    labels = jnp.pad(labels, (0, -n_rows % block_rows))
    w = jnp.pad(w, ((0, 0), (0, -n_columns % block_columns)))
    real = (jnp.arange(x.shape[0]) < n_rows).astype(x.dtype)

    def of_rows(block: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        normalisers, loss = carry
        first_row = block * block_rows

        def of_columns(inner: jax.Array, inner_carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            normaliser, right = inner_carry
            first_column = inner * block_columns
            of_block = lax.dynamic_slice_in_dim(x, first_row, block_rows)
            columns = lax.dynamic_slice_in_dim(w, first_column, block_columns, axis=1)
            logits = (of_block @ columns).astype(x.dtype)
            place = lax.dynamic_slice_in_dim(labels, first_row, block_rows) - first_column
            normaliser = jnp.logaddexp(normaliser, jax.nn.logsumexp(logits, axis=-1))
            return normaliser, right + jnp.sum(logits * jax.nn.one_hot(place, block_columns, dtype=x.dtype), axis=-1)

        start = (jnp.full(block_rows, -jnp.inf, x.dtype), jnp.zeros(block_rows, x.dtype))
        normaliser, right = lax.fori_loop(0, w.shape[1] // block_columns, of_columns, start)
        counted = lax.dynamic_slice_in_dim(real, first_row, block_rows)
        normalisers = lax.dynamic_update_slice_in_dim(normalisers, normaliser, first_row, axis=0)
        return normalisers, loss + jnp.sum((normaliser - right) * counted)

    start = (jnp.zeros(x.shape[0], x.dtype), jnp.zeros((), x.dtype))
    normalisers, loss = lax.fori_loop(0, x.shape[0] // block_rows, of_rows, start)
    loss = loss / n_rows if mean else loss
    return loss.astype(jnp.float32), normalisers[:n_rows]


CHUNKED_LOSS = "chunked_xla_linear_softmax_cross_entropy_loss"
FORMULAS = (CHUNKED_LOSS,)
"""Operations that are built from their formula here."""


def formula(timing: KernelTiming) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """The function and the arguments of a timing whose operation is one of `FORMULAS`."""
    arguments, settings = dict(timing.arguments), dict(timing.settings)
    arrays = [described(arguments.pop(name, None), DTYPES) for name in ("x", "labels", "w")]
    reduction, residuals = arguments.pop("reduction", "sum"), arguments.pop("return_residuals", False)
    rows, columns = settings.pop("b_block_size", None), settings.pop("v_block_size", None)
    blocks = all(isinstance(block, int) and block > 0 for block in (rows, columns))
    if not blocks or None in arrays or arguments or settings or reduction not in ("sum", "mean"):
        raise TomatError(
            f"{timing.op} has the arrays x, labels and w ({', '.join(DTYPES)}), reduction, return_residuals and the "
            f"settings b_block_size and v_block_size; found {dict(timing.arguments)}, {dict(timing.settings)}"
        )
    run = functools.partial(blockwise_loss, block_rows=rows, block_columns=columns, mean=reduction == "mean")
    return (run if residuals else lambda *values: run(*values)[0]), [array for array in arrays if array is not None]


RAGGED = ("ragged_dot", "pallas_mosaic_tpu_ragged_dot")
"""Products of groups of rows. The group sizes decide which blocks run, but they are data, which rows do not record."""

STATED = {"xla_chunked_dot_product_attention": {"chunk_size": (512, 1024)}}
"""Fields of an operation that a timing lacks: these are from tokamax's public call (0.0.12, `attention/api.py`)."""

DEFAULTS_OF = {
    "dot_product_attention_vjp": "dot_product_attention",
    "pallas_mosaic_tpu_flash_attention_vjp": "pallas_mosaic_tpu_flash_attention",
}
"""Backward pass -> the operation whose defaults fill in what its rows leave out: bias, soft cap, dropout. tokamax's
backward passes have no defaults of their own (0.0.12, `attention/base.py`)."""

DEFAULT_PRECISION = "BF16_BF16_F32"
"""The meaning of `Precision.DEFAULT` for both operands on a TPU (tokamax 0.0.12, `precision.py`). Rows of tokamax's
first versions have the pair."""


def no_program(timing: KernelTiming) -> str | None:
    """Why a timing's operation has no program; None if it may have one."""
    if timing.op in RAGGED:
        return "how many of its blocks run depends on the sizes of its groups, which no compile knows"
    if timing.op not in (*OPS, *FORMULAS):
        return f"tokamax 0.0.12 has no operation {timing.op}"
    return None


def lower_kernel(timing: KernelTiming, device: Any) -> jax.stages.Lowered:
    from tokamax import benchmarking

    reason = no_program(timing)
    if reason is not None:
        raise TomatError(reason)
    sharding = jax.sharding.SingleDeviceSharding(device)
    # Pallas kernels read the chip that they are traced for from this abstract mesh.
    abstract = jax.sharding.AbstractDevice(device.device_kind, device.num_cores, platform="tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract)
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
    except Exception as error:  # tracing may raise anything, from the operation or from JAX
        raise TomatError(f"it cannot be lowered: {first_line(error)}") from error


def _placed(arrays: Iterable[Any], sharding: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array in arrays]


def _bound(timing: KernelTiming) -> tuple[Any, dict[str, Any]]:
    """The operation with its settings, and its arguments with arrays as shapes."""
    there = class_of(timing.op)
    # tokamax would check the device of this process, but the chip is not present.
    own: dict[str, Any] = {"supported_on": lambda self, device: True}
    if timing.op == "dot_product_attention_vjp":  # the only operation whose own `_fwd` fails with JAX 0.11
        own["_fwd"] = attention_backward(there, class_of("dot_product_attention"))
    cls = type(there.__name__, (there,), own)
    arguments = dict(timing.arguments)
    precision = arguments.get("precision")
    if isinstance(precision, list) and all(isinstance(pair, list) for pair in precision):
        # Rows of tokamax's first versions, which have no presets.
        if any(pair != ["DEFAULT", "DEFAULT"] for pair in precision):
            raise TomatError(f"precision is {precision}; expected DEFAULT pairs or presets such as BF16_BF16_F32")
        arguments["precision"] = [DEFAULT_PRECISION] * len(precision)
    try:
        operation, arrays = bound(cls, STATED.get(timing.op, {}), timing.settings, arguments)
    except ValueError as error:  # from pydantic
        raise TomatError(f"tokamax refuses its arguments: {first_line(error)}") from None
    defaults: dict[str, Any] = {}
    if timing.op in DEFAULTS_OF:
        # Defaults of the forward pass for the arguments that the backward pass requires.
        absent = inspect.Parameter.empty
        demanded = inspect.signature(operation._fwd).parameters
        forward = inspect.signature(class_of(DEFAULTS_OF[timing.op]).bind).parameters
        left_out = [name for name in forward if name in demanded and demanded[name].default is absent]
        defaults = {name: forward[name].default for name in left_out if forward[name].default is not absent}
    return operation, defaults | arrays


if __name__ == "__main__":
    sys.exit(answer(sys.argv[1], functools.partial(compile_kernel, lower=lower_kernel)))
