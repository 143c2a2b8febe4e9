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


def test_damage(tmp_path):
    path = tmp_path / "c.json.gz"
    with pytest.raises(TomatError, match="no density at"):
        read_materials_project(path)
    path.write_bytes(gzip.compress(b"[" * 200_000))
    with pytest.raises(TomatError, match="not a complete gzipped JSON document .RecursionError"):
        read_materials_project(path)
    path.write_bytes(gzip.compress(bytes(2 * FREE_BYTES), 1))
    with pytest.raises(TomatError, match="decompresses to more than"):
        read_materials_project(path)


def test_parts_types_and_numbers(tmp_path, grid):
    def wrong(place, value):
        content = document(grid)
        *parents, last = place
        node = content["data"]
        for key in parents:
            node = node[key]
        node[last] = value
        return content

    matrix, sites = ("poscar", "structure", "lattice", "matrix"), ("poscar", "structure", "sites")
    values = ("data", "total", "data")
    for content, message in (
        ({"task_id": "x"}, "no 'data'"),
        (wrong(("poscar",), {}), "no 'structure'"),
        (wrong(sites, [{}] * 1_000_000), "1,000,000 atoms"),
        (wrong((*sites, 1, "species", 0, "occu"), 0.5), "site 2 holds .*fully occupied"),
        (wrong((*sites, 1, "species", 0, "occu"), 10**400), "not a pymatgen structure.*too large"),
        (wrong((*sites, 0, "species", 0, "element"), "Xx"), "not a pymatgen structure"),
        (wrong((*sites, 1, "abc", 2), 0.123), "not the same place"),
        (wrong((*matrix, 0, 0), 3.9), "states"),
        (wrong((*values, 0), [[1.0]]), "no .* lists of numbers"),
        (wrong((*values, 1, 1, 1), 10**400), "too large"),
        (wrong((*values, 1, 1, 1), True), "holds bool and float in 3 dimensions"),
        (wrong((*values, 1, 1), [1e308] * 4), "h.json: 4 of 120 values are NaN, infinite or beyond 1e.15; expected"),
    ):
        (tmp_path / "h.json").write_text(json.dumps(content))
        with pytest.raises(TomatError, match=message):
            read_materials_project(tmp_path / "h.json")
