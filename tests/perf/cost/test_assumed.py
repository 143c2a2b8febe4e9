"""What the plan of a step says that it did not find, on programs made by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tomat.base.report.markdown import markdown
from tomat.hardware.chips import slice_named
from tomat.perf.cost.chip_model import ChipModel, Parameters
from tomat.perf.cost.estimate import StepEstimate, estimate_step
from tomat.perf.cost.llo import OpSchedule, Region, read_schedules
from tomat.perf.cost.memory import MemoryReport
from tomat.perf.profile.hlo_files import program_from_text
from tomat.report.pages.report import memory_part, setup_facts

DUMP = Path(__file__).parent / "data" / "llo"
SPLASH = "splash_mha_fwd_residuals.14"
SHAPE = "bf16[8,16,8192,64]{3,2,1,0}"
COST = 'backend_config={"custom_call_config":{"cost_estimate":{"flops":"1000","bytes_accessed":"1000"}}}'

HLO = f"""HloModule m, entry_computation_layout={{(s32[], s8[1,4,4]{{2,1,0}}, {SHAPE})->{SHAPE}}}
body {{
  p = (s32[], s8[1,4,4]{{2,1,0}}, {SHAPE}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  blocks = s8[1,4,4]{{2,1,0}} get-tuple-element(p), index=1
  x = {SHAPE} get-tuple-element(p), index=2
  one = s32[] constant(1)
  next = s32[] add(i, one)
  {SPLASH} = {SHAPE} custom-call(blocks, blocks, x, x, x), custom_call_target="tpu_custom_call", \
metadata={{op_name="jit(step)/splash_mha_fwd_residuals/pallas_call"}}, {COST}
  ROOT t = (s32[], s8[1,4,4]{{2,1,0}}, {SHAPE}) tuple(next, blocks, {SPLASH})
}}
cond {{
  p = (s32[], s8[1,4,4]{{2,1,0}}, {SHAPE}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(12)
  ROOT lt = pred[] compare(i, n), direction=LT
}}
ENTRY main {{
  start = s32[] parameter(0)
  given = s8[1,4,4]{{2,1,0}} parameter(1)
  x = {SHAPE} parameter(2)
  zero = s32[] constant(0)
  mask = s8[1,4,4]{{2,1,0}} constant({{ {{ {{1,0,0,0}}, {{2,1,0,0}}, {{2,2,1,0}}, {{2,2,2,1}} }} }})
  init = (s32[], s8[1,4,4]{{2,1,0}}, {SHAPE}) tuple(START, MASK, x)
  loop = (s32[], s8[1,4,4]{{2,1,0}}, {SHAPE}) while(init), condition=cond, body=body
  y = {SHAPE} get-tuple-element(loop), index=2
  ROOT twice = {SHAPE} add(y, y)
}}
"""


@pytest.fixture(scope="module")
def schedules() -> dict[str, OpSchedule]:
    return read_schedules(DUMP)


def estimate(
    schedules: dict[str, OpSchedule], start: str = "zero", mask: str = "mask", hlo: str = HLO, **keywords: Any
) -> StepEstimate:
    program = program_from_text(hlo.replace("START", start).replace("MASK", mask), "test")
    return estimate_step(program, schedules, slice_named("v6e-16"), title="test", notes=("first",), **keywords)


def test_a_step_of_which_all_is_known_assumes_nothing(schedules):
    step = estimate(schedules)
    assert step.assumed == () and step.breakdown.notes == ("first",)
    assert step.breakdown.n_hosts == 4
    assert step.ops[SPLASH].executions == 12


def test_a_mask_that_is_computed_counts_every_block_and_says_so(schedules):
    known, step = estimate(schedules), estimate(schedules, mask="given")
    (assumed,) = step.assumed
    assert (assumed.kind, assumed.operations, assumed.executions_per_step) == ("mask_not_found", (SPLASH,), 12)
    row = next(row for row in step.breakdown.ops if row.name == SPLASH)
    assert assumed.seconds_per_step == row.seconds > next(r for r in known.breakdown.ops if r.name == SPLASH).seconds
    assert assumed.step_share == pytest.approx(row.seconds / step.breakdown.step_seconds)
    assert step.breakdown.notes == ("first", assumed.sentence)
    assert "every block" in assumed.sentence and SPLASH in assumed.sentence


def test_a_loop_of_unknown_length_says_what_is_in_it(schedules):
    (assumed,) = estimate(schedules, start="start").assumed
    assert (assumed.kind, assumed.operations) == ("trip_count_not_found", ("loop",))
    assert 0.5 < assumed.step_share < 1  # all of the step but the addition


def test_a_kernel_without_bundles_is_named_as_costed_by_its_traffic(schedules):
    step = estimate({name: schedule for name, schedule in schedules.items() if name != SPLASH})
    (assumed,) = step.assumed
    assert (assumed.kind, assumed.operations, assumed.executions_per_step) == ("bundles_not_found", (SPLASH,), 12)
    assert step.ops[SPLASH].basis == "unscheduled hbm"
    assert "HBM traffic alone" in assumed.sentence
    data = assumed.to_dict()
    assert data["sentence"] == assumed.sentence and 0 < data["step_share"] < 1 and data["seconds_per_step"] > 0


def test_bundles_with_a_loop_of_unknown_length_are_another_reason(schedules):
    schedule = schedules[SPLASH]
    regions = tuple(
        replace(region, executions=None) if region.kind == "loop" else region for region in schedule.body.regions
    )
    step = estimate({SPLASH: replace(schedule, body=replace(schedule.body, regions=regions))})
    assert [assumed.kind for assumed in step.assumed] == ["bundle_loops_not_found"]


def test_a_kernel_of_which_nothing_is_known_is_said_to_count_as_none(schedules):
    (assumed,) = estimate({}, hlo=HLO.replace(f", {COST}", "")).assumed
    assert (assumed.kind, assumed.operations, assumed.seconds_per_step) == ("time_not_known", (SPLASH,), 0.0)


def test_branches_are_said_to_count_alike(schedules):
    branches = "".join(
        f"{name} {{\n  b = {SHAPE} parameter(0)\n  ROOT r{name} = {SHAPE} {opcode}(b, b)\n}}\n"
        for name, opcode in (("left", "add"), ("right", "multiply"))
    )
    hlo = HLO.replace("ENTRY main", branches + "ENTRY main").replace(
        "ROOT twice = " + SHAPE + " add(y, y)",
        "ROOT twice = " + SHAPE + " conditional(start, y, y), branch_computations={left, right}",
    )
    (assumed,) = estimate(schedules, hlo=hlo).assumed
    assert (assumed.kind, assumed.operations) == ("branch_not_known", ("twice",))
    assert 0 < assumed.step_share < 1


def test_the_page_has_the_hosts_of_the_slice_and_the_memory_of_the_report(schedules):
    report = MemoryReport(True, 7 * 2**30, 31 * 2**30, argument_bytes=2**30, output_bytes=0, temporary_bytes=5 * 2**30)
    breakdown = estimate(schedules, memory_bytes=report.by_kind()).breakdown
    assert sum(breakdown.memory_bytes.values()) == report.required_bytes
    record = dict.fromkeys(("commit", "date", "config_hash", "slice", "batch_sequences", "sequence_tokens"))
    assert "16 on 4 host(s)" in str(setup_facts({"kind": "predicted", **record}, breakdown))
    text = markdown([memory_part(breakdown)])
    for row in ("| temporaries | 5.000 GiB |", "| **sum** | 7.000 GiB |", "| constants | 1.000 GiB |"):
        assert row in text
    assert MemoryReport(False, 9, 8).by_kind() == {"others": 9}


def busy(region: Region, every: int) -> Region:
    """The region with a product in one of `every` bundles."""
    inner = tuple(busy(one, every) for one in region.regions)
    return replace(region, mxu_cycles=region.bundles // every, regions=inner)


def test_a_pallas_kernel_reaches_the_share_of_the_peak_that_its_matrix_units_are_busy(schedules):
    schedule = schedules[SPLASH]
    for every, bound in ((20, "latency"), (2, "compute")):
        # The fixture has few of the kernel's bundles: its steps would be bound by the latency of their copies.
        free = Parameters(hbm_read_efficiency=1e6, hbm_write_efficiency=1e6, step_seconds=0.0, copy_seconds=0.0)
        model = ChipModel("v6e", free)
        step = estimate({SPLASH: replace(schedule, body=busy(schedule.body, every))}, model=model)
        op = step.ops[SPLASH]
        time = op.schedule
        row = next(row for row in step.breakdown.ops if row.name == SPLASH)
        assert time is not None and row.flops is not None and row.flops > 1000  # what its author stated
        group = step.breakdown.group(SPLASH, [row])
        assert op.estimate is not None and op.estimate > time.seconds
        assert group.flops_fraction == pytest.approx(time.mxu_seconds / op.estimate)
        assert group.bound == bound
