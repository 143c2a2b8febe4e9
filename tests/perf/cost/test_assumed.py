"""What the plan of a step says that it did not find, on programs made by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tomat.base.report.markdown import markdown
from tomat.hardware.chips import slice_named
from tomat.perf.cost.chip_model import ChipModel, Parameters
from tomat.perf.cost.estimate import StepEstimate, estimate_step
from tomat.perf.cost.llo import OpSchedule, Region
from tomat.perf.cost.memory import MemoryReport
from tomat.perf.profile.hlo_files import program_from_text
from tomat.report.pages.report import memory_part

SPLASH = "splash_mha_fwd_residuals.14"
SHAPE = "bf16[8,16,8192,64]{3,2,1,0}"
COST = ', backend_config={"custom_call_config":{"cost_estimate":{"flops":"1000","bytes_accessed":"1000"}}}'


@pytest.fixture
def estimate(splash_hlo):
    """The step of a program of one kernel, whose text `change` may alter."""

    def of(
        schedules: dict[str, OpSchedule],
        change: Callable[[str], str] = str,
        cost: str = COST,
        keywords: dict[str, Any] | None = None,
        **program: str,
    ) -> StepEstimate:
        text = splash_hlo((SPLASH, "splash_mha_fwd_residuals", cost), **program)
        known = {"title": "test", "notes": ("first",), **(keywords or {})}
        return estimate_step(program_from_text(change(text), "test"), schedules, slice_named("v6e-16"), **known)

    return of


def test_a_step_of_which_all_is_known_assumes_nothing(schedules, estimate):
    step = estimate(schedules)
    assert step.assumed == () and step.breakdown.notes == ("first",)
    assert step.breakdown.n_hosts == 4
    assert step.ops[SPLASH].executions == 12


def test_a_mask_that_is_computed_counts_every_block_and_says_so(schedules, estimate):
    known, step = estimate(schedules), estimate(schedules, mask="given")
    (assumed,) = step.assumed
    assert (assumed.kind, assumed.operations, assumed.executions_per_step) == ("mask_not_found", (SPLASH,), 12)
    row = next(row for row in step.breakdown.ops if row.name == SPLASH)
    assert assumed.seconds_per_step == row.seconds > next(r for r in known.breakdown.ops if r.name == SPLASH).seconds
    assert assumed.step_share == pytest.approx(row.seconds / step.breakdown.step_seconds)
    assert step.breakdown.notes == ("first", assumed.sentence)
    assert "every block" in assumed.sentence and SPLASH in assumed.sentence


def test_a_kernel_without_bundles_is_named_as_costed_by_its_traffic(schedules, estimate):
    step = estimate({name: schedule for name, schedule in schedules.items() if name != SPLASH})
    (assumed,) = step.assumed
    assert (assumed.kind, assumed.operations, assumed.executions_per_step) == ("bundles_not_found", (SPLASH,), 12)
    assert step.ops[SPLASH].basis == "unscheduled hbm"
    assert "HBM traffic alone" in assumed.sentence
    data = assumed.to_dict()
    assert data["sentence"] == assumed.sentence and 0 < data["step_share"] < 1 and data["seconds_per_step"] > 0
    # One of which nothing at all is known counts as no time.
    (assumed,) = estimate({}, cost="").assumed
    assert (assumed.kind, assumed.operations, assumed.seconds_per_step) == ("time_not_known", (SPLASH,), 0.0)


def test_a_loop_of_unknown_length_says_what_is_in_it_and_one_of_bundles_is_another_reason(schedules, estimate):
    (assumed,) = estimate(schedules, start="start").assumed
    assert (assumed.kind, assumed.operations) == ("trip_count_not_found", ("loop",))
    assert 0.5 < assumed.step_share < 1  # all of the step but the addition
    schedule = schedules[SPLASH]
    regions = tuple(
        replace(region, executions=None) if region.kind == "loop" else region for region in schedule.body.regions
    )
    step = estimate({SPLASH: replace(schedule, body=replace(schedule.body, regions=regions))})
    assert [assumed.kind for assumed in step.assumed] == ["bundle_loops_not_found"]


def test_branches_are_said_to_count_alike(schedules, estimate):
    branches = "".join(
        f"{name} {{\n  b = {SHAPE} parameter(0)\n  ROOT r{name} = {SHAPE} {opcode}(b, b)\n}}\n"
        for name, opcode in (("left", "add"), ("right", "multiply"))
    )

    def branched(text: str) -> str:
        chosen = "conditional(start, y, y), branch_computations={left, right}"
        return text.replace("ENTRY main", branches + "ENTRY main").replace("add(y, y)", chosen)

    (assumed,) = estimate(schedules, branched).assumed
    assert (assumed.kind, assumed.operations) == ("branch_not_known", ("twice",))
    assert 0 < assumed.step_share < 1


def test_the_page_has_the_memory_of_the_report(schedules, estimate):
    report = MemoryReport(True, 7 * 2**30, 31 * 2**30, argument_bytes=2**30, output_bytes=0, temporary_bytes=5 * 2**30)
    text = markdown([memory_part(estimate(schedules, keywords={"memory_bytes": report.by_kind()}).breakdown)])
    for row in ("| temporaries | 5.000 GiB |", "| **sum** | 7.000 GiB |", "| constants | 1.000 GiB |"):
        assert row in text


def busy(region: Region, every: int) -> Region:
    """The region with a product in one of `every` bundles."""
    inner = tuple(busy(one, every) for one in region.regions)
    return replace(region, mxu_cycles=region.bundles // every, regions=inner)


def test_a_pallas_kernel_reaches_the_share_of_the_peak_that_its_matrix_units_are_busy(schedules, estimate):
    schedule = schedules[SPLASH]
    for every, bound in ((20, "latency"), (2, "compute")):
        # The fixture has few of the kernel's bundles: its steps would be bound by the latency of their copies.
        free = Parameters(hbm_read_efficiency=1e6, hbm_write_efficiency=1e6, step_seconds=0.0, copy_seconds=0.0)
        model = ChipModel("v6e", free)
        step = estimate({SPLASH: replace(schedule, body=busy(schedule.body, every))}, keywords={"model": model})
        op = step.ops[SPLASH]
        time = op.schedule
        row = next(row for row in step.breakdown.ops if row.name == SPLASH)
        assert time is not None and row.flops is not None and row.flops > 1000  # what its author stated
        group = step.breakdown.group(SPLASH, [row])
        assert op.estimate is not None and op.estimate > time.core_seconds
        assert group.flops_fraction == pytest.approx(time.mxu_seconds / op.estimate)
        assert group.bound == bound
