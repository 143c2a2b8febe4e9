import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.predict.evaluation.baselines import constant_median, copy_previous, lorenzo, predict_baselines, quantise
from tomat.predict.evaluation.metrics import nmae

CONSTANT = 7.0


def patches(shape=(2, 4, 3, 5), seed=0):
    return np.random.default_rng(seed).uniform(1, 2, size=shape).astype(np.float32)


def test_copy_previous_is_the_token_before_in_c_order():
    values = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    expected = np.array([CONSTANT, *range(23)], dtype=np.float32).reshape(1, 2, 3, 4)
    np.testing.assert_array_equal(copy_previous(values, CONSTANT), expected)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_lorenzo_is_exact_where_the_mixed_third_difference_vanishes(seed):
    # a(x,y) + b(x,z) + c(y,z): any functions of two coordinates each.
    generator = np.random.default_rng(seed)
    nx, ny, nz = 5, 4, 6
    a, b, c = (
        generator.uniform(1, 2, (nx, ny, 1)),
        generator.uniform(1, 2, (nx, 1, nz)),
        generator.uniform(1, 2, (ny, nz)),
    )
    values = (a + b + c)[None].astype(np.float32)
    predicted = lorenzo(values, CONSTANT)
    np.testing.assert_allclose(predicted[:, 1:, 1:, 1:], values[:, 1:, 1:, 1:], rtol=1e-5)
    # One voxel off breaks its own prediction by nothing, and that of the voxel after it by as much.
    values[0, 2, 2, 2] += 1
    moved = lorenzo(values, CONSTANT)
    assert moved[0, 2, 2, 2] == predicted[0, 2, 2, 2]
    assert moved[0, 2, 2, 3] == pytest.approx(predicted[0, 2, 2, 3] + 1, rel=1e-5)


def test_lorenzo_falls_to_lower_order_on_faces_edges_and_the_first_voxel():
    values = patches()
    predicted = lorenzo(values, CONSTANT)
    assert (predicted[:, 0, 0, 0] == CONSTANT).all()
    np.testing.assert_allclose(predicted[:, 0, 0, 1:], values[:, 0, 0, :-1], rtol=1e-6)
    np.testing.assert_allclose(predicted[:, 1:, 0, 0], values[:, :-1, 0, 0], rtol=1e-6)
    plane = values[:, 0, :-1, 1:] + values[:, 0, 1:, :-1] - values[:, 0, :-1, :-1]
    np.testing.assert_allclose(predicted[:, 0, 1:, 1:], np.maximum(plane, 0), rtol=1e-5)


def test_lorenzo_answers_no_negative_density():
    values = np.ones((1, 2, 2, 2), dtype=np.float32)
    values[0, 0, 0, 0] = 9
    assert lorenzo(values, CONSTANT)[0, 0, 1, 1] == 0  # 1 + 1 - 9


@pytest.mark.parametrize("predict", [copy_previous, lorenzo, constant_median])
def test_no_baseline_sees_a_later_voxel(predict):
    values = patches()
    changed = values.reshape(2, -1).copy()
    for voxel in (0, 7, 30):
        changed[:, voxel:] += 1
        earlier = [predict(v.reshape(values.shape), CONSTANT).reshape(2, -1)[:, : voxel + 1] for v in (values, changed)]
        np.testing.assert_array_equal(earlier[0], earlier[1])
        changed = values.reshape(2, -1).copy()


def test_constant_median_is_the_best_constant():
    values = patches()
    best = nmae(constant_median(values, float(np.median(values))), values)
    for constant in np.linspace(1, 2, 41):
        assert nmae(constant_median(values, float(constant)), values) >= best


def test_baselines_are_rounded_to_the_codec(grid, codec):
    visible = quantise(grid.rho[None], codec)
    table = codec.decode(np.arange(codec.n_density_tokens, dtype=np.uint16))
    for name, predicted in predict_baselines(visible, codec, 0.5).items():
        assert predicted.shape == visible.shape, name
        assert np.isin(predicted, table).all(), name
    np.testing.assert_array_equal(
        predict_baselines(visible, codec, 0.5)["copy_previous"][0, 0, 0, 1:], visible[0, 0, 0, :-1]
    )
