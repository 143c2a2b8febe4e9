from itertools import combinations_with_replacement
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.data.tokens.layouts import LAYOUTS, SequenceLayout, layout_named


@pytest.mark.parametrize(
    ("name", "n_voxels", "context", "most_atoms"),
    [
        ("v3-p19", 6859, 8192, 131),
        ("v3-p20", 8000, 8192, 17),
        ("v3-fill8k", 8000, 8192, 17),
        ("v3-p15", 3375, 4608, 121),
        ("v3-p12", 1728, 2048, 29),
        ("v3-p11", 1331, 1536, 18),
        ("v3-p7", 343, 512, 14),
        ("v2-p14", 2744, 8192, 266),
    ],
)
def test_named_layouts(name, n_voxels, context, most_atoms):
    layout = LAYOUTS[name]
    assert (layout.n_voxels, layout.context) == (n_voxels, context)
    assert layout.patch_shape(most_atoms) == layout.default_shape
    assert prod(layout.patch_shape(most_atoms + 1)) < n_voxels
    assert layout.used_tokens(most_atoms, layout.default_shape) <= context


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["v3", "v2"]), st.integers(1, 9), st.integers(60, 700), st.integers(0, 9), st.integers(0, 60))
def test_box_is_the_largest_that_fits(version, patch_size, context, difference, n_atoms):
    layout = SequenceLayout("x", version, patch_size, context, 1, min(difference, patch_size))
    sides = range(1, 12 + layout.max_side_difference)
    fitting = [
        box
        for box in combinations_with_replacement(sides, 3)
        if (layout.fills_context or len(set(box)) == 1 and box[0] <= patch_size)
        and box[2] - box[0] <= layout.max_side_difference
        and layout.used_tokens(n_atoms, box) <= context
    ]
    if not fitting:
        with pytest.raises(TomatError, match="too short"):
            layout.patch_shape(n_atoms)
        return
    box = layout.patch_shape(n_atoms)
    assert box in fitting and prod(box) == max(map(prod, fitting))
    assert layout.n_voxels >= prod(box)


def test_patches_that_fill_8192_tokens():
    layout = LAYOUTS["v3-fill8k"]
    found = {n_atoms: layout.patch_shape(n_atoms) for n_atoms in range(1, 132)}
    changes = {n: box for n, box in found.items() if box != found.get(n - 1)}
    expected = {1: (20, 20, 20), 18: (19, 20, 20), 57: (19, 19, 20), 95: (19, 19, 19), 131: (18, 19, 19)}
    assert changes == expected
    assert all(prod(box) >= prod(LAYOUTS["v3-p20"].patch_shape(n)) for n, box in found.items())


def test_layouts_of_cubes_are_written_as_they_always_were():
    """Manifests and interrupted runs on disk are compared with these."""
    kept = {"name": "v3-p19", "version": "v3", "patch_size": 19, "context": 8192, "tokens_per_voxel": 1}
    assert LAYOUTS["v3-p19"].to_dict() == kept
    for layout in LAYOUTS.values():
        assert SequenceLayout(**layout.to_dict()) == layout


def test_unknown_and_impossible_layouts_are_refused():
    with pytest.raises(TomatError, match="v3-p19, v3-p20, v3-p15"):
        layout_named("v3-p21")
    for arguments, message in [
        (("x", "v4", 3, 100), "version 'v4'"),
        (("x", "v3", 0, 100), "patch_size 0"),
        (("x", "v3", 3, 100, 3), "tokens_per_voxel 3"),
        (("x", "v3", 3, 20), "context of 20 tokens"),
        (("x", "v3", 1024, 20), "expected 1 to 1023"),
        (("x", "v3", 3, 100, 1, -1), "max_side_difference -1"),
        (("x", "v3", 3, 100, 1, 4), r"expected 0 \(cubes\) to its patch_size of 3"),
    ]:
        with pytest.raises(TomatError, match=message):
            SequenceLayout(*arguments)
