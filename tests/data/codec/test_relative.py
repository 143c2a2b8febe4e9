import dataclasses
import json

import numpy as np
import pytest
from relative_codec import PROMOLECULE, bonded, relative_codec

from tomat.base.errors import TomatError
from tomat.data.codec.base import UNIT_RHO_TIMES_VOLUME
from tomat.data.codec.files import load_codec
from tomat.data.codec.relative import CellCodec, cell_codec, check_promolecule
from tomat.data.codec.two_token import TwoTokenCodec
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule


def test_differences_of_bins_are_those_of_their_values_times_the_scale():
    codec, grid = relative_codec(), bonded(5)
    cell = cell_codec(codec, grid)
    assert cell.scale is not None
    np.testing.assert_allclose(cell.scale, PROMOLECULE.density(Crystal.of(grid), grid.grid_shape) + 0.01, rtol=1e-6)
    ids = codec.encode(cell.values(grid.rho))
    np.testing.assert_array_equal(cell.encode(grid.rho), ids)
    high = np.full_like(ids, codec.n_density_tokens - 1)
    apart = cell.decode(high).astype(np.float64) - cell.decode(ids)
    np.testing.assert_allclose(apart, cell.scale * (codec.medians[high] - codec.medians[ids]), rtol=1e-4, atol=1e-6)
    # A density is in the bin whose two edges, as densities, it lies between.
    ends = np.concatenate([[0], codec.edges, [1e9]]).astype(np.float32)
    low, upper = (cell.density(ends[ids + more]) for more in (0, 1))
    assert np.all(low <= grid.rho * (1 + 1e-5) + 1e-7) and np.all(grid.rho <= upper * (1 + 1e-5) + 1e-7)


def test_atoms_alone_and_vacuum_come_back_as_they_are():
    grid = bonded()
    atoms = PROMOLECULE.density(Crystal.of(grid), grid.grid_shape)
    vacuum = atoms == 0
    assert vacuum.any()
    cell = cell_codec(relative_codec(8), dataclasses.replace(grid, rho=atoms))
    np.testing.assert_allclose(cell.rounded(atoms), atoms, rtol=1e-6, atol=1e-8)
    for decoder in ("median", "mean"):
        assert np.all(cell.decode(cell.encode(atoms), decoder)[vacuum] == 0)
    # A ratio below that of no density at all is no density, and not less than none.
    assert np.all(cell.density(np.zeros_like(atoms)) == 0)


def test_a_patch_has_the_ids_of_its_voxels_in_the_cell():
    grid, codec = bonded(), relative_codec()
    cell, anchors = cell_codec(codec, grid), np.array([[0, 0, 0], [9, 7, 13]])
    at = cell.patches(anchors, (5, 4, 6))
    rho = np.stack([grid.patch(tuple(anchor), (5, 4, 6)) for anchor in anchors.tolist()])
    whole = np.pad(cell.encode(grid.rho), [(0, 6)] * 3, mode="wrap")
    for ids, (x, y, z) in zip(at.encode(rho), anchors, strict=True):
        np.testing.assert_array_equal(ids, whole[x : x + 5, y : y + 4, z : z + 6])


def test_other_codecs_are_theirs_at_every_voxel():
    grid = bonded()
    codec = TwoTokenCodec(UNIT_RHO_TIMES_VOLUME)
    cell = cell_codec(codec, grid)
    assert cell.scale is None and cell.patches(np.zeros((2, 3), int), (2, 2, 2)) is cell
    np.testing.assert_array_equal(cell.encode(grid.rho), codec.encode(grid.rho_times_volume()))
    np.testing.assert_allclose(cell.rounded(grid.rho)[grid.rho > 1e-3], grid.rho[grid.rho > 1e-3], rtol=2e-5)


def test_the_hash_covers_promolecule_and_offset():
    codec = relative_codec()
    others = (
        dataclasses.replace(codec, promolecule=dataclasses.replace(PROMOLECULE, n_materials=9)),
        dataclasses.replace(codec, offset_e_per_a3=0.02),
        dataclasses.replace(codec, means=codec.medians),
    )
    assert len({codec.sha256, *(each.sha256 for each in others)}) == 4


def test_a_file_without_its_promolecule_or_with_a_damaged_one_is_refused(tmp_path):
    content = relative_codec().to_dict()
    other = json.loads(json.dumps(content["promolecule"]))
    other["coefficients_e_per_a3"]["O"][0] = 7.0
    for change, message in (
        ({"promolecule": None}, "sum of atoms in it is not a promolecule"),
        ({"promolecule": other}, "sum of atoms in it is damaged"),
        ({"offset_e_per_a3": 0.0}, "offset of a relative codec is 0.0"),
        ({"unit": UNIT_RHO_TIMES_VOLUME}, "relative codec has the unit 'rho_times_volume'; expected e_per_A3"),
        ({"medians": [0.0, *content["medians"][1:]]}, "first value is 0"),
    ):
        (tmp_path / "codec.json").write_text(json.dumps(content | change))
        with pytest.raises(TomatError, match=f"codec.json is a damaged codec: .*{message}"):
            load_codec(tmp_path / "codec.json")
    del content["promolecule"]
    (tmp_path / "codec.json").write_text(json.dumps(content))
    with pytest.raises(TomatError, match="relative to a sum of atoms, but contains none"):
        load_codec(tmp_path / "codec.json")


def test_another_promolecule_beside_it_and_an_element_that_it_has_not_are_refused():
    codec, grid = relative_codec(), bonded()
    check_promolecule(codec, PROMOLECULE, "here")
    check_promolecule(TwoTokenCodec(), None, "here")
    for other in (None, Promolecule(PROMOLECULE.basis, {12: np.ones(4)})):
        with pytest.raises(TomatError, match=f"relative to the promolecule {PROMOLECULE.sha256[:12]}"):
            check_promolecule(codec, other, "here")
    iron = DensityGrid(grid.rho, grid.lattice, np.array([26, 8]), grid.frac_coords, "rust")
    with pytest.raises(TomatError, match="rust has Fe, which no training density had"):
        cell_codec(codec, iron)


def test_scales_are_computed_once_a_density_and_codec(monkeypatch):
    calls, grid, codec = [], bonded(), relative_codec()
    density = Promolecule.density
    monkeypatch.setattr(Promolecule, "density", lambda *args: calls.append(1) or density(*args))
    first, again = cell_codec(codec, grid), cell_codec(codec, grid)
    assert isinstance(first, CellCodec) and first.scale is again.scale and len(calls) == 1
    other = cell_codec(dataclasses.replace(codec, offset_e_per_a3=0.02), grid)
    np.testing.assert_allclose(other.scale, first.scale + np.float32(0.01), rtol=1e-6)
