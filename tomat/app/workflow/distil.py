"""The words of a distillation: a command line of three flags, and the configuration that it stands for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mergedeep

from tomat.base.layout import CONFIG_FILE
from tomat.base.overrides import parse_overrides, read_yaml

OPTIMIZER: dict[str, Any] = {
    "type": "adam",
    "learning_rate": 1.5e-3,
    "weight_decay": 0.0,
    "warmup": 20,
    "min_lr_ratio": 0.0,
    "lr_schedule": "cosine",
}
"""Of what `TrainedArrays` keeps relative to its scale: 1.5e-3 moves a number by 0.15 % of its scale in a step."""
STEPS = 800
"""What the demo takes in 2 bits: the divergence from the teacher, 3.3 nats a voxel before, is 0.15 after 500 steps and
0.09 after 800. In 3 and 4 bits 400 and 300 are enough (`docs/tracking/small-models.md`)."""


def distillation_values(
    quantised: Path, teacher: str, train: str | None, overrides: Sequence[str]
) -> tuple[dict[str, Any], str]:
    """The configuration of a distillation as plain values, and where they are from in words: that of the folder
    `quantised`, with an optimizer and steps of its own, and `overrides` over all of it."""
    path = quantised / CONFIG_FILE
    values = read_yaml(path, "a folder of `tomat compress`")
    name = quantised.resolve().name
    distillation = {"teacher": teacher, "quantised": str(quantised)} | ({} if train is None else {"train": train})
    own: dict[str, Any] = {
        "run_name": f"{name}-distilled",
        "purpose": f"Brings {name} back to its teacher, {teacher}.",
        "distillation": distillation,
        "trainer": {"num_train_steps": STEPS, "model_averaging": None},
        "sharding": "replicated",
    }
    values.pop("optimizer", None)
    merged = mergedeep.merge({}, values, own, {"optimizer": OPTIMIZER}, parse_overrides(overrides))
    return dict(merged), str(path)
