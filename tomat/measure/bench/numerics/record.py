"""The figures of all variants that have ended, as one record: what the page shows and `--json` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.measure.bench.numerics.compare import (
    CurveComparison,
    PairedFigure,
    SeedFigure,
    compare_curves,
    compare_figure,
    seed_figure,
    window_means,
)
from tomat.measure.bench.numerics.runs import FinishedRun
from tomat.measure.bench.numerics.variants import BASE, NumericsConfig, PlannedRun, Variant

if TYPE_CHECKING:
    from tomat.train.settings.config import TrainConfig


@dataclass(frozen=True, eq=False)
class BaseRecord:
    """What the base has learnt; NMAE and NEMD are fractions."""

    parameters: int
    devices: str
    """Of one run, such as `1 x cpu`."""
    train_seconds: float
    """Wall-clock of all seeds together."""
    loss_window_means: np.ndarray
    """Training losses, averaged over windows of steps, [seeds, windows]."""
    held_out_nmae_median: SeedFigure
    held_out_nemd: SeedFigure


@dataclass(frozen=True, eq=False)
class VariantRecord(BaseRecord):
    """What a variant has learnt, against the base of the same seeds."""

    held_out_nmae_median: PairedFigure
    held_out_nemd: PairedFigure
    variant: Variant
    curves: CurveComparison | None
    """None where the variant minimises another loss, whose values cannot be compared."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys; without a comparison of curves where there is none."""
        values = asdict(self)
        variant, curves = values.pop("variant"), values.pop("curves")
        return variant | values | {"same_loss": curves is not None} | (curves or {})


@dataclass(frozen=True, eq=False)
class NumericsRecord:
    """All figures of a comparison."""

    numerics: NumericsConfig
    steps: int
    """Of each run."""
    seeds: list[int]
    batch_sequences: int
    sequence_tokens: int
    evaluation_patches_per_material: int
    loss: str
    """Its kind, of the base."""
    loss_unit: str
    not_trained_yet: list[str]
    """Variants of which a seed is missing."""
    window_end_steps: list[int]
    base: BaseRecord
    variants: list[VariantRecord]

    @property
    def exact_variants_are_the_same(self) -> bool:
        """Whether every variant that is meant to be exact has the base's curve; one of another loss has not."""
        exact = [row for row in self.variants if row.variant.exact]
        return all(row.curves is not None and row.curves.same_curve for row in exact)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys."""
        values = asdict(self)
        numerics = values.pop("numerics")
        variants = [row.to_dict() for row in self.variants]
        same = self.exact_variants_are_the_same
        return numerics | values | {"variants": variants, "exact_variants_are_the_same": same}


def make_record(
    numerics: NumericsConfig, runs: Mapping[str, Sequence[PlannedRun]], finished: Mapping[str, FinishedRun]
) -> NumericsRecord:
    """Compare every variant that has ended with the base.

    Args:
        numerics: The variants.
        runs: Planned runs by variant, the base's first.
        finished: By run name.

    Raises:
        TomatError: The base has not ended, or has fewer than two seeds.
    """
    ended = {
        name: [finished[run.name] for run in group]
        for name, group in runs.items()
        if all(run.name in finished for run in group)
    }
    if BASE not in ended:
        raise TomatError("the base has not been trained with every seed; run without --compare_only.")
    config, base = runs[BASE][0].config, ended[BASE]
    steps, window_steps = base[0].losses.size, numerics.window_steps

    def compared(variant: Variant) -> VariantRecord:
        of_variant, trained = runs[variant.name][0].config, ended[variant.name]
        curves = None
        if replace(of_variant.loss, block_positions=config.loss.block_positions) == config.loss:
            curves = compare_curves(_losses(base), _losses(trained), window_steps, numerics.first_step_tolerance)
        shared = _of_runs(of_variant, trained, window_steps)
        shared |= {name: compare_figure(errors[name], values) for name, values in _held_out_errors(trained).items()}
        return VariantRecord(**shared, variant=variant, curves=curves)

    own, errors = _of_runs(config, base, window_steps), _held_out_errors(base)
    own |= {name: seed_figure(values) for name, values in errors.items()}
    return NumericsRecord(
        numerics=numerics,
        steps=steps,
        seeds=[run.seed for run in runs[BASE]],
        batch_sequences=config.batch_size,
        sequence_tokens=config.seq_len,
        evaluation_patches_per_material=config.evaluation.patches_per_material,
        loss=config.loss.kind,
        loss_unit=config.loss.unit,
        not_trained_yet=[name for name in runs if name not in ended],
        window_end_steps=[*(window_steps * n for n in range(1, own["loss_window_means"].shape[1])), steps],
        base=BaseRecord(**own),
        variants=[compared(variant) for variant in numerics.variants if variant.name in ended],
    )


def _of_runs(config: TrainConfig, runs: Sequence[FinishedRun], window_steps: int) -> dict[str, Any]:
    """The part of a `BaseRecord` that is of one configuration alone."""
    from tomat.model.decoder import parameter_count

    return {
        "parameters": parameter_count(config.model_config(), config.data.model_vocabulary),
        "devices": runs[0].devices,
        "train_seconds": sum(run.train_seconds for run in runs),
        "loss_window_means": window_means(_losses(runs), window_steps),
    }


def _losses(runs: Sequence[FinishedRun]) -> np.ndarray:
    return np.stack([run.losses for run in runs])


def _held_out_errors(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Each held-out error of a `FinishedRun`, seed by seed."""
    return {name: [getattr(run, name) for run in runs] for name in ("held_out_nmae_median", "held_out_nemd")}
