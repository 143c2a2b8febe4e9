"""Refusing to continue a run as another one.

Four of the first generation's scripts in a row resumed on other data than the run had; the loss spiked and nobody knew
why. What decides what a model learns may therefore not change under a run's name; what only decides how fast or where
it learns may.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import yaml

from tomat.errors import TomatError
from tomat.training.config import TrainConfig
from tomat.training.published import is_remote

FIXED_KEYS = (
    "data",
    "model",
    "loss",
    "optimizer",
    "trainer.train_batch_size",
    "trainer.num_train_steps",
    "trainer.seed",
    "trainer.mp",
    "trainer.model_averaging",
    "trainer.quantization",
)
"""What decides what is learnt: data and codec, shuffle, model, loss, optimizer and schedule, batch, steps, seed."""

FREE_KEYS = (
    "data.verify_checksums",
    "model.attn_backend",
    "model.flash_attention_block_size",
    "model.gradient_checkpointing",
    "model.scan_layers",
    "model.splash",
    "model.reference_checkpoint",
    "model.tokenizer",
    "loss.block_positions",
)
"""What lies below a fixed key but decides only how the same numbers are computed."""


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fixed keys whose value differs, each with its old and new value; a key absent on one side counts as None."""
    flat_old, flat_new = _flatten(old), _flatten(new)
    changed = {}
    for key in sorted(flat_old.keys() | flat_new.keys()):
        before, after = flat_old.get(key), flat_new.get(key)
        if before != after and _below(key, FIXED_KEYS) and not _below(key, FREE_KEYS):
            changed[key] = (before, after)
    return changed


def refuse_changes(recorded: Path, config: TrainConfig) -> None:
    """Stop if the run's folder belongs to a run that learns something else.

    Args:
        recorded: The `config.yaml` in the run's folder; nothing is checked where there is none, or no checkpoint.
        config: The configuration about to run.

    Raises:
        TomatError: With every difference, one a line.
    """
    files, root = fsspec.core.url_to_fs(config.run_dir if is_remote(config.output_dir) else str(recorded.parent))
    if not recorded.exists() or not files.glob(f"{root}/checkpoints/step-*"):
        return
    try:
        old = yaml.safe_load(recorded.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise TomatError(f"{recorded} is not YAML ({error}); restore it or use another run_name.") from error
    # Through YAML, so that tuples and lists compare as what the file holds.
    changed = changed_keys(old, yaml.safe_load(yaml.safe_dump(config.to_dict())))
    if changed:
        lines = "\n".join(f"  {key}: {before!r} -> {after!r}" for key, (before, after) in changed.items())
        raise TomatError(
            f"run '{config.run_name}' exists with another configuration:\n{lines}\n"
            "Use another run_name, or the values the run began with."
        )


def _below(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
