"""One planned row of a sweep in figures: what its record keeps, and how it stands against its base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tomat.hardware.mfu import TABLE_UTILISATIONS
from tomat.pages.tables import percent
from tomat.tuning.sweep_config import SweepRow
from tomat.tuning.windowed import windowed_einsums

if TYPE_CHECKING:
    from tomat.hardware.chips import Slice
    from tomat.planning.compile.compiler import CompiledStep
    from tomat.profile.breakdown import Breakdown
    from tomat.training.config import TrainConfig

FITS, OOM, FAILED = "fits", "does not fit", "failed"
"""Status of a row."""

UTILISATION_KEYS = tuple(one.key for one in TABLE_UTILISATIONS)
KEPT_OPERATIONS = 10
KEPT_BUFFERS = 5
INTERVAL = ("estimate", "low", "high")
SAME = 0.01
"""A difference of the estimates below this says nothing: "as fast"."""


class PlanLike(Protocol):
    """What a sweep needs of a plan (`plan.py`)."""

    @property
    def compiled(self) -> CompiledStep: ...
    @property
    def breakdown(self) -> Breakdown | None: ...
    def to_dict(self) -> dict[str, Any]: ...


def described(row: SweepRow, config: TrainConfig | None, slice_: Slice | None) -> dict[str, Any]:
    """What is known of a row before it is planned."""
    from tomat.training.config import config_hash

    return {
        "name": row.name,
        "question": row.question,
        "explain": row.explain,
        "base": row.base,
        "overrides": dict(row.overrides),
        "config_file": row.config_path.name,
        "config_hash": config_hash(config) if config else None,
        "model": config.preset if config else None,
        "batch_sequences": config.batch_size if config else None,
        "sequence_tokens": config.seq_len if config else None,
        "slice": slice_.name if slice_ else row.slice,
        "n_chips": slice_.n_chips if slice_ else None,
    }


def failed(row: SweepRow, config: TrainConfig | None, slice_: Slice | None, error: str) -> dict[str, Any]:
    """The record of a row that has no answer."""
    return {**described(row, config, slice_), "status": FAILED, "error": " ".join(error.split())}


def planned(row: SweepRow, config: TrainConfig, slice_: Slice, plan: PlanLike) -> dict[str, Any]:
    """The record of a row, with units in the keys; the same for the same plan, whether it was cached or not."""
    values = plan.to_dict()
    step = _interval(values.get("step_seconds"))
    tokens = config.batch_size * config.seq_len / slice_.n_chips
    record = {
        **described(row, config, slice_),
        "status": FITS if values["fits"] else OOM,
        "error": "",
        "hbm_required_bytes": values["hbm_required_bytes"],
        "hbm_capacity_bytes": values["hbm_capacity_bytes"],
        "memory_space": values["memory"]["memory_space"],
        "largest_buffers": values["memory"]["largest"][:KEPT_BUFFERS],
        "step_seconds": step,
        **{key: _interval(values.get(key)) for key in UTILISATION_KEYS},
        # The shortest step has the most tokens a second.
        "tokens_per_second_per_chip": _interval(
            step and {name: tokens / step[of] for name, of in zip(INTERVAL, ("estimate", "high", "low"), strict=True)}
        ),
        "compiler": values.get("compiler"),
        "program_key": values.get("program_key"),
        "compile_seconds": values.get("compile_seconds"),
        "notes": list(values.get("notes") or ()),
        "categories": [],
        "top_operations": [],
        "windowed_einsums": None,
    }
    breakdown = plan.breakdown
    if breakdown is not None:
        seconds = {op.name: op.seconds for op in breakdown.ops}
        windowed = windowed_einsums(plan.compiled.program, seconds, breakdown.step_seconds)
        record |= {
            "categories": [
                {
                    "name": group.name,
                    "seconds": group.seconds,
                    "share": group.share,
                    "hidden_seconds": group.hidden_seconds,
                    "flops_fraction": group.flops_fraction,
                }
                for group in breakdown.categories
            ],
            "top_operations": [
                {"name": op.name, "category": str(op.category), "seconds": op.seconds, "source": op.source}
                for op in breakdown.top(KEPT_OPERATIONS)
            ],
            "windowed_einsums": windowed.to_dict() if windowed else None,
        }
    return record


def _interval(value: Any) -> dict[str, float] | None:
    """`{"estimate", "low", "high"}`; None where there is no estimate."""
    if not isinstance(value, Mapping) or value.get("estimate") is None:
        return None
    return {name: float(value[name]) for name in INTERVAL}


def largest_category(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The category with the most time."""
    return max(record.get("categories") or (), key=lambda group: group["seconds"], default=None)


def ranked(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The best MFU first; then what does not fit, the smallest overshoot first; then what failed."""

    def order(record: Mapping[str, Any]) -> tuple[int, float, str]:
        if record["status"] == FITS:
            mfu = record["mfu_full"]
            return 0, -(mfu["estimate"] if mfu else 0.0), record["name"]
        if record["status"] == OOM:
            return 1, record["hbm_required_bytes"] / record["hbm_capacity_bytes"], record["name"]
        return 2, 0.0, record["name"]

    return sorted(records, key=order)


def base_of(record: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The record of the row that this one is compared with, if it is there."""
    return next((other for other in records if other["name"] == record["base"]), None)


def speedup(record: Mapping[str, Any], base: Mapping[str, Any] | None) -> float | None:
    """Tokens a second and chip over the base's; None where either has no step time."""
    mine = record.get("tokens_per_second_per_chip")
    theirs = base.get("tokens_per_second_per_chip") if base is not None else None
    return mine["estimate"] / theirs["estimate"] if mine and theirs else None


def against_error(record: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """How a difference of speed stands against the intervals: `beyond the intervals` where they do not touch."""
    mine, theirs = record["tokens_per_second_per_chip"], base["tokens_per_second_per_chip"]
    if mine["low"] == mine["high"] or theirs["low"] == theirs["high"]:
        return "with an error that is not known"
    apart = mine["low"] > theirs["high"] or mine["high"] < theirs["low"]
    return "beyond the intervals" if apart else "within the intervals"


def verdict(record: Mapping[str, Any], base: Mapping[str, Any] | None) -> str:
    """How the row stands against its base, in a few words."""
    if record["status"] == FAILED:
        return f"failed: {record['error']}"
    if record["status"] == OOM:
        over = record["hbm_required_bytes"] - record["hbm_capacity_bytes"]
        share = percent(over / record["hbm_capacity_bytes"], 0)
        return f"does not fit: {gib(over)}{memory_space(record)} too much ({share})"
    if record["base"] is None:
        return "base"
    factor = speedup(record, base)
    if factor is None or base is None:
        return f"fits; `{record['base']}` has no step time to compare with"
    if abs(factor - 1) < SAME:
        return f"as fast as `{record['base']}` ({factor:.2f}x tokens/s/chip)"
    words = "faster" if factor > 1 else "slower"
    return f"{words} than `{record['base']}`: {factor:.2f}x tokens/s/chip, {against_error(record, base)}"


def gib(count: float) -> str:
    """Bytes as `31.24 GiB`; below 1 GiB in MiB."""
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.1f} MiB"


def required_text(record: Mapping[str, Any]) -> str:
    """Of a row that was compiled, `10.10 of 31.24 GiB`."""
    required, capacity = record["hbm_required_bytes"], record["hbm_capacity_bytes"]
    if capacity < 2**30:
        return f"{gib(required)} of {gib(capacity)}{memory_space(record)}"
    return f"{required / 2**30:.2f} of {gib(capacity)}"


def memory_space(record: Mapping[str, Any]) -> str:
    """ " of vmem" where it is a kernel's tiles that do not fit, and not the step."""
    space = record["memory_space"]
    return "" if space == "hbm" else f" of {space}"
