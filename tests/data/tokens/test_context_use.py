from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.data.tokens.context_use import context_table, one_patch, packed
from tomat.data.tokens.layouts import LAYOUTS, SequenceLayout
from tomat.data.tokens.patch import encode_sequence


def test_one_patch_is_what_a_sequence_holds(make_grid, codec):
    layout = LAYOUTS["v3-fill512"]
    for n_atoms in (1, 5, 17):
        ids = encode_sequence(make_grid(n_atoms=n_atoms), (3, 4, 5), layout, codec)
        use = one_patch(layout, n_atoms)
        assert use["voxels"] == np.count_nonzero(ids >= 2186)
        assert use["padding_share"] == pytest.approx(np.mean(ids == 0))


def test_neighbour_share_is_that_of_the_voxels(make_grid):
    """Counted voxel by voxel in a patch of 3 x 4 x 4 and in two cubes."""
    inside = np.zeros((3, 4, 4), dtype=bool)
    inside[1:, 1:, 1:] = True
    layout = SequenceLayout("x", "v3", 4, 21 + 10 + 5 + 48, max_side_difference=1)
    assert one_patch(layout, 1)["patch_shapes_voxels"] == [[3, 4, 4]]
    assert one_patch(layout, 1)["neighbour_share"] == inside.mean()
    two = packed(31 + 27 + 7 + 27, 1, 2, shared_preamble=True, smallest_side=1)
    assert two is not None and two["patch_shapes_voxels"] == [[3, 3, 3]] * 2 and two["neighbour_share"] == 8 / 27


@settings(max_examples=30, deadline=None)
@given(st.integers(60, 400), st.integers(0, 8), st.integers(1, 4), st.booleans(), st.integers(1, 3))
def test_packing_is_the_best_there_is(context, n_atoms, n_patches, shared, smallest):
    """Against all combinations, their tokens added up from the layouts' own sequences."""
    best = 0
    for sides in combinations_with_replacement(range(smallest, 8), n_patches):
        layout = SequenceLayout("x", "v3", max(sides), 10_000)
        cubes = [(side,) * 3 for side in sides]
        each = [layout.used_tokens(n_atoms, cube) for cube in cubes]
        if shared:
            # One preamble; the others have OFFSET (5), the brackets of the density (2) and, if smaller, SHAPE (5).
            tokens = 21 + 10 * n_atoms + 7 * (n_patches - 1)
            tokens += sum(side**3 + (5 if side < max(sides) else 0) for side in sides)
        else:
            tokens = sum(each)
        if tokens <= context:
            best = max(best, sum(side**3 for side in sides))
    found = packed(context, n_atoms, n_patches, shared_preamble=shared, smallest_side=smallest)
    assert (found["voxels"] if found else 0) == best
    assert found is None or found["padding_share"] >= 0


def test_the_guide_has_these_figures():
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "layouts.md").read_text(encoding="utf-8")
    for row in context_table(8192, [1, 4, 12, 29, 88], 8):
        best = [
            max((use for use in row["packed"] if use["shared_preamble"] == shared), key=lambda use: use["voxels"])
            for shared in (True, False)
        ]
        cells = [str(row["n_atoms"]), str(row["preamble_tokens"])]
        for use in (row["layouts"]["v3-p19"], row["layouts"]["v3-p20"]):
            cells.append(f"{use['voxels']:,} ({use['voxel_share']:.1%})")
        for use in (row["layouts"]["v3-fill8k"], row["wide_box"]):
            sides = " x ".join(map(str, use["patch_shapes_voxels"][0]))
            cells.append(f"{sides}: {use['voxels']:,} ({use['voxel_share']:.1%})")
        for use in best:
            cubes = " + ".join(f"{shape[0]}^3" for shape in use["patch_shapes_voxels"])
            cells.append(f"{cubes}: {use['voxels']:,} ({use['voxel_share']:.1%})")
        assert f"| {' | '.join(cells)} |".replace("%", " %") in guide
