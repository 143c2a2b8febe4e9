"""The figures of all variants that have ended, as one record: what the page shows and `--json` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.bench.numerics.compare import compare_curves, compare_figure, window_means
from tomat.bench.numerics.runs import FinishedRun
from tomat.bench.numerics.variants import BASE, NumericsConfig, PlannedRun, Variant

if TYPE_CHECKING:
    from tomat.training.config import TrainConfig


def make_record(
    numerics: NumericsConfig, runs: Mapping[str, Sequence[PlannedRun]], finished: Mapping[str, FinishedRun]
) -> dict[str, Any]:
    """Compare every variant that has ended with the base.

    Args:
        numerics: The variants.
        runs: Planned runs by variant, the base's first.
        finished: By run name.

    Returns:
        Plain values, units in the keys; NMAE and NEMD are fractions.

    Raises:
        TomatError: The base has not ended, or has fewer than two seeds.
    """
    config = runs[BASE][0].config
    base = _ended(runs[BASE], finished)
    if base is None:
        raise TomatError("the base has not been trained with every seed; run without --compare_only.")
    losses = _losses(base)
    windows = window_means(losses, numerics.window_steps)
    pending = [name for name in runs if _ended(runs[name], finished) is None]
    record: dict[str, Any] = {
        "name": numerics.name,
        "title": numerics.title,
        "introduction": numerics.introduction,
        "config_path": numerics.config_path,
        "overrides": dict(numerics.overrides),
        "steps": losses.shape[1],
        "window_steps": numerics.window_steps,
        "first_step_tolerance": numerics.first_step_tolerance,
        "seeds": [run.seed for run in runs[BASE]],
        "batch_sequences": config.batch_size,
        "sequence_tokens": config.seq_len,
        "evaluation_patches_per_material": config.evaluation.patches_per_material,
        "loss": config.loss.kind,
        "loss_unit": config.loss.unit,
        "not_trained_yet": pending,
        "window_end_steps": [numerics.window_steps * (n + 1) for n in range(windows.shape[1] - 1)] + [losses.shape[1]],
        "base": {
            "parameters": _parameters(config),
            "devices": base[0].devices,
            "train_seconds": sum(run.train_seconds for run in base),
            "loss_window_means": windows.tolist(),
            "held_out_nmae_median": _spread([run.held_out_nmae_median for run in base]),
            "held_out_nemd": _spread([run.held_out_nemd for run in base]),
        },
        "variants": [],
    }
    for variant in numerics.variants:
        ended = _ended(runs[variant.name], finished)
        if ended is not None:
            record["variants"].append(_variant(variant, runs[variant.name][0].config, config, base, ended, numerics))
    record["exact_variants_are_the_same"] = all(row["same_curve"] for row in record["variants"] if row["exact"])
    return record


def _variant(
    variant: Variant,
    config: TrainConfig,
    base_config: TrainConfig,
    base: Sequence[FinishedRun],
    ended: Sequence[FinishedRun],
    numerics: NumericsConfig,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": variant.name,
        "exact": variant.exact,
        "reason": variant.reason,
        "overrides": dict(variant.overrides),
        "parameters": _parameters(config),
        "devices": ended[0].devices,
        "train_seconds": sum(run.train_seconds for run in ended),
        "loss_window_means": window_means(_losses(ended), numerics.window_steps).tolist(),
        "same_loss": replace(config.loss, block_positions=base_config.loss.block_positions) == base_config.loss,
        "held_out_nmae_median": asdict(
            compare_figure([run.held_out_nmae_median for run in base], [run.held_out_nmae_median for run in ended])
        ),
        "held_out_nemd": asdict(
            compare_figure([run.held_out_nemd for run in base], [run.held_out_nemd for run in ended])
        ),
    }
    if row["same_loss"]:
        curves = compare_curves(_losses(base), _losses(ended), numerics.window_steps)
        row |= {
            "first_step_relative_difference": curves.first_relative_difference,
            "first_window_relative_difference": curves.early_relative_difference,
            "largest_relative_difference": curves.largest_relative_difference,
            "window_relative_differences": curves.window_relative_difference.tolist(),
            "largest_window_difference_over_noise": curves.largest_over_noise,
            "same_curve": curves.within_noise and curves.first_relative_difference <= numerics.first_step_tolerance,
        }
    return row


def _ended(runs: Sequence[PlannedRun], finished: Mapping[str, FinishedRun]) -> list[FinishedRun] | None:
    return [finished[run.name] for run in runs] if all(run.name in finished for run in runs) else None


def _losses(runs: Sequence[FinishedRun]) -> np.ndarray:
    return np.stack([run.losses for run in runs])


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1))}


def _parameters(config: TrainConfig) -> int:
    from tomat.model.decoder import parameter_count

    return parameter_count(config.model_config(), config.data.vocabulary.size)
