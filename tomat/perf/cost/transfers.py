"""The copies between HBM and a core's own memory that a TPU program starts, read off its final bundles.

A bundle that starts one names its size and, in a comment of the compiler's pipeline emitter, the window that it moves:
``base_bounds`` of the array, ``window_bounds`` of the block, both in tiles, and ``element_size_in_bytes`` of a tile.
From these follows what XLA's HLO does not say: how often a block is fetched again. Read off dumps of libtpu 0.0.46.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tomat.perf.cost.scalar_code import ScalarCode

BYTES_PER_GRANULE = 32
"""Unit of the sizes: a window of 64 tiles of 2,048 bytes is 4,096 granules (splash forward kernel)."""

_START = re.compile(
    r"= dma\.(?P<kind>hbm_to_vmem|vmem_to_hbm|general) (?:\[thread:\$\d+\]\s+)?"
    r"(?:\((?P<negated>!?)%(?P<predicate>p\d+)_p\d+\), )?"
    r"/\*(?:hbm|vmem|src)=\*/%(?P<source>s\d+)_\S+, /\*size_in_granules=\*/(?:(?P<granules>\d+)|%\S+), "
    r"/\*(?:hbm|vmem|dst)=\*/%(?P<target>s\d+)_"
)
_WINDOW = re.compile(r"(base_bounds|window_bounds): \(([\d, ]*)\)")
_ELEMENT_BYTES = re.compile(r"element_size_in_bytes: (\d+)")


@dataclass(frozen=True)
class Transfer:
    """A copy between HBM and the memory of the core."""

    written: bool
    """To HBM; else from it."""
    size_bytes: int
    share: float | None = 1.0
    """In which share of the executions of its region it is started: a block that is there already is not fetched. None
    where data decide it."""


class TransferReader:
    """Collects the copies of one op, line by line."""

    def __init__(self) -> None:
        self._found: list[tuple[int, re.Match[str], dict[str, tuple[int, ...]]]] = []
        self._open = False

    def line(self, bundle: int, line: str) -> None:
        """Takes note of a copy that a line starts, or of its window."""
        if "= dma." in line:
            match = _START.search(line)
            self._open = match is not None
            if match is not None:
                self._found.append((bundle, match, {}))
        elif self._open and ":" in line:
            window = self._found[-1][2]
            for name, sizes in _WINDOW.findall(line):
                window.setdefault(name, tuple(int(size) for size in sizes.split(",") if size.strip()))
            element = _ELEMENT_BYTES.search(line)
            if element is not None:
                window.setdefault("element", (int(element[1]),))
                self._open = False

    def transfers(
        self, code: ScalarCode, trips: Mapping[int, int | None], grid: tuple[int, ...]
    ) -> dict[int, list[Transfer]]:
        """Bundle -> the copies it starts between HBM and the core.

        Args:
            code: The scalar code of the op, whole.
            trips: Loop (first bundle) -> trip count.
            grid: Sizes of its grid.
        """
        found: dict[int, list[Transfer]] = {}
        for bundle, match, window in self._found:
            written = _written(code, match)
            if written is None:
                continue
            element = window.get("element", (0,))[0]
            base, bounds = window.get("base_bounds", ()), window.get("window_bounds", ())
            # A size that is no constant belongs to an array that its blocks do not divide: the last one is shorter.
            cut = math.prod(size / (math.ceil(size / part) * part) for size, part in zip(base, bounds, strict=True))
            granules = match["granules"]
            size = int(granules) * BYTES_PER_GRANULE if granules else round(element * math.prod(bounds) * cut)
            share: float | None = 1.0
            if match["predicate"]:
                share, _ = code.share(match["predicate"], bool(match["negated"]), trips, grid)
                if share is None:
                    share = code.changed_share(match["predicate"], grid)
            if size:
                found.setdefault(bundle, []).append(Transfer(written, size, share))
        return found


def _written(code: ScalarCode, match: re.Match[str]) -> bool | None:
    """Whether a copy goes to HBM; None where neither end of it is there."""
    if match["kind"] != "general":
        return match["kind"] == "vmem_to_hbm"
    in_core = [code.operation(match[end]).endswith(".vmem") for end in ("source", "target")]
    return None if all(in_core) else in_core[0]
