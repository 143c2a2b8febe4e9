"""How large a density may be, so that a damaged header or a crafted file is refused before memory is taken for it."""

import bz2
import gzip
import io
import lzma
import math
import os
import zlib
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from tomat.base.errors import TomatError

MOST_ATOMS = 10_000
"""Of a cell. The largest of the Materials Project has 444; plane-wave DFT ends at a few thousand."""

MOST_VOXELS = 2**28
"""Of a grid: 645^3, 1 GiB as float32. The largest of the Materials Project has 448^3."""

MOST_TEXT_BYTES = 2**33
"""Of a file that is decompressed: 448^3 values of 20 characters, total and three magnetisations, take 7.2 GB. Once the
grid of a CHGCAR is known, its limit is what that grid can need, more or less than this: it is read piece by piece."""

MOST_STRUCTURE_BYTES = 2**24
"""Of a file that is read for its structure alone, decompressed: 1,600 for each of 10,000 atoms; JSON of pymatgen takes
300, a CIF 100."""

MOST_EXPANSION = 64
"""Decompressed over compressed bytes, above `FREE_BYTES`. Eleven random digits compress 3 to 4 times, a file of zeros
about 1,000 times."""

FREE_BYTES = 2**26
"""Decompressed without a look at the ratio."""

COMPRESSION_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What gzip, bz2 and lzma raise for damaged data."""

_PIECE_BYTES = 2**20
_FEW_LINES = 16


def check_atom_count(count: int, source: str) -> None:
    """Refuse a number of atoms that no cell has, before anything is read for it."""
    if not 1 <= count <= MOST_ATOMS:
        raise TomatError(
            f"{source}: the cell has {count:,} atoms; expected 1 to {MOST_ATOMS:,}. The cell is too large, or the "
            "file damaged."
        )


def check_grid_shape(shape: Sequence[int], source: str) -> None:
    """Refuse a grid that no density has, before anything is allocated for it."""
    if len(shape) != 3 or min(shape) < 1 or math.prod(shape) > MOST_VOXELS:
        sides = " x ".join(f"{int(side):,}" for side in shape)
        raise TomatError(
            f"{source}: the grid is {sides}; expected three sides of at least 1 and at most {MOST_VOXELS:,} voxels. "
            "The file is damaged."
        )


class BoundedText:
    """Bytes of a plain, gzip, bz2 or xz stream, of which no more are decompressed than their header can need."""

    def __init__(self, raw: IO[bytes], compressed_bytes: int, source: str) -> None:
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
        self.limit_bytes = MOST_TEXT_BYTES
        self.kind = "density"
        """What errors call the content."""
        self._compressed_bytes = compressed_bytes
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
        if count <= _FEW_LINES:  # or all that is read ahead would be searched for the end of one line, again and again
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
        """All that is left."""
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
                f"{self.source} holds more than {self.limit_bytes:,} bytes, the most that such a {self.kind} can need; "
                "it is not one, or damaged."
            )
        if self.compressed and self.read_bytes > max(FREE_BYTES, MOST_EXPANSION * self._compressed_bytes):
            raise TomatError(
                f"{self.source} has {self._compressed_bytes:,} bytes and decompresses to more than "
                f"{self.read_bytes:,}; a {self.kind} shrinks at most {MOST_EXPANSION} times, so this is none."
            )
        self._buffer, self._at = self._buffer[self._at :] + piece, 0
        return bool(piece)


def decompressed(raw: bytes, source: str) -> bytes:
    """The content of a plain or compressed object, within the limits.

    Raises:
        COMPRESSION_ERRORS: damaged compression.
    """
    return BoundedText(io.BytesIO(raw), len(raw), source).everything()


def open_structure(path: str) -> BoundedText:
    """As `open_text`, of a file that is read for its structure alone: up to `MOST_STRUCTURE_BYTES`."""
    text = open_text(path)
    text.limit_bytes, text.kind = MOST_STRUCTURE_BYTES, "structure"
    return text


def structure_text(path: str) -> str:
    """The whole content of a local file with a structure or pseudopotentials, plain or compressed.

    Raises:
        COMPRESSION_ERRORS: damaged compression.
    """
    text = open_structure(path)
    with text.stream:
        content = text.everything()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")  # names of authors; every byte is a letter of it


def open_text(path: str) -> BoundedText:
    """A local file, within the limits; close its `stream`."""
    return BoundedText(open(path, "rb"), os.stat(path).st_size, path)
