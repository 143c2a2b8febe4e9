import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.data.codec.two_token import TwoTokenCodec
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens import vocabulary as v
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.patch import check_encodable, decode_sequence, encode_rows, encode_sequence, humanise, token_runs
from tomat.data.tokens.vocabulary import MAX_POSITION_ERROR

V3 = SequenceLayout("small-v3", "v3", 4, 160)
FILLING = SequenceLayout("small-filling", "v3", 4, 160, max_side_difference=2)
FILLING_V2 = SequenceLayout("small-filling-v2", "v2", 4, 160, max_side_difference=1)
V2 = SequenceLayout("small-v2", "v2", 4, 220, tokens_per_voxel=2)

cases = st.fixed_dictionaries(
    {
        # Cells larger than the patch, equal, and smaller, so that the patch wraps round, more than once too.
        "shape": st.tuples(*[st.integers(1, 11)] * 3),
        "n_atoms": st.integers(0, 6),
        "seed": st.integers(0, 1000),
    }
)
anchors = st.tuples(*[st.integers(-30, 30)] * 3)


def wrapped_distance(a, b):
    distance = np.abs(a - b) % 1
    return np.minimum(distance, 1 - distance)


@settings(max_examples=40, deadline=None)
@given(cases, anchors, st.sampled_from(["e_per_A3", "rho_times_volume"]))
def test_v2_round_trip(make_grid, case, anchor, unit):
    grid, codec = make_grid(**case), TwoTokenCodec(unit)
    ids = encode_sequence(grid, anchor, V2, codec)
    read = decode_sequence(ids, V2, codec)
    shape = np.array(grid.grid_shape)
    patch_shape = V2.patch_shape(case["n_atoms"])
    assert read.grid_shape == grid.grid_shape and read.patch_shape == patch_shape
    np.testing.assert_array_equal(read.offset, np.array(anchor) % shape)
    assert np.all(wrapped_distance(read.frac_coords, grid.frac_coords) <= MAX_POSITION_ERROR)
    patch = grid.patch(anchor, patch_shape) * (np.float64(grid.volume_a3) if unit == "rho_times_volume" else 1)
    np.testing.assert_allclose(read.values, patch, rtol=1e-5)
    assert read.unit == unit


@settings(max_examples=60, deadline=None)
@given(cases, anchors, st.sampled_from([V3, FILLING, FILLING_V2]))
def test_round_trip(make_grid, codec, case, anchor, layout):
    grid = make_grid(**case)
    ids = encode_sequence(grid, anchor, layout, codec)
    assert ids.dtype == np.uint16 and ids.shape == (160,)
    read = decode_sequence(ids, layout, codec)
    box = layout.patch_shape(case["n_atoms"])
    assert read.patch_shape == box and read.grid_shape == grid.grid_shape
    # Voxel by voxel, wrapped round the cell axis by axis.
    along = [(anchor[axis] + np.arange(box[axis])) % grid.grid_shape[axis] for axis in range(3)]
    np.testing.assert_array_equal(read.density_tokens, codec.encode(grid.rho[np.ix_(*along)]))
    np.testing.assert_array_equal(read.values, codec.decode(read.density_tokens))
    parameters = np.array(grid.lattice_parameters)
    assert np.all(np.abs(np.array(read.lattice_parameters) - parameters) <= [0.02501] * 3 + [0.1001] * 3)
    has_shape = v.SHAPE_START in ids[: np.flatnonzero(ids == v.DENSITY_BLOCK_START)[0]]
    assert has_shape == (layout.version == "v2" or box != (4, 4, 4))
    origin = np.array(anchor) / grid.grid_shape if layout.version == "v3" else np.zeros(3)
    assert np.all(wrapped_distance(read.frac_coords, grid.frac_coords - origin) <= MAX_POSITION_ERROR + 1e-14)
    np.testing.assert_array_equal(read.atomic_numbers, grid.atomic_numbers)
    # What is not padding is what the layout counts, and a reader of cubes of the same P reads the same.
    assert np.count_nonzero(ids) == layout.used_tokens(case["n_atoms"], box)
    cubes = SequenceLayout("cubes", layout.version, layout.patch_size, layout.context)
    np.testing.assert_array_equal(decode_sequence(ids, cubes, codec).density_tokens, read.density_tokens)
    rows = encode_rows(grid, np.array([anchor, (0, 0, 0), anchor]), layout, codec)
    np.testing.assert_array_equal(rows[[0, 2]], [ids, ids])


def test_v3_token_by_token(codec):
    """The sequence of the specification, written out by hand."""
    rho = np.full((2, 3, 4), 0.5, dtype=np.float32)
    rho[1, 2, 3] = 2.0
    grid = DensityGrid(rho, np.diag([3.0, 4.0, 5.0]), np.array([14, 8]), np.array([[0.5, 0.0, 0.25], [0, 1 / 3, 0.75]]))
    layout = SequenceLayout("p2", "v3", 2, 60)
    ids = encode_sequence(grid, (1, 2, 3), layout, codec).tolist()
    low, high = (int(codec.encode(np.float32(x))) + 2186 for x in (0.5, 2.0))
    exp, m1, m2 = 1162, 1162 + 512, 1162 + 768
    zero, half = [exp, m1, m2], [exp + 126, m1, m2]
    third = [exp + 125, m1 + 0x55, m2 + 0x55]
    expected = [1, 7, 140, 141, 142, 8, 18, 138 + 60, 138 + 80, 138 + 100, *[138 + 450] * 3, 19]
    expected += [3, 20 + 13, 20 + 7, 4, 5]
    # Si at (1/2, 0, 1/4) less (1/2, 2/3, 3/4); O at (0, 1/3, 3/4) less the same.
    expected += [*zero, *third, *half, *half, exp + 126, m1 + 0x55, m2 + 0x55, *zero]
    expected += [6, 15, high, *[low] * 7, 16, 2]
    assert ids == expected + [0] * (60 - len(expected))


def test_v2_tells_first_and_last_voxel(make_grid):
    ids = encode_sequence(make_grid(shape=(10, 12, 9), n_atoms=1), (8, 2, 9), V2, TwoTokenCodec())
    first = int(np.flatnonzero(ids == v.OFFSET_START)[0])
    assert ids[first - 5 : first + 10].tolist() == [
        *(9, 142, 142, 142, 10),
        *(11, 138 + 8, 138 + 2, 138 + 0, 12),
        *(13, 138 + 1, 138 + 5, 138 + 3, 14),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (1024, 1, 1)}, r"grid of 1024 x 1 x 1 voxels; at most 1023 a side"),
        ({"lattice": np.diag([3.0, 60.0, 3.0])}, "60.00"),
        ({"n_atoms": 20}, "too short"),
    ],
)
def test_material_out_of_range_is_refused(make_grid, codec, changes, message):
    grid = make_grid(material_id="mp-1", **changes)
    with pytest.raises(TomatError, match=message):
        check_encodable(grid, V3, codec)
    with pytest.raises(TomatError, match=message):
        encode_rows(grid, np.zeros((1, 3), int), V3, codec)


def test_layout_and_codec_that_disagree_are_refused(make_grid, codec):
    with pytest.raises(TomatError, match="writes 1 token"):
        encode_rows(make_grid(), np.zeros((1, 3), int), V3, TwoTokenCodec())
    with pytest.raises(TomatError, match="writes 2 token"):
        decode_sequence(np.zeros(220, int), V2, codec)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 159), st.integers(0, 2500))
def test_damaged_sequence_is_refused_or_says_something_else(make_grid, codec, place, token):
    """Whatever token is replaced: the reader raises TomatError, or what it reads writes back the damaged tokens."""
    grid = make_grid(n_atoms=3)
    ids = encode_sequence(grid, (1, 2, 3), V3, codec)
    damaged = ids.copy()
    damaged[place] = token
    try:
        read = decode_sequence(damaged, V3, codec)
    except TomatError:
        return
    good = decode_sequence(ids, V3, codec)
    same = (
        read.grid_shape == good.grid_shape
        and read.lattice_parameters == good.lattice_parameters
        and np.array_equal(read.atomic_numbers, good.atomic_numbers)
        and np.array_equal(read.frac_coords, good.frac_coords)
        and np.array_equal(read.density_tokens, good.density_tokens)
    )
    assert same == (token == ids[place])


def test_cut_sequence_is_refused(make_grid, codec):
    ids = encode_sequence(make_grid(n_atoms=3), (1, 2, 3), V3, codec)
    end = int(np.flatnonzero(ids)[-1]) + 1
    decode_sequence(ids[:end], V3, codec)
    for length in range(end):
        with pytest.raises(TomatError, match="not v3"):
            decode_sequence(ids[:length], V3, codec)


WORDS_V3 = SequenceLayout("p2", "v3", 2, 64)
WORDS_V2 = SequenceLayout("p2", "v2", 2, 100, tokens_per_voxel=2)


@pytest.fixture(scope="module")
def silica():
    rho = np.full((4, 5, 6), 0.25, dtype=np.float32)
    return DensityGrid(rho, np.diag([3.0, 4.0, 5.0]), np.array([14, 8]), np.array([[0.5, 0.0, 0.25], [0, 0.2, 0.75]]))


def test_sequence_in_words(silica, codec):
    lines = humanise(encode_sequence(silica, (1, 0, 0), WORDS_V3, codec), WORDS_V3, codec, first_voxels=2)
    token = codec.encode(np.float32(0.25))
    assert lines[4:6] == ["         Si  0.25000  0.00000  0.25000", "         O   0.75000  0.20000  0.75000"]
    assert lines[9] == f"         voxel 0 0 1  rho {token}  = {codec.decode(token):.5g} e/Å³" and "6 more" in lines[10]
    lines = humanise(encode_sequence(silica, (3, 4, 5), WORDS_V2, TwoTokenCodec()), WORDS_V2, TwoTokenCodec())
    assert "patch    2 x 2 x 2 voxels, first voxel 3 x 4 x 5" in lines
    # 0.25 e/Å³ in a cell of 60 A^3.
    assert any("max 15 e (density x cell volume)" in line for line in lines)


def test_blocks_cover_every_token_once(silica, codec):
    ids = encode_sequence(silica, (1, 0, 0), WORDS_V3, codec)
    runs = list(token_runs(ids, v.Vocabulary(codec.n_density_tokens)))
    starts = [start for start, _ in runs]
    assert starts == list(np.cumsum([0] + [len(names) for _, names in runs])[:-1])
    assert sum(len(names) for _, names in runs) == 64
    assert [names[0] for _, names in runs] == ["BOS", "GRID", "LATTICE", "ATOMS", "POS", "DENS", "EOS", "PAD"]
    assert runs[3][1] == ["ATOMS", "Z14", "Z8", "/ATOMS"] and runs[7][1] == ["PAD"] * 15
