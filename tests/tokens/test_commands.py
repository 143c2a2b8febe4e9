import argparse
import json
import shutil

import numpy as np
import pytest

from tomat.density.demo import demo_materials
from tomat.density.grid import DensityGrid
from tomat.density.zarr_store import write_zarr
from tomat.errors import TomatError
from tomat.tokens.commands import register
from tomat.tokens.shards import open_shards


def run(*arguments):
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    args = parser.parse_args([str(each) for each in arguments])
    return args.run(args)


@pytest.fixture
def densities(tmp_path):
    for k, z in enumerate((14, 6)):
        rho = np.random.default_rng(k).lognormal(-2.5, 0.5, (9, 10, 11)).astype(np.float32)
        grid = DensityGrid(rho, np.diag([4.0, 4.0, 5.0]), np.array([z, z]), np.array([[0, 0, 0], [0.5, 0.5, 0.5]]))
        write_zarr(grid, tmp_path / "in" / f"mp-{k}.zarr")
    return tmp_path / "in"


@pytest.fixture
def shards(tmp_path, densities, codec):
    codec.save(tmp_path / "codec.json")
    arguments = ["--input", densities, "--layout", "v3-p7", "--codec", tmp_path / "codec.json"]
    arguments += ["--patches_per_material", 40, "--seed", 3, "--split", "train", "--json", tmp_path / "figures.json"]
    assert run("tokenise", *arguments, "--output", tmp_path / "set") == 0
    return tmp_path / "set"


def test_tokenise(tmp_path, shards, capsys):
    opened = open_shards(shards)
    assert [m.material_id for m in opened.manifest.materials] == ["mp-0", "mp-1"]
    assert (opened.rows, opened.manifest.split, opened.manifest.seed) == (80, "train", 3)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["rows"], figures["materials"], figures["context_tokens"], figures["chunks"]) == (80, 2, 512, 2)


def test_tokenise_prints_what_it_skipped(tmp_path, densities, codec, capsys):
    (densities / "mp-9.json.gz").write_bytes(b"not gzip")
    codec.save(tmp_path / "codec.json")
    arguments = ["--input", densities, "--layout", "v3-p7", "--codec", tmp_path / "codec.json"]
    run("tokenise", *arguments, "--patches_per_material", 4, "--output", tmp_path / "set")
    printed = capsys.readouterr().out
    assert "skipped mp-9: " in printed and "1 skipped" in printed


def test_tokenise_the_embedded_densities(tmp_path, codec):
    codec.save(tmp_path / "codec.json")
    arguments = ["--demo", "validation", "--layout", "v3-p7", "--codec", tmp_path / "codec.json"]
    run("tokenise", *arguments, "--patches_per_material", 2, "--output", tmp_path / "set")
    manifest = open_shards(tmp_path / "set").manifest
    names = [each.material_id for each in (*manifest.materials, *manifest.skipped)]
    assert set(names) == {material.material_id for material in demo_materials("validation")}
    assert manifest.split == "validation" and not manifest.skipped


def test_info_and_verify(tmp_path, shards, capsys):
    assert run("shards", "info", shards, "--json", tmp_path / "info.json") == 0
    assert json.loads((tmp_path / "info.json").read_text())["tokens"] == 80 * 512
    assert run("shards", "verify", shards, "--json", tmp_path / "verify.json") == 0
    assert json.loads((tmp_path / "verify.json").read_text())["chunks"] == 2
    assert "all 2 chunks (80 rows) are whole" in capsys.readouterr().out
    (shards / "tokens.zarr" / "c" / "1" / "0").unlink()
    with pytest.raises(TomatError, match="Chunk 1 of"):
        run("shards", "verify", shards)


def test_show_a_row(shards, capsys):
    run("tokens", "show", shards, "--row", 41, "--raw", "--voxels", 2)
    printed = capsys.readouterr().out.splitlines()
    x, y, z = open_shards(shards).anchor_of_row(41)
    assert printed[0] == f"row      41 of 80: mp-1, first voxel {x} {y} {z}"
    assert any(line.startswith("grid     9 x 10 x 11") for line in printed)
    assert any(line.endswith("ATOMS  Z6  Z6  /ATOMS") for line in printed)
    with pytest.raises(TomatError, match="has 80 rows"):
        run("tokens", "show", shards, "--row", 80)


def test_show_a_density(tmp_path, shards, densities, capsys):
    """The row of the set, cut from the density itself, reads the same."""
    x, y, z = open_shards(shards).anchor_of_row(5)
    run("tokens", "show", shards, "--row", 5)
    row = capsys.readouterr().out.splitlines()[1:]
    codec = tmp_path / "codec.json"
    arguments = ["--input", densities / "mp-0.zarr", "--anchor", x, y, z, "--layout", "v3-p7", "--codec", codec]
    run("tokens", "show", *arguments)
    assert capsys.readouterr().out.splitlines() == row


def test_show_needs_one_source(shards, densities):
    for arguments in ([], [shards, "--input", densities / "mp-0.zarr"]):
        with pytest.raises(TomatError, match="Give a shard set, or a density"):
            run("tokens", "show", *arguments)
    with pytest.raises(TomatError, match="needs --codec"):
        run("tokens", "show", "--input", densities / "mp-0.zarr")


def test_another_set_in_the_place_is_left_alone(tmp_path, shards, densities):
    before = {path: path.read_bytes() for path in shards.rglob("*") if path.is_file()}
    arguments = ["--input", densities, "--layout", "v3-p7", "--codec", tmp_path / "codec.json", "--output", shards]
    with pytest.raises(TomatError, match="holds another data set"):
        run("tokenise", *arguments, "--patches_per_material", 7)
    assert before == {path: path.read_bytes() for path in shards.rglob("*") if path.is_file()}
    shutil.rmtree(shards)
