"""Rows of scattered voxels: every voxel at most once, each where it is said to be, and nothing else encoded."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from retokenized import rewrite

from tomat.base.errors import TomatError
from tomat.data.codec.files import write_codec
from tomat.data.codec.relative import RelativeCodec, cell_codec
from tomat.data.density.crystal import Crystal
from tomat.data.density.promolecule import Promolecule, RadialBasis
from tomat.data.density.zarr_store import write_zarr
from tomat.data.tokens.layouts import LAYOUTS, SequenceLayout
from tomat.data.tokens.manifest import anchors_seed
from tomat.data.tokens.patch import decode_sequence, encode_sequence
from tomat.data.tokens.pipeline.driver import write_shards
from tomat.data.tokens.scattered import decode_scattered, draw_voxels, encode_scattered
from tomat.data.tokens.shards import open_shards
from tomat.data.tokens.source_check import compare_with_source, damaged_chunks
from tomat.data.tokens.vocabulary import DENSITY_START, PAD

LAYOUT = SequenceLayout("few", "scattered", 0, 48)
SHAPES = {"a": (6, 7, 8), "b": (13, 12, 11), "c": (1, 1, 1), "d": (3, 4, 4)}
"""336 voxels fill 7 rows, 1,716 more than the 9 asked for; one tells nothing; 48 fill one row and leave no padding."""


@pytest.fixture(scope="module")
def get_grid(make_grid):
    grids = {
        name: make_grid(shape, n_atoms=2, seed=i, material_id=name) for i, (name, shape) in enumerate(SHAPES.items())
    }
    return grids.__getitem__


@pytest.fixture(scope="module")
def written(tmp_path_factory, get_grid, codec) -> Path:
    place = tmp_path_factory.mktemp("scattered") / "set"
    settings = {"patches_per_material": 9, "seed": 5, "split": "train", "block_rows": 4}
    write_shards(place, "abcd", get_grid, layout=LAYOUT, codec=codec, **settings)
    return place


def rows_of(shards):
    return {each.material_id: each.row_end - each.row_start for each in shards.manifest.materials}


def test_a_set_holds_every_voxel_at_most_once_where_it_is_said_to_be(written, get_grid, codec):
    shards = open_shards(written)
    assert rows_of(shards) == {"a": 7, "b": 9, "d": 1} and shards.manifest.short_materials == 2
    (skipped,) = shards.manifest.skipped
    assert skipped.material_id == "c" and "a grid of one voxel" in skipped.reason
    for material in shards.manifest.materials:
        grid, voxels = get_grid(material.material_id), shards.manifest.voxels(material)
        held = voxels[voxels >= 0]
        assert len(np.unique(held)) == len(held) == min(voxels.size, grid.rho.size) and held.max() < grid.rho.size
        # The cell, from its rows.
        found = np.full(grid.rho.size, np.nan, np.float32)
        for row, places in zip(range(material.row_start, material.row_end), voxels, strict=True):
            ids = shards.read_rows(row, row + 1)[0]
            read = decode_scattered(ids, LAYOUT, shards.codec)
            assert np.array_equal(shards.voxels_of_row(row), places) and (ids[places < 0] == PAD).all()
            found[places[places >= 0]] = read.values
        true = codec.decode(codec.encode(grid.rho)).ravel()
        held = ~np.isnan(found)
        np.testing.assert_array_equal(found[held], true[held])
        assert held.all() == (material.material_id != "b")


def test_voxels_depend_on_seed_and_material_and_on_nothing_else(written):
    manifest = open_shards(written).manifest
    b = manifest.materials[1]
    assert np.array_equal(manifest.voxels(b, 3, 5), manifest.voxels(b)[3:5])
    others = (draw_voxels(anchors_seed(seed, name), b.grid_shape, 48, 0, 9) for seed, name in ((6, "b"), (5, "B")))
    for other in others:
        assert np.mean(other == manifest.voxels(b)) < 0.02
    # Of a cell that is half in the rows, as much is of every eighth of it: each within 5 deviations.
    many = draw_voxels(anchors_seed(5, "b"), (32, 32, 32), 2048, 0, 8)
    counts = np.bincount(many.ravel() // 4096, minlength=8)
    assert (np.abs(counts - 2048) < 5 * 23).all()


def test_only_the_voxels_asked_for_are_encoded(get_grid, codec):
    seen = []

    class Counting:
        def __getattr__(self, name):
            return getattr(codec, name)

        def encode(self, rho):
            seen.append(rho.size)
            return codec.encode(rho)

    voxels = draw_voxels(anchors_seed(0, "b"), SHAPES["b"], 48, 2, 4)
    rows = encode_scattered(get_grid("b"), voxels, LAYOUT, Counting())
    assert rows.dtype == np.uint16 and seen == [96]


def test_verifying_compares_the_voxels_with_the_source(written, get_grid, make_grid, tmp_path):
    shards = open_shards(written)
    assert not damaged_chunks(shards)
    found = compare_with_source(shards, range(shards.rows), get_grid)
    assert found["voxels_compared"] == 336 + 9 * 48 + 48 and found["nmae_fraction"] < 0.02

    def other(name):
        grid = get_grid(name)
        return dataclasses.replace(grid, rho=np.roll(grid.rho, 1, axis=2))

    with pytest.raises(TomatError, match=r"Row 0 .*voxels lie in another bin"):
        compare_with_source(shards, range(shards.rows), other)
    place = Path(shutil.copytree(written, tmp_path / "set"))
    (place / "tokens.zarr" / "c" / "2" / "0").unlink()
    assert "is missing" in damaged_chunks(open_shards(place))[2]


def test_a_set_without_structures_or_with_other_rows_is_refused(written, tmp_path):
    place = Path(shutil.copytree(written, tmp_path / "set"))
    rewrite(place / "manifest.json", patches_per_material=5)
    with pytest.raises(TomatError, match="a has 7 rows, expected 5"):
        open_shards(place)
    rewrite(place / "manifest.json", patches_per_material=9, structures_sha256=None)
    with pytest.raises(TomatError, match=r"scattered voxels has no structures.npz"):
        open_shards(place)


def test_what_is_of_another_layout_is_refused_in_one_line(written, get_grid, codec):
    shards, patches = open_shards(written), LAYOUTS["v3-p7"]
    with pytest.raises(TomatError, match=r"few has scattered voxels, and this needs patches. Use .*v3-p19"):
        LAYOUT.patch_shape(2)
    with pytest.raises(TomatError, match="ask for its voxels"):
        shards.anchor_of_row(0)
    with pytest.raises(TomatError, match="position 0 has 1, expected a density token"):
        decode_scattered(encode_sequence(get_grid("a"), (0, 0, 0), patches, codec), LAYOUT, codec)
    with pytest.raises(TomatError, match=r"position 0 has .*expected BOS"):
        decode_sequence(shards.read_rows(0, 1)[0], patches, codec)
    row = shards.read_rows(6, 7)[0]
    for place, value, expected in ((3, PAD, "position 4 has .*or padding to the end"), (47, DENSITY_START + 256, "47")):
        damaged = row.copy()
        damaged[place] = value
        with pytest.raises(TomatError, match=expected):
            decode_scattered(damaged, LAYOUT, codec)
    with pytest.raises(TomatError, match=r"expected \(0, 1, 0\)"):
        SequenceLayout("x", "scattered", 7, 512)


def test_verbs_tell_a_set_of_scattered_voxels(tmp_path, get_grid, codec, capsys):
    from tomat.app.cli import main

    write_codec(codec, tmp_path / "codec.json")
    grid = get_grid("b")
    grid = dataclasses.replace(
        grid, rho=grid.rho * np.float32(8 / grid.electron_count), atomic_numbers=np.array([14, 14])
    )
    write_zarr(grid, tmp_path / "in" / "b.zarr")
    words = ["--layout", "scattered-512", "--codec", str(tmp_path / "codec.json"), "--patches_per_material", "6"]
    places = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "set")]
    assert main(["retokenize", *places, *words, "--workers", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "4 rows of 512 tokens from 1 material, 16.2 % padding" in said and "1 material with fewer than 6 rows" in said
    )
    assert main(["shards", "info", str(tmp_path / "set")]) == 0
    assert "but fewer for 1, whose rows hold the whole cell" in " ".join(capsys.readouterr().out.split())
    assert main(["shards", "verify", str(tmp_path / "set")]) == 0
    assert "4 rows (1,716 voxels) agree" in " ".join(capsys.readouterr().out.split())
    assert main(["tokens", "show", str(tmp_path / "set"), "--row", "3"]) == 0
    of_set = capsys.readouterr().out.splitlines()
    assert of_set[0] == "row      3 of 4: b"
    assert "13 x 12 x 11 voxels, of which 180 stand here" in of_set[2]
    words = ["--input", str(tmp_path / "in" / "b.zarr"), *words[:4], "--row"]
    assert main(["tokens", "show", *words, "3"]) == 0
    assert capsys.readouterr().out.splitlines() == of_set[1:]
    assert main(["tokens", "show", *words, "4"]) == 2


def test_a_relative_codec_is_of_the_same_voxels(get_grid):
    """Its ids need the sum of atoms at each voxel; a row decodes to the density that the whole cell does."""
    grid = get_grid("b")
    crystal = Crystal.of(grid)
    functions = {number: np.linspace(0.4, 0.1, 6) for number in set(grid.atomic_numbers.tolist())}
    promolecule = Promolecule(RadialBasis(6, 3.0), functions)
    ratio = np.geomspace(0.01, 100, 200).astype(np.float32)
    edges = np.sqrt(ratio[1:] * ratio[:-1])
    codec = RelativeCodec("e_per_A3", "absolute", edges, ratio, ratio, 100.0, promolecule=promolecule)
    voxels = draw_voxels(anchors_seed(0, "b"), grid.grid_shape, 48, 34, 36)
    whole = cell_codec(codec, grid)
    scale = codec.scale(crystal, grid.grid_shape).ravel()
    for ids, places in zip(encode_scattered(grid, voxels, LAYOUT, codec), voxels, strict=True):
        places = places[places >= 0]
        read = decode_scattered(ids, LAYOUT, codec, scale=scale[places])
        np.testing.assert_array_equal(read.density_tokens, whole.encode(grid.rho).ravel()[places])
        np.testing.assert_array_equal(read.values, whole.rounded(grid.rho).ravel()[places])
        assert decode_scattered(ids, LAYOUT, codec).unit == "ratio_to_sum_of_atoms"
