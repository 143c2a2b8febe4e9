"""Published runs beside their plans: errors, ranges, and a page of both."""

import pytest

from tomat.base.report.markdown import update_page
from tomat.perf.plan.host import (
    COMPILE_SECONDS,
    COMPILES_ON_RECORD,
    FUSED_LOSS_MORE,
    LEVANTER,
    TOMAT,
    host_dict,
    step_on_record,
)
from tomat.perf.plan.plan import Interval
from tomat.perf.tuning.published_runs import PublishedRun
from tomat.perf.tuning.sweep_rows import FAILED, FITS, RowRecord
from tomat.report.published_runs import beside, errors_of, published_report


def run_of(name: str, seconds: float, **more) -> PublishedRun:
    facts = {"source": "a file", "date": "2025-06-27", "family": "llama", "chip": "v5p", "slice": "v5p-32"}
    facts["step"] = "llama, adam"
    overrides = {"model.hidden_dim": 512, "trainer.num_train_steps": 1000}
    known = {"optimizer": "adamw", "steps": 1000, "overrides": overrides, **facts, **more}
    return PublishedRun(id=name, step_seconds=seconds, **known)


def row_of(run: PublishedRun, seconds: float, status=FITS) -> RowRecord:
    return RowRecord(
        name=run.id, base=None, overrides=run.overrides, config_file="a.yaml", explain="", config_hash=None, model=None,
        batch_sequences=1, sequence_tokens=1, slice=run.slice, n_chips=16, status=status,
        hbm_required_bytes=2**30, hbm_capacity_bytes=2**35, error="too deep" if status == FAILED else "",
        step_seconds={"estimate": seconds, "low": 0.9 * seconds, "high": 1.1 * seconds},
        categories=[{"name": "matmul", "seconds": seconds, "share": 1, "hidden_seconds": 0, "flops_fraction": None}],
    )  # fmt: skip


def test_a_record_has_the_host_and_two_compiles_on_top_and_a_loop_ahead_hides_its_own():
    device = Interval(1.0, 0.9, 1.1)
    whole = step_on_record(device, LEVANTER, 1000)
    compiles = COMPILES_ON_RECORD * COMPILE_SECONDS.estimate / 1000
    assert whole.estimate == pytest.approx(1.0 + LEVANTER.step_seconds.estimate + compiles)
    assert whole.low > device.low and whole.high > device.high
    assert step_on_record(device, LEVANTER, 10**9).estimate == pytest.approx(1 + LEVANTER.step_seconds.estimate)
    fused = step_on_record(device, LEVANTER, 1000, fused_loss_seconds=0.5)
    assert fused.estimate == pytest.approx(whole.estimate + 0.5 * FUSED_LOSS_MORE.estimate)
    assert fused.high - fused.low > whole.high - whole.low
    assert TOMAT.on_top(device) == Interval(0, 0, 0)
    short = Interval(0.002, 0.001, 0.003)
    on_top = TOMAT.on_top(short)
    assert 0 < on_top.low < on_top.estimate < on_top.high
    assert short.estimate + on_top.estimate == pytest.approx(TOMAT.step_seconds.estimate)
    assert host_dict(0, device)["host_loop"] == LEVANTER.name != host_dict(1, device)["host_loop"]


def test_errors_and_coverage_are_those_of_the_rows_that_are_planned(tmp_path):
    exact = step_on_record(Interval(1.0, 0.9, 1.1), LEVANTER, 1000).estimate
    runs = [run_of("near", exact / 1.01), run_of("far", exact / 2, kept_aside=True), run_of("again", exact)]
    runs += [
        run_of("gone", 1.0, refused="a mixture of experts", overrides={}),
        run_of("later", 1.0, step="llama, muon"),
        run_of("bad", 1.0, step=""),
    ]
    rows = {run.id: row_of(run, 1.0) for run in runs[:3]} | {"bad": row_of(runs[5], 1.0, FAILED)}
    found = beside(runs, rows)
    assert [one.run.id for one in found] == ["near", "far", "again"]
    assert [round(one.error, 6) for one in found] == [0.01, 1.0, 0.0]
    errors = errors_of(found)
    assert errors["absolute_error_median"] == pytest.approx(0.01) and errors["absolute_error_largest"] == pytest.approx(
        1
    )
    assert errors["inside_range_share"] == pytest.approx(2 / 3)
    report = published_report(
        runs,
        rows,
        kernels={"v5p": {"all": dict.fromkeys(("kernels", "absolute_error_median", "absolute_error_p90"), 0.5)}},
    )
    by = report.figures["errors"]
    assert by["all"] == errors and by["learnt from: kept aside"]["rows"] == 1
    text = update_page(tmp_path / "page.md", report, tmp_path).read_text()
    for word in ("near", "far", "a mixture of experts", "too deep", "not yet", "near, far, again, gone"):
        assert word in text
    assert published_report(runs, {}).figures["planned"] == 0
