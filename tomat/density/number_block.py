"""A block of numbers in a text file, such as the values of a CHGCAR or a cube: read whole, or refused."""

import re
from io import BytesIO

import numpy as np

from tomat.base.errors import TomatError
from tomat.density.limits import BoundedText

LONGEST_LINE_BYTES = 1 << 26
_LINES_AT_ONCE = 1 << 16
MOST_BLANK_READS = 1_000
"""Pieces of a block without a value, after which it is refused: a file of millions of blank lines takes minutes."""


def read_block(text: BoundedText, n_values: int, what: str, kind: str) -> np.ndarray:
    """`n_values` numbers over as many lines as they take, float64; a block ends with its line.

    Args:
        what: the block, in errors.
        kind: of the file, in errors, such as "CHGCAR".

    Raises:
        TomatError: fewer or more values, a word that is no number, or blank lines without end.
    """
    parts: list[np.ndarray] = []
    found, per_line, blank = 0, 1, 0
    while found < n_values:
        # As many lines as are certain to belong to the block, from the values of its first line.
        certain = min((n_values - found) // per_line, _LINES_AT_ONCE) if found else 1
        lines = text.lines(max(certain, 1), LONGEST_LINE_BYTES)
        if not lines:
            raise TomatError(
                f"{text.source} is not a complete {kind}: {found:,} of {n_values:,} values of the {what}. It may be "
                "cut off: compare its size with the original."
            )
        part = parsed(lines, text.source, what, kind)
        blank += not part.size
        if blank > MOST_BLANK_READS:
            raise TomatError(
                f"{text.source} is not a complete {kind}: blank lines after {found:,} of {n_values:,} values of the "
                f"{what}; the file is damaged."
            )
        if not found:
            per_line = max(part.size, 1)
        parts.append(part)
        found += part.size
    if found != n_values:
        raise TomatError(f"{text.source}: {found:,} values where the {what} has {n_values:,}; the file is damaged.")
    return np.concatenate(parts) if parts else np.empty(0)


def parsed(lines: bytes, source: str, what: str, kind: str) -> np.ndarray:
    """The numbers in a piece of text, of which every word must be one.

    Raises:
        TomatError: with the first word that is none.
    """
    values = _numbers(lines)
    if values is None:
        # Fortran leaves the E out where an exponent has three digits: 0.12345678901-100.
        values = _numbers(re.sub(rb"(\d)([+-]\d{3})\b", rb"\1E\2", lines))
    if values is None:
        word = next((word for word in lines.split() if _numbers(word) is None), b"")
        raise TomatError(
            f"{source} is not a complete {kind}: found {word[:40].decode('latin-1')!r} among the values of the {what}."
        )
    return values


def _numbers(text: bytes) -> np.ndarray | None:
    """All numbers of a text; None if a word of it is none."""
    from pymatgen.optimization.fast_parser import parse_n_doubles

    space = np.frombuffer(b" " + text, dtype=np.uint8) <= 32
    n_words = int(np.count_nonzero(space[:-1] & ~space[1:]))
    values = np.empty(n_words + 1)
    # The parser stops at what is no number, and takes 1.2.3 or 1-100 as two.
    return values[:n_words] if parse_n_doubles(BytesIO(text), values, n_words + 1) == n_words else None
