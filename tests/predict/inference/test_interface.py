import dataclasses

import numpy as np
import pytest
from small_promolecule import promolecule

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.predict.inference.interface import Predictor, PromoleculePredictor, load_promolecule

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
    assert load_promolecule(promolecule_file).void_radius_a is None
    assert "vacuum is not flagged" in " ".join(capsys.readouterr().out.split())
    later = tmp_path / "later.json"
    later.write_text(dataclasses.replace(promolecule(), void_radius_a=2.5).to_text())
    assert load_promolecule(later).void_radius_a == 2.5 and "vacuum" not in capsys.readouterr().out


def test_what_is_no_promolecule_is_refused(tmp_path, promolecule_file):
    assert load_promolecule(promolecule_file).identity == f"promolecule {promolecule().sha256}"
    for content in (b"{}", b"\xff", promolecule_file.read_bytes().replace(b"3.45", b"3.44")):
        (tmp_path / "p.json").write_bytes(content)
        with pytest.raises(TomatError, match="p.json"):
            load_promolecule(tmp_path / "p.json")
