"""The plan of a training step: whether it fits, where its cycles will go, and which MFU to expect."""

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.hardware.chips import Slice
from tomat.hardware.mfu import MFU_KEYS, StepWork, peaks_dict, slice_dict
from tomat.perf.cost.chip_model import ChipModel, untimed_share
from tomat.perf.cost.estimate import PALLAS_TARGET, StepEstimate, estimate_step
from tomat.perf.cost.llo import slot_utilisation
from tomat.perf.cost.schedule_model import matched_schedules
from tomat.perf.plan.calibration import Calibration
from tomat.perf.plan.compile.compiler import CompiledStep, compile_step
from tomat.perf.profile.breakdown import Breakdown

if TYPE_CHECKING:
    from tomat.train.settings.config import TrainConfig


@dataclass(frozen=True)
class Interval:
    """An estimate and the range in which the measured value is expected."""

    estimate: float
    low: float
    high: float

    @staticmethod
    def of(step: StepEstimate, times: int = 1) -> "Interval":
        """The duration of `times` runs of a program. The range is that of its parts (`perf/cost/estimate.py`)."""
        seconds, factor = step.breakdown.step_seconds * times, 1 + step.error
        return Interval(seconds, seconds * (1 / factor), seconds * factor)


@dataclass(frozen=True)
class Plan:
    config: "TrainConfig"
    slice_: Slice
    compiled: CompiledStep
    calibration: Calibration
    model: ChipModel
    work: StepWork
    """The FLOPs of the step's products, by every convention."""

    @cached_property
    def step(self) -> StepEstimate | None:
        """The cycle models applied to the compiled program; None if it does not fit."""
        if not self.compiled.fits:
            return None
        title = f"{self.config.run_name} on {self.slice_.name}, planned"
        return estimated(self.compiled, self.slice_, self.model, title, self.calibration.notes(self.slice_.chip.name))

    @property
    def breakdown(self) -> Breakdown | None:
        """Where the cycles are expected to go; None if the step does not fit."""
        return self.step.breakdown if self.step is not None else None

    @cached_property
    def step_seconds(self) -> Interval | None:
        """Duration of a step, without the host's part."""
        return Interval.of(self.step) if self.step is not None else None

    @cached_property
    def utilisation(self) -> dict[str, Interval]:
        """The figures of `MFU_KEYS`, as fractions; empty if the step does not fit."""
        if self.step_seconds is None:
            return {}
        on = self.slice_.chip, self.slice_.n_devices
        at = {bound: self.work.utilisation(seconds, *on) for bound, seconds in asdict(self.step_seconds).items()}
        # the longest step has the lowest utilisation
        return {key: Interval(at["estimate"][key], at["high"][key], at["low"][key]) for key in MFU_KEYS}

    @property
    def notes(self) -> tuple[str, ...]:
        return self.breakdown.notes if self.breakdown is not None else self.calibration.notes(self.slice_.chip.name)

    def pallas_kernels(self) -> list[dict[str, Any]]:
        """The Pallas kernels of the step, longest first: schedule, utilisation of slots, what bounds them."""
        if self.step is None:
            return []
        program, schedules = self.compiled.made
        matched = matched_schedules(program, schedules)
        rows = [
            {
                "name": name,
                "executions": op.executions,
                "seconds_per_execution": op.estimate,
                "seconds_per_step": (op.estimate or 0.0) * op.executions,
                "mxu_busy_seconds": op.schedule.mxu_seconds,
                "bound": op.basis,
                "active_grid_share": op.schedule.active_share,
                "mask_found": op.schedule.mask_found,
                "assumed_bundle_share": op.schedule.assumed_bundle_share,
                "slot_utilisation": slot_utilisation(matched[name]),
            }
            for name, op in self.step.ops.items()
            if op.schedule is not None and program.by_name[name].custom_call_target == PALLAS_TARGET
        ]
        return sorted(rows, key=lambda row: -row["seconds_per_step"])

    def to_dict(self) -> dict[str, Any]:
        """For a JSON report: bytes, seconds, fractions. All but the utilisation are those of one device."""
        from tomat.train.settings.config import config_hash

        step, seconds = self.step, self.step_seconds
        return {
            "run_name": self.config.run_name,
            "fits": self.compiled.fits,
            **program_dict(self.compiled, step),
            "step_seconds": asdict(seconds) if seconds is not None else None,
            **{key: asdict(self.utilisation[key]) if self.utilisation else None for key in MFU_KEYS},
            "models_seconds": step.model_table() if step is not None else None,
            "pallas_kernels": self.pallas_kernels(),
            "collectives": {name: asdict(one) for name, one in step.collectives.items()} if step is not None else None,
            "work": self.work.to_dict(),
            **slice_dict(self.slice_),
            **peaks_dict(self.work, self.slice_.chip),
            "lowered_sha256": self.compiled.result["lowered_sha256"],
            "config_hash": config_hash(self.config),
            "lower_seconds": self.compiled.result["lower_seconds"],
            "notes": list(self.notes),
        }


def estimated(
    compiled: CompiledStep, slice_: Slice, model: ChipModel, title: str, notes: tuple[str, ...]
) -> StepEstimate:
    """The cycle models applied to a compiled program that fits."""
    return estimate_step(
        *compiled.made,
        slice_,
        title=title,
        model=model,
        notes=notes,
        memory_bytes=compiled.memory.by_kind(),
    )


def program_dict(compiled: CompiledStep, step: StepEstimate | None) -> dict[str, Any]:
    """The part of a JSON report for any compiled program: bytes, seconds, fractions, all of one device."""
    return {
        "hbm_required_bytes": compiled.memory.required_bytes,
        "hbm_capacity_bytes": compiled.memory.capacity_bytes,
        "memory": compiled.memory.to_dict(),
        "breakdown": step.breakdown.to_dict() if step is not None else None,
        "assumed": [one.to_dict() for one in step.assumed] if step is not None else None,
        "rests_on": [asdict(part) for part in step.supports] if step is not None else None,
        "untimed_step_share": untimed_share(step.supports) if step is not None else None,
        "compiler": compiled.compiler,
        "program_key": compiled.key,
        "cached": compiled.cached,
        "compile_seconds": compiled.result["compile_seconds"],
    }


def make_plan(config: "TrainConfig", slice_: Slice, **how: Any) -> Plan:
    """Compile the step of `config` for `slice_` (or find it in the cache) and estimate it. `how` is passed to
    `compile_step`. A step that does not fit is an answer, not an error. A model whose FLOPs are not known is refused
    before anything is compiled."""
    from tomat.train.mfu import step_work

    work = step_work(config, "tpu")
    calibration = Calibration.load(Path(config.tracking_dir))
    model = ChipModel.load(Path(config.tracking_dir), slice_.chip)
    return Plan(config, slice_, compile_step(config, slice_, **how), calibration, model, work)
