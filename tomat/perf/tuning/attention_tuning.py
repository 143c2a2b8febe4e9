"""Tunes the attention kernels by the compiler's own schedule, and writes the table that `model.whole_head` reads.

As `loss_tuning.py`: each candidate is one attention layer (projections, norms, rotary embedding, kernels; forward and
backward), compiled for one chip in a process of its own. `tomat bench attention-tiles` is the verb.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.model.attention_tiles import NAMES, TABLE_FILE
from tomat.perf.plan.compile.process import Limits
from tomat.perf.tuning.kernel_plans import planned, put_entry

CHILD_MODULE = "tomat.perf.tuning.attention_child"
"""What lowers, compiles and measures a layer."""


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer on one device."""

    slice_name: str = "v6e-1"
    batch: int = 8
    positions: int = 8192
    hidden_dim: int = 1024
    num_heads: int = 4
    num_kv_heads: int = 4
    dtype: str = "bfloat16"

    @property
    def head_size(self) -> int:
        """Of queries, keys and values."""
        return self.hidden_dim // self.num_heads

    def request(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """What `attention_child.py` is asked: this shape, with these keys of `DensityDecoderConfig` on top."""
        sizes = {
            "max_seq_len": self.positions,
            "hidden_dim": self.hidden_dim,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "num_layers": 1,
            "attn_backend": "splash",
        }
        return {"slice_name": self.slice_name, "batch": self.batch, "dtype": self.dtype, "model": sizes | dict(model)}


def splash_model(block: int, rotary: str = "pallas") -> dict[str, Any]:
    """Keys of a layer with JAX's kernels in square tiles, backward in one kernel."""
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv")
    return {
        "splash": {**dict.fromkeys(names, block), "use_fused_bwd": True},
        "qk_rotary": {"kernel": rotary},
    }


def whole_head_model(tiles: Sequence[int], rotary: str = "attention") -> dict[str, Any]:
    """Keys of a layer with a whole head in VMEM; `tiles` as `NAMES` orders them."""
    return {"whole_head": dict(zip(NAMES, tiles, strict=True)), "qk_rotary": {"kernel": rotary}}


def tune(
    shape: AttentionShape,
    splash_blocks: Sequence[int],
    tiles: Sequence[Sequence[int]],
    cache_dir: Path,
    on_candidate: Callable[[str], None] = lambda name: None,
    limits: Limits | None = None,
) -> list[dict[str, Any]]:
    """Every candidate planned.

    Args:
        shape: The layer.
        splash_blocks: Tiles of JAX's splash kernels.
        tiles: Sizes of the kernels that hold a head in VMEM, as `NAMES` orders them.
        cache_dir, limits: As for `planned`.
        on_candidate: Told the name of a candidate before it is compiled.

    Returns:
        One dictionary each: `kernel` (splash or whole_head), `tiles`, and the child's answer.
    """
    candidates = [("splash", {"block": block}, splash_model(block)) for block in splash_blocks]
    candidates += [("whole_head", dict(zip(NAMES, sizes, strict=True)), whole_head_model(sizes)) for sizes in tiles]
    rows = []
    for kernel, sizes, model in candidates:
        on_candidate(f"{kernel}, {' x '.join(map(str, sizes.values()))}")
        answer = planned(CHILD_MODULE, shape.request(model), cache_dir, limits)
        rows.append({"kernel": kernel, "tiles": sizes} | answer)
    return rows


def attention_seconds(row: Mapping[str, Any]) -> float:
    """Planned seconds of a candidate without its projections, which are the same for all."""
    return row["seconds"] - row["categories"].get("matmul", 0.0)


def table_entry(shape: AttentionShape, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the table keeps of one tuning: the sizes of the shortest planned time, and what they won against.

    Raises:
        TomatError: No sizes could be compiled.
    """
    answered = [row for row in rows if "refused" not in row]
    whole_head = sorted((row for row in answered if row["kernel"] == "whole_head"), key=attention_seconds)
    if not whole_head:
        reasons = sorted({row["refused"] for row in rows if "refused" in row})
        raise TomatError(
            f"none of {len(rows)} candidates holds a head of {shape.positions} positions and size {shape.head_size} in "
            f"VMEM and compiles: {' '.join(reasons) or 'give --tiles.'}"
        )
    best = whole_head[0]
    return {
        "device_kind": best["device_kind"],
        "positions": shape.positions,
        "head_size": shape.head_size,
        "dtype": shape.dtype,
        "tiles": best["tiles"],
        "planned_seconds": attention_seconds(best),
        "provenance": {
            "compiler": best["compiler"],
            "jax": importlib.metadata.version("jax"),
            "shape": asdict(shape),
            "candidates": [
                {"kernel": row["kernel"], "tiles": row["tiles"]}
                | ({"refused": row["refused"]} if "refused" in row else {"seconds": attention_seconds(row)})
                for row in rows
            ],
        },
    }


def write_entry(entry: dict[str, Any], table_file: Path = TABLE_FILE) -> None:
    """Put an entry into the table, in the place of one for the same chip, positions, head size and type."""
    put_entry(entry, ("device_kind", "positions", "head_size", "dtype"), table_file)
