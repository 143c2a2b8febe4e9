"""A9: a step's time when a few events of its trace are damaged, and when step marks are missing.

The CPU trace of the tests is a real one, of 8.37 ms; the TPU trace is built of a compiled program, of 1.58 ms.
"""

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trace_builder import build_xspace

from tomat.base.errors import TomatError
from tomat.perf.profile.breakdown import Breakdown, Roofs
from tomat.perf.profile.hlo_files import load_program
from tomat.perf.profile.program_breakdown import compiler_seconds, roofline_seconds
from tomat.perf.profile.protos import new_message
from tomat.perf.profile.trace import merge_hosts
from tomat.perf.profile.trace_breakdown import breakdown_from_trace
from tomat.perf.profile.xplane import read_xplane_bytes

PROFILES = Path(__file__).parents[1] / "fixtures" / "profiles"
UNKNOWN_ID = 10**9
Figure = Callable[[str, str, object], None]


def parsed(data: bytes) -> Any:
    space = new_message("XSpace")
    space.ParseFromString(data)
    return space


@pytest.fixture
def cpu() -> Any:
    return parsed(gzip.decompress((PROFILES / "cpu_step.xplane.pb.gz").read_bytes()))


@pytest.fixture(scope="module")
def tpu_bytes() -> bytes:
    """Four steps of a program compiled for a v6e, each operation as long as the compiler's own estimate says."""
    program = load_program(PROFILES / "v6e_step.hlo.pb.gz")
    roofs = Roofs.of_device_kind("TPU v6 lite")
    kernel_seconds, shortest_seconds = 20e-6, 50e-9

    def seconds(instruction: Any) -> float:
        known = compiler_seconds(program, instruction, roofs)
        if known is None:  # a collective takes some time, whatever the interconnect
            known = roofline_seconds(program, instruction, roofs)
        return kernel_seconds if known is None else max(known, shortest_seconds)

    return build_xspace(program, "TPU v6 lite", seconds, n_steps=4)


def events(space: Any) -> Iterator[Any]:
    return (event for plane in space.planes for line in plane.lines for event in line.events)


def line_named(space: Any, name: str) -> Any:
    return next(line for plane in space.planes for line in plane.lines if line.name == name)


def breakdown_of(space: Any) -> Breakdown:
    return breakdown_from_trace(merge_hosts("x", [read_xplane_bytes(space.SerializeToString(), "x", "x")]))


def milliseconds(space: Any) -> str:
    """The step as tomat says it, or how it ended."""
    try:
        return f"{1e3 * breakdown_of(space).step_seconds:.3f} ms"
    except TomatError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001 - an older version's traceback is a figure of this audit
        return f"traceback: {type(error).__name__}"


@pytest.mark.parametrize(
    "damage",
    [lambda event: setattr(event, "metadata_id", UNKNOWN_ID), lambda event: setattr(event, "duration_ps", -1)],
    ids=["unknown ids", "negative durations"],
)
def test_a_thousandth_of_damaged_events(damage, cpu, figure: Figure):
    figure("A9", "step of the CPU trace, whole", milliseconds(cpu))
    for event in list(events(cpu))[::1000]:
        damage(event)
    figure("A9", "step with 0.1 % of damaged events", milliseconds(cpu))
    assert "refused: " in milliseconds(cpu)


def test_every_second_mark_missing(tpu_bytes, figure: Figure):
    space = parsed(tpu_bytes)
    whole = breakdown_of(space).step_seconds
    line = line_named(space, "Steps")
    kept = list(line.events)[::2]
    del line.events[:]
    line.events.extend(kept)
    figure("A9", "step with every second mark missing", milliseconds(space))
    damaged = breakdown_of(space)
    assert damaged.step_seconds == pytest.approx(whole, rel=1e-6)


def test_all_marks_at_zero(tpu_bytes, figure: Figure):
    space = parsed(tpu_bytes)
    whole = breakdown_of(space).step_seconds
    for event in line_named(space, "Steps").events:
        event.offset_ps = 0
    figure("A9", "step with all marks at zero", milliseconds(space))
    damaged = breakdown_of(space)
    assert damaged.step_seconds == pytest.approx(whole, rel=1e-6)
    assert any("marks begin at one time" in note for note in damaged.notes)
    assert any("a step is one execution of" in note for note in damaged.notes)
