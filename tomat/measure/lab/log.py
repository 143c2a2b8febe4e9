"""Measured rows in the log of an output folder (`train/runs/run_log.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tomat.measure.lab.max_batch import Probe
from tomat.measure.lab.messages import Limits
from tomat.measure.lab.record import LabRow
from tomat.train.runs.devices import DETAILS
from tomat.train.runs.run_log import LAB, ROW, Asked, append_line, machine


def log_row(output_dir: str, sweep: str, title: str, row: LabRow, asked: Asked) -> None:
    """Write what is known of a row so far.

    Args:
        output_dir: Whose log.
        sweep: Its name.
        title: Of the sweep.
        row: Measured, or refused.
        asked: How the sweep was asked for; its settings are the row's own.
    """
    ratio, setup = row.ratio, row.setup
    figures: dict[str, Any] = {
        **{key: setup.get(key) for key in ("batch_sequences", "accumulations", "sequence_tokens", "parameters")},
        "tokens_per_second_median": row.tokens_per_second,
        "step_seconds_median": row.step_seconds,
        "compile_cold_seconds": row.compile_cold_seconds,
        "compile_cached_seconds": row.compile_cached_seconds,
        "peak_memory_bytes": row.peak_memory_bytes,
        "memory_limit_bytes": row.memory_limit_bytes,
        "loss": setup.get("warm_loss"),
        "windows": len(row.windows),
        "base": row.base,
        **row.mfu,
    }
    if ratio is not None:
        figures |= {
            "against_base_mean": ratio.mean,
            "against_base_low": ratio.low,
            "against_base_high": ratio.high,
            "verdict": ratio.verdict,
        }
    names = {"sweep": sweep, "purpose": title, "key": row.key, "settings": row.overrides}
    append_line(output_dir, LAB, row.name, ROW, **names, **_found(row, figures, asked, setup))


def log_probe(
    output_dir: str, title: str, name: str, probe: Probe, asked: Asked, limits: Limits, setup: Mapping[str, Any]
) -> None:
    """Write what a batch that was tried has come to.

    Args:
        output_dir: Whose log.
        title: Of the search, which its entries stand under.
        name: Of the probe: policy, accumulations, batch.
        probe: The batch.
        asked: How the search was asked for.
        limits: Of the probe.
        setup: Has the devices that it ran on, and the slice that was asked for (`train/runs/devices.py`).
    """
    figures = {
        "batch_sequences": probe.batch_sequences,
        "tokens_per_second_median": probe.tokens_per_second,
        "step_seconds_median": probe.step_seconds,
        "peak_memory_bytes": probe.peak_memory_bytes,
        "memory_limit_bytes": limits.memory_bytes,
        "loss": probe.loss,
    }
    key = f"{name}, {limits.memory_bytes}, {asked.recipe}, {dict(asked.settings)}"
    purpose = f"Find the largest batch: {title}"
    names = {"sweep": title, "purpose": purpose, "key": key, "settings": asked.settings}
    append_line(output_dir, LAB, name, ROW, **names, **_found(probe, figures, asked, setup))


def _found(row: LabRow | Probe, figures: Mapping[str, Any], asked: Asked, setup: Mapping[str, Any]) -> dict[str, Any]:
    """What a line says of a row or a probe, whichever it is."""
    return {
        "status": row.status,
        "reason": row.reason,
        "figures": {name: value for name, value in figures.items() if value is not None},
        "command": asked.command,
        "recipe": asked.recipe,
        **{key: setup.get(key) for key in DETAILS},
        **machine(),
    }
