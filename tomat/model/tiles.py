"""Sizes of Pallas kernels: those that a configuration may set, and the tables of tuned tiles for the loss and for the
kernels that hold a head in VMEM. No JAX here, so that a step without these kernels imports none of them.

`loss/loss_tiles.json` and `attention_tiles.json`, written by `tomat bench loss-tiles` and `attention-tiles`, have for
each chip, shape and compute type the tiles with the shortest planned time, that time, the times of the others, and the
compiler.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from msgspec import Meta

from tomat.base.config_keys import key
from tomat.base.errors import TomatError
from tomat.base.records import Positive, read_typed

LANES = 128
"""Lanes of a TPU vector register (`NUM_LANES` in JAX's splash kernel): sizes along them are multiples of it."""
PACKED_ROWS = 16
"""Rows of a bfloat16 register tile (two rows in each of 8 sublanes): rows of a block are a multiple of it."""
DEFAULT_SPLASH_BLOCK = 512
"""Tile where none is set: Levanter's `DEFAULT_SPLASH_BLOCK_SIZE`."""
ROTARY_ROWS = 64
"""Positions that norm and rotary embedding work on at a time: heads of 256 in float32 take 16 of 64 registers."""


def largest_divisor(n: int, limit: int, multiple_of: int = 1) -> int:
    """The largest multiple of `multiple_of` up to `limit` that divides `n`; `multiple_of` must divide `n`."""
    candidates = range(min(n, limit) // multiple_of * multiple_of, 0, -multiple_of)
    return next(size for size in candidates if n % size == 0)


def check_multiples(section: str, sizes: object, units: Mapping[str, int]) -> None:
    """Refuse a size that is set and is no positive multiple of its unit."""
    for name, unit in units.items():
        size = getattr(sizes, name)
        if size is not None and (size < unit or size % unit):
            raise TomatError(f"{section}.{name} is {size}; expected a positive multiple of {unit}.")


def check_divides(section: str, sizes: object, pairs: tuple[tuple[str, str], ...]) -> None:
    """Refuse two sizes that are set if the first is no multiple of the second."""
    for outer, inner in pairs:
        large, small = getattr(sizes, outer), getattr(sizes, inner)
        if large is not None and small is not None and large % small:
            said = f"{section}.{outer} is {large} and {inner} is {small}"
            raise TomatError(f"{said}; expected {outer} to be a multiple of {inner}.")


QkvLayout = Literal["head_dim_minor", "seq_minor"]


@dataclass(frozen=True)
class SplashBlockSizes:
    """Tile sizes of the splash attention kernels, in positions. They change the speed, not (beyond rounding) the
    values. None becomes the largest multiple of 128 up to 512 that divides the sequence; a `compute` size becomes that
    of its memory block."""

    block_q: int | None = key(None, free="rounding")
    """Queries per step of the forward kernel."""
    block_kv: int | None = key(None, free="rounding")
    """Keys fetched per step of the forward kernel."""
    block_kv_compute: int | None = key(None, free="rounding")
    """Keys per inner step of the forward kernel; divides `block_kv`."""
    block_q_dkv: int | None = key(None, free="rounding")
    """Queries per step of the kernel for the gradients of keys and values (all three gradients when fused)."""
    block_kv_dkv: int | None = key(None, free="rounding")
    """Keys fetched per step of that kernel."""
    block_kv_dkv_compute: int | None = key(None, free="rounding")
    """Keys per inner step of that kernel; divides `block_kv_dkv`."""
    block_q_dq: int | None = key(None, free="rounding")
    """Queries per step of the kernel for the gradient of queries; not with `use_fused_bwd`."""
    block_kv_dq: int | None = key(None, free="rounding")
    """Keys per step of that kernel; not with `use_fused_bwd`."""
    use_fused_bwd: bool = key(False, free="rounding")
    """One backward kernel for all three gradients. It writes a gradient of the queries for each block of `block_kv_dkv`
    keys and sums them afterwards, so its memory grows as that block shrinks."""
    q_layout: QkvLayout = key("head_dim_minor", free="rounding")
    """Which dimension of the queries lies innermost in memory."""
    k_layout: QkvLayout = key("head_dim_minor", free="rounding")
    """The same for the keys."""
    v_layout: QkvLayout = key("head_dim_minor", free="rounding")
    """The same for the values."""
    interpret: bool = key(False, free="rounding")
    """Run the kernels in Pallas' interpreter on whatever platform there is: to check values without a TPU, slowly."""

    def __post_init__(self) -> None:
        check_multiples("model.splash", self, dict.fromkeys(SPLASH_BLOCKS, LANES))
        check_divides(
            "model.splash", self, (("block_kv", "block_kv_compute"), ("block_kv_dkv", "block_kv_dkv_compute"))
        )
        if self.use_fused_bwd and not (self.block_q_dq is None and self.block_kv_dq is None):
            raise TomatError(
                f"model.splash.use_fused_bwd is true, yet block_q_dq is {self.block_q_dq} and block_kv_dq "
                f"{self.block_kv_dq}; it has no separate kernel for queries: leave both unset."
            )

    def for_sequence(self, seq_len: int) -> "SplashBlockSizes":
        """The sizes, with every one filled in that the kernels for sequences of `seq_len` positions take."""
        if seq_len % LANES:
            said = f"the sequence length is {seq_len}; splash attention expects a multiple of {LANES}"
            raise TomatError(f"{said}. Choose another length, or attn_backend jax_flash or vanilla.")
        default = largest_divisor(seq_len, DEFAULT_SPLASH_BLOCK, LANES)
        sizes: dict[str, int] = {}
        for name in SPLASH_BLOCKS:
            if not (self.use_fused_bwd and name.endswith("_dq")):
                sizes[name] = getattr(self, name) or sizes.get(name.removesuffix("_compute"), default)
                if seq_len % sizes[name]:
                    said = f"model.splash.{name} is {sizes[name]} and the sequence length is {seq_len}"
                    raise TomatError(f"{said}; expected a block that divides the sequence.")
        try:
            return replace(self, **sizes)
        except TomatError as error:
            raise TomatError(f"for a sequence length of {seq_len}, {error}") from None


SPLASH_BLOCKS = tuple(field.name for field in fields(SplashBlockSizes) if field.name.startswith("block_"))

RotaryKernel = Literal["xla", "pallas", "attention"]


@dataclass(frozen=True)
class QkRotaryConfig:
    """How queries and keys get their norm and rotary embedding."""

    kernel: RotaryKernel = key("xla", free="rounding")
    """`xla`: Levanter's formulas. `pallas`: one kernel, beside splash attention, for head sizes that are multiples of
    128. `attention`: inside the kernels of `model.whole_head`, which then read what the projections give. Both compute
    in float32, where Levanter rounds angles and normalised values to the compute type."""
    block_positions: int = key(1024, free="rounding")
    """Positions per step of the kernel; the largest divisor of the sequence up to this is used."""
    interpret: bool = key(False, free="rounding")
    """As `model.splash.interpret`."""

    def __post_init__(self) -> None:
        if self.kernel not in get_args(RotaryKernel):
            said = f"model.qk_rotary.kernel is {self.kernel!r}"
            raise TomatError(f"{said}; expected one of {', '.join(get_args(RotaryKernel))}.")
        check_multiples("model.qk_rotary", self, {"block_positions": ROTARY_ROWS})

    def check_head_size(self, head_size: int) -> None:
        if self.kernel != "xla" and head_size % LANES:
            raise TomatError(
                f"model.qk_rotary.kernel is {self.kernel} and the head size is {head_size}; expected a multiple of "
                f"{LANES}. Use fewer heads (model.num_heads), or qk_rotary.kernel: xla."
            )


@dataclass(frozen=True)
class WholeHeadConfig:
    """Sizes of the kernels that hold all positions of a head in VMEM. They change the speed, not (but for rounding) the
    values. Each is an upper limit: the largest multiple of 128 up to it is taken that divides what it is a part of.
    None: from the table of tuned sizes, as for the nearest shape in it."""

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
        check_multiples("model.whole_head", self, dict.fromkeys(HEAD_NAMES, LANES))

    def sizes(self, seq_len: int, head_size: int) -> tuple[int, int, int, int]:
        """Block and rows of the forward kernel, block and keys of the backward: as set, else tuned, cut to divide."""
        if seq_len % LANES or head_size % LANES:
            said = f"model.whole_head takes multiples of {LANES}, and got {seq_len} positions and heads of {head_size}"
            raise TomatError(f"{said}; leave it unset, or choose fewer, wider heads (model.num_heads).")
        mine = {name: size for name in HEAD_NAMES if (size := getattr(self, name)) is not None}
        sizes = mine if len(mine) == len(HEAD_NAMES) else {**tuned_sizes(seq_len, head_size), **mine}
        block, block_bwd = (largest_divisor(seq_len, sizes[name], LANES) for name in ("block", "block_bwd"))
        rows, keys = largest_divisor(block, sizes["rows"], LANES), largest_divisor(block_bwd, sizes["keys_bwd"], LANES)
        return block, rows, block_bwd, keys


@dataclass(frozen=True)
class HeadTiles:
    """What the kernels are compiled with: the sizes of `WholeHeadConfig`; rows and keys divide their block."""

    block: int
    rows: int
    block_bwd: int
    keys_bwd: int
    vmem_bytes: int
    """VMEM that the kernels may take."""
    eps: float | None = None
    """Epsilon of the norm of queries and keys, where the kernels rotate; None: no norm."""
    interpret: bool = False


@dataclass(frozen=True)
class LossTiles:
    """Tiles of the Pallas loss, which change the speed, not (beyond rounding) the values. None: as tuned."""

    resident_rows: int | None = key(None, free="rounding")
    """Positions (of all sequences on a device) that are worked on between two passes over the head: their hidden
    states and gradients stay in VMEM meanwhile. A multiple of `block_rows`."""
    block_rows: int | None = key(None, free="rounding")
    """Positions of one matrix product; a multiple of 16."""
    block_ids: int | None = key(None, free="rounding")
    """Ids of one matrix product; a multiple of 128."""
    chunk_rows: int | None = key(None, free="rounding")
    """Positions whose softmax sums are held in registers at one time; a multiple of 16 that divides `block_rows`."""

    def __post_init__(self) -> None:
        units = zip(LOSS_NAMES, (PACKED_ROWS, PACKED_ROWS, LANES, PACKED_ROWS), strict=True)
        check_multiples("loss.tiles", self, dict(units))
        check_divides("loss.tiles", self, (("resident_rows", "block_rows"), ("block_rows", "chunk_rows")))

    def filled(self, tuned: "LossTiles") -> "LossTiles":
        mine = {name: size for name, size in asdict(self).items() if size is not None}
        return LossTiles(**asdict(tuned) | mine)


LOSS_NAMES = tuple(field.name for field in fields(LossTiles))


@dataclass(frozen=True)
class TunedTiles:
    """An entry of the table of the loss."""

    FILE: ClassVar = Path(__file__).parent / "loss/loss_tiles.json"
    REMEDY: ClassVar = "Write it with `tomat bench loss-tiles`, or set every size of loss.tiles."

    device_kind: str
    width: int
    ids: int
    dtype: str
    tiles: LossTiles


HEAD_NAMES = tuple(field.name for field in fields(WholeHeadConfig) if field.name != "interpret")


@dataclass(frozen=True)
class TunedSizes:
    """An entry of the table of the kernels that hold a head."""

    FILE: ClassVar = Path(__file__).with_name("attention_tiles.json")
    REMEDY: ClassVar = "Write it with `tomat bench attention-tiles`, or set every size of model.whole_head."

    positions: Positive
    head_size: Positive
    tiles: WholeHeadConfig


@dataclass(frozen=True)
class _Table[T]:
    entries: Annotated[tuple[T, ...], Meta(min_length=1)]


@lru_cache
def load_table[T: (TunedTiles, TunedSizes)](kind: type[T], path: Path | None = None) -> tuple[T, ...]:
    return read_typed(path or kind.FILE, _Table[kind], kind.REMEDY).entries


def _apart(*sizes: tuple[int, int]) -> float:
    """How far two shapes are from each other: the logarithms of the factors between their sizes, summed."""
    return sum(abs(math.log(one / other)) for one, other in sizes)


def tuned_tiles(
    device_kind: str, width: int, ids: int, dtype: str, table: tuple[TunedTiles, ...] | None = None
) -> LossTiles:
    """The tiles of the nearest entry: of this chip (JAX's name) and compute type if there is one, by width and ids."""

    def distance(entry: TunedTiles) -> tuple[bool, bool, float]:
        apart = _apart((entry.width, width), (entry.ids, ids))
        return entry.device_kind != device_kind, entry.dtype != dtype, apart

    return min(table or load_table(TunedTiles), key=distance).tiles


def tuned_sizes(positions: int, head_size: int, table: tuple[TunedSizes, ...] | None = None) -> dict[str, int]:
    """The sizes of the entry with the nearest number of positions and head size, whatever its chip and type."""

    entries = table or load_table(TunedSizes)
    nearest = min(entries, key=lambda each: _apart((each.positions, positions), (each.head_size, head_size)))
    return {name: getattr(nearest.tiles, name) for name in HEAD_NAMES}
