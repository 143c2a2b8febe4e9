"""Words that would do nothing are refused, not passed over."""

import pytest

from tomat.app.cli import main

LEAVE_OUT = ["eval", "--leave_one_out", "demo"]
COMPARE = ["profile", "compare", "a.json", "b.json"]


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["plan", "--sweep", "mfu-200m", "--slice", "v6e-32"],
            "which --slice does not change",
        ),
        (["plan", "--calibrate", "--docs"], "which --docs does not change"),
        (["plan", "--config_path", "demo", "--max_batch", "--emit", "best.yaml"], "--max_batch writes no --emit"),
        (["plan", "--config_path", "demo", "--policies", "full"], "--policies is for --max_batch"),
        ([*LEAVE_OUT, "--seed", "3"], "--seed does not go with --leave_one_out"),
        ([*LEAVE_OUT, "--groups", "molecules"], "--groups does not go with --leave_one_out"),
        ([*LEAVE_OUT, "--step", "0"], "--step does not go with --leave_one_out"),
        ([*COMPARE, "--session", "x"], "--session is for one profile"),
        ([*COMPARE, "--docs", "x"], "--docs is for one profile"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(words, said, capsys):
    assert main(words) == 2
    assert said in " ".join(capsys.readouterr().err.split())
