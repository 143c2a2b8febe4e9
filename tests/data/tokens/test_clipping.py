"""Voxels outside the codec: how they are counted, said and refused."""

import json
import shutil

import numpy as np
import pytest
from fitted_codec import fitted_codec
from relative_codec import bonded, relative_codec
from reported import reported

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.data.codec.files import write_codec
from tomat.data.codec.relative import cell_codec
from tomat.data.codec.two_token import TwoTokenCodec
from tomat.data.density.grid import DensityGrid
from tomat.data.density.zarr_store import read_zarr, write_zarr
from tomat.data.tokens.clipping import clipped_of
from tomat.data.tokens.pipeline.driver import retokenize
from tomat.data.tokens.pipeline.runners import PoolRunner
from tomat.data.tokens.shards import open_shards


def grid_of(values):
    return DensityGrid(values.reshape(1, 1, -1), np.eye(3), np.array([1]), np.zeros((1, 3)))


@pytest.fixture(scope="module")
def narrow():
    return fitted_codec(100, np.geomspace(0.1, 2, 5000))


def test_what_a_codec_was_fitted_to_lies_within_it():
    rho = np.random.default_rng(0).lognormal(-2, 1.5, 50_000).astype(np.float32)
    assert clipped_of(grid_of(rho), fitted_codec(100, rho), "a", 0.0).voxels == 0


def test_both_ends_are_counted_and_zero_is_within(narrow):
    rho = np.array([0, 0, 0.01, 0.05, 0.5, 1.0, 3.0], np.float32)
    clipped = clipped_of(grid_of(rho), narrow, "a", 1.0)
    assert (clipped.below_voxels, clipped.above_voxels) == (2, 1)
    lost = np.abs(narrow.decode(narrow.encode(rho)) - rho)[[2, 3, 6]].sum() / rho.sum()
    assert clipped.electron_share == pytest.approx(lost, rel=1e-6)


def test_two_token_codec_counts_in_its_unit(make_grid):
    grid = make_grid()
    values = grid.rho_times_volume()
    codec = TwoTokenCodec(log10_low=float(np.log10(np.quantile(values, 0.2))), log10_high=4.97)
    clipped = clipped_of(grid, codec, "a", 1.0)
    assert clipped.above_voxels == 0 and clipped.below_voxels == pytest.approx(0.2 * values.size, abs=2)
    # Below its range a density becomes zero, so all of it is lost.
    assert clipped.electron_share == pytest.approx(values[values < 10**codec.log10_low].sum() / values.sum(), rel=1e-4)


def test_share_decides(make_grid, narrow):
    grid = make_grid()
    share = clipped_of(grid, narrow, "a", 1.0).electron_share
    assert 0 < share < 1
    clipped_of(grid, narrow, "a", share)
    with pytest.raises(TomatError, match="voxels lie outside the codec .* more than the .* of --max_clipped_share"):
        clipped_of(grid, narrow, "a", share * 0.99)


def scaled(tree, name, peak):
    """The material with a few voxels made denser, and as many electrons as before."""
    place = tree / "label" / f"{name}.zarr"
    grid = read_zarr(place, name)
    rho = np.array(grid.rho)
    rho.reshape(-1)[:3] = peak
    rho *= np.float32(grid.rho.sum() / rho.sum())
    shutil.rmtree(place)
    write_zarr(type(grid)(rho, grid.lattice, grid.atomic_numbers, grid.frac_coords), place)
    return rho


def test_retokenize_counts_says_and_skips(tmp_path, tree, kept_set, capsys):
    trained = open_shards(kept_set)
    # A codec fitted to these very densities has none outside, which is known without looking.
    assert trained.manifest.clipped == () and trained.manifest.max_clipped_share == 0.001
    codec = trained.codec
    top = codec.fitted_range[1]
    rho = scaled(tree, "mp-1", 1.05 * top)
    scaled(tree, "mp-2", 5 * top)
    words = ["retokenize", "--input", tree, "--output", tmp_path / "set", "--layout", "v3-p7", "--workers", "1"]
    words += ["--codec", kept_set / "codec.json", "--patches_per_material", "20"]
    words += ["--filelist", "mp_filelist.txt", "--split_file", "split_limit_22M.json", "--json", tmp_path / "f.json"]
    assert main([*map(str, words), "--max_skipped", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    manifest = open_shards(tmp_path / "set").manifest
    (skipped,) = manifest.skipped
    assert skipped.material_id == "mp-2" and "above its largest" in skipped.reason
    (clipped,) = manifest.clipped or ()
    above, below = int(np.count_nonzero(rho > top)), int(np.count_nonzero(rho < codec.fitted_range[0]))
    assert clipped.material_id == "mp-1" and (clipped.above_voxels, clipped.below_voxels) == (above, below)
    assert above > 0
    counts = f"{below} below it, {above} above it, in 1 material"
    assert counts in printed and "outside the codec mp-1: " in printed
    assert json.loads((tmp_path / "f.json").read_text())["voxels_above_codec"] == above
    assert reported(tmp_path, "shards", "verify", tmp_path / "set")["materials_clipped"] == 1
    assert counts in " ".join(capsys.readouterr().out.split())
    # The share is part of what the set is.
    assert main([*map(str, words), "--max_clipped_share", "1"]) == 2
    assert "it differs in max_clipped_share" in capsys.readouterr().err


def test_negative_values_are_counted_apart(tmp_path, tree, retokenize_config):
    import zarr

    group = zarr.open_group(tree / "label" / "mp-1.zarr")
    values = np.asarray(group["charge_density_total"][...])
    values[0, 0, :4] = -1e-4
    group["charge_density_total"][...] = values
    del group.attrs["sha256"]  # as a store has it that was written before stores had checksums
    result = retokenize(retokenize_config(tmp_path / "set"), PoolRunner(1))
    assert result.manifest.clipped == ()
    survey = json.loads((tmp_path / "set" / "survey.json").read_text())["materials"]
    assert {each["material_id"]: each["clipped_voxels"] for each in survey}["mp-1"] == 4


def test_tokenize_takes_the_share(tmp_path, tree, narrow, capsys):
    write_codec(narrow, tmp_path / "codec.json")
    words = ["tokenize", "--input", tree / "label" / "mp-1.zarr", "--layout", "v3-p7", "--patches_per_material", "2"]
    words += ["--codec", tmp_path / "codec.json", "--output", tmp_path / "set"]
    assert main([*map(str, words)]) == 2
    assert "There is nothing to tokenize: 1 material was skipped" in capsys.readouterr().err
    assert main([*map(str, words), "--max_clipped_share", "1"]) == 0
    printed = capsys.readouterr().out
    assert "in 1 material;" in printed and "2 in 1 chunk of 64" in printed


def test_ratios_outside_a_relative_codec_cost_what_their_densities_lose():
    codec, grid = relative_codec(), bonded(0)
    assert clipped_of(grid, codec, "a", 0.0).voxels == 0
    cell = cell_codec(codec, grid)
    rho = grid.rho.copy()
    rho[0, 0, :3] *= 3
    high = DensityGrid(rho, grid.lattice, grid.atomic_numbers, grid.frac_coords)
    found = clipped_of(high, codec, "a", 1.0)
    lost = np.abs(cell.rounded(rho)[0, 0, :3].astype(np.float64) - rho[0, 0, :3]).sum()
    assert found.above_voxels == 3 and found.below_voxels == 0
    assert found.electron_share == pytest.approx(lost / rho.sum(dtype=np.float64), rel=1e-5)
    with pytest.raises(TomatError, match="above its largest of .* times the sum of atoms"):
        clipped_of(high, codec, "a", 1e-6)
