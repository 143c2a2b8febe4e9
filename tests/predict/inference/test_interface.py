import dataclasses

import numpy as np
import pytest
from pymatgen.io.vasp import Chgcar
from small_promolecule import promolecule

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.predict.inference.interface import (
    SPACING_A,
    GridChoice,
    Predictor,
    PromoleculePredictor,
    choose_grid,
    electron_count,
    load_promolecule,
)

CRYSTAL = Crystal(np.diag([3.0, 3.2, 3.4]), np.array([11, 9]), np.array([[0, 0, 0], [0.5, 0.5, 0.5]]), "NaF")


def test_it_is_a_predictor_whose_density_has_the_electrons_asked_for():
    predictor: Predictor = PromoleculePredictor(promolecule())
    told = []
    free = predictor.predict(CRYSTAL, (20, 21, 22), electrons=None)
    asked = predictor.predict(CRYSTAL, (20, 21, 22), electrons=8.0, on_patches=lambda *each: told.append(each))
    assert asked.electron_count == pytest.approx(8.0, rel=1e-6) and told == [(1, 1)]
    assert free.electron_count == pytest.approx(free.electrons_before, rel=1e-6)
    assert asked.electrons_before == free.electrons_before != 8.0
    assert np.allclose(asked.rho / free.rho, 8.0 / free.electrons_before, rtol=1e-5)
    assert predictor.valences is None, "its functions hold a part of their neighbours' electrons"
    with pytest.warns(UserWarning, match="NaF: electrons not known"):
        said = predictor.predict(CRYSTAL, (20, 21, 22))
    assert np.array_equal(said.rho, free.rho)


def test_a_promolecule_of_before_is_read_and_says_that_vacuum_is_not_checked(tmp_path, promolecule_file, capsys):
    assert "void_radius_a" not in promolecule_file.read_text(), "its hash is that of an earlier tomat"
    assert load_promolecule(promolecule_file).promolecule.void_radius_a is None
    assert "vacuum is not flagged" in " ".join(capsys.readouterr().out.split())
    later = tmp_path / "later.json"
    later.write_text(dataclasses.replace(promolecule(), void_radius_a=2.5).to_text())
    assert load_promolecule(later).promolecule.void_radius_a == 2.5 and "vacuum" not in capsys.readouterr().out


def test_what_is_no_promolecule_is_refused(tmp_path, promolecule_file):
    assert load_promolecule(promolecule_file).identity == f"promolecule {promolecule().sha256}"
    for content in (b"{}", b"\xff", promolecule_file.read_bytes().replace(b"3.45", b"3.44")):
        (tmp_path / "p.json").write_bytes(content)
        with pytest.raises(TomatError, match="p.json"):
            load_promolecule(tmp_path / "p.json")


BOX = Crystal(np.diag([3.0, 4.0, 7.0]), np.array([11]), np.zeros((1, 3)), "x")


def test_a_spacing_is_a_bound_and_its_sides_have_small_factors():
    for spacing_a in (0.065, 0.1, 0.31):
        shape = choose_grid(None, spacing_a, None, None).shape(BOX)
        for side, length in zip(shape, (3.0, 4.0, 7.0), strict=True):
            assert length / side <= spacing_a
            smaller = [n for n in range(int(np.ceil(length / spacing_a)), side) if factors(n) <= {2, 3, 5}]
            assert factors(side) <= {2, 3, 5} and not smaller


def factors(n: int) -> set[int]:
    found, p = set(), 2
    while n > 1:
        while n % p == 0:
            found.add(p)
            n //= p
        p += 1
    return found


def test_sides_and_those_of_another_density(tmp_path, structure):
    assert choose_grid((5, 6, 7), None, None, 0.2).shape(BOX) == (5, 6, 7)
    assert choose_grid(None, None, None, 0.2) == GridChoice(spacing_a=0.2, why="0.2 A, the median of the training")
    assert choose_grid(None, None, None, None).spacing_a == SPACING_A
    path = tmp_path / "CHGCAR"
    Chgcar(structure, {"total": np.ones((4, 5, 6))}).write_file(str(path))
    path.write_text(path.read_text().partition("   4   5   6\n")[0] + "   4   5   6\n noise")
    assert choose_grid(None, None, str(path), None).shape(BOX) == (4, 5, 6)
    path.write_text("x")
    with pytest.raises(TomatError, match="not a complete"):
        choose_grid(None, None, str(path), None)


def test_a_grid_beyond_all_memory_is_refused():
    for choice in (GridChoice(sides=(2000, 2000, 2000)), GridChoice(spacing_a=1e-4)):
        with pytest.raises(TomatError, match="Ask for a coarser one"):
            choice.shape(BOX)


SRF2 = Crystal(np.eye(3) * 4, np.array([38, 9, 9]), np.random.default_rng(0).random((3, 3)), "SrF2")


def test_given_valences_go_before_learnt_ones_and_both_are_named():
    assert electron_count(SRF2, None, None)[0] is None
    assert electron_count(SRF2, None, {38: 10, 9: 7, 8: 6}) == (24.0, "learnt from the training set")
    assert electron_count(SRF2, {38: 10, 9: 7}, None) == (24.0, "--valences")
    assert electron_count(SRF2, {38: 2}, {38: 10, 9: 7}) == (16.0, "--valences and learnt from the training set")


def test_what_is_missing_or_cannot_be_is_refused():
    with pytest.raises(TomatError, match="no valence electrons of Sr are known.*Sr=N"):
        electron_count(SRF2, {9: 7}, None)
    with pytest.raises(TomatError, match="its 3 atoms 76 electrons; expected"):
        electron_count(SRF2, {38: 62, 9: 7}, None)
