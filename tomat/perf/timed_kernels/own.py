"""tomat's own programs. `tomat bench chip` times them on the present device and writes rows; a calibration compiles the
programs of these rows.

A row names the operation, its arrays and its settings; nothing else determines the program. XLA moves loop-invariant
work out of a loop (seen in the compiled v6e programs). So only operations that can take their own result as input are
repeated in a loop, `loop` times, to last longer than their dispatch: `CARRIED`. The others run once: `ONCE`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tomat.base.errors import TomatError
from tomat.base.reporting import first_line
from tomat.perf.timed_kernels.timings import KernelTiming, described

TIMED_WITH = "timed_with"
"""The setting that says which JAX and which runtime timed a row. It has no effect on the program."""

type Arrays = Mapping[str, jax.Array]

_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}


@dataclass(frozen=True)
class OwnProgram:
    """A program that is ready to be lowered: `jax.jit(run, compiler_options=...).lower(arrays)`."""

    run: Callable[[Arrays], Any]
    arrays: dict[str, jax.ShapeDtypeStruct]
    compiler_options: dict[str, str]

    def lower(self, sharding: jax.sharding.Sharding) -> jax.stages.Lowered:
        placed = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
            for name, array in self.arrays.items()
        }
        return jax.jit(self.run, compiler_options=self.compiler_options or None).lower(placed)


def _rms_norm(x: jax.Array, scale: jax.Array) -> dict[str, jax.Array]:
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return {"x": (normed * scale).astype(x.dtype)}


def _adam(parameter: jax.Array, mean: jax.Array, square: jax.Array, gradient: jax.Array) -> dict[str, jax.Array]:
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.95 * square + 0.05 * jnp.square(gradient)
    parameter = parameter - 1e-3 * (mean * lax.rsqrt(jnp.abs(square) + 1e-8) + 0.1 * parameter)
    return {"parameter": parameter, "mean": mean, "square": square}


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, *, tiles: Mapping[str, Any]) -> jax.Array:
    """Causal attention of the model (`model/splash.py`); `q` [B, K, G, S, D], `k` and `v` [B, K, S, D]: B sequences,
    K key heads, G query heads of each, S positions, D head size."""
    import haliax as hax
    from levanter.layers.attention import AttentionMask

    from tomat.model.splash import splash_attention
    from tomat.model.tiles import SplashBlockSizes

    queries = hax.named(q, ("batch", "kv_head", "q_heads_per_group", "position", "head_size"))
    keys, values = (hax.named(array, ("batch", "kv_head", "key_position", "head_size")) for array in (k, v))
    blocks = SplashBlockSizes(**tiles)
    return splash_attention(queries, keys, values, AttentionMask.causal(), blocks, q_is_scaled=True).array


def _splash_backward(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, *, tiles: Mapping[str, Any]) -> Any:
    """The forward kernel that keeps its residuals, then the backward, as in a step for a layer without remat."""
    return jax.vjp(partial(_splash, tiles=tiles), q, k, v)[1](d_out)


CARRIED: Mapping[str, tuple[tuple[str, ...], Callable[..., dict[str, jax.Array]]]] = {
    # XLA:TPU would fuse a product into the next one. The barrier keeps two kernels.
    "tomat_matmul_chain": (("x", "up", "down"), lambda x, up, down: {"x": lax.optimization_barrier(x @ up) @ down}),
    "tomat_add": (("x", "y"), lambda x, y: {"x": x + y}),
    "tomat_swiglu": (("gate", "up"), lambda gate, up: {"gate": jax.nn.silu(gate) * up}),
    "tomat_rms_norm": (("x", "scale"), _rms_norm),
    "tomat_softmax": (("x",), lambda x: {"x": jax.nn.softmax(x, axis=-1)}),
    "tomat_adam": (("parameter", "mean", "square", "gradient"), _adam),
}
"""Operation -> its arrays, and one round of it, which returns the arrays that it changes. Settings: `links`, rounds in
succession in one loop body, and `loop`, how often the body runs; 1 where they are not given."""

ONCE: Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "tomat_matmul": (("x", "w"), lambda x, w: x @ w),
    # The gradient of weights: the contracted axis is the outermost of both operands.
    "tomat_matmul_transposed": (("x", "y"), lambda x, y: x.T @ y),
    "tomat_copy": (("x",), jnp.copy),
    "tomat_copy_transposed": (("x",), jnp.transpose),
    # [B, S, H, D] -> [B, H, S, D].
    "tomat_copy_heads_first": (("x",), lambda x: x.transpose(0, 2, 1, 3)),
    "tomat_row_sum": (("x",), lambda x: x.sum(axis=-1)),
    "tomat_column_sum": (("x",), lambda x: x.sum(axis=0)),
    "tomat_column_slice": (("x",), lambda x, columns: x[:, :columns]),
    "tomat_splash_attention": (("q", "k", "v"), _splash),
    "tomat_splash_attention_backward": (("q", "k", "v", "d_out"), _splash_backward),
}
"""Operation -> its arrays, and its function. Settings: `columns` of the slice (128 columns of a float32 array with rows
of C are pieces of 4 KB, 32 C bytes apart: one tile of 8 x 128 out of C / 128); the tiles of splash attention
(`SplashBlockSizes`)."""

SPLASH = ("tomat_splash_attention", "tomat_splash_attention_backward")
"""Operations that only TPUs run."""


def own_program(op: str, arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> OwnProgram:
    """The program of a row: its operation, of `CARRIED` or `ONCE`; its arrays, as `bf16[1024,4096]`; its settings. All
    operations accept `scoped_vmem_kib`, the VMEM that the compiler may give one kernel (default: the compiler's own
    limit), and `timed_with`."""
    if op not in CARRIED and op not in ONCE:
        raise TomatError(f"tomat has no operation {op}; it has {', '.join(sorted((*CARRIED, *ONCE)))}")
    names = (CARRIED[op] if op in CARRIED else ONCE[op])[0]
    if set(arguments) != set(names):
        raise TomatError(f"{op} has the arrays {', '.join(sorted(arguments))}; expected {', '.join(names)}")
    arrays = {}
    for name in names:
        array = described(arguments[name], _DTYPES)
        if array is None:
            raise TomatError(f"{name} is {arguments[name]!r}; expected bf16 or f32, such as bf16[1024,4096]")
        arrays[name] = array
    rest = {name: value for name, value in settings.items() if name != TIMED_WITH}
    options = {}
    if "scoped_vmem_kib" in rest:
        options["xla_tpu_scoped_vmem_limit_kib"] = str(_count(rest, "scoped_vmem_kib"))
    if op in CARRIED:
        run = _repeated(CARRIED[op][1], _count(rest, "loop"), _count(rest, "links"))
    else:
        given: dict[str, Any] = {}
        if op in SPLASH:
            given, rest = {"tiles": rest}, {}
        elif op == "tomat_column_slice":
            given = {"columns": _count(rest, "columns")}
        function = ONCE[op][1]

        def once(arrays: Arrays) -> Any:
            return function(*(arrays[name] for name in names), **given)

        run = once
    if rest:
        raise TomatError(f"{op} has no setting {', '.join(sorted(rest))}")
    return OwnProgram(run, arrays, options)


def _count(settings: dict[str, Any], name: str) -> int:
    """Remove and return a setting; 1 if it is missing."""
    value = settings.pop(name, 1)
    if type(value) is not int or value < 1:
        raise TomatError(f"{name} is {value!r}; expected a whole number from 1")
    return value


def lower_own(timing: KernelTiming, device: Any) -> jax.stages.Lowered:
    """The program of one timing, for `device`, which may be a described one (`topology_devices`)."""
    program = own_program(timing.op, timing.arguments, timing.settings)
    try:
        return program.lower(jax.sharding.SingleDeviceSharding(device))
    except Exception as error:  # whatever JAX and Pallas raise while tracing
        raise TomatError(f"it cannot be lowered: {first_line(error)}") from error


def _repeated(step: Callable[..., dict[str, jax.Array]], loop: int, links: int) -> Callable[[Arrays], Any]:
    def body(arrays: Arrays) -> dict[str, jax.Array]:
        state = step(**arrays)
        for _ in range(links - 1):
            # Without the barrier, XLA would make one kernel of the links.
            state = step(**{**arrays, **lax.optimization_barrier(state)})
        return state

    def run(arrays: Arrays) -> dict[str, jax.Array]:
        if loop == 1:
            return body(arrays)
        changed = {name: arrays[name] for name in jax.eval_shape(body, arrays)}
        return lax.fori_loop(0, loop, lambda _, state: body({**arrays, **state}), changed)

    return run
