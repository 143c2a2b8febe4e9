"""Limits on a density's size, checked before memory is taken; and blocks of numbers in text, read whole or refused."""

import bz2
import contextlib
import gzip
import io
import lzma
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np

from tomat.base.errors import TomatError

MOST_ATOMS = 10_000
"""Most atoms of a cell. The largest of the Materials Project has 444; plane-wave DFT ends at a few thousand."""

MOST_VOXELS = 2**28
"""Most voxels of a grid: 645^3, 1 GiB as float32. The largest of the Materials Project has 448^3."""

MOST_TEXT_BYTES = 2**33
"""Most bytes of a decompressed file: 448^3 values of 20 characters, total and three magnetisations, take 7.2 GB. Once
the grid of a CHGCAR is known, the limit is what this grid can need, more or less, since it is read piece by piece."""

MOST_STRUCTURE_BYTES = 2**24
"""Most decompressed bytes of a structure: 1,600 for each of 10,000 atoms; JSON of pymatgen takes 300, a CIF 100."""

MOST_EXPANSION = 64
"""Most decompressed over compressed bytes, above `FREE_BYTES`: random digits reach 3 to 4, zeros 1,000."""

FREE_BYTES = 2**26
"""Decompressed bytes up to which the ratio is not checked."""

COMPRESSION_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What gzip, bz2 and lzma raise for damaged data."""

PACKED = (".gz", ".bz2", ".xz")
"""Endings of the names of compressed files."""

_PIECE_BYTES = 2**20
_FEW_LINES = 16


def unpacked(name: str) -> str:
    """A name without the suffix of a compression."""
    return next((name.removesuffix(suffix) for suffix in PACKED if name.endswith(suffix)), name)


def check_atom_count(count: int, source: str) -> None:
    """Refuse a number of atoms that no cell has, before anything is read for it."""
    if not 1 <= count <= MOST_ATOMS:
        raise TomatError(f"{source}: the cell has {count:,} atoms; expected 1 to {MOST_ATOMS:,}. Is the file damaged?")


def check_grid_shape(shape: Sequence[int], source: str) -> None:
    """Refuse a grid that no density has, before anything is allocated for it."""
    if len(shape) != 3 or min(shape) < 1 or math.prod(shape) > MOST_VOXELS:
        sides = " x ".join(f"{int(side):,}" for side in shape)
        raise TomatError(
            f"{source}: the grid is {sides}; expected three sides, each 1 or more, and at most {MOST_VOXELS:,} voxels."
        )


class BoundedText:
    """Bytes of a plain, gzip, bz2 or xz stream. No more are decompressed than `limit_bytes`."""

    def __init__(self, raw: IO[bytes], source: str, limit_bytes: int = MOST_TEXT_BYTES, kind: str = "density") -> None:
        """`kind`: what errors call the content."""
        self._compressed_bytes = raw.seek(0, os.SEEK_END)
        raw.seek(0)
        head = raw.read(6)
        raw.seek(0)
        self.stream: Any = raw
        if head[:2] == b"\x1f\x8b":
            self.stream = gzip.GzipFile(fileobj=raw, mode="rb")
        elif head[:3] == b"BZh":
            self.stream = bz2.BZ2File(raw)
        elif head == b"\xfd7zXZ\x00":
            self.stream = lzma.LZMAFile(raw)
        self.compressed = self.stream is not raw
        self.source = source
        self.read_bytes = 0
        """Decompressed so far."""
        self.limit_bytes = limit_bytes
        self._kind = kind
        self._buffer, self._at = b"", 0

    def line(self, longest: int = 4096) -> bytes:
        """The next line with its end; empty at the end of the text."""
        while (end := self._buffer.find(b"\n", self._at) + 1) == 0:
            if len(self._buffer) - self._at > longest or not self._fill():
                end = len(self._buffer)
                break
        line = self._buffer[self._at : end]
        if len(line) > longest:
            raise TomatError(f"{self.source}: a line is longer than {longest:,} bytes; this is not such a file.")
        self._at = end
        return line

    def lines(self, count: int, longest: int) -> bytes:
        """The next `count` lines together; fewer at the end of the text."""
        if count <= _FEW_LINES:  # otherwise every call would search all that is read ahead for the end of one line
            return b"".join(self.line(longest) for _ in range(count))
        found = []
        while count > 0 and (self._at < len(self._buffer) or self._fill()):
            ends = np.flatnonzero(np.frombuffer(self._buffer, np.uint8)[self._at :] == ord("\n"))[:count] + self._at + 1
            if ends.size:
                found.append(self._buffer[self._at : int(ends[-1])])
                self._at = int(ends[-1])
                count -= ends.size
            else:
                found.append(self.line(longest))
                count -= 1
        return b"".join(found)

    def everything(self) -> bytes:
        """All that is left; damaged compression is one of `COMPRESSION_ERRORS`."""
        pieces = io.BytesIO()
        while self._at < len(self._buffer) or self._fill():
            pieces.write(self._buffer[self._at :])
            self._at = len(self._buffer)
        return pieces.getvalue()

    def _fill(self) -> bool:
        """Decompress some more; False at the end."""
        piece = self.stream.read(_PIECE_BYTES)
        self.read_bytes += len(piece)
        if self.read_bytes > self.limit_bytes:
            raise TomatError(
                f"{self.source} has more than {self.limit_bytes:,} bytes, too many for a {self._kind}; it is damaged."
            )
        if self.compressed and self.read_bytes > max(FREE_BYTES, MOST_EXPANSION * self._compressed_bytes):
            raise TomatError(
                f"{self.source} has {self._compressed_bytes:,} bytes and decompresses to more than "
                f"{self.read_bytes:,}; a {self._kind} shrinks at most {MOST_EXPANSION} times, so this is none."
            )
        self._buffer, self._at = self._buffer[self._at :] + piece, 0
        return bool(piece)


def open_text(path: str) -> BoundedText:
    """A local file, within the limits; close its `stream`."""
    return BoundedText(open(path, "rb"), path)


def open_structure(path: str) -> BoundedText:
    """As `open_text`, for a file that is read only for its structure: up to `MOST_STRUCTURE_BYTES`."""
    return BoundedText(open(path, "rb"), path, MOST_STRUCTURE_BYTES, "structure")


def structure_text(path: str) -> str:
    """A local file with a structure or pseudopotentials, plain or compressed; raises one of `COMPRESSION_ERRORS`."""
    text = open_structure(path)
    with text.stream:
        content = text.everything()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")  # for names of authors; every byte is a latin-1 character


LONGEST_LINE_BYTES = 1 << 26
_LINES_AT_ONCE = 1 << 16
MOST_BLANK_READS = 1_000
"""A block with more pieces without a value is refused: a file of millions of blank lines would take minutes."""


_D_AS_E = bytes.maketrans(b"Dd", b"Ee")
_NO_E = re.compile(rb"(?<=[\d.])(?=[+-]\d{3}\b)")
"""The place where Fortran leaves out the E before an exponent of three digits: 0.12345678901-100."""


def finite_numbers(line: bytes) -> list[float] | None:
    """The numbers of a short line, as in a header; None if a word is not a finite number."""
    for text in _as_fortran(line):
        with contextlib.suppress(ValueError):
            values = [float(word) for word in text.split()]
            # Python takes 1_000 as a number.
            return values if all(map(math.isfinite, values)) and b"_" not in text else None
    return None


def without_padding(values: np.ndarray, n_values: int, per_line: int) -> np.ndarray:
    """`values` without the zeros that fill their last line: some programs write every line in full. `values`: `[n]`."""
    excess = values[n_values:]
    return values[:n_values] if excess.size < per_line and not excess.any() else values


def read_block(text: BoundedText, n_values: int, what: str, kind: str) -> np.ndarray:
    """`n_values` numbers, float64, over as many lines as they take. A block ends with a line, which zeros may fill."""
    parts = [np.empty(0)]
    found, per_line, blank = 0, 1, 0
    while found < n_values:
        # As many lines as are certain to belong to the block, from the values of its first line.
        certain = min((n_values - found) // per_line, _LINES_AT_ONCE) if found else 1
        lines = text.lines(max(certain, 1), LONGEST_LINE_BYTES)
        _, part = parsed(lines, text.source, what, kind)
        blank += not part.size
        if not lines or blank > MOST_BLANK_READS:
            end = "blank lines" if lines else "the end"
            raise TomatError(
                f"{text.source} is not a complete {kind}: {end} after {found:,} of {n_values:,} values of the {what}. "
                "It may be cut off or damaged: compare its size with the original."
            )
        per_line = per_line if found else max(part.size, 1)
        parts.append(part)
        found += part.size
    values = without_padding(np.concatenate(parts), n_values, per_line)
    if values.size != n_values:
        raise TomatError(f"{text.source}: found {values.size:,} values, the {what} has {n_values:,}; it is damaged.")
    return values


def parsed(lines: bytes, source: str, what: str, kind: str) -> tuple[bytes, np.ndarray]:
    """A piece of text, with exponents as other languages read them, and its numbers. Every word must be a number."""
    found = _numbers(lines)
    if found is None:
        word = next((word for word in lines.split() if _numbers(word) is None), b"")[:40].decode("latin-1")
        raise TomatError(f"{source} is not a complete {kind}: found {word!r} among the values of the {what}.")
    return found


def _as_fortran(text: bytes) -> Iterator[bytes]:
    """The text as it is, then with E in place of Fortran's D, then also with E where Fortran writes no letter."""
    yield text
    text = text.translate(_D_AS_E)
    yield text
    yield _NO_E.sub(b"E", text)


def _numbers(text: bytes) -> tuple[bytes, np.ndarray] | None:
    """The text with exponents as other languages write them, and its numbers; None if a word is not a number."""
    from pymatgen.optimization.fast_parser import parse_n_doubles

    space = np.frombuffer(b" " + text, dtype=np.uint8) <= 32
    n_words = int(np.count_nonzero(space[:-1] & ~space[1:]))
    values = np.empty(n_words + 2)
    # The parser takes 1.2.3 or 1-100 as two numbers, and stops at anything else, as after the 1.5 of 1.5D-03. It finds
    # one number more than there are words, the added 0, only if it has read every word as one number.
    for spelt in _as_fortran(text):
        if parse_n_doubles(io.BytesIO(spelt + b" 0\n"), values, n_words + 2) == n_words + 1:
            return spelt, values[:n_words]
    return None


@contextlib.contextmanager
def opened(source: str, kind: str) -> Iterator[BoundedText]:
    """The text of a file that has the form of a `kind`, such as a CHGCAR, within the limits."""
    if not os.path.isfile(source):
        raise TomatError(f"no {kind} at {source}; expected a file.")
    try:
        text = open_text(source)
        with text.stream:
            yield text
    except COMPRESSION_ERRORS as error:
        found = f"{source} is not a complete {kind} ({type(error).__name__}: {error})"
        raise TomatError(f"{found}. It may be cut off or damaged: compare it with the original.") from error
