"""What collectives of a slice reach, from the JSON that `tomat bench chip` writes beside its CSV.

Its fits say `seconds = start + bytes moved / rate` for each kind. The model of a plan (`perf/cost/interconnect.py`) has
the hops apart from the start, and the rate as a share of the links that a ring over the whole slice has.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.records import Amount, Positive, read_typed, typed
from tomat.hardware.chips import TPU_SLICES
from tomat.perf.cost.interconnect import HOP_SECONDS, LinkRates, link_bandwidth
from tomat.perf.cost.torus import coordinates, entrances, hops_across

PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""Kinds that go round, and how often: an all-reduce scatters, then gathers."""
PERMUTE = "collective-permute"
"""Of neighbours: one hop."""


@dataclass(frozen=True)
class _Fit:
    start_seconds: Amount
    bytes_per_second: Amount | None


@dataclass(frozen=True)
class _Report:
    chip: str
    n_devices: Positive
    collective_fits: dict[str, _Fit]
    timed_with: Any


def measured_rates(timings: Path) -> tuple[str, dict[str, Any]] | None:
    """The chip and its record of collectives, from the JSON beside a file of timings; None where there is none, or it
    has no collectives (of one device).

    Args:
        timings: The CSV.

    Raises:
        TomatError: The JSON is damaged, or of a slice that is not known.
    """
    path = timings.with_suffix(".json")
    if not path.is_file():
        return None
    how = "Restore it, or move it away from beside the CSV."
    report = read_typed(path, _Report, how)
    chip, n_devices, fits = report.chip, report.n_devices, report.collective_fits
    rings = {kind: fits[kind] for kind in PASSES if kind in fits}
    if not rings:
        return None
    slices = [each for each in TPU_SLICES.values() if each.chip.name == chip and each.n_devices == n_devices]
    if not slices:
        raise TomatError(f"{path}: no TPU slice of {n_devices} devices of {chip} is known.")
    places = [coordinates(device, slices[0]) for device in range(n_devices)]
    hops = {kind: passes * hops_across(places, slices[0]) for kind, passes in PASSES.items()} | {PERMUTE: 1}
    starts = [fits[kind].start_seconds - hops[kind] * HOP_SECONDS for kind in hops if kind in fits]
    nominal = entrances(places, slices[0]) * link_bandwidth(slices[0])
    shares = [fit.bytes_per_second / nominal for fit in rings.values() if fit.bytes_per_second]
    found = {"start_seconds": max(0.0, float(np.median(starts))), "ring_efficiency": float(np.median(shares or [0.0]))}
    rates = typed(found, LinkRates, path, how)
    return chip, asdict(rates) | {"slice": slices[0].name, "timed_with": str(report.timed_with)}
