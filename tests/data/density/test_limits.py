import bz2
import gzip
import io
import lzma
import tracemalloc

import pytest

from tomat.base.errors import TomatError
from tomat.data.density.limits import (
    FREE_BYTES,
    MOST_ATOMS,
    MOST_VOXELS,
    BoundedText,
    check_atom_count,
    check_grid_shape,
    decompressed,
)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_every_compression_is_read_by_its_content(pack):
    content = b"0.125 0.25\n" * 1000
    assert decompressed(pack(content), "file") == content
    text = BoundedText(io.BytesIO(pack(content)), 10, "file")
    assert text.line() == b"0.125 0.25\n" and text.lines(5, 100) == b"0.125 0.25\n" * 5


def test_a_bomb_is_refused_within_the_memory_of_the_limit():
    with io.BytesIO() as packed:
        with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
            for _ in range(160):
                file.write(bytes(1 << 20))
        raw = packed.getvalue()
    assert len(raw) < 1 << 20
    tracemalloc.start()
    with pytest.raises(TomatError, match="file has .* bytes and decompresses to more than .* shrinks at most 64 times"):
        decompressed(raw, "file")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * FREE_BYTES


def test_a_line_and_a_text_have_limits():
    with pytest.raises(TomatError, match="longer than 4,096 bytes"):
        BoundedText(io.BytesIO(b"1" * 10_000), 10_000, "file").line()
    text = BoundedText(io.BytesIO(b"1\n" * 100), 200, "file")
    text.limit_bytes = 20
    with pytest.raises(TomatError, match="more than 20 bytes"):
        text.lines(50, 10)


@pytest.mark.parametrize("shape", [(0, 1, 1), (-4, -4, 4), (2**14, 2**14, 2), (99_999_999,) * 3, (4, 4)])
def test_grids_that_no_density_has(shape):
    with pytest.raises(TomatError, match=f"file: the grid is .* at most {MOST_VOXELS:,} voxels"):
        check_grid_shape(shape, "file")


def test_counts_of_atoms():
    check_grid_shape((448, 448, 448), "file")
    check_atom_count(MOST_ATOMS, "file")
    for count in (0, -1, 10**6, 99_999_999):
        with pytest.raises(TomatError, match="expected 1 to 10,000"):
            check_atom_count(count, "file")
