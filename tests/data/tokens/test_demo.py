"""The embedded densities on the grid that a run asks for."""

import pytest

from tomat.base.errors import TomatError
from tomat.data.density.demo.embedded import GROUPS, demo_materials, load_stored
from tomat.data.tokens import demo
from tomat.data.tokens.layouts import LAYOUTS
from tomat.data.tokens.shards import open_shards


@pytest.fixture(params=["Si-diamond-ideal"])
def one_cell(monkeypatch, request):
    """One cell in both splits, so that its codec holds all of them; nothing of it is kept."""
    every = demo_materials("train", GROUPS)
    few = dict.fromkeys(("train", "validation"), [each for each in every if each.material_id == request.param])
    monkeypatch.setattr(demo, "demo_materials", lambda split, groups=(), left_out=(): few[split])
    yield few
    for function in (demo.fit_demo_codec, demo.fit_demo_promolecule):
        function.cache_clear()


def test_rows_are_of_the_grid_asked_for_and_a_set_of_the_other_is_refused(tmp_path, one_cell):
    for function in (demo.fit_demo_codec, demo.fit_demo_promolecule):
        function.cache_clear()
    settings = {"layout": LAYOUTS["scattered-512"], "n_density_tokens": 32, "objective": "absolute"}
    demo.write_demo_shards(tmp_path, **settings, patches_per_material=2, grid="stored")
    shards, material = open_shards(tmp_path / "train"), one_cell["train"][0]
    stored = load_stored(material.material_id)
    assert shards.manifest.materials[0].grid_shape == stored.grid_shape and shards.rows == 2
    ids = shards.codec.encode(stored.rho).ravel()[shards.voxels_of_row(1)]
    assert ((shards.read_rows(1, 2)[0] - ids) == 2186).all()
    demo.write_demo_shards(tmp_path, **settings, patches_per_material=2, grid="stored")
    with pytest.raises(TomatError, match="on their stored grids, and data.embedded_grid is refined"):
        demo.write_demo_shards(tmp_path, **settings, patches_per_material=2)


@pytest.mark.parametrize("other", ["left_out", "objective"])
def test_a_set_with_other_compounds_or_bins_is_refused(tmp_path, one_cell, other):
    """It would train on what the configuration says it has not seen."""
    settings = {"layout": LAYOUTS["scattered-512"], "n_density_tokens": 32, "objective": "absolute", "grid": "stored"}
    demo.write_demo_shards(tmp_path, **settings, patches_per_material=2)
    if other == "left_out":
        one_cell["train"], said = [], "has Si-diamond-ideal"
    else:
        settings["objective"], said = "squared", "has bins for the absolute error"
    with pytest.raises(TomatError, match=f"{said}.* another run_name"):
        demo.write_demo_shards(tmp_path, **settings, patches_per_material=2)


@pytest.mark.parametrize("one_cell", ["He-atom-ideal"], indirect=True)
def test_what_rounding_left_below_zero_in_a_vacuum_is_zero(tmp_path, one_cell):
    settings = {"layout": LAYOUTS["scattered-512"], "n_density_tokens": 32, "objective": "absolute"}
    demo.write_demo_shards(tmp_path, **settings, patches_per_material=2, grid="stored")
    stored = load_stored(one_cell["train"][0].material_id)
    assert stored.rho.min() < 0 and open_shards(tmp_path / "train").codec.encode(stored.rho.clip(0)).min() == 0
