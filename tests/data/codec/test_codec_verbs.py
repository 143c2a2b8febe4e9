import dataclasses

import numpy as np
import pytest
from reported import reported, run

from tomat.base.errors import TomatError
from tomat.data.codec.files import load_codec, write_codec
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.ratios import fit_codec
from tomat.data.codec.report import relative_widths
from tomat.data.codec.two_token import TwoTokenCodec
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule, PromoleculeFit, RadialBasis
from tomat.data.density.zarr_store import read_zarr, write_zarr


@pytest.fixture(scope="module")
def densities(tmp_path_factory):
    """Three cells of silicon whose densities are sums of atoms of 4 electrons."""
    place = tmp_path_factory.mktemp("sums_of_atoms")
    shape = Promolecule(RadialBasis(), {14: np.exp(-np.arange(16) / 4)})
    atom = Promolecule(shape.basis, {14: shape.coefficients[14] * 4 / shape.electrons()[14]})
    for k in range(3):
        crystal = Crystal(np.diag([4.0, 4.1, 4.5 + k / 2]), np.array([14, 14]), np.array([[0, 0, 0], [0.4, 0.4, 0.4]]))
        rho = atom.density(crystal, (20, 20, 24))
        grid = DensityGrid(rho, crystal.lattice, crystal.atomic_numbers, crystal.frac_coords)
        write_zarr(grid, place / f"mp-{k}.zarr")
    return place


def fitted_to(grids, n_bins, objective="absolute"):
    histogram = DensityHistogram()
    for grid in grids:
        histogram.add(grid.rho)
    return fit_codec(histogram, n_bins, objective)


def test_fit_counts_every_voxel_of_every_input(tmp_path, densities, capsys):
    out = tmp_path / "codec.json"
    content = reported(tmp_path, "codec", "fit", "--input", densities, "--bins", 200, "--output", out)
    codec = load_codec(out)
    assert codec.n_density_tokens == 200 and codec.fit["n_voxels"] == 3 * 9600
    grids = [read_zarr(densities / f"mp-{k}.zarr") for k in range(3)]
    np.testing.assert_array_equal(codec.medians, fitted_to(grids, 200).medians)
    assert content["n_materials"] == 3 and content["skipped"] == {}
    assert content["nmae_floor_fraction"].keys() == {"absolute", "squared"}
    printed = capsys.readouterr().out
    assert "NMAE floor, absolute fit" in printed and "NMAE floor, squared fit" in printed


@pytest.mark.parametrize(
    ("words", "flag", "load"),
    [
        (("codec", "fit", "--bins", 200), "--histogram", DensityHistogram.from_bytes),
        (("promolecule", "fit"), "--sums", PromoleculeFit.from_bytes),
    ],
)
def test_a_fit_goes_on_from_what_it_has_counted(tmp_path, densities, words, flag, load):
    kept, fit = tmp_path / "kept.npz", (*words, "--input")
    run(*fit, densities / "mp-0.zarr", flag, kept, "--output", tmp_path / "a.json")
    run(*fit, densities, flag, kept, "--output", tmp_path / "b.json")
    run(*fit, densities, "--output", tmp_path / "c.json")
    assert set(load(kept.read_bytes(), "", "").material_ids) == {"mp-0", "mp-1", "mp-2"}
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "c.json").read_bytes()
    with pytest.raises(TomatError, match="has mp-0, which is not among the inputs"):
        run(*fit, densities / "mp-1.zarr", flag, kept, "--output", tmp_path / "d.json")
    kept.write_bytes(b"no sums")
    with pytest.raises(TomatError, match="kept.npz is not .* Remove it and (fit|count) again."):
        run(*fit, densities, flag, kept, "--output", tmp_path / "d.json")


def test_fit_skips_what_cannot_be_read_and_refuses_what_is_too_little(tmp_path, densities, capsys):
    bad = tmp_path / "mp-9.json.gz"
    bad.write_bytes(b"not gzip")
    run("codec", "fit", "--input", densities, bad, "--bins", 100, "--output", tmp_path / "codec.json")
    assert "skipped mp-9: " in capsys.readouterr().out
    for message, *arguments in (
        ("nothing to fit", bad),
        ("too few for 16,384 bins", densities),
        ("--bins is 1;", densities, "--bins", 1),
    ):
        with pytest.raises(TomatError, match=message):
            run("codec", "fit", "--input", *arguments, "--output", tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()


def test_show(densities, tmp_path, capsys):
    grid = read_zarr(densities / "mp-0.zarr")
    path, codec = tmp_path / "codec.json", fitted_to([grid], 64, "squared")
    write_codec(codec, path)
    picture = tmp_path / "codec.svg"
    found = reported(tmp_path, "codec", "show", path, "--plot", picture)
    assert "squared error" in capsys.readouterr().out
    whole = picture.read_bytes()
    assert run("codec", "show", path, "--plot", picture) == 0 and picture.read_bytes() == whole
    assert whole.startswith(b"<?xml") and (found["n_density_tokens"], found["n_voxels"]) == (64, 9600)
    # The median voxel's bin, counted voxel by voxel.
    ids = codec.encode(grid.rho)
    widths = relative_widths(codec)[ids[(ids > 0) & (ids < 63)] - 1]
    assert found["relative_bin_width_by_voxel"]["p50"] == pytest.approx(np.median(widths), rel=1e-6)
    with pytest.raises(TomatError, match=r"\.svg or \.png, not a\.gif"):
        run("codec", "show", path, "--plot", tmp_path / "a.gif")
    for fit, said in (
        ({}, "codec.json does not say how its codec was fitted"),
        (codec.fit | {"n_voxels": "x"}, "codec.json: how the codec was fitted is damaged: n_voxels is 'x'; expected"),
        (codec.fit | {"counts": [3]}, "codec.json counts the voxels of 1 bins; expected 64"),
    ):
        write_codec(dataclasses.replace(codec, fit=fit), path)
        with pytest.raises(TomatError, match=f"{said}.* Fit it again with `tomat codec fit`."):
            run("codec", "show", path)
    write_codec(TwoTokenCodec(), path)
    assert run("codec", "show", path) == 0
    assert "4,608" in capsys.readouterr().out
    with pytest.raises(TomatError, match="nothing to draw"):
        run("codec", "show", path, "--plot", tmp_path / "a.svg")


def test_a_promolecule_finds_electrons_and_how_far_it_is(densities, tmp_path, capsys):
    out = tmp_path / "promolecule.json"
    content = reported(tmp_path, "promolecule", "fit", "--input", densities, "--output", out)
    assert content["electrons"]["Si"] == pytest.approx(4, abs=0.01)
    assert content["nmae_fraction"]["worst"] < 1e-3 and content["n_materials"] == 3 and content["skipped"] == {}
    found = Promolecule.load(out)
    grid = read_zarr(densities / "mp-1.zarr", "mp-1")
    assert content["nmae_fraction_by_material"]["mp-1"] == found.nmae(grid) and content["sha256"] == found.sha256
    assert "NMAE on these densities, whole cells: median" in capsys.readouterr().out
    assert reported(tmp_path, "promolecule", "show", out)["electrons"] == content["electrons"]
    printed = capsys.readouterr().out
    assert "Si 4.00" in printed and "3 densities" in printed
