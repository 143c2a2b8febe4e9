"""What `tomat bench chip` measured of collectives becomes what a plan takes for them."""

import json

import pytest

from tomat.base.errors import TomatError
from tomat.hardware.chips import slice_named
from tomat.measure.bench.collectives import KINDS
from tomat.perf.cost.chip_model import ASSUMED_RATES, NAMES, RECORD_FILE, ChipModel, LinkRates, Parameters
from tomat.perf.cost.interconnect import HOP_SECONDS
from tomat.perf.timed_kernels.timings import PASSES, PERMUTE, measured_rates

LINK = 100e9
"""Of a v6e: 800 GB/s over four ports and both directions."""


def fit(start_seconds: float, bytes_per_second: float | None) -> dict:
    return {"start_seconds": start_seconds, "bytes_per_second": bytes_per_second}


def report(**changes: object) -> dict:
    fits = {
        # A corner of 4 x 4 has two links, and six hops to the other corner.
        "all-gather": fit(10e-6 + 6 * HOP_SECONDS, 2 * LINK * 0.6),
        "reduce-scatter": fit(12e-6 + 6 * HOP_SECONDS, 2 * LINK * 0.7),
        "all-reduce": fit(14e-6 + 12 * HOP_SECONDS, 2 * LINK * 0.8),
        "collective-permute": fit(12e-6 + HOP_SECONDS, 70e9),
        "all-to-all": fit(1.0, 1.0),
    }
    return {"chip": "v6e", "n_devices": 16, "timed_with": "jax 1, libtpu 2", "collective_fits": fits, **changes}


def write(folder, content: object):
    timings = folder / "mine.csv"
    (folder / "mine.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return timings


def test_the_kinds_are_those_that_are_timed():
    assert {*PASSES, PERMUTE} < set(KINDS)


def test_starts_and_rates_become_those_of_the_model(tmp_path):
    found = measured_rates(write(tmp_path, report()))
    assert found is not None and found[0] == "v6e"
    assert found[1] == {
        "start_seconds": pytest.approx(12e-6), "ring_efficiency": pytest.approx(0.7), "slice": "v6e-16",
        "timed_with": "jax 1, libtpu 2",
    }  # fmt: skip


def test_without_collectives_there_is_nothing(tmp_path):
    assert measured_rates(tmp_path / "mine.csv") is None
    assert measured_rates(write(tmp_path, report(n_devices=1, collective_fits={}))) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not JSON"),
        ("[]", "mine.json is damaged"),
        (report(n_devices=7), "no TPU slice of 7 devices of v6e"),
        (report(collective_fits={"all-gather": fit(1e-5, 1e15)}), "expected up to 1"),
        (report(collective_fits={"all-gather": fit(2.0, 1e11)}), "expected 0 to 1"),
        (report(collective_fits={"all-gather": fit(1e-5, None)}), "expected up to 1"),
        (report(collective_fits={"all-gather": {}}), "start_seconds"),
    ],
)
def test_what_cannot_be_is_one_clear_error(tmp_path, content, said):
    with pytest.raises(TomatError, match=said):
        measured_rates(write(tmp_path, content))


@pytest.mark.parametrize("fitted", [True, False])
def test_a_plan_takes_what_is_on_record(tmp_path, fitted):
    errors = {"kernels": 40, "absolute_error_median": 0.02, "absolute_error_p90": 0.1}
    chip = {
        "fitted": fitted,
        "parameters": {name: {"value": getattr(Parameters(), name), "deviation": 0.1} for name in NAMES},
        "all": errors,
        "bounds": {},
        "collectives": {"start_seconds": 5e-6, "ring_efficiency": 0.8, "slice": "v6e-16", "timed_with": "jax 1"},
    }
    (tmp_path / RECORD_FILE).write_text(json.dumps({"chips": {"v6e": chip}}))
    model = ChipModel.load(tmp_path, slice_named("v6e-1").chip)
    assert model.links == LinkRates(5e-6, 0.8) and "5 us to start, rings at 80%" in model.notes()[0]
    assert ChipModel.load(tmp_path, slice_named("v5p-8").chip).links == ASSUMED_RATES
    chip["collectives"]["ring_efficiency"] = 80
    (tmp_path / RECORD_FILE).write_text(json.dumps({"chips": {"v6e": chip}}))
    with pytest.raises(TomatError, match="is damaged: chips.* expected up to 1"):
        ChipModel.load(tmp_path, slice_named("v6e-1").chip)
