import dataclasses
import json

import numpy as np
import pytest
from fitted_codec import fitted_codec

from tomat.data.density.crystal import Crystal
from tomat.data.density.demo.embedded import load_stored
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import PromoleculeFit
from tomat.predict.evaluation.free_running import evaluate_free_running
from tomat.predict.evaluation.picture import draw_plane, predicted_plane
from tomat.predict.inference.interface import Prediction
from tomat.predict.inference.sum_of_atoms import PromoleculePredictor

NAMES = ["SiC-zinc-blende-ideal", "Si-diamond-ideal"]


@pytest.fixture(scope="module")
def promolecule():
    fit = PromoleculeFit()
    for name in (*NAMES, "C-diamond-ideal"):
        fit.add(load_stored(name), voxels=512)
    return fit.solve()


@pytest.fixture(scope="module")
def codec():
    return fitted_codec(64, load_stored(NAMES[0]).rho)


def test_figures_are_of_whole_cells_scaled_to_the_learnt_valences(promolecule, codec, tmp_path):
    told = []
    predictor = PromoleculePredictor(promolecule)
    result = evaluate_free_running(predictor, codec, NAMES, load_stored, on_material=told.append)
    assert tuple(told) == result.materials and json.loads(json.dumps(result.to_dict()))["materials"]
    for material in result.materials:
        truth = load_stored(material.material_id)
        rho = promolecule.density(Crystal.of(truth), truth.grid_shape).astype(np.float64)
        rho *= 8 / (rho.mean() * truth.volume_a3)
        expected = np.abs(rho - truth.rho).sum() / truth.rho.sum(dtype=np.float64)
        assert material.electrons == 8 and material.voxels == truth.rho.size
        assert material.free_running_nmae == pytest.approx(expected, rel=1e-5)
        assert material.promolecule_nmae == pytest.approx(expected, rel=1e-5)
        assert material.constant_nmae == pytest.approx(
            np.abs(truth.rho - 8 / truth.volume_a3).sum() / truth.rho.sum(dtype=np.float64), rel=1e-5
        )
        assert 0 < material.codec_floor_nmae < 0.1
    assert "the model is the better one on 0" in result.summary()
    truth = load_stored(NAMES[0])
    plane = predicted_plane(truth.rho * np.float32(1.1), truth)
    assert draw_plane(plane, tmp_path / "plane.png").stat().st_size > 10_000


def test_how_well_a_spread_says_the_error(promolecule, codec):
    """A spread that is the error of a Gaussian says it perfectly; the negative of it says the opposite."""

    def result(of_error):
        class Sampled(PromoleculePredictor):
            def predict(self, crystal, *args, **kwargs) -> Prediction:
                one = super().predict(crystal, *args, **kwargs)
                error = np.abs(one.rho - load_stored(crystal.name).rho)
                return dataclasses.replace(one, spread=of_error(error).astype(np.float32))

        return evaluate_free_running(Sampled(promolecule), codec, NAMES, load_stored)

    right, wrong = result(lambda e: e / np.sqrt(2 / np.pi) / 3), result(lambda e: e.max() - e)
    assert right.spread_says == pytest.approx(
        {"rank_correlation_over_voxels": 1.0, "rank_correlation_over_materials": 1.0, "error_over_expected": 3.0}, 1e-3
    )
    assert wrong.spread_says is not None and wrong.spread_says["rank_correlation_over_voxels"] < -0.999
    assert "errors are 3.0 times as large as the spread" in right.summary()
    assert "nan" not in dataclasses.replace(right, materials=right.materials[:1]).summary()
    assert right.to_dict()["over_materials"]["spread_share"]["median"] == right.spread("spread_share").median > 0


def test_the_truth_is_not_in_the_loop(promolecule, codec):
    """The predictor sees no density: noise in its place changes what is compared with, and no prediction."""
    predicted = []

    class Keeps(PromoleculePredictor):
        def predict(self, *args, **kwargs) -> Prediction:
            predicted.append(super().predict(*args, **kwargs))
            return predicted[-1]

    def noise(name):
        truth = load_stored(name)
        random = np.random.default_rng(0).random(truth.grid_shape, dtype=np.float32)
        return type(truth)(random, truth.lattice, truth.atomic_numbers, truth.frac_coords, name)

    results = [evaluate_free_running(Keeps(promolecule), codec, NAMES[:1], load) for load in (load_stored, noise)]
    assert np.array_equal(predicted[0].rho, predicted[1].rho)
    assert results[0].materials[0].free_running_nmae < 0.2 < results[1].materials[0].free_running_nmae


def test_where_the_error_lies_by_distance_and_group(promolecule, codec):
    """The parts sum to the whole, and the charge far from an atom in a box is what its images at least distance say."""
    box = DensityGrid(np.full((10, 10, 10), 0.004, np.float32), 10 * np.eye(3), np.array([14]), np.zeros((1, 3)), "box")
    load = {"box": box, NAMES[0]: load_stored(NAMES[0])}.__getitem__
    predictor = PromoleculePredictor(promolecule)
    groups = {"box": "vacuum", NAMES[0]: "crystals"}
    result = evaluate_free_running(predictor, codec, list(groups), load, groups=groups)
    for material in result.materials:
        assert sum(material.nmae_by_distance) == pytest.approx(material.free_running_nmae, rel=1e-6)
    side = np.minimum(np.arange(10), 10 - np.arange(10)) ** 2
    far = np.sqrt(side[:, None, None] + side[:, None] + side) > 4
    one, crystal = result.materials
    assert one.far_reference_electrons == pytest.approx(0.004 * far.sum(), rel=1e-5)
    assert crystal.far_electrons == crystal.far_reference_electrons == crystal.nmae_by_distance[-1] == 0
    found = result.to_dict()
    assert found["by_group"]["vacuum"]["mean"] == one.free_running_nmae
    assert "vacuum" in result.summary() and "in box:" in result.summary()


def test_what_is_flagged_is_told_and_nothing_is_refused(promolecule, codec):
    """A cell with more vacuum than the training and electrons far off the count is evaluated, and named."""
    far = dataclasses.replace(promolecule, void_radius_a=0.5, valences={6: 8.0, 14: 8.0})
    result = evaluate_free_running(PromoleculePredictor(far), codec, NAMES, load_stored)
    assert all("farther than 0.50 A" in m.flags[0] and "too few" in m.flags[1] for m in result.materials)
    assert "Flagged as unlike the training: 2, such as SiC-zinc-blende-ideal" in result.summary()
    assert [m.compound for m in result.materials] == ["CSi", "Si"]
    near = evaluate_free_running(PromoleculePredictor(promolecule), codec, NAMES[:1], load_stored)
    assert near.materials[0].flags == () and "Flagged" not in near.summary()
