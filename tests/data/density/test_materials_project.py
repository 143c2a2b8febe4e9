import gzip
import json

import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.data.density.limits import FREE_BYTES
from tomat.data.density.materials_project import read_materials_project


def document(grid):
    return {
        "task_id": "mp-1138",
        "fs_id": "0123",
        "data": {
            "@module": "pymatgen.io.vasp.outputs",
            "@class": "Chgcar",
            "poscar": {"@class": "Poscar", "structure": json.loads(grid.structure.to_json())},
            "data": {"total": {"@class": "array", "dtype": "float64", "data": grid.rho_times_volume().tolist()}},
            "data_aug": {},
        },
    }


def write(path, content) -> None:
    path.write_bytes(gzip.compress(json.dumps(content).encode()))


def test_read_as_pymatgen_writes_it(tmp_path, grid):
    from pymatgen.io.vasp import Chgcar, Poscar

    write(tmp_path / "a.json.gz", document(grid))
    chgcar = Chgcar(Poscar(grid.structure), {"total": grid.rho_times_volume().astype(np.float64)})
    saved = json.loads(json.dumps(chgcar.as_dict(), default=lambda value: value.tolist()))
    write(tmp_path / "b.json.gz", {"fs_id": "77", "data": saved})
    for name, material_id in (("a", "mp-1138"), ("b", "77")):
        back = read_materials_project(tmp_path / f"{name}.json.gz")
        np.testing.assert_allclose(back.rho, grid.rho, rtol=1e-6)
        np.testing.assert_allclose(back.lattice, grid.lattice)
        np.testing.assert_allclose(back.frac_coords, grid.frac_coords)
        assert back.material_id == material_id and back.atomic_numbers.tolist() == [3, 9]


def test_damage(tmp_path, grid):
    path = tmp_path / "c.json.gz"
    with pytest.raises(TomatError, match="no density at"):
        read_materials_project(path)
    path.write_bytes(gzip.compress(b"[" * 200_000))
    with pytest.raises(TomatError, match="not a complete gzipped JSON document .RecursionError"):
        read_materials_project(path)
    path.write_bytes(gzip.compress(bytes(2 * FREE_BYTES), 1))
    with pytest.raises(TomatError, match="decompresses to more than"):
        read_materials_project(path)
    write(path, document(grid))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TomatError, match="not a complete gzipped JSON"):
        read_materials_project(path)


def values_of(content):
    return content["data"]["data"]["total"]["data"]


def sites_of(content):
    return content["data"]["poscar"]["structure"]["sites"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda doc: doc.pop("data"), "no 'data'"),
        (lambda doc: doc["data"].pop("poscar"), "no 'poscar'"),
        (lambda doc: doc["data"]["poscar"]["structure"].pop("lattice"), "not a pymatgen structure"),
        (lambda doc: doc["data"]["poscar"]["structure"].update(sites=[]), "has no atoms"),
        (lambda doc: sites_of(doc)[1]["species"][0].update(occu=0.5), "site 1 holds .*fully occupied"),
        (lambda doc: values_of(doc)[0].pop(), "ragged"),
        (lambda doc: doc["data"]["data"]["total"].update(data=[1.0, 2.0]), "expected .nx..ny..nz."),
        (lambda doc: values_of(doc)[0][0].__setitem__(0, float("nan")), "1 of 120 values are NaN"),
        (lambda doc: values_of(doc)[1][1].__setitem__(1, 10**400), "beyond float64"),
        (lambda doc: values_of(doc)[1][1].__setitem__(1, True), r"holds a bool at \[1\]\[1\]"),
        (lambda doc: sites_of(doc)[0]["species"][0].update(element="Xx"), "not a pymatgen structure"),
        (lambda doc: doc["data"]["poscar"]["structure"].update(sites=[{}] * 1_000_000), "1,000,000 atoms"),
        (lambda doc: doc["data"]["poscar"]["structure"]["lattice"]["matrix"][0].__setitem__(0, 3.9), "states"),
        (lambda doc: sites_of(doc)[1]["abc"].__setitem__(2, 0.123), "not the same place"),
        (lambda doc: doc.update(data=[1, 2]), "where a Materials Project charge density has"),
    ],
)
def test_parts_types_and_numbers(tmp_path, grid, edit, message):
    content = document(grid)
    edit(content)
    (tmp_path / "h.json").write_text(json.dumps(content))
    with pytest.raises(TomatError, match=message):
        read_materials_project(tmp_path / "h.json")
