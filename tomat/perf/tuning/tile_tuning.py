"""Tunes the tiles of the Pallas loss and the sizes of the attention kernels by the compiler's own schedule, and writes
the tables that `model.loss` and `model.whole_head` read.

Each candidate is compiled alone, for one chip, in a process of its own, and kept in a cache by what was asked, the
compiler and the sources: a tuning that was stopped goes on where it was. A candidate is a dictionary with `kernel` and
its `tiles` (of XLA's loss `block_positions`). `tomat bench loss-tiles` and `attention-tiles` are the verbs.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from tomat.base.errors import TomatError
from tomat.base.reporting import console, write_json
from tomat.hardware.chips import slice_named
from tomat.model.loss.config import LossKind, LossVocabulary
from tomat.model.tiles import TunedSizes, TunedTiles
from tomat.perf.cost.chip_model import record_digest
from tomat.perf.plan.compile.process import Limits, ask, request_key
from tomat.perf.plan.compile.topology import compiler_version
from tomat.perf.plan.plan_cache import open_cache, open_result

Candidate = Mapping[str, Any]
CHILD_MODULE = "tomat.perf.tuning.tile_child"
"""What lowers, compiles and measures; its imports are part of what decides an answer."""


@dataclass(frozen=True)
class LossShape:
    """Loss and arrays of one device: value and gradients."""

    KERNEL: ClassVar = "pallas"
    """The kernel whose tiles are tuned, against the other one."""
    TABLE_FILE: ClassVar = TunedTiles.FILE

    slice_name: str = "v6e-1"
    batch: int = 8
    positions: int = 8192
    width: int = 1024
    density_tokens: int = 16384
    dtype: str = "bfloat16"
    kind: LossKind = "cross_entropy"
    vocabulary: LossVocabulary = "full"

    @property
    def ids(self) -> int:
        """Ids over which the loss normalises."""
        from tomat.data.tokens.vocabulary import Vocabulary

        return self.density_tokens if self.vocabulary == "density" else Vocabulary(self.density_tokens).size

    @property
    def key(self) -> dict[str, Any]:
        """What an entry of the table is for, besides the chip."""
        return {"width": self.width, "ids": self.ids, "dtype": self.dtype}

    def request(self, candidate: Candidate) -> dict[str, Any]:
        return {**asdict(self), "loss": {"kind": self.kind, "vocabulary": self.vocabulary} | dict(candidate)}

    def seconds(self, row: Mapping[str, Any]) -> float:
        return row["seconds"]


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer on one device: projections, norms, rotary embedding, kernels; forward and backward."""

    KERNEL: ClassVar = "whole_head"
    TABLE_FILE: ClassVar = TunedSizes.FILE

    slice_name: str = "v6e-1"
    batch: int = 8
    positions: int = 8192
    hidden_dim: int = 1024
    num_heads: int = 4
    num_kv_heads: int = 4
    dtype: str = "bfloat16"

    @property
    def head_size(self) -> int:
        return self.hidden_dim // self.num_heads

    @property
    def key(self) -> dict[str, Any]:
        """What an entry of the table is for, besides the chip."""
        return {"positions": self.positions, "head_size": self.head_size, "dtype": self.dtype}

    def request(self, candidate: Candidate) -> dict[str, Any]:
        model = {
            "max_seq_len": self.positions,
            "hidden_dim": self.hidden_dim,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "num_layers": 1,
            "attn_backend": "splash",
        }
        if candidate["kernel"] == self.KERNEL:
            model |= {"whole_head": candidate["tiles"], "qk_rotary": {"kernel": "attention"}}
        else:  # JAX's kernels in square tiles, backward in one kernel
            blocks = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv"), candidate["tiles"]["block"])
            model |= {"splash": {**blocks, "use_fused_bwd": True}, "qk_rotary": {"kernel": "pallas"}}
        return {"slice_name": self.slice_name, "batch": self.batch, "dtype": self.dtype, "model": model}

    def seconds(self, row: Mapping[str, Any]) -> float:
        """Planned seconds of an answered candidate without its projections, which are the same for all."""
        return row["seconds"] - row["categories"].get("matmul", 0.0)


def sizes_text(candidate: Candidate) -> str:
    """`4096 x 256 x 512 x 32`."""
    return " x ".join(map(str, candidate["tiles"].values() if "tiles" in candidate else [candidate["block_positions"]]))


def tune(
    shape: LossShape | AttentionShape,
    candidates: Sequence[Candidate],
    cache_dir: Path,
    on_candidate: Callable[[str], None] = lambda name: None,
    limits: Limits | None = None,
) -> list[dict[str, Any]]:
    """Each candidate with what the compiler makes of it, from the cache or by compiling, or `refused`: why.

    Args:
        limits: Of one compile, which takes 40 to 300 s on two cores, by how much else runs on them.
    """
    rows = []
    for candidate in candidates:
        on_candidate(f"{candidate['kernel']}, {sizes_text(candidate)}")
        rows.append({**candidate, **_planned(shape.request(candidate), cache_dir, limits or Limits())})
    return rows


def _planned(request: dict[str, Any], cache_dir: Path, limits: Limits) -> dict[str, Any]:
    key = request_key([request, compiler_version(), record_digest()], CHILD_MODULE)
    kept = open_result(open_cache(cache_dir) / key)
    if kept is None:
        slice_, say = slice_named(request["slice_name"]), partial(console.print, highlight=False)
        kept = ask(CHILD_MODULE, {**request, "key": key}, slice_, cache_dir, limits, on_removed=say)
    kept.lock.close()
    return kept.result


def table_entry(shape: LossShape | AttentionShape, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the table keeps of one tuning: the tiles of the shortest planned time, and what they won against."""
    tuned = [row for row in rows if row["kernel"] == shape.KERNEL and "refused" not in row]
    if not tuned:
        reasons = sorted({row["refused"] for row in rows if "refused" in row})
        what = ", ".join(f"{name} {value}" for name, value in shape.key.items())
        raise TomatError(
            f"none of {len(rows)} candidates is a {shape.KERNEL} kernel that compiles for {what}: "
            + (" ".join(reasons) or "give --tiles.")
        )
    best = min(tuned, key=shape.seconds)
    kept = ("kernel", "tiles", "block_positions", "refused")
    return {
        "device_kind": best["device_kind"],
        **shape.key,
        "tiles": best["tiles"],
        "planned_seconds": shape.seconds(best),
        "provenance": {
            "compiler": best["compiler"],
            "jax": importlib.metadata.version("jax"),
            "shape": asdict(shape),
            "candidates": [
                {key: row[key] for key in kept if key in row}
                | ({} if "refused" in row else {"seconds": shape.seconds(row)})
                for row in rows
            ],
        },
    }


def write_entry(shape: LossShape | AttentionShape, entry: dict[str, Any], table_file: Path | None = None) -> None:
    """Put an entry into its table (of the package, unless another is given), in the place of one for the same."""
    file, keys = table_file or shape.TABLE_FILE, ("device_kind", *shape.key)
    entries = json.loads(file.read_text(encoding="utf-8"))["entries"] if file.exists() else []
    others = [e for e in entries if any(e[key] != entry[key] for key in keys)]
    write_json(file, {"entries": sorted([*others, entry], key=lambda e: tuple(e[key] for key in keys))})
