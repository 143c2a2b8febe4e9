import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.perf.profile.timeline import attribute
from tomat.perf.profile.trace_data import Events

HORIZON = 40
N_KINDS = 5


@st.composite
def nested_line(draw, line: int):
    """Events of one line, properly nested, as (kind, start, duration, line)."""

    def inside(low: int, high: int, depth: int):
        events = []
        at = low
        while at < high and draw(st.booleans()):
            start = draw(st.integers(at, high - 1))
            end = draw(st.integers(start + 1, high))
            events.append((draw(st.integers(0, N_KINDS - 1)), start, end - start, line))
            if depth < 2:
                events += inside(start, end, depth + 1)
            at = end
        return events

    return inside(0, HORIZON, 0)


def innermost(events, line, tick):
    """Kind that has the line at a tick: the event that starts last, and of those the shortest."""
    open_events = [e for e in events if e[3] == line and e[1] <= tick < e[1] + e[2]]
    # of equal intervals the one later in the list is the inner one
    best = None
    for e in open_events:
        if best is None or (e[1], -e[2]) >= (best[1], -best[2]):
            best = e
    return None if best is None else best[0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_attribution_is_that_of_a_tick_by_tick_count(data):
    events = [e for line in range(data.draw(st.integers(1, 3))) for e in data.draw(nested_line(line))]
    # equal intervals on one line have no order: keep one of each
    events = list({(e[1], e[2], e[3]): e for e in events}.values())
    collective = np.array([False, False, False, True, True])
    cut = data.draw(st.integers(1, HORIZON - 1))
    windows = np.array([[0, cut], [cut, data.draw(st.integers(cut, HORIZON))]])
    module = np.array([[5, 30]])
    result = attribute(Events.build(events), Events.build([]), collective, windows, module)

    exclusive, hidden = np.zeros(N_KINDS), np.zeros(N_KINDS)
    between = waiting = 0
    for tick in range(int(windows[-1, 1])):
        kinds = [k for line in range(3) if (k := innermost(events, line, tick)) is not None]
        compute = [k for k in kinds if not collective[k]]
        transfers = [k for k in kinds if collective[k]]
        for kind in compute:
            exclusive[kind] += 1 / len(compute)
        for kind in transfers:
            (hidden if compute else exclusive)[kind] += 1 / len(transfers)
        if not kinds:
            inside = module[0, 0] <= tick < module[0, 1]
            waiting, between = waiting + inside, between + (not inside)
    np.testing.assert_allclose(result.exclusive_ps, exclusive, atol=1e-9)
    np.testing.assert_allclose(result.hidden_ps, hidden, atol=1e-9)
    np.testing.assert_allclose([result.between_ps, result.waiting_ps], [between, waiting], atol=1e-9)
    total = result.exclusive_ps.sum() + result.between_ps + result.waiting_ps
    np.testing.assert_allclose(total, result.total_ps)


def test_an_asynchronous_collective_is_hidden_while_compute_runs():
    # kinds: 0 compute, 1 the transfer (and the -done that waits for it)
    ops = Events.build([(0, 0, 60, 0), (1, 60, 40, 0)])
    flight = Events.build([(1, 10, 90, 1)])
    result = attribute(ops, flight, np.array([False, True]), np.array([[0, 100]]), np.array([[0, 100]]))
    assert result.exclusive_ps.tolist() == [60, 40]
    assert result.hidden_ps.tolist() == [0, 50]


def test_gaps_name_their_neighbours():
    ops = Events.build([(0, 0, 10, 0), (1, 25, 10, 0)])
    result = attribute(ops, Events.build([]), np.zeros(2, bool), np.array([[0, 50]]), np.array([[0, 20]]))
    assert result.gaps.tolist() == [[10, 25, 0, 1], [35, 50, 1, -1]]
    assert (result.waiting_ps, result.between_ps) == (10, 20)
