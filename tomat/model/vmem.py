"""VMEM of a TPU core, by chip, and how much of it the kernels that hold their arrays in it take. What does not fit is
refused by name, with what does, before the compiler fails on it. No JAX here."""

from collections.abc import Callable

from tomat.base.errors import TomatError
from tomat.model.tiles import (
    LANES,
    LOSS_NAMES,
    ROTARY_ROWS,
    HeadTiles,
    LossTiles,
    QkRotaryConfig,
    WholeHeadConfig,
    largest_divisor,
)

MIB = 2**20
VMEM_BYTES = {
    "TPU v4": 16 * MIB,
    "TPU v5 lite": 128 * MIB,
    "TPU v5": 64 * MIB,
    "TPU v6 lite": 128 * MIB,
    "TPU7x": 64 * MIB,
}
"""VMEM of a core by JAX's name of the device (`vmem_capacity_bytes` in jax 0.11.1's `tpu_info.py`)."""

MOST_HEAD_VMEM = 112 * MIB
"""Most VMEM of a kernel, of the 128 MiB of a v6e; the rest is the compiler's. MaxText gives kernels 96 MiB on a v6e
(`--xla_tpu_scoped_vmem_limit_kib=98304`)."""
COMPILERS_VMEM = MIB // 8
"""VMEM that the compiler keeps for itself on any chip: libtpu 0.0.46 gives a program 63.94 of 64 MiB. A kernel that is
counted to take 63.8 MiB compiles for a TPU7x, one of 81.6 uses 67.9 (`tests/model/vmem_by_chip.json`)."""
SPARE_HEAD_VMEM = 8 * MIB
"""VMEM beyond the arrays that are counted: with it the kernels of 8 sequences of 8,192 and heads of 256 compile."""

VMEM_SHARE = 0.8
"""Share of VMEM that the kernels' blocks may take; the rest is for the products on their way and what is spilled."""
SPARE_VMEM = 16 * 2**20
"""VMEM that is granted on top of the blocks, bytes. What is not asked for stays with XLA, for other arrays."""

SCOPED_VMEM = {
    "TPU v4": 16 * MIB,
    "TPU v5 lite": 16 * MIB,
    "TPU v5": 16 * MIB,
    "TPU v6 lite": 32 * MIB,
    "TPU7x": 32 * MIB,
}
"""VMEM that libtpu 0.0.46 gives a kernel that asks for no more, by JAX's name of the device, from its error messages
("Scoped allocation with size 33.30M and limit 32.00M")."""


def most_head_vmem(device_kind: str | None) -> int:
    """VMEM that a kernel which holds a head may ask for, bytes; for None and an unknown chip that of a v6e."""
    capacity = VMEM_BYTES.get(device_kind or "", max(VMEM_BYTES.values()))
    return min(MOST_HEAD_VMEM, capacity - COMPILERS_VMEM)


def head_vmem_bytes(S: int, D: int, itemsize: int, block: int, part: int, *, rotate: bool) -> tuple[int, int]:
    """VMEM that the forward and the backward kernel hold at one time, counted from their arrays, for S positions of
    heads of D numbers of `itemsize` bytes; `block` is the larger block of the two kernels, `part` the larger number of
    queries or keys whose scores are computed at a time."""
    head, head32, row = S * D * itemsize, S * D * 4, 8 * S * 4
    # Inputs and outputs twice: a head is fetched and another written while one is worked on. Scores of three parts in
    # float32 and of one in the type of the queries.
    scores = part * block * (3 * 4 + itemsize)
    forward = 2 * (4 * head + row) + head32 + 2 * S * LANES * 4 + scores
    backward = 2 * (8 * head + row) + row + 3 * head32 + scores
    if rotate:  # the table, and the rotated keys of the forward kernel
        return forward + head32 + head, backward + head32
    return forward, backward


def what_fits(most: int, S: int, D: int, needed: Callable[[int, int], int]) -> str:
    """The widest heads for S positions, and the most positions for heads of D, for which a kernel needs at most `most`
    bytes; in words."""
    heads = max((size for size in range(LANES, D, LANES) if needed(S, size) <= most), default=0)
    positions = max((size for size in range(LANES, S, LANES) if needed(size, D) <= most), default=0)
    fits = [f"heads of {heads}"] if heads else []
    fits += [f"{positions:,} positions"] if positions else []
    return f"{' or '.join(fits)} would fit; " if fits else ""


def rotary_vmem_bytes(block: int, D: int, itemsize: int) -> int:
    """VMEM of the larger kernel of norm and rotary embedding, bytes. Counted for a block of positions: three arrays of
    heads of D, each twice, since one is fetched or written while the other is worked on; the table in float32 once; and
    a byte for each of the table's numbers, for what is on its way. For 1,024 positions of 2,048 in bfloat16 the
    compiler takes 33.3 MiB, and this gives 34."""
    return block * D * (6 * itemsize + 5)


def check_rotary(config: QkRotaryConfig, positions: int, head_size: int, itemsize: int, device_kind: str) -> None:
    """Refuse a block that the kernel of norm and rotary embedding cannot hold on a chip, by JAX's name of it."""
    block, most = largest_divisor(positions, config.block_positions, ROTARY_ROWS), SCOPED_VMEM.get(device_kind)
    needed = rotary_vmem_bytes(block, head_size, itemsize)
    if config.interpret or most is None or needed <= most:
        return
    smaller = (size for size in range(block - ROTARY_ROWS, 0, -ROTARY_ROWS) if positions % size == 0)
    fits = next((size for size in smaller if rotary_vmem_bytes(size, head_size, itemsize) <= most), None)
    remedy = "Set" if fits is None else f"Set model.qk_rotary.block_positions: {fits}, or"
    raise TomatError(
        f"model.qk_rotary.block_positions is {block}, which takes {needed / 2**20:.0f} MiB of VMEM with heads of "
        f"{head_size} in {itemsize} bytes; {device_kind} gives a kernel {most / 2**20:.0f}. {remedy} "
        "model.qk_rotary.kernel: xla."
    )


def head_tiles(
    config: WholeHeadConfig,
    seq_len: int,
    head_size: int,
    itemsize: int,
    *,
    rotate: bool = False,
    eps: float | None = None,
    device_kind: str | None = None,
) -> HeadTiles:
    """What the kernels that hold a head are compiled with; with `rotate` they do norm (no `eps`: none) and rotary
    embedding too. `device_kind`: JAX's name of the chip, whose VMEM they must fit; None: unknown yet, a v6e's."""
    block, rows, block_bwd, keys = config.sizes(seq_len, head_size)
    needed = _head_bytes(config, seq_len, head_size, itemsize, rotate)
    most = most_head_vmem(device_kind)
    if needed > most:
        fits = what_fits(most, seq_len, head_size, lambda S, D: _head_bytes(config, S, D, itemsize, rotate))
        raise TomatError(
            f"model.whole_head needs {needed / 2**20:.0f} MiB of VMEM for {seq_len} positions and heads of "
            f"{head_size} in {itemsize} bytes, {device_kind or 'a TPU v6 lite'} has {most / 2**20:.0f} for it. "
            f"{fits}or leave model.whole_head unset, which takes the splash kernels."
        )
    return HeadTiles(block, rows, block_bwd, keys, needed, eps, config.interpret)


def _head_bytes(config: WholeHeadConfig, seq_len: int, head_size: int, itemsize: int, rotate: bool) -> int:
    block, rows, block_bwd, keys = config.sizes(seq_len, head_size)
    counted = head_vmem_bytes(seq_len, head_size, itemsize, max(block, block_bwd), max(rows, keys), rotate=rotate)
    return max(counted) + SPARE_HEAD_VMEM


def vmem_bytes(tiles: LossTiles, rows: int, width: int, itemsize: int, n_statistics: int) -> int:
    """VMEM of the blocks of the larger kernel, bytes, with `rows` resident: the device's rows, if those are fewer."""
    block_rows, block_ids = tiles.block_rows or 0, tiles.block_ids or 0
    lanes = 4 * LANES * rows
    logits = 2 * 4 * block_rows * block_ids
    head = 2 * itemsize * block_ids * width
    statistics = lanes * (1 + 2 * n_statistics) + itemsize * rows * width + head + logits
    by_head = 4 * 4 * block_ids * width
    gradients = lanes + (4 + 2 * itemsize) * rows * width + head + by_head + logits + itemsize * block_rows * block_ids
    return max(statistics, gradients)


def check_vmem(tiles: LossTiles, rows: int, width: int, itemsize: int, n_statistics: int, device_kind: str) -> int:
    """VMEM to ask for, bytes, if the tiles fit."""
    capacity = VMEM_BYTES.get(device_kind, max(VMEM_BYTES.values()))
    needed = vmem_bytes(tiles, rows, width, itemsize, n_statistics)
    if needed > VMEM_SHARE * capacity:
        raise TomatError(
            f"the tiles of the Pallas loss need {needed / 2**20:.0f} MiB of VMEM at a width of {width} "
            f"({', '.join(f'{name} {getattr(tiles, name)}' for name in LOSS_NAMES)}); {device_kind} has "
            f"{capacity / 2**20:.0f} MiB, of which {VMEM_SHARE * capacity / 2**20:.0f} may be used. Set a smaller "
            "loss.tiles.resident_rows or loss.tiles.block_ids, or loss.kernel: xla."
        )
    return needed + SPARE_VMEM
