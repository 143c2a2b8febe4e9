"""Kernels of a GPU are put into the executions that launched them, or into none."""

import itertools

import numpy as np

from tomat.perf.profile.planes import GpuExecutions
from tomat.perf.profile.trace import load_trace
from tomat.perf.profile.trace_data import ModuleRun

LAUNCHES = "[0] GpuExecutable::ExecuteThunks"


def launched(*events):
    """Of (thread, label, correlation_id, start, end)."""
    found = GpuExecutions()
    for thread, label, correlation_id, start, end in events:
        found.add(thread, label, correlation_id, start, end)
    return found


def test_a_kernel_is_of_the_execution_whose_thread_launched_it():
    found = launched(
        (0, LAUNCHES, 0, 100, 200),
        (0, "cuGraphLaunch (CudaGraph:1)", 7, 110, 120),
        (0, "cuLaunchKernel", 8, 150, 160),
        (0, LAUNCHES, 0, 300, 400),
        (0, "cuLaunchKernel", 9, 310, 320),
        (1, "[1] GpuExecutable::ExecuteThunks", 0, 90, 500),  # another device's, at the same time
        (1, "cuLaunchKernel", 10, 350, 360),
    )
    kernels = [
        (9, "jit_step", 5, 4000, 4100),
        (7, "jit_step", 5, 1000, 1100),
        (7, "jit_step", 5, 1200, 1300),  # one launch of many kernels
        (8, "jit_step", 5, 1400, 1500),
    ]
    assert found.of_kernels(kernels) == [ModuleRun("jit_step", 5, 1000, 1500), ModuleRun("jit_step", 5, 4000, 4100)]
    assert found.of_kernels([(10, "jit_step", 5, 2000, 2100)]) == [ModuleRun("jit_step", 5, 2000, 2100)]


def test_kernels_that_no_execution_launched_make_none():
    found = launched(
        (0, LAUNCHES, 0, 100, 200),
        (0, "MemcpyH2D", 3, 250, 260),  # after it
        (0, "MemcpyH2D", 4, 50, 60),  # before it
        (2, "MemcpyD2H", 5, 150, 160),  # of another thread
        (0, "MemcpyD2D", 6, 150, 160),
    )
    kernels = [(3, "jit_step", 5, 0, 1), (4, "jit_step", 5, 2, 3), (5, "jit_step", 5, 4, 5), (6, "", 0, 6, 7)]
    assert found.of_kernels(kernels) == []


def test_launches_on_lines_of_their_own_go_to_the_thread_around_them():
    """As AMD's profiler writes them: two devices, each with a thread that annotates and a line of launches."""
    threads = [
        (t, "GpuExecutable::ExecuteThunks", 0, start + 5 * t, start + 5 * t + 40)
        for t in (0, 1)
        for start in (100, 200)
    ]
    nested = [
        (t, "jit_step:XLA GPU module", 0, start + 5 * t + 2, start + 5 * t + 38) for t in (0, 1) for start in (100, 200)
    ]
    launches = [
        (10 + t, "hipModuleLaunchKernel", 100 * t + i, start + 5 * t + 1 + 12 * j, start + 5 * t + 3 + 12 * j)
        for t in (0, 1) for i, (start, j) in enumerate([(100, 0), (100, 3), (200, 0), (200, 3)], start=1)
    ]  # fmt: skip
    elsewhere = [(20, "hipMemcpyDtoDAsync", 900, 300, 310)]
    found = launched(*threads, *nested, *launches, *elsewhere)
    for t in (0, 1):
        kernels = [(100 * t + i, "jit_step", 5, 1000 * i, 1000 * i + 500) for i in (1, 2, 3, 4)]
        expected = [ModuleRun("jit_step", 5, 1000, 2500), ModuleRun("jit_step", 5, 3000, 4500)]
        assert found.of_kernels([*kernels, (900, "jit_step", 5, 9000, 9100)]) == expected


def test_the_executions_of_a_real_trace_hold_its_kernels(gpu_profile):
    device = load_trace(gpu_profile).devices[0]
    steps = [run for run in device.modules if run.program == "jit__train_step"]
    assert len(steps) == 4
    assert all(a.end_ps <= b.start_ps for a, b in itertools.pairwise(steps))
    starts = device.ops.start_ps
    inside = sum(int(((starts >= run.start_ps) & (starts < run.end_ps)).sum()) for run in steps)
    of_step = np.array([kind.program == "jit__train_step" for kind in device.kinds])
    assert inside >= int(of_step[device.ops.kind].sum()) > 3_000
