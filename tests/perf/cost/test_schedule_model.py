from dataclasses import replace

import pytest

from tomat.perf.cost.llo import OpSchedule, Region
from tomat.perf.cost.schedule_model import entered_shares, mask_blocks, matched_schedules, schedule_time
from tomat.perf.profile.hlo import HloProgram
from tomat.perf.profile.hlo_files import program_from_text

SPLASH = "splash_mha_fwd_residuals.14"
CLOCK_HZ = 1.75e9

KERNELS = (
    (SPLASH, "splash_mha_fwd_residuals", ""),
    ("splash_mha_fwd_residuals.13", "checkpoint/splash_mha_fwd_residuals", ""),
    ("splash_mha_dq.1", "splash_mha_dq", ""),
)
"""As the compiled step holds them: the forward one twice."""
MASK = [1, 0, 0, 0, 2, 1, 0, 0, 2, 2, 1, 0, 2, 2, 2, 1]


@pytest.fixture(scope="module")
def program(splash_hlo) -> HloProgram:
    return program_from_text(splash_hlo(*KERNELS), "test")


def test_a_splash_kernel_counts_its_active_steps(program, schedules):
    kernel = program.by_name[SPLASH]
    assert mask_blocks(program, kernel, schedules[SPLASH]) == MASK
    # Regions of the fixture as its README counts them: 15 bundles on 10 of 16 steps, 2 and 4 on one of 16.
    bundles = 10 + 32770 * 65 + 32768 * (39 + 2 / 16 + 15 * 10 / 16 + 4 / 16)
    time = schedule_time(program, kernel, schedules[SPLASH], CLOCK_HZ)
    assert time is not None and time.core_seconds == pytest.approx(bundles / CLOCK_HZ)
    assert time.active_share == 10 / 16


def test_a_mask_that_the_loop_changes_leaves_every_step_active(splash_hlo, schedules):
    program = program_from_text(splash_hlo(*KERNELS, handed_on="changed"), "test")
    assert mask_blocks(program, program.by_name[SPLASH], schedules[SPLASH]) == []
    time = schedule_time(program, program.by_name[SPLASH], schedules[SPLASH], CLOCK_HZ)
    assert time is not None and time.mask_found is False and time.active_share == 1.0


def test_blocks_are_fetched_in_the_active_steps(program, schedules):
    time = schedule_time(program, program.by_name[SPLASH], schedules[SPLASH], CLOCK_HZ)
    assert time is not None and time.steps == 32768 * 10 / 16
    read = sum(times * copy.size_bytes for copy, times in time.copies if not copy.written)
    # Queries, keys and values of 512 x 128 bf16: the fixture has not kept what decides whether one is there already.
    assert read == pytest.approx(3 * 32770 * 10 / 16 * 512 * 128 * 2)
    assert time.mxu_seconds == pytest.approx(32768 * 10 / 16 * 24 / CLOCK_HZ)


def test_equal_ops_share_a_schedule(program, schedules):
    matched = matched_schedules(program, {SPLASH: schedules[SPLASH]})
    assert set(matched) == {SPLASH, "splash_mha_fwd_residuals.13"}
    assert matched["splash_mha_fwd_residuals.13"] is schedules[SPLASH]


def branch(first_bundle: int, entered_for: tuple[int, ...], bundles: int, inner: tuple[Region, ...] = ()) -> Region:
    """A branch that the mask of `HLO`, its operand 1, decides."""
    decided = {"operand": 1, "entered_for": entered_for, "mxu_cycles": bundles // 2}
    return Region("branch", first_bundle, bundles, (), None, regions=inner, **decided)


def of_branches(schedules: dict[str, OpSchedule], *branches: Region) -> OpSchedule:
    """The kernel with these branches alone."""
    body = replace(schedules[SPLASH].body, bundles=0, transfers=(), regions=branches)
    return replace(schedules[SPLASH], body=body)


def test_a_branch_for_whole_blocks_and_one_for_the_diagonal_are_not_both_entered(program, schedules):
    # As tokamax 0.0.12 writes its backward pass (`splash_mha_dkv_no_residuals`); `MASK` has 6 whole blocks and 4 on the
    # diagonal of 16. Both were counted for the 10, twice the time.
    branches = (branch(100, (2, 3), 1000), branch(1100, (1,), 2000))
    schedule = of_branches(schedules, *branches)
    time = schedule_time(program, program.by_name[SPLASH], schedule, CLOCK_HZ)
    assert time is not None
    assert time.core_seconds == pytest.approx((1000 * 6 / 16 + 2000 * 4 / 16) / CLOCK_HZ)
    assert time.mxu_seconds == pytest.approx((500 * 6 / 16 + 1000 * 4 / 16) / CLOCK_HZ)
    assert time.assumed_bundle_share == 0.0


def test_a_branch_within_a_branch_is_entered_in_a_share_of_its_blocks(program, schedules):
    around = branch(100, (1, 2, 3), 100, (branch(150, (1,), 1000), branch(160, (0,), 5000)))
    schedule = of_branches(schedules, around)
    time = schedule_time(program, program.by_name[SPLASH], schedule, CLOCK_HZ)
    assert time is not None and time.core_seconds == pytest.approx((100 * 10 / 16 + 1000 * 4 / 16) / CLOCK_HZ)
    (outer,) = schedule.body.regions
    diagonal, never = outer.regions
    shares = entered_shares(program, program.by_name[SPLASH], schedule)
    assert shares == {id(outer): 10 / 16, id(diagonal): 4 / 10, id(never): 0.0}
