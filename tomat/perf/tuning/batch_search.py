"""Which batch to try next on the way to the largest one, whoever judges: the compiler (`search.py`) or runs on the
devices that are here (`measure/lab/max_batch.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Tried(NamedTuple):
    """A size that was tried; sizes are batches in some unit."""

    fits: bool
    memory_bytes: int | None
    """None where it is not known, as of a run that was ended."""


@dataclass(frozen=True)
class Judge:
    """How far what a judge says of memory can be trusted."""

    apart: float
    """Of two sizes that a line goes through, the smaller over the larger, at most: between neighbours noise would
    decide the slope."""
    beyond: float
    """How far beyond the largest that fits the next size is, where the line puts the edge still nearer."""
    furthest: float
    """A size beyond all that have fitted is at most this many times as large as the largest of them."""


COMPILER = Judge(apart=1.0, beyond=0.0, furthest=float("inf"))
RUNS = Judge(apart=0.7, beyond=0.02, furthest=8)
"""Two measurements of a process's memory differ by 2 %."""


def next_size(
    known: Mapping[int, Tried], first: int, most: int, limit_bytes: int | None, judge: Judge = COMPILER
) -> int | None:
    """The size to try next, from 1 to `most`; None once the largest that fits and the next one up are known.

    Doubled, or where the memory of two is known, read off the line through it, which is nearly straight; near the edge
    a little beyond it, so that the edge is between two sizes, and what is left of the bracket is halved, or cut by it.
    """
    fit = max((size for size, one in known.items() if one.fits), default=0)
    unfit = min((size for size, one in known.items() if not one.fits and size > fit), default=most + 1)
    if unfit == fit + 1:
        return None
    if not known:
        return min(first, most)
    guess, step = _by_line(known, fit, most, limit_bytes, judge), max(1, round(judge.beyond * fit))
    if not fit:
        return max(1, min(min(known) // 2 if guess is None else guess, unfit - 1))
    if unfit > most:
        target = 2 * fit if guess is None else max(guess, fit + step)
        return int(max(fit + 1, min(target, judge.furthest * fit, most)))
    if guess is not None and unfit - fit > 2 * step and fit <= guess + step < unfit:
        return max(guess + step, fit + 1)
    # Every other time, so that a line that names the wrong end of the bracket does not lead through all of it.
    inside = guess is not None and fit < guess < unfit and len(known) % 2
    return guess if inside else (fit + unfit) // 2


def _by_line(known: Mapping[int, Tried], fit: int, most: int, limit_bytes: int | None, judge: Judge) -> int | None:
    """The largest size below the limit on a line through the two nearest to `fit` that are apart."""
    points = sorted((abs(size - fit), size, one.memory_bytes) for size, one in known.items() if one.memory_bytes)
    if limit_bytes is None or len(points) < 2:
        return None
    (_, near, near_bytes), *others = points
    far = [point for point in others if min(point[1], near) <= judge.apart * max(point[1], near)]
    _, other, other_bytes = (far or others[-1:])[0]
    slope = (near_bytes - other_bytes) / (near - other)
    if slope <= 0:  # as with a configured microbatch, which the batch only repeats; or it is noise
        return None if judge.beyond else most
    return int(near + (limit_bytes - near_bytes) / slope)
