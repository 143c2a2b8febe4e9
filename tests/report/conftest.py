"""A run, a step and densities that pages are made of."""

import shutil
from pathlib import Path

import pytest

from tomat.perf.cost.memory import LIVE_AT_PEAK, Buffer, MemoryReport
from tomat.perf.profile.breakdown import Breakdown, GapRow, OpRow, Roofs, StepClass
from tomat.perf.profile.categories import Category, Direction, Part

BEFORE = Path(__file__).parents[1] / "fixtures" / "before" / "run"


@pytest.fixture
def run(tmp_path):
    """A run that has ended: `tests/fixtures/before/README.md`."""
    return Path(shutil.copytree(BEFORE, tmp_path / "run"))


@pytest.fixture
def memory() -> MemoryReport:
    """A plan's, which fits: its largest buffer, and what is in use along the schedule."""
    buffer = Buffer(2**30, 2**29, "bf16[8]", "fusion.9", "fusion", "jit(step)/x", "model.py:3")
    timeline = ((0.0, 2**30), (0.5, 2**31), (0.9, 2**30))
    sizes = 2**30, 0, 0, 2**30, 2**20, 2**31
    return MemoryReport(True, 3 * 2**30, 4 * 2**30, *sizes, (buffer,), LIVE_AT_PEAK, timeline)


@pytest.fixture
def step() -> Breakdown:
    """A step of three operations and a wait."""

    def op(name, category, part, direction, seconds, **figures):
        return OpRow(name, "jit_step", "fusion", category, part, direction, 2.0, seconds, **figures)

    layer = "jit(step)/jvp(Model)/scan(layer)/Attention/dot_general"
    work = {"flops": 2e9, "hbm_bytes": 1e6, "op_name": layer, "source": "<model>.py:1"}
    back = work | {"op_name": "jit(step)/transpose(jvp(Model))/scan(layer)/Attention/dot_general", "hbm_bytes": 0.0}
    parts, ways = tuple(Part), tuple(Direction)
    ops = (
        op("fusion.1", Category.MATMUL, parts[0], ways[0], 3e-3, **work),
        op("fusion.2", Category.MATMUL, parts[0], ways[1], 1e-3, **back),
        op("copy.3", Category.COPIES, parts[-1], ways[0], 1e-9),
        op("idle", Category.IDLE, parts[-1], ways[0], 1e-3),
    )
    roofs = Roofs("TPU v6 lite", 9.2e14, 1.6e12, 1.75e9, 32 * 2**30)
    return Breakdown(
        "A <step>", "trace", roofs, sum(one.seconds for one in ops), ops, n_steps=2, notes=("a note",),
        step_times_seconds=(5e-3, 5.1e-3), step_classes=(StepClass("all", 2, 5e-3, 5e-3, 5e-3, 5.1e-3),),
        gaps=(GapRow("fusion.1", "fusion.2", 1.0, 1e-3, 1e-3, "loading"),), memory_bytes={"arguments": 2**20},
    )  # fmt: skip
