"""Private names of Levanter: of another version, look again at what `base/ports/levanter.py` touches.

`tests/train/test_dispatch.py` holds that its compiled step gives Levanter's own numbers, `test_checkpointer.py` when it
saves, `tests/perf/plan/compile/test_lowering.py` that the step lowered is the step trained.
"""

import importlib.metadata

import jax.numpy as jnp
from levanter.metrics import Metric, ReductionType, unwrap_metrics

from tomat.base.ports.levanter import VERSION, value_of, weighted_mean


def test_the_version_is_the_one_that_this_was_written_for():
    assert importlib.metadata.version("marin-levanter") == VERSION


def test_a_weighted_mean_is_the_sum_over_its_weight():
    mean = weighted_mean(jnp.float32(3.0), jnp.float32(0.5))
    assert unwrap_metrics({"mean": mean})["mean"] == 6.0
    assert value_of(Metric.from_value(jnp.float32(2.0), ReductionType.MEAN)) == 2.0
