"""Chooses the batch to try next in the search for the largest one. The judge of what fits is the compiler (`search.py`)
or runs on the present devices (`measure/lab/max_batch.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Tried(NamedTuple):
    """The result for a size that was tried. Sizes are batches in some unit."""

    fits: bool
    memory_bytes: int | None
    """None if it is not known, as for a run that was ended."""


@dataclass(frozen=True)
class Judge:
    """How far the memory that a judge states can be trusted."""

    apart: float
    """Largest ratio of the smaller to the larger size on a line: between near sizes, noise would decide the slope."""
    beyond: float
    """Least step beyond the largest size that fits, as a share of it, even if the line puts the edge nearer."""
    furthest: float
    """A size beyond all that fitted is at most this many times the largest that fitted."""


COMPILER = Judge(apart=1.0, beyond=0.0, furthest=float("inf"))
RUNS = Judge(apart=0.7, beyond=0.02, furthest=8)
"""Two measurements of a process's memory differ by 2 %."""


def next_size(
    known: Mapping[int, Tried], first: int, most: int, limit_bytes: int | None, judge: Judge = COMPILER
) -> int | None:
    """The size to try next, from 1 to `most`; None once the largest that fits and the next one up are known.

    The size is doubled, or once the memory of two sizes is known, taken from the line through both, since memory is
    nearly linear. Near the edge it is a little beyond the line's size, so that the edge is bracketed. The bracket that
    remains is halved, or cut at the line's size.
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
    # The line cuts only every other time, so that a wrong line does not lead through the whole bracket step by step.
    inside = guess is not None and fit < guess < unfit and len(known) % 2
    return guess if inside else (fit + unfit) // 2


def _by_line(known: Mapping[int, Tried], fit: int, most: int, limit_bytes: int | None, judge: Judge) -> int | None:
    """The largest size below the limit, by a line through the two sizes nearest to `fit` that are far enough apart."""
    points = sorted((abs(size - fit), size, one.memory_bytes) for size, one in known.items() if one.memory_bytes)
    if limit_bytes is None or len(points) < 2:
        return None
    (_, near, near_bytes), *others = points
    far = [point for point in others if min(point[1], near) <= judge.apart * max(point[1], near)]
    _, other, other_bytes = (far or others[-1:])[0]
    slope = (near_bytes - other_bytes) / (near - other)
    if slope <= 0:  # a configured microbatch, which a larger batch only repeats, or noise
        return None if judge.beyond else most
    return int(near + (limit_bytes - near_bytes) / slope)
