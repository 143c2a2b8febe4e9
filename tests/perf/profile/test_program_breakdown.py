import pytest

from tomat.perf.profile.breakdown import Bound
from tomat.perf.profile.categories import Category
from tomat.perf.profile.program_breakdown import breakdown_from_program
from tomat.perf.profile.trace import load_trace
from tomat.perf.profile.trace_breakdown import breakdown_from_trace

V6E = "TPU v6 lite"


def test_predicted_and_traced_are_the_same_table(v6e_program, tpu_profile, v6e_seconds):
    """The trace was built from the compiler's seconds; the compiled breakdown with them must be its categories."""
    traced = breakdown_from_trace(load_trace(tpu_profile))

    def slower(instruction):
        return 0.0 if instruction.opcode == "while" else v6e_seconds(instruction) * 1.015

    predicted = breakdown_from_program(v6e_program, device_kind=V6E, kernel_seconds=slower)
    mine = {r.name: r for r in predicted.categories}
    for row in traced.categories:
        if row.name in (Category.IDLE, Category.UNATTRIBUTED, Category.CONTROL):
            continue
        # the builder cuts every duration to whole picoseconds
        assert mine[row.name].seconds == pytest.approx(row.seconds, rel=1e-5, abs=1e-10), row.name
        assert mine[row.name].flops == (pytest.approx(row.flops) if row.flops is not None else None)
        assert mine[row.name].hbm_bytes == pytest.approx(row.hbm_bytes)


def test_nothing_takes_less_than_a_cycle(v6e_program):
    """Scalars that XLA gives no cycles: their bytes over the bandwidth would be a third of one."""
    breakdown = breakdown_from_program(v6e_program, device_kind=V6E)
    clock_hz = breakdown.roofs.clock_hz
    assert clock_hz
    short = [op for op in breakdown.ops if 0 < op.seconds * clock_hz < op.occurrences * (1 - 1e-9)]
    assert short == []
    assert any(op.seconds * clock_hz == pytest.approx(op.occurrences) for op in breakdown.ops)


def test_collectives_and_pallas_kernels_have_no_known_time(v6e_program):
    """Neither XLA's cycles nor the traffic of the HBM say how long the interconnect takes."""
    breakdown = breakdown_from_program(v6e_program, device_kind=V6E)
    collectives = [op for op in breakdown.ops if op.category == Category.COLLECTIVES_EXPOSED]
    assert collectives and all(op.seconds == 0 for op in collectives)
    kernels = {op.name for op in breakdown.ops if op.opcode == "custom-call" and op.flops is None}
    unknown = {op.name for op in collectives} | kernels
    assert any(f"no time is known for {len(unknown)} kernels" in note for note in breakdown.notes), breakdown.notes
    assert breakdown.source == "compiled" and "the step is a lower bound" in breakdown.notes[-1]


def test_an_unknown_chip_has_no_fractions(v6e_program):
    how = {"device_kind": "TPU of this test alone", "kernel_seconds": lambda i: 1e-6}
    with pytest.warns(UserWarning, match="no peak is known"):
        breakdown = breakdown_from_program(v6e_program, **how)
    for row in breakdown.categories:
        assert row.flops_fraction is None and row.bandwidth_fraction is None and row.cycles is None
        assert row.bound in (Bound.UNKNOWN, Bound.LATENCY, Bound.COMMUNICATION)
