"""Executions of programs on a GPU, which its trace does not mark: told by what the host launched in each.

XLA annotates the host's thread while it launches the kernels of one execution: `[ordinal] GpuExecutable::ExecuteThunks`
(jaxlib 0.11.2), the same without ordinal (0.8), `PROGRAM:XLA GPU module` (both, and before). A launch and all its
kernels have one `correlation_id`. NVIDIA's tracing library puts the launch on the thread's line; AMD's on a line of its
own, `Host Threads/N`, whose number is not that of the thread: it is the one whose annotations lie around the launches.
"""

from __future__ import annotations

import re

import numpy as np

from tomat.perf.profile.trace_data import ModuleRun

LAUNCHES = re.compile(r"(\[\d+\] )?GpuExecutable::ExecuteThunks|.+:XLA GPU module")


class GpuExecutions:
    """What one host's threads launched; `of_kernels` puts a device's kernels into executions."""

    def __init__(self) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._launches: dict[int, list[tuple[int, int]]] = {}
        """By line: (start_ps, correlation_id)."""

    def add(self, line: int, label: str, correlation_id: int, start_ps: int, end_ps: int) -> None:
        """An event on a line of the host; `correlation_id` is 0 where it has none."""
        if LAUNCHES.fullmatch(label):
            self._spans.setdefault(line, []).append((start_ps, end_ps))
        elif correlation_id:
            self._launches.setdefault(line, []).append((start_ps, correlation_id))

    def of_kernels(self, kernels: list[tuple[int, str, int, int, int]]) -> list[ModuleRun]:
        """Executions in order of their start.

        Args:
            kernels: (correlation_id, program, program_id, start_ps, end_ps) of a device's kernels.
        """
        execution = self._executions({kernel[0] for kernel in kernels})
        runs: dict[tuple[tuple[int, int], str, int], list[int]] = {}
        for correlation_id, program, program_id, start, end in kernels:
            if program and correlation_id in execution:
                run = runs.setdefault((execution[correlation_id], program, program_id), [start, end])
                run[0], run[1] = min(run[0], start), max(run[1], end)
        found = [ModuleRun(program, program_id, *run) for (_, program, program_id), run in runs.items()]
        return sorted(found, key=lambda run: run.start_ps)

    def _executions(self, wanted: set[int]) -> dict[int, tuple[int, int]]:
        """The execution that launched each of the `wanted` correlation ids, as (line, number) of its annotation."""
        spans = {line: _outermost(found) for line, found in self._spans.items()}
        apart = not spans.keys() & self._launches.keys()
        execution: dict[int, tuple[int, int]] = {}
        for line, launches in self._launches.items():
            mine = [launch for launch in launches if launch[1] in wanted]
            starts = np.array([start for start, _ in mine], dtype=np.int64)
            # Where launches have lines of their own: the thread whose annotations hold the most of them.
            candidates = spans.keys() if apart else spans.keys() & {line}
            places = {thread: _places(spans[thread], starts) for thread in candidates}
            thread = max(places, key=lambda one: (int((places[one] >= 0).sum()), -one), default=None)
            if thread is not None:
                for (_, correlation_id), place in zip(mine, places[thread].tolist(), strict=True):
                    if place >= 0:
                        execution[correlation_id] = (thread, place)
        return execution


def _outermost(spans: list[tuple[int, int]]) -> np.ndarray:
    """int64 [n, 2]: those that lie in no other, in order of their start."""
    kept: list[tuple[int, int]] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not kept or end > kept[-1][1]:
            kept.append((start, end))
    return np.array(kept, dtype=np.int64).reshape(-1, 2)


def _places(spans: np.ndarray, times: np.ndarray) -> np.ndarray:
    """int64 [n]: the last span that begins before each time and has not ended, -1 where there is none."""
    place = np.searchsorted(spans[:, 0], times, side="right") - 1
    return np.where((place >= 0) & (times <= spans[np.maximum(place, 0), 1]), place, -1)
