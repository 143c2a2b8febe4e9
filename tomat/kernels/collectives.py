"""What collectives of a slice reach, from the JSON that `tomat bench chip` writes beside its CSV.

Its fits say `seconds = start + bytes moved / rate` for each kind. The model of a plan (`cost/interconnect.py`) has the
hops apart from the start, and the rate as a share of the links that a ring over the whole slice has.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.cost.interconnect import HOP_SECONDS, LinkRates, checked_rates, link_bandwidth
from tomat.cost.torus import coordinates, entrances, hops_across
from tomat.hardware.chips import TPU_SLICES

PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""Kinds that go round, and how often: an all-reduce scatters, then gathers."""
PERMUTE = "collective-permute"
"""Of neighbours: one hop."""


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
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        chip, n_devices, fits = report["chip"], int(report["n_devices"]), dict(report["collective_fits"])
        rings = {kind: fits[kind] for kind in PASSES if kind in fits}
        if not rings:
            return None
        slices = [each for each in TPU_SLICES.values() if each.chip.name == chip and each.n_devices == n_devices]
        if not slices:
            raise TomatError(f"{path}: no TPU slice of {n_devices} devices of {chip} is known.")
        places = [coordinates(device, slices[0]) for device in range(n_devices)]
        hops = {kind: passes * hops_across(places, slices[0]) for kind, passes in PASSES.items()} | {PERMUTE: 1}
        starts = [float(fits[kind]["start_seconds"]) - hops[kind] * HOP_SECONDS for kind in hops if kind in fits]
        nominal = entrances(places, slices[0]) * link_bandwidth(slices[0])
        shares = [float(fit["bytes_per_second"]) / nominal for fit in rings.values() if fit["bytes_per_second"]]
        rates = LinkRates(max(0.0, float(np.median(starts))), float(np.median(shares)) if shares else 0.0)
        return chip, asdict(checked_rates(rates)) | {"slice": slices[0].name, "timed_with": str(report["timed_with"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TomatError(
            f"{path} is no record of collectives that `tomat bench chip` wrote ({type(error).__name__}: {error}); "
            "restore it, or move it away from beside the CSV."
        ) from None
