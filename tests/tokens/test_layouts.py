import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.errors import TomatError
from tomat.tokens.layouts import LAYOUTS, SequenceLayout, layout_named


@pytest.mark.parametrize(
    ("name", "n_voxels", "context", "most_atoms"),
    [
        ("v3-p19", 6859, 8192, 131),
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
    assert layout.patch_side(most_atoms) == layout.patch_size
    assert layout.patch_side(most_atoms + 1) < layout.patch_size
    assert layout.used_tokens(most_atoms, layout.patch_size) <= context


@settings(deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.integers(0, 900))
def test_patch_is_the_largest_that_fits(name, n_atoms):
    layout = LAYOUTS[name]
    try:
        side = layout.patch_side(n_atoms)
    except TomatError:
        assert layout.used_tokens(n_atoms, 1) > layout.context
        return
    assert layout.used_tokens(n_atoms, side) <= layout.context
    assert side == layout.patch_size or layout.used_tokens(n_atoms, side + 1) > layout.context
    assert layout.padding_share(n_atoms) == 1 - layout.used_tokens(n_atoms, side) / layout.context


def test_padding_of_the_median_material():
    # 21 fixed tokens and 10 an atom, counted off the specification's sequence.
    assert LAYOUTS["v3-p19"].padding_share(12) == pytest.approx((8192 - 6859 - 21 - 120) / 8192)
    assert LAYOUTS["v2-p14"].padding_share(12) == pytest.approx((8192 - 2 * 2744 - 36 - 120) / 8192)


def test_context_too_short_for_the_atoms_is_refused():
    with pytest.raises(TomatError, match="60 atoms take 626 of 512 tokens"):
        LAYOUTS["v3-p7"].patch_side(60)


def test_unknown_and_impossible_layouts_are_refused():
    with pytest.raises(TomatError, match="v3-p19, v3-p15"):
        layout_named("v3-p20")
    for arguments, message in [
        (("x", "v4", 3, 100), "version 'v4'"),
        (("x", "v3", 0, 100), "patch_size 0"),
        (("x", "v3", 3, 100, 3), "tokens_per_voxel 3"),
        (("x", "v3", 3, 20), "context of 20 tokens"),
        (("x", "v3", 1024, 20), "end at 1023"),
    ]:
        with pytest.raises(TomatError, match=message):
            SequenceLayout(*arguments)
