import numpy as np
import pytest
from chgcar_files import write_chgcar

from tomat.base.errors import TomatError
from tomat.data.density import io
from tomat.data.density.io import check_species_apply, open_density
from tomat.data.density.outputs import write_density
from tomat.data.density.rules import ReadRules


def test_every_kind_gives_the_same_density(tmp_path, grid):
    for name, form in (("mp-1.zarr", "zarr"), ("unmarked", "zarr"), ("mp-1.json.gz", "json"), ("a.cube", "cube")):
        write_density(grid, tmp_path / name, form)
    write_chgcar(grid, tmp_path / "CHGCAR.gz")
    write_chgcar(grid, tmp_path / "LiF.vasp")
    for name in ("mp-1.zarr", "unmarked", "CHGCAR.gz", "LiF.vasp", "mp-1.json.gz", "a.cube"):
        np.testing.assert_allclose(open_density(tmp_path / name).rho, grid.rho, rtol=1e-5)
    assert open_density(tmp_path / "CHGCAR.gz", "mine").material_id == "mine"


def test_other_names_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(TomatError, match="notes.txt is there, but its name is of no known kind; expected CHGCAR"):
        open_density(tmp_path / "notes.txt")
    with pytest.raises(TomatError, match="does not exist"):
        open_density(tmp_path / "nothing")
    rules = ReadRules(species=("Na",))
    check_species_apply(["a.zarr", "b/CHGCAR.xz"], rules)
    check_species_apply(["a.zarr"], ReadRules(accept=("zeros",)))
    with pytest.raises(TomatError, match="--species names Na, but no input is a CHGCAR"):
        check_species_apply(["a.zarr", "CHGCAR.json.gz"], rules)


def test_what_a_reader_did_not_foresee_is_one_line_of_the_file(tmp_path, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied" + "\nand more" * 300)

    monkeypatch.setattr(io, "_reader", lambda text: fail)
    with pytest.raises(TomatError, match="CHGCAR cannot be read as a density .PermissionError") as found:
        open_density(tmp_path / "CHGCAR")
    assert "\n" not in str(found.value) and len(str(found.value)) < 500
