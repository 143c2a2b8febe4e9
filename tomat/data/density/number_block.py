"""A block of numbers in a text file, such as the values of a CHGCAR or a cube: read whole, or refused."""

import contextlib
import math
import re
from collections.abc import Iterator
from io import BytesIO

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.limits import BoundedText

LONGEST_LINE_BYTES = 1 << 26
_LINES_AT_ONCE = 1 << 16
MOST_BLANK_READS = 1_000
"""Pieces of a block without a value, after which it is refused: a file of millions of blank lines takes minutes."""


_D_AS_E = bytes.maketrans(b"Dd", b"Ee")
_NO_E = re.compile(rb"(?<=[\d.])(?=[+-]\d{3}\b)")
"""Where Fortran leaves the E out, of an exponent of three digits: 0.12345678901-100."""


def finite_numbers(line: bytes) -> list[float] | None:
    """The numbers of a short line, of a header; None if a word of it is none, or not finite."""
    for text in _as_fortran(line):
        with contextlib.suppress(ValueError):
            values = [float(word) for word in text.split()]
            # Python takes 1_000 as a number.
            return values if all(map(math.isfinite, values)) and b"_" not in text else None
    return None


def with_e(line: bytes) -> bytes:
    """A line of numbers with their exponents as other languages read them; as it is if it has others."""
    return next((each for each in _as_fortran(line) if _plain_numbers(each) is not None), line)


def without_padding(values: np.ndarray, n_values: int, per_line: int) -> np.ndarray:
    """`values` without the zeros that fill their last line: some programs write every line in full. `values`: `[n]`."""
    excess = values[n_values:]
    return values[:n_values] if excess.size < per_line and not excess.any() else values


def read_block(text: BoundedText, n_values: int, what: str, kind: str) -> np.ndarray:
    """`n_values` numbers over as many lines as they take, float64; a block ends with its line, which zeros may fill."""
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
    values = without_padding(np.concatenate(parts) if parts else np.empty(0), n_values, per_line)
    if values.size != n_values:
        raise TomatError(
            f"{text.source}: {values.size:,} values where the {what} has {n_values:,}; the file is damaged."
        )
    return values


def parsed(lines: bytes, source: str, what: str, kind: str) -> np.ndarray:
    """The numbers in a piece of text, of which every word must be one."""
    values = _numbers(lines)
    if values is None:
        word = next((word for word in lines.split() if _numbers(word) is None), b"")
        raise TomatError(
            f"{source} is not a complete {kind}: found {word[:40].decode('latin-1')!r} among the values of the {what}."
        )
    return values


def _as_fortran(text: bytes) -> Iterator[bytes]:
    """A text as it is, and with the exponents that Fortran writes: D in double precision, or none."""
    yield text
    text = text.translate(_D_AS_E)
    yield text
    yield _NO_E.sub(b"E", text)


def _numbers(text: bytes) -> np.ndarray | None:
    """All numbers of a text; None if a word of it is none."""
    return next((values for each in _as_fortran(text) if (values := _plain_numbers(each)) is not None), None)


def _plain_numbers(text: bytes) -> np.ndarray | None:
    from pymatgen.optimization.fast_parser import parse_n_doubles

    space = np.frombuffer(b" " + text, dtype=np.uint8) <= 32
    n_words = int(np.count_nonzero(space[:-1] & ~space[1:]))
    values = np.empty(n_words + 2)
    # The parser takes 1.2.3 or 1-100 as two, and stops at what is no number, after the 1.5 of 1.5D-03: it reaches the
    # number that is added only if it has read all before.
    found = parse_n_doubles(BytesIO(text + b" 0\n"), values, n_words + 2)
    return values[:n_words] if found == n_words + 1 else None
