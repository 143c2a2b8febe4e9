"""What the end of a training says of itself."""

import math

import pytest

from tomat.workflow.train import loss_change


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (5.0, 2.5, " (2.0 times lower)"),
        (2.5376, 2.5658, " (1.1 % higher)"),
        (2.5658, 2.5376, " (1.1 % lower)"),
        (1.0, 7.0, " (600.0 % higher)"),
        (2.5, 2.5, ""),
        (math.nan, 2.5, ""),
        (2.5, math.inf, ""),
        (2.5, 0.0, ""),
    ],
)
def test_a_loss_that_rose_is_not_called_lower(first, last, words):
    assert loss_change(first, last) == words
