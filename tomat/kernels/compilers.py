"""Which libtpu compiles which timed operation.

A file of timings may hold kernels of several versions of the compiler, even of one chip: of openxla/tokamax's TPU7x the
backward pass of XLA's loss has the memory that libtpu 0.0.37 plans (21 of 21), all else that of 0.0.44 (84 of 87).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.planning.compile.topology import OtherLibtpu, compiler_version, libtpu_in


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
        """`libtpu 0.0.46`.

        Raises:
            TomatError: As for `compiler_version`.
        """
        other = self.of(op)
        return compiler_version() if other is None else other.compiler

    def require(self, ops: Iterable[str]) -> None:
        """Refuse a compiler of an operation that there is not.

        Raises:
            TomatError: `by_op` names one.
        """
        there = sorted(set(ops))
        unknown = [op for op in self.by_op if op not in there]
        if unknown:
            raise TomatError(f"--libtpu names the operation {unknown[0]}; the rows are of {', '.join(there)}.")


def read_compilers(words: Sequence[str]) -> Compilers:
    """Of `DIR`, the libtpu of all operations, and any number of `OP=DIR`, that of one.

    Raises:
        TomatError: As for `libtpu_in`; or an operation, or all of them, would have two.
    """
    found: dict[str, OtherLibtpu] = {}
    for word in words:
        op, equals, folder = word.partition("=")
        if not (equals and op.isidentifier()):
            op, folder = "", word
        if op in found:
            raise TomatError(f"--libtpu gives two compilers of {op or 'all operations'}; expected one, or OP=DIR each.")
        found[op] = libtpu_in(Path(folder))
    return Compilers(found.pop("", None), found)
