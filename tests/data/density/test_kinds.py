"""What names and titles say a file holds, in every format."""

import json

import numpy as np
import pytest
from ionic_density import gallium_arsenide

from tomat.base.errors import TomatError
from tomat.data.density.find import find_densities
from tomat.data.density.io import open_density
from tomat.data.density.kinds import kind_of_name, kind_of_titles
from tomat.data.density.outputs import write_density
from tomat.data.density.rules import ReadRules

FORMATS = {"chgcar": ".vasp", "cube": ".cube.gz", "zarr": ".zarr", "json": ".json.gz"}


NAMES = {
    "AECCAR0": "cores", "GaAs_AECCAR1": "free atoms", "EuO-SPIN_DENSITY-1_0": "spin", "cube_001_spin_density": "spin",
    "CHGCAR_mag_GdN": "spin", "h2o.spindens": "spin", "CHGDIFF": "difference", "PARCHG.0042": "bands",
    "MgO-WFN_00008_1-1_0": "orbital", "ELFCAR": "localisation", "MgO-ELF_S1-1_0": "localisation",
    "LOCPOT": "potential", "MgO-v_hartree-1_0": "potential",
}  # fmt: skip


def test_names_of_something_else():
    for name, what in NAMES.items():
        for ending in FORMATS.values():
            kind = kind_of_name(f"{name}{ending}")
            assert kind is not None and what in kind.words


@pytest.mark.parametrize("name", ["AECCAR0", "EuO-SPIN_DENSITY-1_0", "LOCPOT"])
def test_no_format_takes_what_is_called_something_else(tmp_path, name):
    grid = gallium_arsenide()
    nevertheless = ReadRules(accept=("not_total",))
    for form, ending in FORMATS.items():
        path = tmp_path / f"{name}{ending}"
        write_density(grid, path, form)
        with pytest.raises(TomatError, match=f"its name says that it holds .*{NAMES[name]}"):
            open_density(path)
        if name == "LOCPOT":
            with pytest.raises(TomatError, match="potential"):
                open_density(path, rules=nevertheless)
        else:
            assert open_density(path, rules=nevertheless).formula == "AsGa"
    write_density(grid, tmp_path / "GaAs.cube", "cube")
    assert [file.name for file in find_densities([str(tmp_path)]).files] == ["GaAs"]


@pytest.mark.parametrize(
    "name",
    ["CHGCAR", "magnetite.CHGCAR", "Mg.cube", "selfconsistent.cube", "MoS2.cube", "Mo2C.cube", "Fe-spin-polarised.vasp",
     "EuO-ELECTRON_DENSITY-1_0.cube", "cube_002_total_density.cube", "h2o.eldens.cube", "Dt.cube", "AECCAR2x.zarr"],
)  # fmt: skip
def test_names_of_total_densities(name):
    kind = kind_of_name(f"AECCAR0/ELF/{name}")
    assert kind is None or kind.form == "other_total"


def test_titles_are_read_too(tmp_path):
    grid = gallium_arsenide()
    write_density(grid, tmp_path / "a.cube", "cube")
    lines = (tmp_path / "a.cube").read_text().splitlines(keepends=True)
    (tmp_path / "a.cube").write_text("".join(["-Quickstep-\n", " SPIN DENSITY\n", *lines[2:]]))
    with pytest.raises(TomatError, match="its title says that it holds a spin density"):
        open_density(tmp_path / "a.cube")
    write_density(grid, tmp_path / "b.vasp", "chgcar")
    lines = (tmp_path / "b.vasp").read_text().splitlines(keepends=True)
    (tmp_path / "b.vasp").write_text("".join(["electrostatic potential\n", *lines[1:]]))
    with pytest.raises(TomatError, match="its title says that it holds a potential"):
        open_density(tmp_path / "b.vasp")
    write_density(grid, tmp_path / "c.json", "json")
    document = json.loads((tmp_path / "c.json").read_text())
    document["data"]["poscar"]["comment"] = "ELF of GaAs"
    (tmp_path / "c.json").write_text(json.dumps(document))
    with pytest.raises(TomatError, match="its title says that it holds a localisation function"):
        open_density(tmp_path / "c.json")
    assert kind_of_titles(["methane density=scf", "Electron density from Total SCF Density"]) is None
    assert kind_of_titles(["GaAs, ONCV pseudopotentials", "electrons/bohr^3"]) is None


def test_a_part_has_no_count(tmp_path):
    grid = gallium_arsenide()
    part = type(grid)(grid.rho * 0.137, grid.lattice, grid.atomic_numbers, grid.frac_coords)
    path = tmp_path / "GaAs-SPIN_DENSITY-1_0.cube"
    with path.open("wb") as file:
        from tomat.data.density.cube import write_cube

        write_cube(part, file)
    found = open_density(path, rules=ReadRules(accept=("not_total",)))
    assert np.isclose(found.electron_count, 0.137 * 8, rtol=1e-4)
