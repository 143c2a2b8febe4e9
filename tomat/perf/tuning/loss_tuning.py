"""Tunes the tiles of the Pallas loss by the compiler's own schedule, and writes the table that the loss reads.

Each candidate is compiled alone, for one chip, in a process of its own, and kept in a cache by what was asked, the
compiler and the loss's sources: a tuning that was stopped goes on where it was. `tomat bench loss-tiles` is the verb.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.model.loss.config import LossKind, LossVocabulary
from tomat.model.loss.tiles import TABLE_FILE, LossTiles
from tomat.perf.plan.compile.process import Limits
from tomat.perf.tuning.kernel_plans import planned, put_entry

CHILD_MODULE = "tomat.perf.tuning.loss_child"
"""What lowers, compiles and measures a loss; its imports are what decides an answer."""


@dataclass(frozen=True)
class LossShape:
    """Loss and arrays of one device."""

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

    def request(self, **loss: Any) -> dict[str, Any]:
        """What `loss_child.py` is asked: this shape, with these arguments of `LossConfig` on top."""
        return {**asdict(self), "loss": {"kind": self.kind, "vocabulary": self.vocabulary} | loss}


def tune(
    shape: LossShape,
    tiles: Sequence[LossTiles],
    block_positions: Sequence[int],
    cache_dir: Path,
    on_candidate: Callable[[str], None] = lambda name: None,
    limits: Limits | None = None,
) -> list[dict[str, Any]]:
    """Every candidate planned: XLA's loss in blocks of these positions, the Pallas loss with these tiles.

    Args:
        shape: Loss and arrays.
        tiles: Candidates, every size set.
        block_positions: Blocks of the XLA loss.
        cache_dir, limits: As for `planned`.
        on_candidate: Told the name of a candidate before it is compiled.

    Returns:
        One dictionary each: `kernel`, `tiles` or `block_positions`, and the child's answer.
    """
    candidates = [(f"xla, {block} positions", {"kernel": "xla", "block_positions": block}) for block in block_positions]
    for sizes in (asdict(candidate) for candidate in tiles):
        candidates.append((f"pallas, {' x '.join(map(str, sizes.values()))}", {"kernel": "pallas", "tiles": sizes}))
    rows = []
    for name, loss in candidates:
        on_candidate(name)
        rows.append(loss | planned(CHILD_MODULE, shape.request(**loss), cache_dir, limits))
    return rows


def table_entry(shape: LossShape, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the table keeps of one tuning: the tiles of the shortest planned time, and what they won against.

    Raises:
        TomatError: No tiles could be compiled.
    """
    answered = [row for row in rows if "refused" not in row]
    pallas = sorted((r for r in answered if r["kernel"] == "pallas"), key=lambda r: r["seconds"])
    if not pallas:
        reasons = sorted({row["refused"] for row in rows if "refused" in row})
        raise TomatError(
            f"none of {len(rows)} candidates is a Pallas loss that compiles at a width of {shape.width}: "
            + (" ".join(reasons) or "give --tiles.")
        )
    best = pallas[0]
    return {
        "device_kind": best["device_kind"],
        "width": shape.width,
        "ids": shape.ids,
        "dtype": shape.dtype,
        "tiles": best["tiles"],
        "planned_seconds": best["seconds"],
        "provenance": {
            "compiler": best["compiler"],
            "jax": importlib.metadata.version("jax"),
            "shape": asdict(shape),
            "candidates": [
                {key: row[key] for key in ("kernel", "tiles", "block_positions", "seconds", "refused") if key in row}
                for row in rows
            ],
        },
    }


def write_entry(entry: dict[str, Any], table_file: Path = TABLE_FILE) -> None:
    """Put an entry into the table, in the place of one for the same chip, width, ids and type."""
    put_entry(entry, ("device_kind", "width", "ids", "dtype"), table_file)
