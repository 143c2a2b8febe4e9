"""Turns concurrent, nested events into exclusive times, which sum to the step.

The rules, in one place:

* Within a line, the innermost running event owns the line (the body of a ``while`` owns it, not the ``while``).
* When several lines run at once (CUDA streams, CPU threads), compute operations share the moment equally. A collective
  that runs beside compute gets nothing: that part is *hidden*. It is *exposed* only where no compute runs.
* A moment in which nothing runs belongs to the program if one was executing; otherwise it lies between steps.
"""

from dataclasses import dataclass

import numpy as np

from tomat.perf.profile.trace_data import Events


@dataclass(frozen=True)
class Attribution:
    """Picoseconds of the windows by operation kind, and the time without operations. The sum is `total_ps`."""

    total_ps: float
    exclusive_ps: np.ndarray
    """float64 [kinds]."""
    hidden_ps: np.ndarray
    """float64 [kinds]: time of collectives beside compute, which is not part of the sum."""
    occurrences: np.ndarray
    """int64 [kinds]: events that start inside a window."""
    between_ps: float
    """Time in which nothing ran and no program was executing."""
    waiting_ps: float
    """Time in which nothing ran although a program was executing."""
    gaps: np.ndarray
    """int64 [n, 4]: stretches of the windows in which nothing ran, [start_ps, end_ps), with the kinds of the operations
    before and after (-1: none)."""


Segments = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(start_ps, end_ps, kind) of stretches during which one event is innermost on its line; arrays of equal length."""


def innermost_segments(events: Events) -> Segments:
    """The stretches in which each event is the innermost of its line, in O(n)."""
    starts, ends = events.start_ps, events.start_ps + events.duration_ps
    same_line = events.line[1:] == events.line[:-1]
    nests = same_line & (starts[1:] < ends[:-1])
    if not np.any(nests):
        return starts, ends, events.kind
    # An event in which the next one does not start is a leaf, and is a whole segment. The loop finds the others: the
    # stretches of events that contain others.
    leaf = np.concatenate([~nests, [True]])
    rest = _uncovered_by_leaves(starts, ends, events, leaf)
    kinds = np.concatenate([events.kind[leaf], rest[:, 2].astype(events.kind.dtype)])
    return np.concatenate([starts[leaf], rest[:, 0]]), np.concatenate([ends[leaf], rest[:, 1]]), kinds


def _uncovered_by_leaves(starts: np.ndarray, ends: np.ndarray, events: Events, leaf: np.ndarray) -> np.ndarray:
    """int64 [m, 3] of (start, end, kind): where a containing event is innermost because no event inside it runs."""
    found: list[tuple[int, int, int]] = []
    stack: list[tuple[int, int]] = []  # (end, kind) of the open containing events
    cursor, line = 0, -1
    forever = int(ends.max()) + 1

    def close(until: int, cursor: int) -> int:
        while stack and stack[-1][0] <= until:
            end, kind = stack.pop()
            if end > cursor:
                found.append((cursor, end, kind))
                cursor = end
        return cursor

    columns = (starts.tolist(), ends.tolist(), events.kind.tolist(), events.line.tolist(), leaf.tolist())
    for start, end, kind, event_line, is_leaf in zip(*columns, strict=True):
        if event_line != line:
            close(forever, cursor)
            line, cursor = event_line, start
        if stack:
            if stack[-1][0] <= start:
                cursor = close(start, cursor)
            if stack and start > cursor:
                found.append((cursor, start, stack[-1][1]))
        if is_leaf:
            cursor = end if end > cursor else cursor
        else:
            cursor = start if start > cursor else cursor
            stack.append((end, kind))
    close(forever, cursor)
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def attribute(
    ops: Events, transfers: Events, is_collective: np.ndarray, windows: np.ndarray, module_spans: np.ndarray
) -> Attribution:
    """Split the time of `windows` among the operations of one device, on any number of lines. For `transfers`,
    asynchronous operations in flight (TPU), only the hidden time is counted, because their exposed time is that of the
    `-done` that waits for them. `is_collective` is bool [kinds], `windows` int64 [n, 2] of disjoint [start, end) steps,
    `module_spans` int64 [m, 2] of program executions, ps."""
    segments = innermost_segments(ops)
    segment_starts, segment_ends, segment_kinds = segments
    communicates = is_collective[transfers.kind]
    flight_kinds, flight_starts = transfers.kind[communicates], transfers.start_ps[communicates]
    flight_ends = flight_starts + transfers.duration_ps[communicates]
    # np.unique hashes integers: it takes 2.0 s, sorting 0.2 s, for the 3 M edges of a trace of 1 M events.
    ends = (segment_starts, segment_ends, windows.ravel(), module_spans.ravel(), flight_starts, flight_ends)
    edges = np.sort(np.concatenate(ends))
    edges = edges[np.concatenate([[True], edges[1:] != edges[:-1]])]
    width = np.diff(edges).astype(np.float64)
    first, last = np.searchsorted(edges, segment_starts), np.searchsorted(edges, segment_ends)
    collective = is_collective[segment_kinds]

    def active(spans: np.ndarray) -> np.ndarray:
        first, last = np.searchsorted(edges, spans.T)
        return _active_between(first, last, len(edges))

    in_window = active(windows) > 0
    n_compute = _active_between(first[~collective], last[~collective], len(edges))
    n_collective = _active_between(first[collective], last[collective], len(edges))
    in_module = active(module_spans) > 0

    masked = np.where(in_window, width, 0.0)
    compute = _shares(masked, n_compute > 0, n_compute)
    exposed = _shares(masked, (n_compute == 0) & (n_collective > 0), n_collective)
    hidden = _shares(masked, (n_compute > 0) & (n_collective > 0), n_collective)
    exclusive = np.where(collective, exposed[last] - exposed[first], compute[last] - compute[first])
    hidden_each = np.where(collective, hidden[last] - hidden[first], 0.0)

    def by_kind(kinds: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(kinds, weights=weights, minlength=len(is_collective))

    flight_first, flight_last = np.searchsorted(edges, flight_starts), np.searchsorted(edges, flight_ends)
    n_flight = _active_between(flight_first, flight_last, len(edges))
    overlapped = _shares(masked, (n_compute > 0) & (n_flight > 0), n_flight)
    hidden_in_flight = overlapped[flight_last] - overlapped[flight_first]

    nothing = in_window & (n_compute + n_collective == 0)
    between = float(masked[nothing & ~in_module].sum())
    total = float((windows[:, 1] - windows[:, 0]).sum())
    exclusive_ps = by_kind(segment_kinds, exclusive)
    return Attribution(
        total_ps=total,
        exclusive_ps=exclusive_ps,
        hidden_ps=by_kind(segment_kinds, hidden_each) + by_kind(flight_kinds, hidden_in_flight),
        occurrences=by_kind(ops.kind[inside(windows, ops.start_ps)]),
        between_ps=between,
        waiting_ps=total - between - float(exclusive_ps.sum()),
        gaps=_gaps(edges, nothing, segments),
    )


def _active_between(first: np.ndarray, last: np.ndarray, n_edges: int) -> np.ndarray:
    """How many intervals [edge first, edge last) cover each of the n_edges - 1 stretches."""
    opened = np.bincount(first, minlength=n_edges)
    closed = np.bincount(last, minlength=n_edges)
    return np.cumsum(opened - closed)[:-1]


def _shares(width: np.ndarray, where: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Running integral over the edges of `width / active`, where `where` holds."""
    weight = np.divide(width, active, out=np.zeros_like(width), where=where)
    return np.concatenate([[0.0], np.cumsum(weight)])


def inside(windows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """bool [n]: which times lie in one of the disjoint windows [start, end), int64 [m, 2]."""
    order = np.argsort(windows[:, 0])
    starts, ends = windows[order, 0], windows[order, 1]
    index = np.searchsorted(starts, times, side="right") - 1
    return (index >= 0) & (times < ends[np.maximum(index, 0)])


def _gaps(edges: np.ndarray, nothing: np.ndarray, segments: Segments) -> np.ndarray:
    """Merge neighbouring empty stretches and name the operations on either side."""
    padded = np.concatenate([[False], nothing, [False]])
    starts, ends = np.flatnonzero(padded[1:] & ~padded[:-1]), np.flatnonzero(~padded[1:] & padded[:-1])
    start_ps, end_ps = edges[starts], edges[ends]
    segment_starts, segment_ends, kinds = segments
    # -1 is put first in the kinds before, and last in the kinds after.
    by_end, by_start = np.argsort(segment_ends, kind="stable"), np.argsort(segment_starts, kind="stable")
    before = np.searchsorted(segment_ends[by_end], start_ps, side="right")
    after = np.searchsorted(segment_starts[by_start], end_ps, side="left")
    return np.stack([start_ps, end_ps, np.append(-1, kinds[by_end])[before], np.append(kinds[by_start], -1)[after]], 1)
