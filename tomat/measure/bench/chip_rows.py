"""The programs that `tomat bench chip` times: those that a cost model of kernels must tell apart, and few others.

Sizes are chosen for a v6e (918 TFLOP/s, 1.6 TB/s, 128 MiB of fast memory on the chip). There a single kernel takes 0.1
ms or more; a shorter one is repeated in one program for about a millisecond.
"""

import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

type Row = tuple[str, dict[str, str], dict[str, Any]]
"""Operation, arrays and settings, as arguments of `tomat/perf/timed_kernels/own.py`."""

MATMULS = (
    # Tokens, inner, outer: layers of 200M, 1B and 8B decoders and their heads.
    (32768, 1024, 1024), (32768, 1024, 4096), (32768, 4096, 1024), (32768, 1024, 16384), (16384, 2048, 8192),
    (8192, 4096, 4096), (8192, 4096, 6144), (8192, 4096, 14336), (8192, 14336, 4096), (24576, 4096, 14336),
    # Sizes that are not multiples of 256.
    (16384, 1152, 4608), (32760, 1024, 4096), (8192, 4096, 18570), (8192, 1000, 3000), (12000, 720, 2880),
    # Square matmuls; then narrow and wide ones, bound by HBM.
    (4096, 4096, 4096), (8192, 8192, 8192), (65536, 4096, 128), (65536, 128, 4096), (256, 8192, 32768),
)  # fmt: skip
MATMULS_F32 = ((8192, 4096, 4096), (8192, 1152, 4608), (4096, 1000, 3000))
MATMULS_TRANSPOSED = ((8192, 4096, 14336), (32768, 1024, 4096), (16384, 1152, 4608), (8192, 720, 2880))
CHAINS = (
    # Rows, inner, outer, links, loop, starting with sizes where the fixed cost of a kernel dominates.
    (8, 128, 128, 1, 1000), (8, 128, 128, 16, 100), (256, 256, 256, 4, 200), (128, 1024, 4096, 1, 200),
    (512, 768, 3072, 2, 100), (512, 1024, 4096, 8, 10), (2048, 1024, 4096, 1, 50), (2048, 1152, 4608, 1, 50),
    (1024, 4096, 4096, 1, 20),
)  # fmt: skip
WIDTHS = (512, 1024, 2048, 4096, 16384)
SPLASH_TILES: tuple[dict[str, Any], ...] = (
    {"block_q": 512, "block_kv": 512},
    {"block_q": 1024, "block_kv": 1024},
    {"block_q": 2048, "block_kv": 2048, "block_kv_compute": 1024},
)
SPLASH_BACKWARD_TILES: tuple[dict[str, Any], ...] = (
    {"block_q_dkv": 512, "block_kv_dkv": 512},
    {"block_q_dkv": 1024, "block_kv_dkv": 1024, "use_fused_bwd": True},
    # The tiles of MaxText's v6e recipes (tpu-recipes training/trillium), with their fast memory.
    {
        "block_q": 2048, "block_kv": 2048, "block_kv_compute": 1024, "block_q_dkv": 2048, "block_kv_dkv": 2048,
        "block_kv_dkv_compute": 1024, "use_fused_bwd": True, "scoped_vmem_kib": 98304,
    },
)  # fmt: skip


def full_rows() -> list[Row]:
    """All rows, one of each operation in turn, so that a stopped measurement has some of every kind."""
    groups: dict[str, list[Row]] = {}
    for row in _rows():
        groups.setdefault(row[0], []).append(row)
    return [row for turn in zip_longest(*groups.values()) for row in turn if row is not None]


def quick_rows() -> list[Row]:
    """The first row of each operation with tiny sizes, for a CPU or to check that everything runs."""

    def tiny(row: Row) -> Row:
        op, arrays, settings = row
        arrays = {
            name: re.sub(r"\d+(?=[],])", lambda size: str(min(256, int(size[0]))), one) for name, one in arrays.items()
        }
        return op, arrays, {name: min(128, value) for name, value in settings.items()}

    rows = full_rows()
    return [tiny(row) for row in rows[: len({op for op, *_ in rows})]]


def _rows() -> Iterator[Row]:
    for dtype, sizes in (("bf16", MATMULS), ("f32", MATMULS_F32)):
        for m, k, n in sizes:
            yield "tomat_matmul", {"x": f"{dtype}[{m},{k}]", "w": f"{dtype}[{k},{n}]"}, {}
    for t, m, n in MATMULS_TRANSPOSED:
        yield "tomat_matmul_transposed", {"x": f"bf16[{t},{m}]", "y": f"bf16[{t},{n}]"}, {}
    for m, k, n, links, loop in CHAINS:
        arrays = {"x": f"bf16[{m},{k}]", "up": f"bf16[{k},{n}]", "down": f"bf16[{n},{k}]"}
        yield "tomat_matmul_chain", arrays, {"links": links, "loop": loop}
    # First the fixed cost, then arrays that fit into the memory on the chip.
    for rows, loop in ((8, 1000), (256, 500), (2048, 100)):
        yield "tomat_add", {"x": f"f32[{rows},1024]", "y": f"f32[{rows},1024]"}, {"links": 2, "loop": loop}
    yield "tomat_rms_norm", {"x": "bf16[512,1024]", "scale": "f32[1024]"}, {"links": 4, "loop": 50}
    # Long pieces: arrays of 0.1, 0.5, 2 and 7 GB.
    for rows in (2**13, 2**15, 2**17, 425_984):
        yield "tomat_add", {"x": f"f32[{rows},4096]", "y": f"f32[{rows},4096]"}, {}
    for rows, columns in ((2**13, 14336), (2**16, 4096), (2**17, 14336)):
        yield "tomat_swiglu", {"gate": f"bf16[{rows},{columns}]", "up": f"bf16[{rows},{columns}]"}, {}
    for rows in (2**13, 2**16):
        yield "tomat_adam", dict.fromkeys(("parameter", "mean", "square", "gradient"), f"f32[{rows},4096]"), {}
    for rows in (2**15, 2**18):
        yield "tomat_copy", {"x": f"f32[{rows},4096]"}, {}
    # Arrays of 1 GB with several row widths. Pieces of a column slice are 4 and 16 KB, their strides 16 to 512 KB.
    for width in WIDTHS:
        yield "tomat_row_sum", {"x": f"f32[{2**28 // width},{width}]"}, {}
        yield "tomat_column_sum", {"x": f"f32[{2**28 // width},{width}]"}, {}
        yield "tomat_softmax", {"x": f"f32[{2**27 // width},{width}]"}, {}
        yield "tomat_rms_norm", {"x": f"bf16[{2**28 // width},{width}]", "scale": f"f32[{width}]"}, {}
        yield "tomat_column_slice", {"x": f"f32[{2**30 // width},{width}]"}, {"columns": 128}
    yield "tomat_column_slice", {"x": "f32[262144,4096]"}, {"columns": 512}
    yield "tomat_row_sum", {"x": "f32[131072,16384]"}, {}
    yield "tomat_column_sum", {"x": "bf16[131072,8192]"}, {}
    for shape in ("f32[16384,4096]", "bf16[32768,16384]", "f32[524288,512]", "f32[512,524288]"):
        yield "tomat_copy_transposed", {"x": shape}, {}
    for shape in ("bf16[4,8192,32,128]", "bf16[16,8192,8,128]", "bf16[8,8192,16,64]"):
        yield "tomat_copy_heads_first", {"x": shape}, {}
    for tiles, backward in zip(SPLASH_TILES, SPLASH_BACKWARD_TILES, strict=True):
        yield "tomat_splash_attention", _attention(1, 8, 4, 8192, 128), tiles
        yield "tomat_splash_attention_backward", _backward(1, 8, 4, 8192, 128), backward
    # The 200M model: 16 heads of 64, 4,608 positions; then short sequences.
    for tiles in ({"block_q": 512, "block_kv": 512}, {"block_q": 1536, "block_kv": 1536, "block_kv_compute": 768}):
        yield "tomat_splash_attention", _attention(8, 16, 1, 4608, 64), tiles
    yield "tomat_splash_attention_backward", _backward(8, 16, 1, 4608, 64), {"block_q_dkv": 512, "block_kv_dkv": 512}
    yield "tomat_splash_attention", _attention(16, 8, 2, 1024, 128), {"block_q": 512, "block_kv": 512}


def _attention(batch: int, kv_heads: int, group: int, positions: int, head: int) -> dict[str, str]:
    keys = f"bf16[{batch},{kv_heads},{positions},{head}]"
    return {"q": f"bf16[{batch},{kv_heads},{group},{positions},{head}]", "k": keys, "v": keys}


def _backward(*sizes: int) -> dict[str, str]:
    arrays = _attention(*sizes)
    return {**arrays, "d_out": arrays["q"]}
