"""Writes measured rows into the log of an output folder (`train/runs/run_log.py`)."""

from collections.abc import Mapping
from typing import Any

from tomat.measure.lab.max_batch import Probe
from tomat.measure.lab.messages import Limits
from tomat.measure.lab.record import LabRow
from tomat.train.runs.devices import DETAILS
from tomat.train.runs.run_log import LAB, ROW, Asked, append_line, machine

OF_A_ROW = (
    "batch_sequences", "accumulations", "sequence_tokens", "parameters", "tokens_per_second_median",
    "step_seconds_median", "compile_cold_seconds", "compile_cached_seconds", "peak_memory_bytes", "memory_limit_bytes",
)  # fmt: skip


def log_row(output_dir: str, sweep: str, title: str, row: LabRow, asked: Asked) -> None:
    """Log what is known of a row so far. `asked` is the command that started its sweep."""
    ratio, setup = row.ratio, row.setup
    known = setup | row.to_dict()
    figures: dict[str, Any] = {key: known.get(key) for key in OF_A_ROW} | row.mfu
    figures |= {"loss": setup.get("warm_loss"), "windows": len(row.windows), "base": row.base}
    if ratio is not None:
        figures |= {f"against_base_{key}": getattr(ratio, key) for key in ("mean", "low", "high")}
        figures["verdict"] = ratio.verdict
    names = {"sweep": sweep, "purpose": title, "key": row.key, "settings": row.overrides}
    _append(output_dir, row.name, row, figures, asked, setup, **names)


def log_probe(
    output_dir: str, title: str, name: str, probe: Probe, asked: Asked, limits: Limits, setup: Mapping[str, Any]
) -> None:
    """Log the result of a batch that was tried. `setup` has the devices that it ran on."""
    figures = {
        "batch_sequences": probe.batch_sequences,
        "tokens_per_second_median": probe.tokens_per_second,
        "step_seconds_median": probe.step_seconds,
        "peak_memory_bytes": probe.peak_memory_bytes,
        "memory_limit_bytes": limits.memory_bytes,
        "loss": probe.loss,
    }
    key = f"{name}, {limits.memory_bytes}, {asked.recipe}, {dict(asked.settings)}"
    names = {"sweep": title, "purpose": f"Find the largest batch: {title}", "key": key, "settings": asked.settings}
    _append(output_dir, name, probe, figures, asked, setup, **names)


def _append(output_dir: str, name: str, row: LabRow | Probe, figures: Mapping[str, Any], asked: Asked,
            setup: Mapping[str, Any], **names: Any) -> None:  # fmt: skip
    known = {key: value for key, value in figures.items() if value is not None}
    how = {"command": asked.command, "recipe": asked.recipe, **{key: setup.get(key) for key in DETAILS}, **machine()}
    append_line(output_dir, LAB, name, ROW, **names, status=row.status, reason=row.reason, figures=known, **how)
