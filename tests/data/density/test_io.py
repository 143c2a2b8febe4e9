"""Every format is opened; what is taken of a folder, how it is called, and what is said of the rest."""

import os

import numpy as np
import pytest
from chgcar_files import write_chgcar

from tomat.base.errors import TomatError
from tomat.data.density import io
from tomat.data.density.io import check_species_apply, find_densities, ignored_words, material_name, open_density
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


@pytest.mark.parametrize(
    "path",
    ["data/mp-149.zarr", "gs://bucket/rho_gga/mp-149.zarr", "mp-149.json.gz", "mp-149.cube.xz", "data/mp-149/CHGCAR",
     "data/mp-149/CHGCAR.gz", "data/mp-149/CHG", "mp-149.CHGCAR.gz"],
)  # fmt: skip
def test_material_name(path):
    assert material_name(path) == "mp-149"
    assert [material_name(name) for name in ("CHGCAR_Si.vasp", "CHGCAR")] == ["CHGCAR_Si", "CHGCAR"]


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_a_folder_gives_its_densities_and_says_why_not_the_rest(tmp_path):
    touch(tmp_path, "a/CHGCAR", "a/CHG", "a/AECCAR0", "a/AECCAR2.gz", "a/POSCAR", "a/INCAR", "b/CHG", "c.cube.gz")
    touch(tmp_path, "deep/down/mp-1.vasp", "deep/POSCAR.vasp", "d.json", "e.json.gz", ".hidden/CHGCAR", ".DS_Store")
    (tmp_path / "f.zarr" / "c").mkdir(parents=True)
    touch(tmp_path, "f.zarr/zarr.json")
    found = find_densities([str(tmp_path)])
    assert {file.name: os.path.relpath(file.path, tmp_path) for file in found.files} == {
        "a": "a/CHGCAR",
        "b": "b/CHG",
        "c": "c.cube.gz",
        "d": "d.json",
        "mp-1": "deep/down/mp-1.vasp",
        "e": "e.json.gz",
        "f": "f.zarr",
    }
    assert {os.path.relpath(path, tmp_path): reason.split()[0] for path, reason in found.ignored.items()} == {
        "a/CHG": "the",
        "a/AECCAR0": "another",
        "a/AECCAR2.gz": "another",
        "a/POSCAR": "a",
        "a/INCAR": "its",
        "deep/POSCAR.vasp": "a",
    }
    partial = find_densities([str(tmp_path)], accept=("not_total",))
    assert set(found.ignored) - set(partial.ignored) == {str(tmp_path / "a/AECCAR0")}
    words = ignored_words(found.ignored)
    assert words.startswith("6 ignored: ") and "a/POSCAR, deep/POSCAR.vasp (a structure without a density)" in words
    assert ignored_words({}) == "0 ignored"
    assert "7 ignored: x/0, x/1, x/2, x/3, x/4 and 2 more (r)" == ignored_words({f"y/x/{n}": "r" for n in range(7)})


def test_names_are_told_apart_by_the_folders_above(tmp_path):
    touch(tmp_path, "r1/static/CHGCAR", "r2/static/CHGCAR", "r2/x.cube", "r3/y/x.cube", "r3/y/x.vasp")
    names = {os.path.relpath(each.path, tmp_path): each.name for each in find_densities([str(tmp_path)]).files}
    assert names == {
        "r1/static/CHGCAR": "r1-static",
        "r2/static/CHGCAR": "r2-static",
        "r2/x.cube": "x",
        "r3/y/x.cube": "x.cube",
        "r3/y/x.vasp": "x.vasp",
    }
    # What is below two folders of the command line has their names; the same file is one density.
    both = find_densities([str(tmp_path / "r1"), str(tmp_path / "r2"), str(tmp_path / "r1" / "static" / "CHGCAR")])
    assert [each.name for each in both.files] == ["r1-static", "r2-static", "x"]
    # Where a folder lies does not name what is in it.
    (tmp_path / "r2" / "static").rename(tmp_path / "r2" / "other")
    assert [each.name for each in find_densities([str(tmp_path / "r2")]).files] == ["other", "x"]


def test_links_to_folders_are_followed_once(tmp_path):
    touch(tmp_path, "data/a/CHGCAR", "in/x")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "in")
    assert [each.name for each in find_densities([str(tmp_path / "in")]).files] == ["a"]


def test_nothing_is_one_error(tmp_path):
    with pytest.raises(TomatError, match="There is no file or folder"):
        find_densities([str(tmp_path / "missing")])
    touch(tmp_path, "in/INCAR", "in/POSCAR")
    with pytest.raises(TomatError, match=r"holds no density; expected CHGCAR.* 2 ignored: in/INCAR .its name"):
        find_densities([str(tmp_path / "in")])
    with pytest.raises(TomatError, match="No density was given"):
        find_densities([])
