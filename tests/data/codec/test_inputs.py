import numpy as np
import pytest
from chgcar_files import write_chgcar

from tomat.data.codec.inputs import demo_inputs, path_inputs
from tomat.data.density.demo.embedded import demo_materials
from tomat.data.density.grid import DensityGrid
from tomat.data.density.zarr_store import write_zarr


@pytest.fixture
def grid():
    rho = np.random.default_rng(0).uniform(0.05, 0.15, (6, 6, 6)).astype(np.float32)
    rho *= 8 / (rho.mean() * 80)  # electrons in A^3: two silicon atoms without their cores
    return DensityGrid(rho, np.diag([4.0, 4.0, 5.0]), np.array([14, 14]), np.array([[0, 0, 0], [0.4, 0.4, 0.4]]))


def test_folder_of_all_kinds(tmp_path, grid):
    write_zarr(grid, tmp_path / "sub" / "mp-2.zarr")
    write_zarr(grid, tmp_path / "mp-1.zarr")
    (tmp_path / "mp-3").mkdir()
    write_chgcar(grid, tmp_path / "mp-3" / "CHGCAR")
    inputs = path_inputs([str(tmp_path / "sub"), str(tmp_path / "mp-1.zarr"), str(tmp_path / "mp-3")])
    assert inputs.material_ids == ("mp-2", "mp-1", "mp-3")
    for name in inputs.material_ids:
        read = inputs.get_grid(name)
        np.testing.assert_allclose(read.rho, grid.rho, rtol=1e-5)


def test_embedded_densities():
    inputs = demo_inputs("validation")
    assert set(inputs.material_ids) == {material.material_id for material in demo_materials("validation")}
    assert inputs.get_grid(inputs.material_ids[0]).rho.size > 1000
