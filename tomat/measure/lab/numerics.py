"""What `tomat bench numerics --json` writes: a study of quality in the keys of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import to_jsonable
from tomat.measure.lab.curves import window_means
from tomat.measure.lab.quality import Quality, QualityRow, against_base, has_loss_of

HELD_OUT = ("held_out_nmae_median", "held_out_nemd")


def numerics_report(study: Quality) -> dict[str, Any]:
    """The figures of every row of a study that has ended with all seeds, against the first, which is the base."""
    base, *others = study.rows.values()
    ended = {row.name for row in study.rows.values() if row.figures.keys() >= set(study.seeds)}
    if base.name not in ended:
        raise TomatError("the base has not been trained with every seed; run without --compare_only.")
    sweep, config = study.sweep, study.plan()[base.name][0].config
    variants = [_variant(row, base, study) for row in others if row.name in ended]
    return to_jsonable(
        {
            "name": sweep.name,
            "title": sweep.title,
            "introduction": sweep.introduction,
            "config_path": os.path.normpath(sweep.rows[0].config_path),
            "overrides": base.overrides,
            "window_steps": sweep.window_steps,
            "first_step_tolerance": sweep.first_step_tolerance,
            **{key: study.config[key] for key in ("steps", "batch_sequences", "sequence_tokens", "loss", "loss_unit")},
            "seeds": study.seeds,
            "evaluation_patches_per_material": config.evaluation.patches_per_material,
            "not_trained_yet": [name for name in study.rows if name not in ended],
            "window_end_steps": study.record()["window_end_steps"],
            "base": _row(base, study),
            "variants": variants,
            "exact_variants_are_the_same": all(row["same_curve"] for row in variants if row["exact"]),
        }
    )


def _row(row: QualityRow, study: Quality) -> dict[str, Any]:
    own = {"parameters": row.parameters, "devices": row.devices}
    own["train_seconds"] = sum(row.values("wall_seconds").values())
    own["loss_window_means"] = [window_means(row.losses[seed], study.sweep.window_steps) for seed in study.seeds]
    return own | {key: _spread([row.figures[seed][key] for seed in study.seeds]) for key in HELD_OUT}


def _variant(row: QualityRow, base: QualityRow, study: Quality) -> dict[str, Any]:
    curves = against_base(row, base, study.sweep.window_steps, study.sweep.first_step_tolerance).curves
    values = _row(row, study)
    for key in HELD_OUT:
        less = np.array([row.figures[seed][key] - base.figures[seed][key] for seed in study.seeds])
        differences = {f"difference_{name}": value for name, value in _spread(less).items()}
        values[key] |= {**differences, "seeds_higher": (less > 0).sum()}
    own = {key: value for key, value in row.overrides.items() if base.overrides.get(key, row) != value}
    return {
        "name": row.name,
        "exact": row.exact,
        "reason": row.question,
        "overrides": own,
        **values,
        "same_loss": has_loss_of(row, base),
        **({"same_curve": False} if curves is None else vars(curves)),
    }


def _spread(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Over seeds; the standard deviation is that of a sample."""
    return {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1))}
