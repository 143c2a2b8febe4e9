"""VMEM of a TPU core, by chip, and what the kernels that hold their arrays in it take of it, so that what does not fit
is refused by name, with what does, before the compiler fails on it. No JAX here."""

from collections.abc import Callable

MIB = 2**20
LANES = 128
"""Lanes of a TPU vector register (`NUM_LANES` in JAX's splash kernel): sizes along them are multiples of it."""

VMEM_BYTES = {
    "TPU v4": 16 * MIB,
    "TPU v5 lite": 128 * MIB,
    "TPU v5": 64 * MIB,
    "TPU v6 lite": 128 * MIB,
    "TPU7x": 64 * MIB,
}
"""VMEM of a core by JAX's name of the device (`vmem_capacity_bytes` in jax 0.11.1's `tpu_info.py`)."""

MOST_HEAD_VMEM = 112 * MIB
"""Of the 128 MiB of a v6e; the rest is the compiler's. MaxText gives kernels 96 MiB on a v6e
(`--xla_tpu_scoped_vmem_limit_kib=98304`)."""
COMPILERS_VMEM = MIB // 8
"""What the compiler keeps for itself of any chip: libtpu 0.0.46 has 63.94 of 64 MiB for a program. A kernel that is
counted to take 63.8 MiB compiles for a TPU7x, one of 81.6 uses 67.9 (`tests/model/vmem_by_chip.json`)."""
SPARE_HEAD_VMEM = 8 * MIB
"""Beyond the arrays that are counted: the kernels of 8 sequences of 8,192 and heads of 256 compile with it."""

SCOPED_VMEM = {
    "TPU v4": 16 * MIB,
    "TPU v5 lite": 16 * MIB,
    "TPU v5": 16 * MIB,
    "TPU v6 lite": 32 * MIB,
    "TPU7x": 32 * MIB,
}
"""What libtpu 0.0.46 gives a kernel that asks for no more, by JAX's name of the device and its error messages ("Scoped
allocation with size 33.30M and limit 32.00M")."""


def most_head_vmem(device_kind: str | None) -> int:
    """VMEM that a kernel which holds a head may ask for, bytes; None, and a chip that is not known: that of a v6e."""
    capacity = VMEM_BYTES.get(device_kind or "", max(VMEM_BYTES.values()))
    return min(MOST_HEAD_VMEM, capacity - COMPILERS_VMEM)


def head_vmem_bytes(S: int, D: int, itemsize: int, block: int, part: int, *, rotate: bool) -> tuple[int, int]:
    """VMEM that the forward and the backward kernel hold at one time, counted from their arrays, for S
    positions of heads of D numbers of `itemsize` bytes; `block` is the larger one of the two kernels, `part` the larger
    number of queries or keys whose scores are computed at a time."""
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
    """The widest heads for S positions, and the most positions for heads of D, of which a kernel needs at most `most`
    bytes; in words."""
    heads = max((size for size in range(LANES, D, LANES) if needed(S, size) <= most), default=0)
    positions = max((size for size in range(LANES, S, LANES) if needed(size, D) <= most), default=0)
    fits = [f"heads of {heads}"] if heads else []
    fits += [f"{positions:,} positions"] if positions else []
    return f"{' or '.join(fits)} would fit; " if fits else ""


def rotary_vmem_bytes(block: int, D: int, itemsize: int) -> int:
    """VMEM of the larger kernel of norm and rotary embedding, bytes: of a block of positions three arrays of heads of
    D, each twice, one being fetched or written while the other is worked on; the table in float32 once, and a byte for
    each of its numbers for what is on its way. 33.3 MiB by the compiler for 1,024 positions of 2,048 in bfloat16, 34
    here."""
    return block * D * (6 * itemsize + 5)
