import gzip
import json

import numpy as np
import pytest

from tomat.density.chgcar import write_chgcar
from tomat.density.io import open_density
from tomat.density.zarr_store import write_zarr
from tomat.errors import TomatError


def test_every_kind_gives_the_same_density(tmp_path, grid):
    write_zarr(grid, tmp_path / "mp-1.zarr")
    (tmp_path / "mp-1.zarr").rename(tmp_path / "unmarked")
    write_zarr(grid, tmp_path / "mp-1.zarr")
    write_chgcar(grid, tmp_path / "CHGCAR.gz")
    write_chgcar(grid, tmp_path / "LiF.vasp")
    total = {"@class": "array", "data": grid.rho_times_volume().tolist()}
    chgcar = {"poscar": {"structure": json.loads(grid.structure.to_json())}, "data": {"total": total}}
    (tmp_path / "mp-1.json.gz").write_bytes(gzip.compress(json.dumps({"task_id": "x", "data": chgcar}).encode()))
    for name in ("mp-1.zarr", "unmarked", "CHGCAR.gz", "LiF.vasp", "mp-1.json.gz"):
        np.testing.assert_allclose(open_density(tmp_path / name).rho, grid.rho, rtol=1e-5)
    assert open_density(tmp_path / "CHGCAR.gz", "mine").material_id == "mine"


def test_other_names_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(TomatError, match="notes.txt is there, but its name is of no known kind; expected CHGCAR"):
        open_density(tmp_path / "notes.txt")
    with pytest.raises(TomatError, match="does not exist"):
        open_density(tmp_path / "nothing")
