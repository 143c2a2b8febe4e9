"""Causal attention with one head in VMEM at a time (`whole_head_kernels.py`), over haliax arrays and a mesh."""

import math
from dataclasses import dataclass
from functools import partial

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import PartitionSpec
from levanter.layers.attention import AttentionMask

from tomat.base.config_keys import key
from tomat.base.errors import TomatError
from tomat.model.norm_rotary import Rotary
from tomat.model.splash import LANES, by_heads, is_causal_alone, largest_divisor
from tomat.model.tiles import HEAD_NAMES, tuned_sizes
from tomat.model.whole_head_kernels import Tiles, attend, vmem_bytes

LOG2_E = math.log2(math.e)
"""What scores of base e are multiplied with to be scores of base 2."""

MOST_VMEM_BYTES = 112 * 2**20
"""Of the 128 MiB of a v6e, the largest of the chips that tomat knows; the rest is the compiler's. MaxText gives kernels
96 MiB on a v6e (`--xla_tpu_scoped_vmem_limit_kib=98304`)."""

SPARE_VMEM_BYTES = 8 * 2**20
"""Beyond the arrays that are counted: the kernels of 8 sequences of 8,192 and heads of 256 compile with it."""


@dataclass(frozen=True)
class WholeHeadConfig:
    """Sizes of the kernels that hold all positions of a head in VMEM. They change the speed, not (but for rounding) the
    values. Each is the most that is taken: the largest multiple of 128 up to it that divides what it is a part of.
    None: as the table of tuned sizes has it for the nearest head (`tiles.py`)."""

    block: int | None = key(None, free="rounding")
    """Positions of a block of the forward kernel; blocks above the diagonal are not visited."""
    rows: int | None = key(None, free="rounding")
    """Queries of a block whose scores are computed at a time."""
    block_bwd: int | None = key(None, free="rounding")
    """Positions of a block of the backward kernel."""
    keys_bwd: int | None = key(None, free="rounding")
    """Keys of a block whose scores are computed at a time."""
    interpret: bool = key(False, free="rounding")
    """As `model.splash.interpret`."""

    def __post_init__(self) -> None:
        for name in HEAD_NAMES:
            size = getattr(self, name)
            if size is not None and (size < LANES or size % LANES):
                raise TomatError(f"model.whole_head.{name} is {size}; expected a positive multiple of {LANES}.")

    def tiles(
        self, seq_len: int, head_size: int, itemsize: int, *, rotate: bool = False, eps: float | None = None
    ) -> Tiles:
        """What the kernels are compiled with; with `rotate` they do norm (None of `eps`: no norm) and rotary embedding
        too."""
        if seq_len % LANES or head_size % LANES:
            said = f"model.whole_head takes multiples of {LANES}, and got {seq_len} positions and heads of {head_size}"
            raise TomatError(f"{said}; leave it unset, or choose fewer, wider heads (model.num_heads).")
        mine = {name: size for name in HEAD_NAMES if (size := getattr(self, name)) is not None}
        sizes = mine if len(mine) == len(HEAD_NAMES) else {**tuned_sizes(seq_len, head_size), **mine}
        block, block_bwd = (largest_divisor(seq_len, sizes[name], LANES) for name in ("block", "block_bwd"))
        rows, keys = largest_divisor(block, sizes["rows"], LANES), largest_divisor(block_bwd, sizes["keys_bwd"], LANES)
        counted = vmem_bytes(seq_len, head_size, itemsize, max(block, block_bwd), max(rows, keys), rotate=rotate)
        needed = max(counted) + SPARE_VMEM_BYTES
        if needed > MOST_VMEM_BYTES:
            raise TomatError(
                f"model.whole_head needs {needed / 2**20:.0f} MiB of VMEM for {seq_len} positions and heads of "
                f"{head_size} in {itemsize} bytes, at most {MOST_VMEM_BYTES / 2**20:.0f} can be had; leave "
                "model.whole_head unset, which takes the splash kernels."
            )
        return Tiles(block, rows, block_bwd, keys, needed, eps, self.interpret)


def whole_head_attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: AttentionMask,
    config: WholeHeadConfig,
    *,
    q_is_scaled: bool = False,
    rotary: Rotary | None = None,
) -> NamedArray:
    """Causal attention in a `shard_map` over the mesh in scope; shapes as in `splash_attention`. The kernels rotate
    queries and keys first where there is a `rotary`; queries are scaled by log2(e) / sqrt(head_size) unless
    `q_is_scaled`."""
    Pos, HeadSize = q.resolve_axis("position"), q.resolve_axis("head_size")
    window = mask.sliding_window
    if not is_causal_alone(mask) or (window is not None and window < Pos.size):
        said = "model.whole_head takes a causal mask alone, without window or segments"
        raise TomatError(f"{said}; leave it unset (splash takes a window), or use attn_backend jax_flash or vanilla.")
    eps = None if rotary is None else rotary.eps
    tiles = config.tiles(Pos.size, HeadSize.size, q.array.dtype.itemsize, rotate=rotary is not None, eps=eps)
    scaled = q if q_is_scaled or rotary is not None else q * (LOG2_E / math.sqrt(HeadSize.size))
    arrays, spec = by_heads(scaled, k, v)
    if rotary is not None:
        weights = jnp.stack([rotary.q_weight * (LOG2_E / math.sqrt(HeadSize.size)), rotary.k_weight])
        arrays += [weights[:, None], rotary.table]
    run = partial(attend, tiles)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(spec, spec, spec) + (() if rotary is None else (PartitionSpec(), PartitionSpec())),
            out_specs=spec,
            check_vma=False,  # a Pallas call does not say over which mesh axes its result varies
        )
    return hax.named(run(*arrays).reshape([axis.size for axis in q.axes]), q.axes)
