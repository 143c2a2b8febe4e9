"""The exact structures beside a set's rows, what older sets say of theirs, and the promolecule beside both."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from retokenized import rewrite

from tomat.base.checked_arrays import pack_arrays
from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.density.promolecule import Promolecule, RadialBasis
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.manifest import IMPORTED_ANCHORS
from tomat.data.tokens.patch import ANGLE_STEP_DEGREES, LENGTH_STEP_A
from tomat.data.tokens.pipeline.driver import write_shards
from tomat.data.tokens.shards import open_shards
from tomat.data.tokens.source_check import compare_with_source
from tomat.data.tokens.structures import PreambleStructures, Structures, crystal_of_row

LAYOUTS = {"v3": SequenceLayout("small", "v3", 4, 160), "v2": SequenceLayout("small-v2", "v2", 4, 170)}
PROMOLECULE = Promolecule(RadialBasis(5, 4.0), {1: np.arange(5.0), 8: np.ones(5)}, 2)
NAMES = ["c", "a", "b"]


@pytest.fixture(scope="session")
def get_grid(make_grid):
    grids = {name: make_grid((5 + k, 6, 7), n_atoms=1 + k, seed=k, material_id=name) for k, name in enumerate("abc")}
    return grids.__getitem__


@pytest.fixture
def write(tmp_path, get_grid, codec):
    def write(version="v3", **settings):
        place = tmp_path / f"set-{version}"
        arguments = {"layout": LAYOUTS[version], "codec": codec, "patches_per_material": 5, "seed": 3, "block_rows": 8}
        write_shards(place, NAMES, get_grid, **(arguments | settings))
        return place

    return write


def as_before(place: Path) -> None:
    """Make the set one that was written before there were structures and promolecules."""
    rewrite(place / "manifest.json", "structures_sha256", "promolecule_sha256")
    for name in ("structures.npz", "promolecule.json"):
        (place / name).unlink(missing_ok=True)


def same(first: Crystal, second: Crystal) -> bool:
    return all(
        np.array_equal(getattr(first, k), getattr(second, k)) for k in ("lattice", "atomic_numbers", "frac_coords")
    )


def test_structures_are_exact_and_in_the_order_of_the_materials(write, get_grid, capsys):
    shards = open_shards(write(promolecule=PROMOLECULE))
    capsys.readouterr()
    assert isinstance(shards.crystals, Structures) and len(shards.crystals) == 3
    for index, name in enumerate(NAMES):
        crystal = shards.crystals[index]
        assert crystal.name == name and same(crystal, Crystal.of(get_grid(name)))
    assert same(shards.crystals[-1], shards.crystals[2]) and [each.name for each in shards.crystals] == NAMES
    assert shards.promolecule is not None and shards.promolecule.sha256 == PROMOLECULE.sha256
    assert "warning" not in capsys.readouterr().out
    assert compare_with_source(shards, range(15), get_grid)["rows_compared"] == 15


def test_what_lies_beside_the_rows_is_no_part_of_their_hash(write, tmp_path):
    place = write(promolecule=PROMOLECULE)
    shards = open_shards(place)
    shutil.copytree(place, tmp_path / "bare")
    as_before(tmp_path / "bare")
    bare = open_shards(tmp_path / "bare")
    assert bare.promolecule is None and bare.content_sha256 == shards.content_sha256
    shutil.rmtree(place)
    without = open_shards(write())
    assert without.promolecule is None and without.content_sha256 == shards.content_sha256


@pytest.mark.parametrize("version", ["v3", "v2"])
def test_older_set_has_those_of_its_rows_rounded_and_says_so_once(write, get_grid, capsys, version):
    place = write(version)
    as_before(place)
    shards = open_shards(place)
    capsys.readouterr()
    for _ in range(2):
        for index, name in enumerate(NAMES):
            exact, found = Crystal.of(get_grid(name)), shards.crystals[index]
            np.testing.assert_array_equal(found.atomic_numbers, exact.atomic_numbers)
            apart = found.frac_coords - exact.frac_coords
            assert np.abs(apart - np.round(apart)).max() < 1e-5  # wherever the row's patch lies
            gram, expected = found.lattice @ found.lattice.T, exact.lattice @ exact.lattice.T
            lengths = np.sqrt(np.diag(expected))
            np.testing.assert_allclose(np.sqrt(np.diag(gram)), lengths, atol=0.5001 * LENGTH_STEP_A)
            cosines = gram / np.sqrt(np.outer(np.diag(gram), np.diag(gram))) - expected / np.outer(lengths, lengths)
            assert np.abs(cosines).max() < np.radians(0.5001 * ANGLE_STEP_DEGREES)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("warning") == 1 and "0.05 A and 0.2 degrees" in said
    assert isinstance(shards.crystals, PreambleStructures) and len(shards.crystals) == 3


def test_imported_rows_place_atoms_by_their_patch_alone(write, get_grid):
    for version in ("v3", "v2"):
        place = write(version)
        as_before(place)
        shards = open_shards(place)
        materials = tuple(dataclasses.replace(m, anchors_seed=IMPORTED_ANCHORS) for m in shards.manifest.materials)
        imported = dataclasses.replace(shards, manifest=dataclasses.replace(shards.manifest, materials=materials))
        if version == "v2":
            assert imported.crystals[0].name == "c"
        else:
            with pytest.raises(TomatError, match="of c were imported, so the places of their patches are not known"):
                imported.crystals[0]
    row = shards.read_rows(3, 4)[0]
    crystal = crystal_of_row(row, shards.layout, shards.codec, "c")
    np.testing.assert_array_equal(crystal.atomic_numbers, get_grid("c").atomic_numbers)


@pytest.mark.parametrize("name", ["structures.npz", "promolecule.json"])
def test_lost_and_other_files_are_refused(write, get_grid, name):
    place = write(promolecule=PROMOLECULE)
    path, content = place / name, (place / name).read_bytes()

    def read():
        shards = open_shards(place)
        return len(shards.crystals), shards.promolecule

    path.unlink()
    with pytest.raises(TomatError, match=f"has no {name}, but its manifest names one. Copy or tokenize"):
        read()
    other = Structures.of([Crystal.of(get_grid(each)) for each in "abc"]).to_bytes()
    path.write_bytes(other if name.endswith("npz") else Promolecule(RadialBasis(), {}).to_text().encode())
    with pytest.raises(TomatError, match="not the set's: it hash"):
        read()
    path.write_bytes(content)
    assert read()[0] == 3


def test_a_set_without_one_goes_on_without_and_says_so(write, get_grid):
    place = write()
    manifest = (place / "manifest.json").read_bytes()
    with pytest.raises(TomatError, match="begun without a promolecule. Leave --promolecule out"):
        write(promolecule=PROMOLECULE)
    as_before(place)
    assert write() == place and not (place / "structures.npz").exists()
    shutil.rmtree(place)
    write(promolecule=PROMOLECULE)
    with pytest.raises(TomatError, match="holds another data set: it differs in promolecule"):
        write()
    assert (place / "manifest.json").read_bytes() != manifest


def test_parts_make_the_whole(get_grid):
    crystals = [Crystal.of(get_grid(name)) for name in "abcab"]
    whole = Structures.of(crystals)
    joined = Structures.of([*Structures.of(crystals[:2]), *Structures.of([]), *Structures.of(crystals[2:])])
    assert joined.sha256 == whole.sha256 and joined.to_bytes() == whole.to_bytes()
    again = Structures.from_bytes(whole.to_bytes(), "s.npz", list("abcab"), "Again.")
    assert all(same(found, crystal) for found, crystal in zip(again, crystals, strict=True))
    with pytest.raises(IndexError):
        again[5]
    with pytest.raises(TomatError, match="structures of 5 materials, expected 4. Again."):
        Structures.from_bytes(whole.to_bytes(), "s.npz", list("abca"), "Again.")
    with pytest.raises(TomatError, match="s.npz is not the structures"):
        Structures.from_bytes(pack_arrays({"a": np.zeros(3)}), "s.npz", [], "Again.")
