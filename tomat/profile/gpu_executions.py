"""Executions of programs on a GPU, which its trace does not mark: told by what the host launched in each.

XLA (jaxlib 0.11.2) annotates the host's thread with `[ordinal] GpuExecutable::ExecuteThunks` while it launches the
kernels of one execution. CUPTI, NVIDIA's tracing library, gives a launch and all kernels of it one `correlation_id`.
"""

from __future__ import annotations

import re
from bisect import bisect_right

from tomat.profile.trace_data import ModuleRun

LAUNCHES = re.compile(r"\[\d+\] GpuExecutable::ExecuteThunks")


class GpuExecutions:
    """What one host's threads launched; `of_kernels` puts a device's kernels into executions."""

    def __init__(self) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._launches: list[tuple[int, int, int]] = []

    def add(self, thread: int, label: str, correlation_id: int, start_ps: int, end_ps: int) -> None:
        """An event of the host's `thread`; `correlation_id` is 0 where it has none."""
        if LAUNCHES.fullmatch(label):
            self._spans.setdefault(thread, []).append((start_ps, end_ps))
        elif correlation_id:
            self._launches.append((thread, start_ps, correlation_id))

    def of_kernels(self, kernels: list[tuple[int, str, int, int, int]]) -> list[ModuleRun]:
        """Executions in order of their start.

        Args:
            kernels: (correlation_id, program, program_id, start_ps, end_ps) of a device's kernels.
        """
        spans = {thread: sorted(found) for thread, found in self._spans.items()}
        execution: dict[int, tuple[int, int]] = {}
        for thread, start, correlation_id in self._launches:
            place = bisect_right(spans.get(thread, []), (start, 2**63)) - 1
            if place >= 0 and start <= spans[thread][place][1]:
                execution[correlation_id] = (thread, place)
        runs: dict[tuple[tuple[int, int], str, int], list[int]] = {}
        for correlation_id, program, program_id, start, end in kernels:
            if program and correlation_id in execution:
                run = runs.setdefault((execution[correlation_id], program, program_id), [start, end])
                run[0], run[1] = min(run[0], start), max(run[1], end)
        found = [ModuleRun(program, program_id, *run) for (_, program, program_id), run in runs.items()]
        return sorted(found, key=lambda run: run.start_ps)
