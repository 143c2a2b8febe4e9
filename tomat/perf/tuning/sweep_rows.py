"""One planned row of a sweep in figures: its record, and its comparison with its base.

Some figures are about windowed einsums: matmuls that XLA's partitioner cut into a loop over the chips because an
operand is sharded over the mesh. The loops are recognised by the names of their bodies
(`windowed_dot_general_body_ag`, `..._rs`: xla/service/spmd/dot_handler.cc).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from tomat.base.records import Amount, Count, Positive
from tomat.base.report.formats import UNKNOWN, percent, ranged
from tomat.hardware.mfu import TABLE_UTILISATIONS
from tomat.perf.cost.chip_model import untimed_share
from tomat.perf.cost.memory import Buffer
from tomat.perf.profile.hlo import HloProgram
from tomat.perf.profile.hlo_costs import instruction_flops
from tomat.perf.profile.hlo_kernels import executed_kernels
from tomat.perf.tuning.sweep_config import SweepRow
from tomat.perf.tuning.sweep_record import Interval, SweptRow

if TYPE_CHECKING:
    from tomat.hardware.chips import Slice
    from tomat.perf.plan.plan import Plan
    from tomat.train.settings.config import TrainConfig

LOOP_NAME = re.compile(r"windowed_dot_general_(body|cond)")
MATMULS = frozenset({"dot", "convolution"})
"""The TPU compiler writes matmuls as convolutions."""


@dataclass(frozen=True)
class WindowedEinsums:
    n_loops: int
    """Loops in the program. Each runs once a layer."""
    steps: float
    """Executions of all loop bodies together."""
    seconds: float
    """Summed time of all operations in the loops."""
    share: float
    narrowest_contraction: int
    """Smallest contracted size of their matmuls, after the cut: 128 in the reference's 200M and 1B, whose whole matmuls
    contract 1,024 and 2,048. (Matmuls of weight gradients contract the batch, which is long.)"""


def windowed_einsums(
    program: HloProgram, operation_seconds: Mapping[str, float], step_seconds: float
) -> WindowedEinsums | None:
    """The windowed einsums of a compiled step; None if there are none. `operation_seconds` holds the time of each
    operation in the step, by its name."""
    seconds = 0.0
    contractions: list[int] = []
    executions: dict[int, float] = {}
    for kernel in executed_kernels(program):
        instruction = kernel.instruction
        found = LOOP_NAME.search(program.computation_names.get(instruction.computation_id, ""))
        if found is None:
            continue
        seconds += operation_seconds.get(instruction.name, 0.0)
        if found.group(1) == "body":
            executions[instruction.computation_id] = kernel.executions
            matmuls = (one for one in program.inner(instruction) if one.opcode in MATMULS and one.shape.elements)
            # A matmul has two flops for each element of its result times the contracted size.
            contractions += [round(instruction_flops(program, one) / (2 * one.shape.elements)) for one in matmuls]
    if not contractions:
        return None
    share = seconds / step_seconds if step_seconds else 0.0
    return WindowedEinsums(len(executions), sum(executions.values()), seconds, share, min(contractions))


Status = Literal["fits", "does not fit", "failed"]
"""Status of a row."""
FITS, OOM, FAILED = get_args(Status)

UTILISATION_KEYS = tuple(one.key for one in TABLE_UTILISATIONS)
KEPT_OPERATIONS = 10
KEPT_BUFFERS = 5
SAME = 0.01
"""Two estimates that differ by less than this share count as equal ("as fast")."""


class CategoryTime(TypedDict):
    name: str
    seconds: Amount
    share: Amount
    hidden_seconds: Amount
    flops_fraction: Amount | None


class OperationTime(TypedDict):
    name: str
    category: str
    seconds: Amount
    source: str


@dataclass(kw_only=True)
class RowRecord(SweptRow):
    """The entry of a row in a sweep's record; seconds, bytes and fractions are those of one chip's step.

    A failed row has only what is known before it is planned, and the error.
    """

    explain: str
    config_hash: str | None
    model: str | None
    batch_sequences: Positive | None
    sequence_tokens: Positive | None
    slice: str | None
    n_chips: Positive | None
    status: Status
    error: str = ""
    hbm_required_bytes: Count = 0
    hbm_capacity_bytes: Count = 0
    memory_space: str = "hbm"
    largest_buffers: Sequence[Buffer] = ()
    """The first `KEPT_BUFFERS` of `MemoryReport.largest`."""
    step_seconds: Interval | None = None
    mfu_full: Interval | None = None
    mfu_causal: Interval | None = None
    mfu_useful: Interval | None = None
    hfu: Interval | None = None
    untimed_step_share: Amount | None = None
    """Share of the step in kernels unlike any that the slice's chip has timed; None also in older records."""
    tokens_per_second_per_chip: Interval | None = None
    compiler: str | None = None
    program_key: str | None = None
    compile_seconds: Amount | None = None
    notes: Sequence[str] = ()
    categories: Sequence[CategoryTime] = ()
    """Empty if the step does not fit."""
    top_operations: Sequence[OperationTime] = ()
    windowed_einsums: WindowedEinsums | None = None
    lines: Sequence[str] = ()

    @property
    def speed(self) -> Interval | None:
        return self.mfu_full if self.status == FITS else None

    @property
    def memory_bytes(self) -> int:
        return self.hbm_required_bytes

    @property
    def limit_bytes(self) -> int | None:
        return self.hbm_capacity_bytes or None

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sort key: fitting rows by MFU, then rows that do not fit by overshoot, smallest first, then failed rows."""
        if self.status == FITS:
            return 0, -self.mfu_full["estimate"] if self.mfu_full else 0.0, self.name
        if self.status == OOM:
            return 1, self.hbm_required_bytes / self.hbm_capacity_bytes, self.name
        return 2, 0.0, self.name

    def utilisation(self, key: str) -> Interval | None:
        return getattr(self, key)

    def estimate(self, key: str) -> float:
        """The estimate of an interval that exists: `step_seconds`, a utilisation, `tokens_per_second_per_chip`."""
        return getattr(self, key)["estimate"]

    @property
    def tokens_per_chip(self) -> float:
        """Tokens of one step per chip, for a row whose configuration could be read."""
        assert self.batch_sequences and self.sequence_tokens and self.n_chips
        return self.batch_sequences * self.sequence_tokens / self.n_chips

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        kept = {key: values[key] for key in KEYS_OF_FAILED} if self.status == FAILED else values
        # Unset keys are left out, so that older records, and those of sweeps without lines, do not change.
        absent = [key for key in ("lines", "untimed_step_share") if values[key] in ((), [], None)]
        return {key: value for key, value in (kept | {"lines": self.lines}).items() if key not in absent}

    def __post_init__(self) -> None:
        if self.status == OOM and not self.hbm_capacity_bytes:
            raise ValueError("expected hbm_capacity_bytes above 0 of a step that does not fit")
        if self.categories and self.step_seconds is None:
            raise ValueError("expected step_seconds of a step with categories")
        for key in ("step_seconds", "tokens_per_second_per_chip", *UTILISATION_KEYS):
            span: Interval | None = getattr(self, key)
            if span is not None and not span["low"] <= span["estimate"] <= span["high"]:
                raise ValueError(f"expected low, estimate and high of {key} in this order")


KEYS_OF_FAILED = ("question", *(one.name for one in fields(RowRecord) if one.default is MISSING), "error")
"""Keys on record for a failed row; `lines` too if it has any."""


def described(row: SweepRow, config: TrainConfig | None, slice_: Slice | None) -> dict[str, Any]:
    """The part of a row that is known before it is planned, as arguments of `RowRecord`."""
    from tomat.train.settings.config import config_hash

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
        "lines": row.lines,
    }


def failed(row: SweepRow, config: TrainConfig | None, slice_: Slice | None, error: str) -> RowRecord:
    return RowRecord(**described(row, config, slice_), status=FAILED, error=" ".join(error.split()))


def planned(row: SweepRow, config: TrainConfig, slice_: Slice, plan: Plan) -> RowRecord:
    """The record of a row. It is the same for the same plan, whether this was cached or not."""
    step, breakdown, compiled = plan.step_seconds, plan.breakdown, plan.compiled
    tokens = config.batch_size * config.seq_len / slice_.n_chips
    # The shortest step has the most tokens a second.
    rate = Interval(estimate=tokens / step.estimate, low=tokens / step.high, high=tokens / step.low) if step else None
    known = described(row, config, slice_)
    known |= {key: asdict(plan.utilisation[key]) for key in UTILISATION_KEYS if plan.utilisation}
    record = RowRecord(
        **known,
        status=FITS if compiled.fits else OOM,
        hbm_required_bytes=compiled.memory.required_bytes,
        hbm_capacity_bytes=compiled.memory.capacity_bytes,
        memory_space=compiled.memory.memory_space,
        largest_buffers=compiled.memory.largest[:KEPT_BUFFERS],
        step_seconds=Interval(**asdict(step)) if step is not None else None,
        tokens_per_second_per_chip=rate,
        untimed_step_share=untimed_share(plan.step.supports) if plan.step is not None else None,
        compiler=compiled.compiler,
        program_key=compiled.key,
        compile_seconds=compiled.result["compile_seconds"],
        notes=plan.notes,
    )
    if breakdown is None:
        return record
    seconds = {op.name: op.seconds for op in breakdown.ops}
    windowed = windowed_einsums(compiled.made[0], seconds, breakdown.step_seconds)
    return replace(
        record,
        categories=[
            {key: getattr(group, key) for key in ("name", "seconds", "share", "hidden_seconds", "flops_fraction")}
            for group in breakdown.categories
        ],
        top_operations=[
            {"name": op.name, "category": str(op.category), "seconds": op.seconds, "source": op.source}
            for op in breakdown.top(KEPT_OPERATIONS)
        ],
        windowed_einsums=windowed,
    )


def base_of(record: RowRecord, records: Sequence[RowRecord]) -> RowRecord | None:
    return next((other for other in records if other.name == record.base), None)


def speedup(record: RowRecord, base: RowRecord | None) -> float | None:
    """Tokens/s per chip divided by the base's; None if either has no step time."""
    mine = record.tokens_per_second_per_chip
    theirs = base.tokens_per_second_per_chip if base is not None else None
    return mine["estimate"] / theirs["estimate"] if mine and theirs else None


def verdict(record: RowRecord, base: RowRecord | None) -> str:
    if record.status == FAILED:
        return f"failed: {record.error}"
    if record.status == OOM:
        over = record.hbm_required_bytes - record.hbm_capacity_bytes
        share = percent(over / record.hbm_capacity_bytes, 0)
        return f"does not fit: {gib(over)}{memory_space(record)} too much ({share})"
    if record.base is None:
        return "base"
    factor = speedup(record, base)
    if factor is None or base is None:
        return f"fits; `{record.base}` has no step time to compare with"
    if abs(factor - 1) < SAME:
        return f"as fast as `{record.base}` ({factor:.2f}x tokens/s/chip)"
    mine, theirs = record.tokens_per_second_per_chip, base.tokens_per_second_per_chip
    assert mine is not None and theirs is not None  # since there is a factor
    apart = mine["low"] > theirs["high"] or mine["high"] < theirs["low"]
    against = "beyond the intervals" if apart else "within the intervals"
    if mine["low"] == mine["high"] or theirs["low"] == theirs["high"]:
        against = "with an error that is not known"
    words = "faster" if factor > 1 else "slower"
    return f"{words} than `{record.base}`: {factor:.2f}x tokens/s/chip, {against}"


def gib(count: float) -> str:
    """Bytes as `31.24 GiB`; below 1 GiB in MiB."""
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.1f} MiB"


def interval_text(value: Interval | None, show: Callable[[float], str]) -> str:
    """`8.7 % (7.5 % to 10.1 %)`."""
    return UNKNOWN if value is None else ranged(value["estimate"], value["low"], value["high"], show)


def required_text(record: RowRecord) -> str:
    """`10.10 of 31.24 GiB`."""
    if record.status == FAILED:
        return UNKNOWN
    required, capacity = record.hbm_required_bytes, record.hbm_capacity_bytes
    if capacity < 2**30:
        return f"{gib(required)} of {gib(capacity)}{memory_space(record)}"
    return f"{required / 2**30:.2f} of {gib(capacity)}"


def memory_space(record: RowRecord) -> str:
    """ " of vmem" if a kernel's tiles do not fit, rather than the step."""
    space = record.memory_space
    return "" if space == "hbm" else f" of {space}"
