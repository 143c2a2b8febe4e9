import numpy as np
import pytest

from tomat.data.codec.two_token import TwoTokenCodec
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.patch import encode_sequence
from tomat.data.tokens.vocabulary import Vocabulary
from tomat.data.tokens.words import humanise, token_runs

V3 = SequenceLayout("p2", "v3", 2, 64)
V2 = SequenceLayout("p2", "v2", 2, 100, tokens_per_voxel=2)


@pytest.fixture(scope="module")
def grid():
    rho = np.full((4, 5, 6), 0.25, dtype=np.float32)
    return DensityGrid(rho, np.diag([3.0, 4.0, 5.0]), np.array([14, 8]), np.array([[0.5, 0.0, 0.25], [0, 0.2, 0.75]]))


def test_sequence_in_words(grid, codec):
    lines = humanise(encode_sequence(grid, (1, 0, 0), V3, codec), V3, codec, first_voxels=2)
    value = codec.decode(codec.encode(np.float32(0.25)))
    assert lines == [
        "layout   p2: 64 tokens, 15 of them padding (23.4 %)",
        "cell     a 3.00  b 4.00  c 5.00 A, alpha 90.0  beta 90.0  gamma 90.0 degrees",
        "grid     4 x 5 x 6 voxels",
        "atoms    2, at fractions of the cell from the patch's first voxel",
        "         Si  0.25000  0.00000  0.25000",
        "         O   0.75000  0.20000  0.75000",
        "patch    2 x 2 x 2 voxels",
        f"density  min {value:.4g}, mean {value:.4g}, max {value:.4g} e/Å³",
        f"         voxel 0 0 0  rho {codec.encode(np.float32(0.25))}  = {value:.5g} e/Å³",
        f"         voxel 0 0 1  rho {codec.encode(np.float32(0.25))}  = {value:.5g} e/Å³",
        "         and 6 more, z fastest",
    ]


def test_v2_says_where_the_patch_lies_and_the_unit(grid):
    codec = TwoTokenCodec()
    lines = humanise(encode_sequence(grid, (3, 4, 5), V2, codec), V2, codec)
    assert "patch    2 x 2 x 2 voxels, first voxel 3 x 4 x 5" in lines
    # 0.25 e/Å³ in a cell of 60 A^3.
    assert any("max 15 e (density x cell volume)" in line for line in lines)


def test_blocks_cover_every_token_once(grid, codec):
    ids = encode_sequence(grid, (1, 0, 0), V3, codec)
    runs = list(token_runs(ids, Vocabulary(codec.n_density_tokens)))
    starts = [start for start, _ in runs]
    assert starts == list(np.cumsum([0] + [len(names) for _, names in runs])[:-1])
    assert sum(len(names) for _, names in runs) == 64
    assert [names[0] for _, names in runs] == ["BOS", "GRID", "LATTICE", "ATOMS", "POS", "DENS", "EOS", "PAD"]
    assert runs[3][1] == ["ATOMS", "Z14", "Z8", "/ATOMS"] and runs[7][1] == ["PAD"] * 15
