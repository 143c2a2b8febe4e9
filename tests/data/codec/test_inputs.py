import numpy as np
from chgcar_files import write_chgcar
from ionic_density import gallium_arsenide

from tomat.data.codec.inputs import demo_inputs, path_inputs
from tomat.data.density.demo.embedded import demo_materials
from tomat.data.density.zarr_store import write_zarr


def test_folder_of_all_kinds(tmp_path):
    grid = gallium_arsenide()
    write_zarr(grid, tmp_path / "sub" / "mp-2.zarr")
    write_zarr(grid, tmp_path / "mp-1.zarr")
    (tmp_path / "mp-3").mkdir()
    write_chgcar(grid, tmp_path / "mp-3" / "CHGCAR")
    inputs = path_inputs([str(tmp_path / "sub"), str(tmp_path / "mp-1.zarr"), str(tmp_path / "mp-3")])
    assert inputs.material_ids == ("mp-2", "mp-1", "mp-3")
    for name in inputs.material_ids:
        np.testing.assert_allclose(inputs.get_grid(name).rho, grid.rho, rtol=1e-5)


def test_embedded_densities():
    inputs = demo_inputs("validation")
    assert set(inputs.material_ids) == {material.material_id for material in demo_materials("validation")}
    assert inputs.get_grid(inputs.material_ids[0]).rho.size > 1000
