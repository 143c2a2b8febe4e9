"""What names and titles say a file holds, in every format."""

import json

import pytest
from ionic_density import gallium_arsenide

from tomat.base.errors import TomatError
from tomat.data.density.io import find_densities, open_density
from tomat.data.density.outputs import write_density
from tomat.data.density.rules import ReadRules, check_kind, kind_of_name

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
    for name, form, title, what in (
        ("a.cube", "cube", "-Quickstep- SPIN DENSITY", "a spin density"),
        ("b.vasp", "chgcar", "electrostatic potential", "a potential"),
        ("c.json", "json", "ELF of GaAs", "a localisation function"),
    ):
        path = tmp_path / name
        write_density(grid, path, form)
        if form == "json":
            document = json.loads(path.read_text())
            document["data"]["poscar"]["comment"] = title
            path.write_text(json.dumps(document))
        else:
            path.write_text("\n".join([title, *path.read_text().splitlines()[1:]]))
        with pytest.raises(TomatError, match=f"{name}: its title says that it holds {what}"):
            open_density(path)
    for titles in (["methane density=scf", "from Total SCF Density"], ["ONCV pseudopotentials", "electrons/bohr^3"]):
        assert not check_kind("a.cube", titles, ())
