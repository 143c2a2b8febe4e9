"""Causal attention by cuDNN's fused kernels, on NVIDIA GPUs.

They are the kernels of `jax.nn.dot_product_attention(implementation="cudnn")`, called on each device's part of arrays.

Axis letters: B batch, H heads, S positions, D head size.
"""

import math
from functools import partial
from typing import Any

import haliax as hax
import jax
from haliax import NamedArray
from haliax.jax_utils import tree_checkpoint_name

from tomat.base.ports.jax import cudnn_attention as forward
from tomat.base.ports.jax import cudnn_attention_backward as backward
from tomat.model.checkpoint_policies import ATTENTION_OUTPUT
from tomat.model.sharding import by_heads, on_mesh

LEAST_CAPABILITY, HOPPER = (8, 0), (9, 0)
"""Compute capabilities: Ampere, the first whose kernels JAX calls, and Hopper, from which heads may be larger."""
LARGEST_HEAD, LARGEST_HEAD_ON_HOPPER, HEAD_UNIT = 128, 256, 8
"""Largest head sizes of the kernels in 16 bit, and their unit (`check_is_flash_attention` of jax 0.11.1)."""


def lacks_cudnn(platform: str | None, head_size: int, dtype: Any) -> str | None:
    """Why cuDNN cannot compute attention on the platform that the step is traced for, with heads of that size and type;
    None: it can. A GPU that is not here is taken to be Hopper; an unknown platform (None) is taken to be a GPU."""
    if platform not in ("gpu", "cuda", None):
        return f"the step is for {platform}; cudnn needs an NVIDIA GPU"
    kind, capability = "a GPU", HOPPER
    if jax.default_backend() == "gpu":
        device = jax.local_devices()[0]
        kind, found = device.device_kind, str(getattr(device, "compute_capability", ""))
        if not found.replace(".", "", 1).isdecimal():  # `gfx942`
            return f"{kind} is not an NVIDIA GPU"
        major, _, minor = found.partition(".")
        capability = int(major), int(minor or 0)
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"{kind} has compute capability {found}; cudnn needs {least} (Ampere) or later"
    largest = LARGEST_HEAD_ON_HOPPER if capability >= HOPPER else LARGEST_HEAD
    if head_size > largest or head_size % HEAD_UNIT:
        return f"heads have {head_size} numbers; on {kind} cudnn takes multiples of {HEAD_UNIT} up to {largest}"
    if jax.numpy.dtype(dtype).itemsize != 2:
        return f"attention computes in {jax.numpy.dtype(dtype).name}; cudnn takes bfloat16 and float16"
    return None


def cudnn_attention(q: NamedArray, k: NamedArray, v: NamedArray, window: int | None) -> NamedArray:
    """Causal attention in a `shard_map` over the mesh in scope; q, k and v as for `splash_attention`, the result [...,
    position, kv_head, q_heads_per_group, head_size]. `window`: positions that each position sees, itself included. A
    checkpoint policy that keeps `ATTENTION_OUTPUT` keeps the result and its log-sum-exp."""
    arrays, spec, axes = by_heads(q, k, v, "cudnn", positions_first=True)
    seen = None if window is None or window >= q.axis_size("position") else window
    out = on_mesh(partial(_attention, seen), (spec, spec, spec), spec)(*arrays)
    return hax.named(out.reshape([axis.size for axis in axes]), axes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(window: int | None, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of queries `[B, S, H, D]` to keys and values with as many heads or fewer."""
    return forward(q, k, v, scale=_scale(q), window=window)[0]


def _forward_rule(window: int | None, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    # Named here: a name on the result alone would keep the result, yet compute the log-sum-exp again.
    out, log_sum = tree_checkpoint_name(forward(q, k, v, scale=_scale(q), window=window), ATTENTION_OUTPUT)
    return out, (q, k, v, out, log_sum)


def _backward_rule(window: int | None, kept: Any, d_out: jax.Array) -> tuple[jax.Array, ...]:
    return backward(kept, d_out, scale=_scale(kept[0]), window=window)


_attention.defvjp(_forward_rule, _backward_rule)


def _scale(q: jax.Array) -> float:
    return 1 / math.sqrt(q.shape[-1])
