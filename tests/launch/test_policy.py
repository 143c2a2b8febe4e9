"""How attempts end, and what ends a launch: steps, not minutes."""

import pytest

from tomat.launch.policy import Ending, Health, RestartPolicy, judge


@pytest.mark.parametrize(
    ("statuses", "ending"),
    [
        (["0", "0"], Ending.FINISHED),
        (["143", "0"], Ending.PREEMPTED),
        (["143", "1"], Ending.FAILED),
        (["2", "143"], Ending.REFUSED),
        (["143", "75"], Ending.STORAGE_FAULT),
        (["2", "75"], Ending.STORAGE_FAULT),
        (["gone", "0"], Ending.FAILED),
        (["137", "76"], Ending.HOST_LOST),
        (["2", "76"], Ending.REFUSED),
    ],
)
def test_the_hosts_end_together(statuses, ending):
    assert judge(statuses)[0] is ending


def test_waits_double_up_to_the_longest():
    policy = RestartPolicy(backoff_seconds=30, max_backoff_seconds=900)
    assert [Health(policy, failures=n).wait_seconds for n in (1, 2, 3, 9, 2000)] == [30, 60, 120, 900, 900]


FAILED, LOST, NONE, STOPPED = Ending.FAILED, Ending.MACHINE_LOST, Ending.NO_CAPACITY, Ending.PREEMPTED


@pytest.mark.parametrize(
    ("attempts", "verdict"),
    [
        ([(FAILED, 0)], None),
        ([(FAILED, 0), (FAILED, 0)], "2 attempts in a row without a step"),
        ([(STOPPED, 0), (Ending.STORAGE_FAULT, 0)], "2 attempts in a row without a step"),
        ([(FAILED, 0), (FAILED, 1), (FAILED, 0)], None),
        # What is taken away before its first step was not at fault, but costs as well.
        ([(LOST, 0)] * 4, None),
        ([(FAILED, 0), (LOST, 0), (FAILED, 0)], "2 attempts in a row without a step"),
        ([(LOST, 0)] * 5, "5 attempts in a row with fewer than 50 steps"),
        ([(FAILED, 49)] * 5, "5 attempts in a row with fewer than 50 steps"),
        ([(FAILED, 49)] * 4 + [(FAILED, 50)] + [(FAILED, 49)] * 4, None),
        ([(Ending.NOT_MADE, 0)] * 4, None),
        ([(Ending.NOT_MADE, 0)] * 5, "5 attempts in a row with fewer than 50 steps"),
        # Machines that are not there cost nothing.
        ([(NONE, 0)] * 300, None),
    ],
)
def test_what_ends_a_launch(attempts, verdict):
    health = Health(RestartPolicy())
    for ending, steps in attempts:
        assert health.verdict is None
        health.count(ending, steps)
    assert health.verdict == verdict


def test_a_slice_that_is_replaced_gives_one_more_attempt():
    health = Health(RestartPolicy())
    for _ in range(2):
        health.count(FAILED, 0)
    health.replaced()
    assert health.verdict is None
    health.count(FAILED, 0)
    assert health.verdict == "2 attempts in a row without a step"
