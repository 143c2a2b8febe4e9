"""Finds on which devices the steps of a run ran, from its history; what was asked for does not say that.

A run goes on wherever there is room. A figure of its steps is only true of one kind of devices and settings, so it is
taken over the steps since either last changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tomat.base.documents import is_figure
from tomat.base.errors import TomatError
from tomat.hardware.chips import FoundDevices, slice_named
from tomat.train.runs.history import Event

NOT_ON_RECORD = "which devices ran is not on record"
ASKED = "asked_slice"
DETAILS = ("devices", "chips", "hosts", ASKED)
"""Keys, in an event that begins a piece or in a line of the log, of what ran and of the configured slice."""


def devices_of(event: Mapping[str, Any]) -> FoundDevices | None:
    """What an event that begins a piece of a run, or a line of the log, says of its devices; None: nothing."""
    return FoundDevices.from_words(event.get("devices"), event.get("hosts"))


def devices_details(found: FoundDevices, asked: str | None) -> dict[str, Any]:
    return dict(zip(DETAILS, (found.words, found.n_chips, found.n_hosts, asked), strict=True))


def asked_but_not_found(found: FoundDevices | None, asked: str | None) -> bool:
    """Whether the devices are not those of the slice `asked`, or not known to be."""
    if asked is None or found is None:
        return asked is not None
    try:
        return found.difference(slice_named(str(asked))) is not None
    except TomatError:  # a slice that this version does not know, or a damaged line
        return True


def devices_sentence(found: FoundDevices | None, asked: str | None) -> str:
    """Devices, with the slice that was asked for where it is another; for a cell of a table."""
    words = NOT_ON_RECORD if found is None else found.words if found.n_hosts == 1 else str(found)
    return f"{words} (asked for: {asked})" if asked_but_not_found(found, asked) else words


@dataclass(frozen=True)
class RanSteps:
    """The steps of a run since devices and configuration last changed."""

    rows: list[dict[str, Any]]
    devices: FoundDevices | None
    """None: not on record."""
    notes: tuple[str, ...]
    """What a reader of their figures must know, each a sentence without its full stop."""


def last_devices(events: Sequence[Event]) -> FoundDevices | None:
    """The devices that the newest piece of a run ran on; None: not on record."""
    begun = _begun(events)
    return devices_of(begun[-1]) if begun else None


def ran_steps(rows: Sequence[dict[str, Any]], events: Sequence[Event], asked: str | None) -> RanSteps:
    # A resume takes back the steps that were done beyond its checkpoint: the last event at or before a step counts.
    pieces: list[Event] = []
    for event in _begun(events):
        pieces = [one for one in pieces if one["step"] < event["step"]] + [event]
    last_step = max((row["step"] for row in rows), default=-1)
    with_steps = [one for one in pieces if one["step"] <= last_step]
    last = with_steps[-1] if with_steps else pieces[-1] if pieces else {}
    found = devices_of(last)
    notes = []
    if asked_but_not_found(found, asked):
        notes.append(f"slice {asked} was asked for, and {NOT_ON_RECORD if found is None else f'{found} ran'}")
    kept = list(rows)
    alike = list(itertools.takewhile(lambda one: _ran_with(one) == _ran_with(last), reversed(with_steps)))
    if len(alike) < len(with_steps):  # steps from before the first piece on record count as its own
        first = alike[-1]["step"]
        kept = [row for row in rows if row["step"] >= first]
        if len(kept) < len(rows):
            older = f"the {len(rows) - len(kept):,} steps before step {first:,}"
            notes.append(f"{older} ran on other devices or with another configuration, and are left out")
    if with_steps and _ran_with(pieces[-1]) != _ran_with(last):
        said = "config.yaml is of a later start that took no step"
        notes.append(f"{said}, and its settings may not be those of the steps")
    return RanSteps(kept, found, tuple(notes))


def _begun(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event["event"] in ("start", "resume") and is_figure(event.get("step"))]


def _ran_with(event: Event) -> tuple[object, ...]:
    return event.get("devices"), event.get("hosts"), event.get("configuration")
