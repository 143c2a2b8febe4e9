"""Arrays in one `.npz` object that carries a checksum of their content.

The checksum is over names, types, shapes and values, not over the compressed bytes, so the same content has the same
checksum whatever wrote it.
"""

import hashlib
from collections.abc import Mapping
from io import BytesIO

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import naming

CHECKSUM_NAME = "content_sha256"


def arrays_checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of the arrays, little-endian and in C order, by name in alphabetical order."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        values = np.asarray(arrays[name])
        values = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        digest.update(f"{name} {values.dtype.str} {values.shape}\n".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The arrays and their checksum as an `.npz` file, the same bytes for the same arrays."""
    file = BytesIO()
    parts = {name: arrays[name] for name in sorted(arrays)}
    np.savez_compressed(file, allow_pickle=False, **parts, **{CHECKSUM_NAME: np.array(arrays_checksum(arrays))})
    return file.getvalue()


def unpack_arrays(content: bytes, source: str, what: str, remedy: str) -> dict[str, np.ndarray]:
    """The arrays that `pack_arrays` wrote. Errors say `source`, `what` it should be, and the `remedy` for damage."""
    arrays = read_arrays(content, source, what, remedy)
    expected = str(arrays.pop(CHECKSUM_NAME, "nothing"))
    if (found := arrays_checksum(arrays)) != expected:
        hashes = f"its arrays hash to {found[:12]}..., the file says {expected[:12]}..."
        raise TomatError(f"{source} is damaged: {hashes} {remedy}")
    return arrays


def read_arrays(content: bytes, source: str, what: str, remedy: str) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file. No checksum over all of them is compared."""
    # zipfile, zlib, struct, ast and NumPy each raise their own errors for a damaged archive.
    with naming(f"{source} is not {what}, or damaged", f". {remedy}"):
        with np.load(BytesIO(content), allow_pickle=False) as file:
            # Every part has a CRC32; NumPy would read a damaged header before it checks the CRC32.
            if (damaged := file.zip.testzip()) is not None:
                raise ValueError(f"its part {damaged} is damaged")
            return {name: file[name] for name in file.files}
