"""Damaged events of a trace: what makes one unusable, and how many are left out before the file is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tomat.base.errors import TomatError

LONGEST_TRACE_PS = 86_400 * 10**12
"""A day. Profilers keep seconds; an event further than this from the others, or longer, has a damaged time."""
MAX_LEFT_OUT = 10
MAX_LEFT_OUT_SHARE = 0.01
"""Damaged events of a file or of one device that are left out, above which (both) the file is refused as damaged or
foreign."""
# What is wrong with an event that is left out, for the note that says so.
UNKNOWN_METADATA = "name metadata that the file does not hold"
NEGATIVE_DURATION = "have a negative duration"
NO_DURATION = "have no duration"
NO_TIME = "have no time that is a number"
FAR_AWAY = "lie or last more than a day from the others"
MALFORMED = "are not formed as events"


def clock_origin(times: Iterable[tuple[int, int]], one_day: int) -> int:
    """The time to count from: 0 where a trace counts from its own start, else the middle one of `times`.

    Args:
        times: (time, events that have it), in the writer's unit; some writers count from 1970, whose picoseconds are
            more than 64 bits hold.
        one_day: in that unit.
    """
    ordered = sorted((time, weight) for time, weight in times if weight > 0)
    half = sum(weight for _, weight in ordered) / 2
    for time, weight in ordered:
        half -= weight
        if half <= 0:
            return time if abs(time) > one_day else 0
    return 0


def left_out_note(left_out: Mapping[str, int], event_count: int) -> str:
    """Which events are in no figure, and why."""
    total = sum(left_out.values())
    return f"{total:,} of {event_count:,} events are damaged and left out: " + ", ".join(
        f"{count:,} {wrong}" for wrong, count in sorted(left_out.items())
    )


def refuse_damaged(place: str, left_out: Mapping[str, int], event_count: int) -> None:
    """Stop where so many events are damaged that what is left is no picture of the step.

    Args:
        place: A file, or a device in it. A device is judged alone too: a host has a hundred times its events.
        left_out: What is wrong with its damaged events, and how many.
        event_count: All its events.

    Raises:
        TomatError: above `MAX_LEFT_OUT` events and `MAX_LEFT_OUT_SHARE` of all.
    """
    total = sum(left_out.values())
    if total > MAX_LEFT_OUT and total > MAX_LEFT_OUT_SHARE * event_count:
        other_schema = " It may come from a profiler with another schema than that of jax 0.11.1."
        raise TomatError(
            f"{place}: {left_out_note(left_out, event_count)}. At most {MAX_LEFT_OUT_SHARE:.0%} may be; copy the file "
            "again from the host that wrote it, or take the profile again."
            f"{other_schema if UNKNOWN_METADATA in left_out else ''}"
        )
