import json
import shutil

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.density.grid import DensityGrid
from tomat.density.zarr_store import TOTAL, list_zarr, read_metadata, read_zarr, write_zarr
from tomat.errors import TomatError


@given(st.integers(0, 1000), st.tuples(*[st.integers(1, 9)] * 3), st.sampled_from([None, 2, 4, 16]))
@settings(max_examples=12, deadline=None)
def test_round_trip(tmp_path_factory, make_grid, seed, shape, chunks):
    grid = make_grid(shape, seed)
    path = tmp_path_factory.mktemp("store") / "mp-1.zarr"
    write_zarr(grid, path, chunks=chunks)
    back = read_zarr(path)
    np.testing.assert_allclose(back.rho, grid.rho, rtol=3e-7)
    np.testing.assert_allclose(back.lattice, grid.lattice)
    np.testing.assert_allclose(back.frac_coords, grid.frac_coords)
    assert back.atomic_numbers.tolist() == grid.atomic_numbers.tolist() and back.material_id == "LiF"
    array = zarr.open_group(path, mode="r")[TOTAL]
    assert array.chunks == tuple(min(chunks or n, n) for n in shape)


def test_the_layout_is_rho_gga(tmp_path, grid):
    write_zarr(grid, tmp_path / "a.zarr", metadata={"source": "test"})
    group = zarr.open_group(tmp_path / "a.zarr", mode="r", zarr_format=3)
    assert group[TOTAL].dtype == np.float32
    assert np.asarray(group[TOTAL]).mean() == pytest.approx(10, rel=1e-5)
    assert json.loads(str(group.attrs["metadata"])) == {"task_id": "LiF", "source": "test"}
    from pymatgen.core import Structure

    structure = Structure.from_str(str(group.attrs["structure"]), fmt="json")
    np.testing.assert_allclose(structure.lattice.matrix, grid.lattice)
    assert read_metadata(tmp_path / "a.zarr")["source"] == "test"


def test_a_spin_density_beside_it_is_left_alone(tmp_path, grid):
    write_zarr(grid, tmp_path / "a.zarr")
    group = zarr.open_group(tmp_path / "a.zarr", mode="a")
    group.create_array("charge_density_diff", data=-np.ones(grid.grid_shape, np.float32))
    np.testing.assert_allclose(read_zarr(tmp_path / "a.zarr").rho, grid.rho, rtol=3e-7)


def test_through_a_url(grid):
    """The path that `gs://` takes, on fsspec's memory file system."""
    write_zarr(grid, "memory://bucket/set/mp-9.zarr", chunks=4)
    write_zarr(grid, "memory://bucket/set/mp-10.zarr")
    assert list_zarr("memory://bucket/set") == ["memory://bucket/set/mp-10.zarr", "memory://bucket/set/mp-9.zarr"]
    np.testing.assert_allclose(read_zarr("memory://bucket/set/mp-9.zarr").rho, grid.rho, rtol=3e-7)
    with pytest.raises(TomatError, match="not a readable Zarr group"):
        read_zarr("memory://bucket/set/absent.zarr")


def test_listing(tmp_path, grid):
    for name in ("mp-2.zarr", "mp-1.zarr"):
        write_zarr(grid, tmp_path / name)
    (tmp_path / "notes.txt").write_text("")
    assert list_zarr(tmp_path) == [str(tmp_path / "mp-1.zarr"), str(tmp_path / "mp-2.zarr")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(TomatError, match="no `\\*.zarr` under"):
        list_zarr(tmp_path / "empty")
    with pytest.raises(TomatError, match="cannot list"):
        list_zarr(tmp_path / "absent")


def test_what_is_there_is_kept_unless_asked(tmp_path, grid, make_grid):
    path = tmp_path / "a.zarr"
    write_zarr(grid, path)
    other = make_grid((3, 3, 3), 5)
    with pytest.raises(TomatError, match="is there already"):
        write_zarr(other, path)
    assert read_zarr(path).grid_shape == grid.grid_shape
    write_zarr(other, path, overwrite=True)
    assert read_zarr(path).grid_shape == (3, 3, 3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.zarr"]


def test_a_density_in_another_unit_is_not_written(tmp_path, grid):
    wrong = DensityGrid(grid.rho * grid.volume_a3, grid.lattice, grid.atomic_numbers, grid.frac_coords)
    with pytest.raises(TomatError, match="check its unit"):
        write_zarr(wrong, tmp_path / "a.zarr")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chunks", [None, 2])
def test_missing_and_damaged_chunks(tmp_path, make_grid, chunks):
    path = tmp_path / "a.zarr"
    write_zarr(make_grid((6, 6, 6)), path, chunks=chunks)
    files = sorted((path / TOTAL / "c").rglob("*"))
    victim = [file for file in files if file.is_file()][-1]
    whole = victim.read_bytes()
    victim.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TomatError, match="does not decode"):
        read_zarr(path)
    victim.write_bytes(b"not zstd at all")
    with pytest.raises(TomatError, match="does not decode"):
        read_zarr(path)
    victim.unlink()
    with pytest.raises(TomatError, match="chunks of 'charge_density_total' are missing .read as zeros"):
        read_zarr(path)


def test_an_all_zero_chunk_is_no_loss(tmp_path, make_grid):
    grid = make_grid((8, 8, 8))
    rho = grid.rho.copy()
    rho[:2, :2, :2] = 0
    vacuum = DensityGrid(rho, grid.lattice, grid.atomic_numbers, grid.frac_coords)
    write_zarr(vacuum, tmp_path / "a.zarr", chunks=2)
    np.testing.assert_array_equal(read_zarr(tmp_path / "a.zarr").rho == 0, rho == 0)


def test_what_is_no_density_group(tmp_path, grid):
    with pytest.raises(TomatError, match="no density at"):
        read_zarr(tmp_path / "absent.zarr")
    (tmp_path / "folder.zarr").mkdir()
    with pytest.raises(TomatError, match="not a readable Zarr group"):
        read_zarr(tmp_path / "folder.zarr")
    zarr.open_group(tmp_path / "empty.zarr", mode="w")
    with pytest.raises(TomatError, match="no readable array"):
        read_zarr(tmp_path / "empty.zarr")
    write_zarr(grid, tmp_path / "a.zarr")
    (tmp_path / "a.zarr" / "zarr.json").write_text("{broken")
    with pytest.raises(TomatError, match="not a readable Zarr group"):
        read_zarr(tmp_path / "a.zarr")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({}, "attribute 'structure' is missing"),
        ({"structure": "{not json"}, "attribute 'structure' is not JSON"),
        ({"structure": "[1]"}, "attribute 'structure' is missing or not an object"),
        ({"structure": "{}"}, "not a pymatgen structure"),
    ],
)
def test_broken_attributes(tmp_path, grid, attributes, message):
    path = tmp_path / "a.zarr"
    write_zarr(grid, path)
    zarr.open_group(path, mode="a").attrs.put(attributes)
    with pytest.raises(TomatError, match=message):
        read_zarr(path)


def test_rho_in_place_of_rho_times_volume(tmp_path, grid):
    path = tmp_path / "a.zarr"
    write_zarr(grid, path)
    array = zarr.open_group(path, mode="a")[TOTAL]
    assert isinstance(array, zarr.Array)
    array[...] = grid.rho
    with pytest.raises(TomatError, match=r"look like e/A\^3"):
        read_zarr(path)
    shutil.rmtree(path)
