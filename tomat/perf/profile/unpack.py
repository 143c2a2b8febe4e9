"""Files that may be gzipped, read up to a limit: a few megabytes of gzip can hold gigabytes of zeros."""

from __future__ import annotations

import gzip
import io
import zlib

from tomat.base.errors import TomatError

ALWAYS_UNPACKED_BYTES = 64 * 2**20
MAX_RATIO = 100
"""Bytes for each byte of gzip, above `ALWAYS_UNPACKED_BYTES`. The tests' profiles have 5 (xplane) to 9 (HLO),
zeros have 1,030."""
MAX_UNPACKED_BYTES = 2**30
"""Four times what the profiler's limit of 1 M events takes as JSON (about 250 bytes each)."""


def unpacked(data: bytes, origin: str, what: str) -> bytes:
    """The content of a file, unpacked if it is gzip.

    Args:
        data: the file.
        origin: its path or URL, for the messages.
        what: it should be, for the messages.

    Raises:
        TomatError: it is damaged gzip, or unpacks to more than such a file holds.
    """
    if data[:2] != b"\x1f\x8b":
        return data
    limit = min(MAX_UNPACKED_BYTES, max(ALWAYS_UNPACKED_BYTES, MAX_RATIO * len(data)))
    try:
        with gzip.open(io.BytesIO(data)) as file:
            content = file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TomatError(
            f"{origin}: not a {what}: it cannot be read ({error}). It may be truncated: copy it again."
        ) from None
    if len(content) > limit:
        raise TomatError(
            f"{origin}: {len(data):,} bytes of gzip unpack to more than {limit:,}, which no {what} does. If it is "
            "sound, unpack it with gunzip and give the unpacked file."
        )
    return content
