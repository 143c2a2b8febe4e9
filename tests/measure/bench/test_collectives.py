"""Collectives: what each round computes, and the law that is fitted to their times."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tomat.measure.bench.collectives import AXIS, KINDS, fit_collectives


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_gives_what_it_took_in_shape_and_depends_on_every_device(kind):
    mesh = jax.make_mesh((2,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec(AXIS)
    step = jax.shard_map(lambda x: KINDS[kind].step(x, 2), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = np.arange(16, dtype=np.float32)[:, None]
    expected = {
        "all-gather": [15, *range(1, 8), 15, *range(9, 16)],
        "reduce-scatter": [3 + 11, *range(1, 8), 7 + 15, *range(9, 16)],
        "all-reduce": [8, 10, 12, 14, 16, 18, 20, 22] * 2,
        "collective-permute": [*range(8, 16), *range(8)],
        "all-to-all": [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)],
    }
    np.testing.assert_array_equal(jax.jit(step)(x).ravel(), expected[kind])


def rows(seconds: list[float], moved: list[float]) -> list[dict]:
    return [
        {"kind": "all-reduce", "compiled_to": ["all-reduce"], "seconds_median": each, "bytes_moved_per_device": size}
        for each, size in zip(seconds, moved, strict=True)
    ]


def test_start_and_rate_are_found_with_their_errors():
    moved = [2.0**power for power in range(16, 29, 2)]
    exact = fit_collectives(rows([20e-6 + size / 200e9 for size in moved], moved))["all-reduce"]
    assert exact["start_seconds"] == pytest.approx(20e-6) and exact["bytes_per_second"] == pytest.approx(200e9)
    assert exact["relative_error_largest"] < 1e-6
    off = [(20e-6 + size / 200e9) * (1.05 if i % 2 else 0.95) for i, size in enumerate(moved)]
    noisy = fit_collectives(rows(off, moved))["all-reduce"]
    assert abs(noisy["start_seconds"] - 20e-6) < 3 * noisy["start_seconds_error"] < 6e-6
    assert abs(noisy["bytes_per_second"] - 200e9) < 3 * noisy["bytes_per_second_error"] < 60e9
    assert 0.03 < noisy["relative_error_rms"] < 0.06


def test_what_the_compiler_made_another_collective_of_is_left_out():
    moved = [1e5, 1e6, 1e7, 1e8]
    four = rows([1e-5 + size / 1e11 for size in moved], moved)
    other = {**four[0], "seconds_median": 1.0, "compiled_to": ["collective-permute"]}
    assert fit_collectives([*four, other]) == fit_collectives(four)
    assert fit_collectives([four[0], other, other]) == {}
    flat = fit_collectives(rows([3e-5, 2e-5], [1e5, 1e6]))["all-reduce"]  # no slope, and two sizes alone
    assert flat["bytes_per_second"] is None and flat["start_seconds_error"] is None
