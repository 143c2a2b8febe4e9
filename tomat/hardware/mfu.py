"""Model FLOPs utilisation: the FLOPs of a step over what the chips could have done in its time.

Every figure here is a fraction (0.087 is 8.7 %). `flops.py` says what the conventions count: `mfu_full` and
`mfu_causal` are the published ones (logits for the whole vocabulary at every position), `mfu_useful` leaves out
padding and logits without a loss, `mfu_levanter` is what Levanter logs, and the convention of the runs in the tracking
issue; `hfu` counts what the program executes. What the chips could have done is by the peak for the operands of each
product (`flops.Products`), in `mfu_levanter` by the bf16 peak for all, as Levanter does it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tomat.base.documents import is_figure
from tomat.base.errors import TomatError
from tomat.hardware.chip_table import Chip
from tomat.hardware.chips import Slice
from tomat.hardware.flops import FieldShape, ModelShape, OperandTypes, Products, UsefulTokens

MAX_STEP_SECONDS = 86_400
"""A duration of more than a day is not a step, but a clock that was set or a damaged number."""


@dataclass(frozen=True)
class Utilisation:
    """One way to count the FLOPs that a step is credited with."""

    key: str
    name: str
    short: str
    """Heading of a column, in a table whose first such column says MFU."""
    counts: str
    """What the convention counts."""
    source: str = ""
    """Who published figures by it."""


UTILISATIONS = (
    Utilisation(
        "mfu_full", "MFU, full attention", "MFU full", "every query sees every key", "PaLM, Levanter's pair count"
    ),
    Utilisation("mfu_causal", "MFU, causal attention", "causal", "only the pairs that the mask leaves", "MaxText"),
    Utilisation("mfu_useful", "MFU, useful", "useful", "no padding, no logits without a loss"),
    Utilisation(
        "mfu_levanter",
        "MFU, as Levanter logs it",
        "Levanter",
        "full attention, mask and softmax with it; all by the bf16 peak",
    ),
    Utilisation("hfu", "HFU", "HFU", "what the program multiplies, recomputation and whole tiles included"),
)
"""Every convention, as reports and pages order them."""
MFU_KEYS = tuple(one.key for one in UTILISATIONS)
TABLE_UTILISATIONS = tuple(one for one in UTILISATIONS if one.key != "mfu_levanter")
"""Columns of a table of many steps; Levanter's figure hardly differs from the full one."""


@dataclass(frozen=True)
class StepWork:
    shape: ModelShape | FieldShape
    parameters: int
    """All parameters of the model that is built."""
    batch_sequences: int
    sequence_tokens: int
    useful: UsefulTokens
    """Those of a typical sequence."""
    full: Products
    causal: Products
    useful_products: Products
    executed: Products
    """Of the whole batch, like the three before it."""
    flops_levanter: float
    operands: OperandTypes = OperandTypes()
    """Types of the executed products' operands."""

    @property
    def tokens(self) -> int:
        """Tokens of a step, padding included."""
        return self.batch_sequences * self.sequence_tokens

    @property
    def useful_tokens(self) -> int:
        """Tokens of a step without padding, for typical sequences."""
        return self.batch_sequences * self.useful.n_tokens

    def utilisation(self, seconds: float, chip: Chip, n_devices: int) -> dict[str, float]:
        """`MFU_KEYS` of a step that took `seconds` on so many JAX devices of a chip.

        Each except Levanter's is the time that the products take at the peak for their operands over the step's time.
        """
        counted = {
            "mfu_full": self.full,
            "mfu_causal": self.causal,
            "mfu_useful": self.useful_products,
            "hfu": self.executed,
        }
        least = {key: products.least_seconds(self.operands, chip.peak_of) for key, products in counted.items()}
        least["mfu_levanter"] = self.flops_levanter / chip.peak_of("bf16")
        return {key: least[key] / (seconds * n_devices) for key in MFU_KEYS}

    def to_dict(self) -> dict[str, Any]:
        """For a JSON report; FLOPs are those of one step."""
        return {
            "model": asdict(self.shape),
            "parameters_total": self.parameters,
            "parameters_matmul": self.shape.matmul_parameters,
            "batch_sequences": self.batch_sequences,
            "sequence_tokens": self.sequence_tokens,
            "useful_tokens_per_sequence": self.useful.n_tokens,
            "density_tokens_per_sequence": self.useful.n_density,
            "loss_vocabulary_rows": self.useful.head_rows,
            "flops_per_step_full": self.full.total,
            "flops_per_step_causal": self.causal.total,
            "flops_per_step_useful": self.useful_products.total,
            "flops_per_step_levanter": self.flops_levanter,
            "flops_per_step_executed": self.executed.total,
            "flops_per_step_executed_by_operand": self.executed.by_operand(self.operands),
        }


def step_report(work: StepWork, slice_: Slice, step_seconds: float) -> dict[str, Any]:
    """A step's work on a slice in a given time, for a JSON report; MFUs are fractions."""
    if not 0 < step_seconds <= MAX_STEP_SECONDS:
        raise TomatError(f"step_seconds is {step_seconds}; expected more than 0, at most {MAX_STEP_SECONDS:,}.")
    return {
        **work.to_dict(),
        **work.utilisation(step_seconds, slice_.chip, slice_.n_devices),
        **slice_dict(slice_),
        **peaks_dict(work, slice_.chip),
        "step_seconds": step_seconds,
        "tokens_per_second": work.tokens / step_seconds,
        "tokens_per_second_per_chip": work.tokens / step_seconds / slice_.n_chips,
        "useful_tokens_per_second_per_chip": work.useful_tokens / step_seconds / slice_.n_chips,
    }


def slice_dict(found: Slice) -> dict[str, Any]:
    return {
        "slice": found.name,
        "chip": found.chip.name,
        "chip_source": found.chip.source,
        "n_chips": found.n_chips,
        "n_hosts": found.n_hosts,
        "peak_bf16_flops_per_second_per_chip": found.chip.peak_bf16_flops_per_second,
    }


def peaks_dict(work: StepWork, chip: Chip) -> dict[str, Any]:
    """The peaks of a chip for what a step multiplies, for a JSON report."""
    operands = work.executed.by_operand(work.operands)
    peaks = {operand: chip.peak_of(operand) * chip.jax_devices_per_chip for operand in operands}
    return {"peak_flops_per_second_per_chip_by_operand": peaks}


@dataclass(frozen=True)
class LiveMfu:
    work: StepWork | None
    """Work of a step; None if its FLOPs are not known, so that no MFU is logged."""
    tokens_per_step: int
    """Padding included."""
    chip: Chip | None
    n_devices: int

    def row(self, step_seconds: float) -> dict[str, float]:
        """`tokens_per_second` and `tokens_per_second_per_chip`, and `MFU_KEYS` where the peak is known."""
        rate = self.tokens_per_step / step_seconds
        shared = self.chip.jax_devices_per_chip if self.chip is not None else 1
        row = {"tokens_per_second": rate, "tokens_per_second_per_chip": rate / max(1, self.n_devices // shared)}
        if self.work is not None and self.chip is not None:
            row |= self.work.utilisation(step_seconds, self.chip, self.n_devices)
        return row


WALL_PARTS = ("compile", "data_loading", "evaluation", "checkpoint", "profiler", "hooks", "other")
"""Where wall-clock time goes beside the device steps."""


@dataclass(frozen=True)
class RunTimes:
    """A run's wall-clock time, split; the parts sum to it exactly."""

    n_steps: int
    steady_step_seconds: tuple[float, ...]
    """Duration of each step in which nothing was compiled."""
    wall_seconds: float
    step_seconds: float
    """All steps, without what was compiled inside them."""
    part_seconds: Mapping[str, float]
    """`WALL_PARTS`. `other` is what no clock saw; it is negative where clocks overlap."""

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]], origin: str | Path) -> "RunTimes":
        """From the rows of a `metrics.jsonl`, which lies at `origin`.

        A row has `step_seconds` and `wall_seconds`, and may have `compile_seconds`, `eval_seconds`,
        `checkpoint_seconds`, `profiler_seconds`, and Levanter's `throughput/loading_time` and `throughput/hook_time`
        (all hooks, evaluation and profiler among them), in seconds. Compilation happens inside another part: it is
        subtracted from the step as far as the step exceeds the median step, then from the evaluation; a remainder is
        not subtracted. Loading and hooks that ran beside a step dispatched ahead cost nothing: they count only as far
        as the wall-clock time has room for them.
        """
        for row in rows:
            _refuse_times(row, origin)
        times = [{key: float(row.get(key) or 0.0) for key in TIME_KEYS} for row in rows]
        timed = [row for row in times if row["step_seconds"] > 0]
        if not timed:
            said = f"{origin}: none of its {len(rows)} rows has step_seconds; expected the metrics.jsonl of a tomat run"
            raise TomatError(f"{said}. Name the folder of one that has trained.")
        steady = tuple(row["step_seconds"] for row in timed if row["compile_seconds"] == 0)
        if steady:
            typical = median(steady)
        else:
            # If every step compiled something, nothing says how long a step would have taken otherwise.
            left = [row["step_seconds"] - row["compile_seconds"] for row in timed]
            typical = min((one for one in left if one > 0), default=min(row["step_seconds"] for row in timed))
        parts: dict[str, float] = {part: 0.0 for part in WALL_PARTS}
        wall = steps = 0.0
        for row in timed:
            step, compiled = row["step_seconds"], row["compile_seconds"]
            evaluation, checkpoint = row["eval_seconds"], row["checkpoint_seconds"]
            profiler = row["profiler_seconds"]
            loading, hooks = row["throughput/loading_time"], row["throughput/hook_time"]
            in_step = min(compiled, max(0.0, step - typical))
            in_evaluation = min(compiled - in_step, evaluation)
            row_wall = row["wall_seconds"] or step + loading + checkpoint + max(hooks, evaluation + profiler)
            found = {
                "compile": compiled,
                "evaluation": evaluation - in_evaluation,
                "checkpoint": checkpoint,
                "profiler": profiler,
            }
            host = {"data_loading": loading, "hooks": max(0.0, hooks - evaluation - profiler)}
            room = max(0.0, row_wall - (step - in_step) - sum(found.values()))
            exposed = min(1.0, room / sum(host.values())) if any(host.values()) else 0.0
            found |= {part: exposed * seconds for part, seconds in host.items()}
            for part, seconds in found.items():
                parts[part] += seconds
            steps += step - in_step
            wall += row_wall
        parts["other"] = wall - steps - sum(parts.values())
        return cls(len(timed), steady, wall, steps, parts)

    @property
    def step_percentiles(self) -> dict[str, float]:
        """p10, p50 and p90 of the steady steps, seconds; the mean of all steps if none was steady."""
        durations = self.steady_step_seconds or (self.step_seconds / self.n_steps,)
        if len(durations) == 1:
            return dict.fromkeys(("p10", "p50", "p90"), durations[0])
        tenths = quantiles(durations, n=10, method="inclusive")
        return {"p10": tenths[0], "p50": tenths[4], "p90": tenths[8]}


def run_report(work: StepWork, times: RunTimes, slice_: Slice | None) -> dict[str, Any]:
    """MFU of a run, over its steps and over its wall-clock time, for a JSON report.

    `mfu_full` and the like are for the median steady step, `step_mfu_full` for all steps' own time, `wall_mfu_full` for
    the wall-clock time; `wall_mfu_full_lost` says which part cost how much of their difference.
    """
    percentiles = times.step_percentiles
    result: dict[str, Any] = {
        **work.to_dict(),
        "n_steps": times.n_steps,
        "n_steady_steps": len(times.steady_step_seconds),
        "wall_seconds": times.wall_seconds,
        "wall_seconds_by_part": {"device_steps": times.step_seconds, **times.part_seconds},
        "step_seconds": percentiles["p50"],
        **{f"step_seconds_{name}": seconds for name, seconds in percentiles.items()},
        "tokens_per_second": work.tokens / percentiles["p50"],
        "wall_tokens_per_second": work.tokens * times.n_steps / times.wall_seconds,
    }
    if slice_ is None:
        return result | dict.fromkeys((*MFU_KEYS, "tokens_per_second_per_chip", "slice"))
    result |= slice_dict(slice_) | peaks_dict(work, slice_.chip)
    on = slice_.chip, slice_.n_devices
    result["tokens_per_second_per_chip"] = result["tokens_per_second"] / slice_.n_chips
    # The slowest tenth of the steps has the lowest MFU.
    for name, of_steps in (("p10", "p90"), ("p50", "p50"), ("p90", "p10")):
        for key, value in work.utilisation(percentiles[of_steps], *on).items():
            result[f"{key}_{name}"] = value
    result |= {key: result[f"{key}_p50"] for key in MFU_KEYS}
    over_steps = work.utilisation(times.step_seconds / times.n_steps, *on)
    over_wall = work.utilisation(times.wall_seconds / times.n_steps, *on)
    result |= {f"step_{key}": value for key, value in over_steps.items()}
    result |= {f"wall_{key}": value for key, value in over_wall.items()}
    result["wall_mfu_full_lost"] = {
        part: over_steps["mfu_full"] * seconds / times.wall_seconds for part, seconds in times.part_seconds.items()
    }
    return result


TIME_KEYS = (
    "step_seconds", "wall_seconds", "compile_seconds", "eval_seconds", "checkpoint_seconds", "profiler_seconds",
    "throughput/loading_time", "throughput/hook_time",
)  # fmt: skip


def _refuse_times(row: Mapping[str, Any], origin: str | Path) -> None:
    """Refuse an impossible duration; null stands for a duration that was not measured."""
    for key in TIME_KEYS:
        value = row.get(key)
        longest = MAX_STEP_SECONDS if key == "step_seconds" else math.inf
        if value is not None and not (is_figure(value) and 0 <= value <= longest):
            expected = f"0 to {longest:,} seconds" if longest < math.inf else "a finite number of at least 0"
            raise TomatError(
                f"{origin}: step {row.get('step')} has {key} {value!r}; expected {expected}. Delete the line, or "
                "restore the file."
            )
