"""Compiles one attention layer for one chip: `python -m tomat.perf.tuning.attention_child REQUEST.json`.

Value and gradients of projections, norms, rotary embedding and attention of one layer of the decoder, on one device of
a slice. Started by `tile_tuning.py`; `perf/plan/compile/process.py` says why apart from it.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from tomat.perf.plan.compile.process import answer
from tomat.perf.tuning.kernel_measure import keep_measured, measure


def lower_attention(request: dict[str, Any], device: Any) -> Any:
    """The lowered value and gradients (`jax.stages.Lowered`) of a request's layer on one described device.

    Args:
        request: `batch`, `dtype`, and `model`, keys of `DensityDecoderConfig`.
        device: Of a topology.
    """
    import draccus
    import equinox as eqx
    import haliax as hax
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tomat.model.any_decoder import build_mask
    from tomat.model.attention import DensityAttention
    from tomat.model.decoder import DensityDecoderConfig

    config = draccus.decode(DensityDecoderConfig, request["model"])
    mesh = Mesh(np.asarray([device]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    dtype = jnp.dtype(request["dtype"])

    def described(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=whole), tree)

    Batch, Pos = hax.Axis("batch", request["batch"]), hax.Axis("position", config.max_seq_len)
    layer = eqx.filter_eval_shape(lambda: DensityAttention.init(config.attention_config(), key=jax.random.key(0)))
    x = eqx.filter_eval_shape(lambda: hax.zeros((Batch, Pos, config.Embed), dtype))

    def attended(layer, x, by_out):
        out, back = jax.vjp(lambda layer, x: layer(x, build_mask(config)), layer, x)
        return out, back(by_out)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), hax.axis_mapping({}):
        return jax.jit(attended).lower(*map(described, (layer, x, x)))


def _compile(request: dict[str, Any]) -> None:
    keep_measured(request, partial(measure, lower_attention, title="attention"))


if __name__ == "__main__":
    answer(sys.argv[1], _compile)
