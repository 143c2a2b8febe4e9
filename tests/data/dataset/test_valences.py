"""Valence electrons of a folder: of the counts, of the POTCARs beside the files, and never of both at odds."""

import gzip
import json

import pytest
from density_folder import small_grid

from tomat.base.errors import TomatError
from tomat.data.dataset.folder import FolderRequest, prepare_folder
from tomat.data.dataset.survey import Material
from tomat.data.dataset.valences import (
    Potcars,
    choose_valences,
    expected_electrons,
    potcar_valences,
    potcars_beside,
    valences_beside,
)
from tomat.data.density.outputs import write_density

REQUEST = FolderRequest("v3-p7", 1, 32, "absolute", 0.2, 0.0, 0)


def potcar(**valences: float) -> str:
    """Lines that a POTCAR has, of nobody's potentials."""
    each = " PAW_MINE {0}\n {1}\n   VRHFIN ={0}: made up\n   POMASS =   1.000; ZVAL   = {1:7.3f}    mass and valenz\n"
    return "".join(each.format(*item) for item in valences.items())


@pytest.fixture
def salts(tmp_path):
    """Two rock salts and a metal: counts settle Mg and O, and neither Na nor F."""
    for name in ("NaF", "MgO", "Mg"):
        write_density(small_grid(name), tmp_path / "in" / name / "CHGCAR", "chgcar")
    return tmp_path / "in"


def prepare(salts, tmp_path, capsys):
    capsys.readouterr()
    data = prepare_folder(str(salts), REQUEST, tmp_path / "run" / "data", "r")
    told = " ".join(capsys.readouterr().out.split())
    return json.loads((data.folder / "promolecule.json").read_text())["valence_electrons"], told


def test_counts_alone(salts, tmp_path, capsys):
    valences, told = prepare(salts, tmp_path, capsys)
    assert valences == {"Mg": 2, "O": 6}
    assert "valence electrons: O 6, Mg 2 of the densities' electron counts; not known for F, Na:" in told
    assert "`tomat predict` asks for --valences F=N,Na=N" in told


def test_a_potcar_settles_the_others(salts, tmp_path, capsys):
    (salts / "NaF" / "POTCAR").write_text(potcar(Na=1, F=7))
    (salts / "MgO" / "POTCAR.gz").write_bytes(gzip.compress(potcar(Mg=2, O=6).encode()))
    (salts / "old").mkdir()
    (salts / "old" / "POTCAR").write_text(potcar(Na=7))
    valences, told = prepare(salts, tmp_path, capsys)
    assert valences == {"Mg": 2, "O": 6, "Na": 1, "F": 7}
    source = salts / "NaF" / "POTCAR"
    assert f"valence electrons: O 6, Mg 2 of the densities' electron counts; F 7, Na 1 of {source}" in told
    # Only the one that was of no use is left out.
    assert "3 read, 1 ignored: old/POTCAR (pseudopotentials without a density), 0 duplicates" in told
    # What was made stays, and so does what is said of the files.
    (salts / "NaF" / "POTCAR").write_text(potcar(Na=3, F=5))
    again, told = prepare(salts, tmp_path, capsys)
    assert again == valences and "valence electrons" not in told and "1 ignored: old/POTCAR" in told


def test_another_number_than_the_counts_is_refused_with_both(salts, tmp_path, capsys):
    place = salts / "MgO" / "POTCAR"
    place.write_text(potcar(Mg=8, O=6))
    words = rf"valence electrons of Mg: the densities' electron counts give 2, {place} says ZVAL = 8. Put the POTCAR"
    with pytest.raises(TomatError, match=words):
        prepare(salts, tmp_path, capsys)
    place.unlink()
    # Neither is settled alone, but together they have to give what the density holds.
    place = salts / "NaF" / "POTCAR"
    place.write_text(potcar(Na=7, F=7))
    words = rf"NaF holds 8, but ZVAL of the POTCARs \(F 7 in {place}; Na 7 in {place}\) adds up to 14"
    with pytest.raises(TomatError, match=words):
        prepare(salts, tmp_path, capsys)
    # Nothing is in the way of the same command once it is put right.
    place.write_text(potcar(Na=1, F=7))
    assert prepare(salts, tmp_path, capsys)[0] == {"Mg": 2, "O": 6, "Na": 1, "F": 7}


def test_potcars_that_say_nothing_are_ignored_with_their_reason(salts, tmp_path, capsys):
    (salts / "NaF" / "POTCAR").write_text("PAW_MINE Na\n")
    (salts / "MgO" / "POTCAR.gz").write_bytes(gzip.compress(potcar(Mg=2).encode())[:-9])
    (salts / "Mg" / "POTCAR").write_text(potcar(Mg=2) + potcar(Mg=8))
    valences, told = prepare(salts, tmp_path, capsys)
    assert valences == {"Mg": 2, "O": 6}
    assert "NaF/POTCAR (it states no element with its valence (VRHFIN, ZVAL))" in told
    assert "3 read, 3 ignored" in told and "with valences 2 and 8" in told and "cannot read" in told


def test_two_potcars_that_differ_settle_nothing(tmp_path):
    for name, text in (("a", potcar(Na=1, F=7)), ("b", potcar(Na=7))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "POTCAR").write_text(text)
    found = potcars_beside([str(tmp_path / name / "CHGCAR") for name in "ab"])
    assert set(found.valences) == {9} and set(found.differing) == {11}
    counts = (("NaF", 8.0), ("NaF", 14.0))
    mixed = [Material(n, "", "", n, {"Na": 1, "F": 1}, electrons, (1, 1, 1), (), ()) for n, electrons in counts]
    with pytest.raises(TomatError, match="NaF holds 14 electrons, expected 8. Take them out"):
        choose_valences(mixed, found)
    valences, words = choose_valences(mixed, found, accept=("electrons",))
    assert valences == {9: 7}
    assert f"not known for Na (the POTCARs differ: Na 1 in {tmp_path}/a/POTCAR, 7 in {tmp_path}/b/POTCAR)" in words
    assert choose_valences(mixed, Potcars(), accept=("electrons",))[0] == {}


def test_the_file_whose_electrons_do_not_fit_the_others_is_named():
    def material(name, atoms, electrons):
        return Material(name, "", "", name, atoms, electrons, (1, 1, 1), (), ())

    fits = [
        material("GaAs", {"Ga": 1, "As": 1}, 8.0),
        material("GaP", {"Ga": 1, "P": 1}, 8.0),
        material("GaN", {"Ga": 2, "N": 2}, 16.0),
        material("AlAs", {"Al": 1, "As": 1}, 8.0),
    ]
    other = material("GaSb", {"Ga": 1, "Sb": 1}, 18.0)  # Ga 13, or Sb 15, which nothing else has
    choose_valences([*fits, other], Potcars())
    with_d = material("Ga2N2-d", {"Ga": 2, "N": 2}, 36.0)
    with pytest.raises(TomatError, match="not 1 density: Ga2N2-d holds 36 electrons, expected 16. Take them out"):
        choose_valences([*fits, other, with_d], Potcars())
    choose_valences([*fits, other, with_d], Potcars(), accept=("electrons",))
    # A charged cell that was accepted has no meaning that could be at odds.
    choose_valences([*fits, material("GaAs+", {"Ga": 4, "As": 4}, 31.0)], Potcars())


def test_expected_electrons_are_those_given_of_the_potcar_or_the_nearest(tmp_path):
    grid = small_grid("NaF")
    path = str(tmp_path / "CHGCAR")
    assert expected_electrons(grid, path, None) == (8.0, "pseudopotentials in use: F 7, Na 1")
    (tmp_path / "POTCAR").write_text(potcar(Na=3, F=7.5))
    assert valences_beside(path) == {11: 3.0, 9: 7.5}
    assert expected_electrons(grid, path, None) == (10.5, "the POTCAR beside it")
    assert expected_electrons(grid, path, {11: 1.0, 9: 7.0}) == (8.0, "the valences given")
    with pytest.raises(TomatError, match="no valence of F was given"):
        expected_electrons(grid, path, {11: 1.0})
    (tmp_path / "POTCAR").write_text(potcar(Na=3, F=7.5) + potcar(Na=1))
    with pytest.raises(TomatError, match="potentials of Na with valences 3 and 1"):
        valences_beside(path)


def test_a_potential_without_a_valence_has_not_that_of_the_next(tmp_path):
    place = tmp_path / "POTCAR"
    place.write_text(potcar(Na=1).replace("ZVAL", "ZVOL") + potcar(Cl=7) + potcar(Cl=7))
    assert potcar_valences(place) == {17: 7.0}
    for nothing in ("PAW_PBE Na_pv 19Sep2006\n", "", " VRHFIN =Xx: s\n ZVAL = 3.0\n VRHFIN =Na: s\n ZVAL = ...\n"):
        place.write_text(nothing)
        assert potcar_valences(place) == {}
    place.write_text(" \n" * 200_000)
    assert potcar_valences(place) == {}
    assert valences_beside("gs://bucket/CHGCAR") == {}
