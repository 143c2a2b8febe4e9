"""Which libtpu compiles which timed operation: the installed one, or those that `profiling/calibrate_with_libtpu.py` is
given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tomat.base.errors import TomatError
from tomat.perf.plan.compile.topology import OtherLibtpu, compiler_version


@dataclass(frozen=True)
class Compilers:
    """The installed libtpu, or others in its place."""

    other: OtherLibtpu | None = None
    """Of every operation that `by_op` does not name; None: the installed one."""
    by_op: Mapping[str, OtherLibtpu] = field(default_factory=dict)

    def of(self, op: str) -> OtherLibtpu | None:
        """What compiles an operation; None: the installed libtpu."""
        return self.by_op.get(op, self.other)

    def name_of(self, op: str) -> str:
        """`libtpu 0.0.46`."""
        other = self.of(op)
        return compiler_version() if other is None else other.compiler

    def require(self, ops: Iterable[str]) -> None:
        """Refuse a compiler of an operation that there is not."""
        there = sorted(set(ops))
        unknown = [op for op in self.by_op if op not in there]
        if unknown:
            raise TomatError(f"--libtpu names the operation {unknown[0]}; the rows are of {', '.join(there)}.")
