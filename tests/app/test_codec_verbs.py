import argparse

import numpy as np
import pytest
from reported import reported

from tomat.app.codec_verbs import register
from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule, PromoleculeFit, RadialBasis
from tomat.data.density.zarr_store import read_zarr, write_zarr


def run(*arguments):
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    args = parser.parse_args(["promolecule", *(str(each) for each in arguments)])
    return args.run(args)


@pytest.fixture(scope="module")
def densities(tmp_path_factory):
    """Three cells of silicon whose densities are sums of atoms of 4 electrons."""
    place = tmp_path_factory.mktemp("densities")
    shape = Promolecule(RadialBasis(), {14: np.exp(-np.arange(16) / 4)})
    atom = Promolecule(shape.basis, {14: shape.coefficients[14] * 4 / shape.electrons()[14]})
    for k in range(3):
        crystal = Crystal(np.diag([4.0, 4.1, 4.5 + k / 2]), np.array([14, 14]), np.array([[0, 0, 0], [0.4, 0.4, 0.4]]))
        rho = atom.density(crystal, (20, 20, 24))
        grid = DensityGrid(rho, crystal.lattice, crystal.atomic_numbers, crystal.frac_coords)
        write_zarr(grid, place / f"mp-{k}.zarr")
    return place


def test_fit_finds_electrons_and_how_far_it_is(densities, tmp_path, capsys):
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


def test_fit_goes_on_from_its_sums(densities, tmp_path):
    kept = tmp_path / "sums.npz"
    run("fit", "--input", densities / "mp-0.zarr", "--sums", kept, "--output", tmp_path / "a.json")
    run("fit", "--input", densities, "--sums", kept, "--output", tmp_path / "b.json")
    run("fit", "--input", densities, "--output", tmp_path / "c.json")
    assert PromoleculeFit.from_bytes(kept.read_bytes(), "", "").material_ids == ["mp-0", "mp-1", "mp-2"]
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "c.json").read_bytes()
    with pytest.raises(TomatError, match="has mp-0, which is not among the inputs"):
        run("fit", "--input", densities / "mp-1.zarr", "--sums", kept, "--output", tmp_path / "d.json")
    kept.write_bytes(b"no sums")
    with pytest.raises(TomatError, match="sums.npz is not the sums of a promolecule's fit.* Remove it and fit again."):
        run("fit", "--input", densities, "--sums", kept, "--output", tmp_path / "d.json")
