"""The search for the largest batch, over sizes whose memory is a formula; compiles: `test_search.py`."""

import numpy as np

from tomat.perf.tuning.batch_search import RUNS, Tried, next_size

GIB = 2**30


def search(memory, limit_bytes, first=8, most=10_000):
    """The sizes tried, given what each takes."""
    known = {}
    while (size := next_size(known, first, most, limit_bytes, RUNS)) is not None:
        assert size not in known and 1 <= size <= most
        used = memory(size)
        fits = used <= (limit_bytes or 5 * GIB)
        known[size] = Tried(fits, used if fits else None)
    return known


def largest(known):
    return max((size for size, one in known.items() if one.fits), default=0)


def test_it_is_found_where_memory_is_noisy_and_jumps():
    rng = np.random.default_rng(0)
    used = {size: int(GIB + size * 20e6 + (size // 32) * 5e7 + rng.normal(0, 2e7)) for size in range(1, 1000)}
    known = search(used.__getitem__, 6 * GIB, most=999)
    assert not known[largest(known) + 1].fits
    assert len(known) <= 16


def test_without_a_limit_that_is_known_it_is_bisected_and_nothing_or_everything_may_run():
    known = search(lambda size: size * GIB // 40, None)
    assert largest(known) == 200 and not known[201].fits
    assert largest(search(lambda size: 9 * GIB, 5 * GIB)) == 0
    assert largest(search(lambda size: size, 5 * GIB, most=100)) == 100
