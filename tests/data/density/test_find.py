"""What is taken of a folder, how it is called, and what is said of the rest."""

import os

import pytest

from tomat.base.errors import TomatError
from tomat.data.density.find import find_densities, ignored_words, material_name


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
