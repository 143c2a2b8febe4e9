import gzip
import io
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
)


def test_a_bomb_is_refused_within_the_memory_of_the_limit():
    with io.BytesIO() as packed:
        with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
            for _ in range(160):
                file.write(bytes(1 << 20))
        raw = packed.getvalue()
    assert len(raw) < 1 << 20
    tracemalloc.start()
    with pytest.raises(TomatError, match="file has .* bytes and decompresses to more than .* shrinks at most 64 times"):
        BoundedText(io.BytesIO(raw), "file").everything()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * FREE_BYTES


def test_lines_texts_grids_and_cells_have_limits():
    with pytest.raises(TomatError, match="longer than 4,096 bytes"):
        BoundedText(io.BytesIO(b"1" * 10_000), "file").line()
    with pytest.raises(TomatError, match="file has more than 20 bytes"):
        BoundedText(io.BytesIO(b"1\n" * 100), "file", limit_bytes=20).lines(50, 10)
    check_grid_shape((448, 448, 448), "file")
    for shape in ((0, 1, 1), (-4, -4, 4), (2**14, 2**14, 2), (99_999_999,) * 3, (4, 4)):
        with pytest.raises(TomatError, match=f"file: the grid is .* at most {MOST_VOXELS:,} voxels"):
            check_grid_shape(shape, "file")
    check_atom_count(MOST_ATOMS, "file")
    for count in (0, -1, 10**6, 99_999_999):
        with pytest.raises(TomatError, match="file: .*expected 1 to 10,000"):
            check_atom_count(count, "file")
