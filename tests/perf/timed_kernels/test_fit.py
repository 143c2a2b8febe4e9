"""Parameters of a chip from kernels and collectives that it has run."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.measure.bench.collectives import KINDS
from tomat.perf.cost.chip_model import KernelWork, Parameters
from tomat.perf.cost.interconnect import HOP_SECONDS
from tomat.perf.cost.llo import Transfer
from tomat.perf.timed_kernels.fit import PASSES, PERMUTE, TimedPrograms, fit, measured_rates
from tomat.perf.timed_kernels.programs import ProgramWork
from tomat.perf.timed_kernels.timings import KernelTiming

BANDWIDTH = 1.6e12
COPIES = {"hbm_read_efficiency": 0.85, "hbm_write_efficiency": 0.85, "sustained_slowdown": 0.3}
TRUE = Parameters(**COPIES, mxu_efficiency=0.9, bundle_efficiency=0.75)


def program(number: int, rng: np.random.Generator, at: Parameters = TRUE) -> tuple[KernelTiming, ProgramWork]:
    """A program of three kernels: one that reads, a product, bundles that write."""
    read, written = (int(10 ** rng.uniform(6, 10.5)) for _ in range(2))
    product, other = (float(10 ** rng.uniform(-6, -1.5)) for _ in range(2))
    kernels = (
        KernelWork(0.0, 0.0, ((Transfer(False, read), 1.0),)),
        KernelWork(product, 0.95 * product, ()),
        KernelWork(other, 0.0, ((Transfer(True, written), 1.0),)),
    )
    work = ProgramWork(tuple((kernel, 2.0) for kernel in kernels), ())
    arguments = {"x": f"bf16[{number // 2 + 1},128]"}  # two programs of each shape
    timing = KernelTiming(number, "v6e", "op", arguments, {}, 1.0, None)
    seconds = float(TimedPrograms([(timing, work)], BANDWIDTH).seconds(at)[0])
    return KernelTiming(number, "v6e", "op", arguments, {}, seconds, None), work


@pytest.fixture(scope="module")
def programs() -> list[tuple[KernelTiming, ProgramWork]]:
    rng = np.random.default_rng(0)
    return [program(number, rng) for number in range(80)]


def test_the_parameters_of_exact_timings_are_found(programs):
    found = fit(TimedPrograms(programs, BANDWIDTH))
    for name in ("hbm_read_efficiency", "hbm_write_efficiency", "mxu_efficiency", "bundle_efficiency"):
        assert getattr(found.parameters, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
        assert 0 < found.deviations[name] < 0.05
    assert found.parameters.sustained_slowdown == pytest.approx(TRUE.sustained_slowdown, abs=0.05)
    assert np.quantile(np.abs(found.held_out_errors), 0.9) < 0.01


def test_a_shape_that_is_off_is_off_where_it_is_left_out(programs):
    """Both programs of one shape take twice as long: only a fit that has seen them could know."""
    shape = programs[0][0].shape_key
    slow = [
        (replace(timing, seconds=timing.seconds * (2 if timing.shape_key == shape else 1)), work)
        for timing, work in programs
    ]
    found = fit(TimedPrograms(slow, BANDWIDTH))
    of_shape = np.array([timing.shape_key == shape for timing, _ in slow])
    assert of_shape.sum() == 2
    assert np.all(found.held_out_errors[of_shape] < -0.45)
    assert np.median(np.abs(found.held_out_errors[~of_shape])) < 0.02


def test_what_bounds_a_program_is_what_takes_longest():
    timing = KernelTiming(2, "v6e", "op", {"x": "bf16[8]"}, {}, 1e-3, None)
    read = KernelWork(1e-6, 0.0, ((Transfer(False, 10**9), 1.0),))
    product = KernelWork(1e-3, 9.5e-4, ())
    for kernels, bound in (
        (((read, 10.0), (product, 1.0)), "hbm"), (((read, 1.0), (product, 9.0)), "mxu"), ((), "latency"),
    ):  # fmt: skip
        assert TimedPrograms([(timing, ProgramWork(kernels, ()))], BANDWIDTH).bounds(TRUE) == [bound]


def test_rows_timed_back_to_back_have_the_sustained_rate():
    work = ProgramWork(((KernelWork(0.0, 0.0, ((Transfer(False, 10**8), 1.0),)), 1.0),), ())
    seconds = {}
    for op in ("add", "tomat_add"):
        timing = KernelTiming(2, "v6e", op, {"x": "bf16[8]"}, {}, 1e-3, None)
        seconds[op] = float(TimedPrograms([(timing, work)], BANDWIDTH).parts(TRUE)[0][0])
    assert seconds["tomat_add"] - TRUE.copy_seconds == pytest.approx(1.3 * (seconds["add"] - TRUE.copy_seconds))


LINK = 100e9
"""Of a v6e: 800 GB/s over four ports and both directions."""


def line(start_seconds: float, bytes_per_second: float | None) -> dict:
    return {"start_seconds": start_seconds, "bytes_per_second": bytes_per_second}


def report(**changes: object) -> dict:
    fits = {
        # A corner of 4 x 4 has two links, and six hops to the other corner.
        "all-gather": line(10e-6 + 6 * HOP_SECONDS, 2 * LINK * 0.6),
        "reduce-scatter": line(12e-6 + 6 * HOP_SECONDS, 2 * LINK * 0.7),
        "all-reduce": line(14e-6 + 12 * HOP_SECONDS, 2 * LINK * 0.8),
        "collective-permute": line(12e-6 + HOP_SECONDS, 70e9),
        "all-to-all": line(1.0, 1.0),
    }
    return {"chip": "v6e", "n_devices": 16, "timed_with": "jax 1, libtpu 2", "collective_fits": fits, **changes}


def write(folder, content: object):
    timings = folder / "mine.csv"
    (folder / "mine.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return timings


def test_starts_and_rates_become_those_of_the_model(tmp_path):
    assert {*PASSES, PERMUTE} < set(KINDS)
    assert measured_rates(tmp_path / "mine.csv") is None
    assert measured_rates(write(tmp_path, report(n_devices=1, collective_fits={}))) is None
    found = measured_rates(write(tmp_path, report()))
    assert found is not None and found[0] == "v6e"
    assert found[1] == {
        "start_seconds": pytest.approx(12e-6), "ring_efficiency": pytest.approx(0.7), "slice": "v6e-16",
        "timed_with": "jax 1, libtpu 2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "mine.json is damaged"),
        (report(n_devices=7), "no TPU slice of 7 devices of v6e"),
        (report(collective_fits={"all-gather": line(1e-5, 1e15)}), "expected up to 1"),
        (report(collective_fits={"all-gather": line(2.0, 1e11)}), "expected 0 to 1"),
        (report(collective_fits={"all-gather": {}}), "start_seconds"),
    ],
)
def test_what_cannot_be_is_one_clear_error(tmp_path, content, said):
    with pytest.raises(TomatError, match=said):
        measured_rates(write(tmp_path, content))
