"""Seconds of a kernel by the model of its chip, and what a step rests on."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.hardware.chips import CHIPS, slice_named
from tomat.perf.cost.chip_model import (
    ASSUMED_RATES,
    CHECKOUT_FILE,
    NAMES,
    RECORD_FILE,
    ChipModel,
    KernelWork,
    LinkRates,
    Parameters,
    Support,
    WorkTable,
    record_digest,
    step_error,
    sustained_share,
    untimed_share,
    untimed_text,
)
from tomat.perf.cost.estimate import ASSUMED_ERROR, OpTimes, supports
from tomat.perf.cost.llo import Transfer
from tomat.perf.profile.categories import Category

BANDWIDTH = 1e12
PLAIN = Parameters(0.8, 0.5, 0.25, 0.9, 0.6, 4.0, 1e-7, 1e-6, 1e-5)
MODEL = ChipModel("v6e", PLAIN)
V6E = slice_named("v6e-1").chip


def block(size: int, written: bool = False) -> Transfer:
    return Transfer(written, size)


def parts(work: KernelWork) -> tuple[float, float]:
    """Seconds of HBM and of the core."""
    hbm, core, _ = WorkTable([work], BANDWIDTH).parts(PLAIN)
    return float(hbm[0]), float(core[0])


def test_hbm_is_paid_by_bytes_and_copies():
    copies = ((block(1_000_000), 10.0), (block(1_000_000, written=True), 1.0))
    work = KernelWork(0.0, 0.0, copies)
    expected = (10e6 / 0.8e12 + 1e6 / 0.5e12) * 1.25 + 11e-7
    assert parts(work)[0] == pytest.approx(expected)
    assert MODEL.time(work, BANDWIDTH) == (pytest.approx(expected + 1e-5), "hbm")


def test_programs_that_last_have_the_sustained_rate():
    shares = sustained_share(np.array([0.0, 0.001, 0.01, math.sqrt(0.01 * 0.03), 0.03, 5.0]))
    assert shares == pytest.approx([0.0, 0.0, 0.0, 0.5, 1.0, 1.0])
    table = WorkTable([KernelWork(0.0, 0.0, ((block(10**9), 1.0),))], BANDWIDTH)
    short, long = (float(table.parts(PLAIN, share)[0][0]) for share in (0.0, 1.0))
    assert short == pytest.approx(1e9 / 0.8e12 + 1e-7) and long == pytest.approx(1.25e9 / 0.8e12 + 1e-7)


def test_bundles_without_products_wait_more():
    work = KernelWork(1e-3, 4e-4, ())
    assert parts(work)[1] == pytest.approx(4e-4 / 0.9 + 6e-4 / 0.6) and MODEL.time(work, BANDWIDTH)[1] == "bundles"
    assert MODEL.time(KernelWork(1e-3, 9e-4, ()), BANDWIDTH)[1] == "mxu"


def test_hbm_and_core_run_side_by_side():
    work = KernelWork(6e-4, 0.0, ((block(640_000_000), 1.0),))
    assert parts(work) == (pytest.approx(1e-3, rel=1e-3), pytest.approx(1e-3))
    assert MODEL.time(work, BANDWIDTH)[0] == pytest.approx(1e-3 * 2**0.25 + 1e-5, rel=1e-3)


def test_a_step_of_a_grid_takes_at_least_its_latency():
    time = MODEL.time(KernelWork(1e-4, 0.0, (), steps=1000.0), BANDWIDTH)
    assert time == (pytest.approx(1e-3 + 1e-5), "latency")


def record(**changes: object) -> dict:
    errors = {"kernels": 40, "absolute_error_median": 0.02, "absolute_error_p90": 0.1}
    parameters = {name: {"value": getattr(PLAIN, name), "deviation": 0.1} for name in NAMES}
    chip = {"fitted": True, "parameters": parameters, "all": errors, "bounds": {"hbm": errors}, **changes}
    return {"chips": {"v6e": chip}}


def test_a_record_becomes_a_model(tmp_path):
    (tmp_path / RECORD_FILE).write_text(json.dumps(record()))
    found = ChipModel.load(tmp_path, V6E)
    assert found.parameters == PLAIN and found.errors["hbm"]["absolute_error_p90"] == 0.1
    assert not found.borrowed and not found.notes()
    other = ChipModel.load(tmp_path, slice_named("v4-8").chip)
    assert other.borrowed and not other.errors and "no kernels of v4" in other.notes()[0]


def test_a_damaged_record_is_one_clear_error(tmp_path):
    """Of a record for the page: `tests/fuzz/test_records.py`."""
    for text in ('{"chips": 3}', json.dumps(record(parameters={})), json.dumps(record()).replace("0.8", "NaN", 1)):
        (tmp_path / RECORD_FILE).write_text(text)
        with pytest.raises(TomatError, match=rf"{RECORD_FILE}.*(--kernels|restore)"):
            ChipModel.load(tmp_path, V6E)


@pytest.mark.parametrize("text", ['{"chips": {}}', json.dumps(record(fitted=False))])
def test_a_record_without_a_fit_leaves_that_of_the_release(tmp_path, text):
    (tmp_path / RECORD_FILE).write_text(text)
    assert ChipModel.load(tmp_path, V6E) == ChipModel.load(None, V6E)


def test_collectives_on_record_take_the_place_of_the_assumed_ones(tmp_path):
    links = {"start_seconds": 5e-6, "ring_efficiency": 0.8, "slice": "v6e-16", "timed_with": "jax 1"}
    (tmp_path / RECORD_FILE).write_text(json.dumps(record(fitted=False, collectives=links)))
    model = ChipModel.load(tmp_path, V6E)
    assert model.links == LinkRates(5e-6, 0.8) and "5 us to start, rings at 80%" in model.notes()[0]
    assert ChipModel.load(tmp_path, slice_named("v5p-8").chip).links == ASSUMED_RATES
    (tmp_path / RECORD_FILE).write_text(json.dumps(record(collectives=links | {"ring_efficiency": 80})))
    with pytest.raises(TomatError, match="is damaged: chips.* expected up to 1"):
        ChipModel.load(tmp_path, V6E)


def test_a_record_has_a_name_for_caches(tmp_path):
    release = record_digest()
    assert len(release) == 64 and record_digest(tmp_path) == release
    (tmp_path / RECORD_FILE).write_text(json.dumps(record()))
    assert record_digest(tmp_path) != release


def op(basis: str, seconds: float) -> OpTimes:
    return OpTimes("k", Category.MATMUL, 2.0, None, None, None, seconds, basis)


def test_the_range_of_a_step_is_that_of_its_parts(tmp_path):
    (tmp_path / RECORD_FILE).write_text(json.dumps(record()))
    model = ChipModel.load(tmp_path, V6E)
    ops = [op("hbm", 2.0), op("hbm", 1.0), op("interconnect", 1.0), op("", 0.0)]
    parts = supports(ops, model)
    assert [(part.kind, part.step_share, part.error) for part in parts] == [
        ("hbm", 0.75, 0.1), ("interconnect", 0.25, ASSUMED_ERROR),
    ]  # fmt: skip
    assert [part.measured_kernels for part in parts] == [40, 0]
    assert step_error(parts) == pytest.approx(math.hypot(0.075, 0.25 * ASSUMED_ERROR))
    assert supports(ops, replace(model, borrowed=True))[0].error == ASSUMED_ERROR
    assert supports([], model) == () and step_error(()) == 0.0


def pallas(category: Category, seconds: float) -> OpTimes:
    return replace(op("mxu", seconds), category=category, pallas=True)


def test_pallas_kernels_that_the_chip_has_not_timed_have_the_error_of_one_that_has():
    """A v6e has timed attention forward alone: what bounds a kernel says nothing of how right its plan is."""
    model, tpu7x = ChipModel.load(None, V6E), ChipModel.load(None, CHIPS["tpu7x"])
    kinds = (Category.ATTENTION_FORWARD, Category.ATTENTION_BACKWARD, Category.LOSS, Category.NORM_ROTARY)
    forward, backward, loss, other = (pallas(kind, 4.0 - place) for place, kind in enumerate(kinds))
    parts = supports([forward, backward, loss, other], model)
    record = json.loads(CHECKOUT_FILE.read_text())["chips"]["tpu7x"]["operations"]
    p90 = {name: errors["absolute_error_p90"] for name, errors in record.items()}
    backward_p90 = p90["pallas_mosaic_tpu_flash_attention_vjp"]
    loss_p90 = p90["pallas_mosaic_tpu_linear_softmax_cross_entropy_loss_vjp"]
    assert [(part.name, part.error, part.chips) for part in parts] == [
        ("matrix unit", model.errors["mxu"]["absolute_error_p90"], ()),
        ("Pallas kernels, attention backward", pytest.approx(backward_p90 / (1 - backward_p90)), ("tpu7x",)),
        ("Pallas kernels, loss", pytest.approx(loss_p90 / (1 - loss_p90)), ("tpu7x",)),
        ("Pallas kernels, normalisation and rotary", ASSUMED_ERROR, ()),
    ]
    # What is planned 30 % short takes as much longer as the range allows.
    assert 1 + parts[2].error == pytest.approx(1 / (1 - loss_p90))
    assert untimed_share(parts) == pytest.approx(0.6)
    assert untimed_text(parts).startswith("60.0 %: Pallas kernels, attention backward 30.0 %")
    plain = [replace(each, pallas=False) for each in (forward, backward, loss, other)]
    assert step_error(parts) > 1.5 * step_error(supports(plain, model))
    assert untimed_share(supports(plain, model)) == 0.0
    # The chip that has timed them all but one.
    assert untimed_share(supports([forward, backward, loss, other], tpu7x)) == pytest.approx(0.1)
    # A chip with no timings at all rests on none, and a record of before has no operations.
    assert untimed_share(supports(plain, replace(model, borrowed=True))) == pytest.approx(1.0)
    assert {part.error for part in supports([backward, loss], replace(model, operations={}))} == {ASSUMED_ERROR}


def test_a_part_reads_back_from_a_report_of_before():
    kept = {"kind": "hbm", "seconds_per_step": 1.0, "step_share": 0.5, "error": 0.05, "measured_kernels": 40}
    assert Support(**kept).timed == "40" and Support(**kept).name == "HBM"
    part = Support("interconnect", 1.0, 0.5, ASSUMED_ERROR, 0, ("tpu7x",))
    assert Support(**json.loads(json.dumps(asdict(part)))).timed == "none: error as on tpu7x"
