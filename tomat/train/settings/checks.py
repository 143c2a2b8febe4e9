"""Settings of Levanter's that tomat does not take, each with what to use instead, and values that cannot be meant.

Levanter can load weights without the optimizer's state, or whatever part of a checkpoint is there, from a key of its
configuration. The first generation lost 17 hours of a v6e-32 to such a resume: trained weights, fresh optimizer.
"""

import dataclasses
import datetime
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import jmp
from levanter.callbacks.profiler import XprofUploadConfig
from levanter.callbacks.watch import WatchConfig
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig
from levanter.optim.config import LrSchedule, OptimizerConfig
from levanter.optim.model_averaging import EmaDecaySqrtConfig
from levanter.tracker.wandb import WandbConfig
from levanter.trainer import TrainerConfig

from tomat.base.errors import TomatError
from tomat.model.any_decoder import int8_matmuls_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_OPTIONS = (
    "a run continues by itself from its newest whole checkpoint; `--fork NEW_NAME` begins another run with a "
    "checkpoint's weights, optimizer state and step, `--warm_start RUN_OR_CHECKPOINT` one with its weights alone"
)

_WATCH = "guards.on_bad_loss watches the loss and the norm of the update, without a second step to compile"
_UPLOAD = "it sends profiles to Marin's own service; they lie in the run's folder, where `tomat profile` reads them"

NO_EFFECT: tuple[tuple[str, object, str], ...] = (
    (
        "trainer.allow_nondivisible_batch_size",
        False,
        "the loader gives every device the same number of sequences; choose a trainer.train_batch_size that is a "
        "multiple of the number of devices",
    ),
    ("trainer.crash_on_nan", False, "guards.on_bad_loss judges the loss inside the step, and names step and materials"),
    ("trainer.crash_on_inf", False, "guards.on_bad_loss judges the loss inside the step, and names step and materials"),
    (
        "trainer.checkpointer.append_run_id_to_base_path",
        True,
        "checkpoints lie in output_dir/run_name/checkpoints; set these two",
    ),
    ("trainer.mesh.batch_axis_name", "batch", "sequences of a batch are counted by the axis 'batch' throughout"),
    ("trainer.xla_dump_upload.enabled", False, "set compiler.xla_flags to [--xla_dump_to=FOLDER] and copy the folder"),
    ("trainer.xla_dump_upload.ttl_days", 30, "set compiler.xla_flags to [--xla_dump_to=FOLDER] and copy the folder"),
    ("trainer.profiler.upload.enabled", False, _UPLOAD),
    ("trainer.profiler.upload.service_url", XprofUploadConfig().service_url, _UPLOAD),
    ("trainer.profiler.upload.ttl_days", XprofUploadConfig().ttl_days, _UPLOAD),
    ("trainer.watch.watch_targets", [], _WATCH),
    *(
        (f"trainer.watch.{f.name}", f.default, _WATCH)
        for f in dataclasses.fields(WatchConfig)
        if f.name != "watch_targets"
    ),
)
"""Keys that reach nothing in tomat, or nothing of its users: the value they must keep, and what to use instead."""

MODEL_NO_EFFECT = (
    ("initializer_range", "weights begin with Haliax's own scale, 1/sqrt(inputs of the matrix); leave it out"),
    ("reference_checkpoint", "no weights of Hugging Face are loaded; `--warm_start` takes those of another run"),
    ("tokenizer", "densities have tokens of their own; data.layout and the codec decide them"),
)
"""Fields that Levanter's Llama-like decoders (0.2.227) have and never read while they are built or trained."""

REMOVED_MODEL_KEYS = ("keep_activation_gradient",)
"""Keys of `model` that an earlier version had, and that decided only how the same numbers are computed."""

_NO_DECAY: dict[str, str] = dict.fromkeys(
    ("weight_decay", "weight_decay_modules", "default_weight_decay_mask"),
    "this optimizer holds the norms of matrices and decays nothing; leave it out, or use another optimizer.type",
)

OPTIMIZER_NO_EFFECT: Mapping[str, Mapping[str, str]] = {
    "adamH": _NO_DECAY,
    "adopt": {"schedule_list": "the schedule is that of optimizer.lr_schedule"},
    "cautious": {"gamma": "what acts are optimizer.beta1, beta2 and epsilon"},
    "kron": {
        "params_sharding": "the sharding is that of the model's named axes",
        "preconditioner_sharding": "Levanter shards preconditioners along the mesh axis `data` whatever it says",
    },
    "lion": {"epsilon": "the update is a sign, which nothing divides; leave it out"},
    "mini": {"lr": "the schedule reads optimizer.learning_rate", "nesterov": "leave it out"},
    "muon": {"lr": "the schedule reads optimizer.learning_rate"},
    "muonH": _NO_DECAY,
    "soap": {
        "mu_dtype": "the step of Levanter 0.2.227 is built for float32 alone; leave it out",
        "precond_dtype": "its QR decomposition takes float32 alone; leave it out",
        "schedule_list": "the schedule is that of optimizer.lr_schedule",
    },
}
"""The same of Levanter's optimizers, by kind and field."""

_TREE_MAP = "Levanter 0.2.227 writes it with jax.tree_map, which JAX 0.11 no longer has"
OPTIMIZERS_THAT_CANNOT_RUN: Mapping[str, str] = {
    "grug_muon": "it takes plain arrays, and the model has named ones; use muon",
    "mars": _TREE_MAP + "; use adam or muon",
    "rmsprop": _TREE_MAP + "; use adam",
    "scion": _TREE_MAP + "; use muon",
}
"""Kinds whose step cannot be built, each with the reason and what to use."""


def check_effect(trainer: TrainerConfig, model: LmConfig, optimizer: OptimizerConfig) -> None:
    """Refuse a setting that would do nothing.

    Raises:
        TomatError: With the key, and what to use instead.
    """
    for key, kept, instead in NO_EFFECT:
        value: Any = trainer
        for part in key.split(".")[1:]:
            value = getattr(value, part)
        _refuse_if_set(key, value, kept, instead)
    if isinstance(model, LlamaConfig):
        for name, instead in MODEL_NO_EFFECT:
            _refuse_if_set(f"model.{name}", getattr(model, name), _default(model, name), instead)
    kind = optimizer.get_choice_name(type(optimizer))
    if kind in OPTIMIZERS_THAT_CANNOT_RUN:
        raise TomatError(f"optimizer.type is '{kind}', which cannot run: {OPTIMIZERS_THAT_CANNOT_RUN[kind]}.")
    for name, instead in OPTIMIZER_NO_EFFECT.get(kind, {}).items():
        _refuse_if_set(f"optimizer.{name}", getattr(optimizer, name), _default(optimizer, name), instead)
    if trainer.mp.output_dtype != trainer.mp.compute_dtype:
        raise TomatError(
            f"trainer.mp has output={jnp.dtype(trainer.mp.output_dtype).name}, which does nothing: the loss is "
            f"computed in float32 whatever the model computes in. Leave output out, or set it to compute="
            f"{jnp.dtype(trainer.mp.compute_dtype).name}."
        )
    if isinstance(trainer.model_averaging, EmaDecaySqrtConfig):
        raise TomatError(
            "trainer.model_averaging is of type ema_decay_sqrt, whose weights Levanter computes outside of the "
            "compiled step, where there is no step number; use type ema."
        )


def drop_without_effect(values: dict[str, Any]) -> list[str]:
    """Take the settings that `check_effect` refuses out of what an earlier version recorded, where they did nothing.

    Args:
        values: A whole configuration as plain values; changed in place.

    Returns:
        The dotted keys whose value was another than the one they must keep.
    """
    model, optimizer = values.get("model") or {}, values.get("optimizer") or {}
    for name in REMOVED_MODEL_KEYS:
        model.pop(name, None)
    kind = str(optimizer.get("type"))
    model_class = LmConfig.get_known_choices().get(str(model.get("type")))
    optimizer_class = OptimizerConfig.get_known_choices().get(kind)
    kept: dict[str, object] = {key: value for key, value, _ in NO_EFFECT}
    if model_class is not None and issubclass(model_class, LlamaConfig):
        kept |= {f"model.{name}": _default(model_class, name) for name, _ in MODEL_NO_EFFECT}
    if optimizer_class is not None:
        kept |= {f"optimizer.{name}": _default(optimizer_class, name) for name in OPTIMIZER_NO_EFFECT.get(kind, {})}
    dropped = []
    for key, value in kept.items():
        *path, name = key.split(".")
        place: Any = values
        for part in path:
            place = place.get(part) if isinstance(place, dict) else None
        if isinstance(place, dict) and name in place and place.pop(name) != value:
            dropped.append(key)
    trainer = values.get("trainer")
    if isinstance(trainer, dict) and _has_other_output(trainer.get("mp")):
        parts = trainer["mp"].split(",")
        # jmp 0.0.4: what is not named is as compute is.
        trainer["mp"] = ",".join(part for part in parts if part.partition("=")[0] not in ("o", "output"))
        dropped.append("trainer.mp (output)")
    return dropped


def check_finite(settings: "DataclassInstance") -> None:
    """Refuse a number that is not finite, anywhere in a whole configuration.

    Raises:
        TomatError: With its key.
    """
    for key, value in _numbers(settings, ""):
        if not math.isfinite(value):
            raise TomatError(f"{key} is {value}; expected a finite number.")


def check_values(trainer: TrainerConfig, optimizer: OptimizerConfig) -> None:
    """Refuse numbers that cannot be meant.

    Raises:
        TomatError: No steps to train, a learning rate below zero, an unknown schedule.
    """
    for name, least in (("num_train_steps", 1), ("steps_per_eval", 1), ("max_eval_batches", 0)):
        value = getattr(trainer, name)
        if value is not None and value < least:
            raise TomatError(f"trainer.{name} is {value}; expected at least {least}.")
    for name in ("per_device_parallelism", "per_device_eval_parallelism"):
        value = getattr(trainer, name)
        if value < 1 and value != -1:
            raise TomatError(f"trainer.{name} is {value}; expected at least 1, or -1 for all of a device's sequences.")
    for field in dataclasses.fields(optimizer):
        value = getattr(optimizer, field.name)
        if (field.name in ("learning_rate", "lr") or field.name.endswith("_lr")) and value is not None and value < 0:
            raise TomatError(f"optimizer.{field.name} is {value}; expected 0 or more.")
    schedule = optimizer.lr_schedule
    if isinstance(schedule, str) and schedule not in LrSchedule.get_known_choices():
        known = ", ".join(sorted(LrSchedule.get_known_choices()))
        raise TomatError(f"optimizer.lr_schedule is '{schedule}'; expected one of {known}.")


def _refuse_if_set(key: str, value: object, kept: object, instead: str) -> None:
    if value != kept:
        raise TomatError(f"{key} is {value!r}, which tomat does not take (it must stay {kept!r}): {instead}.")


def _has_other_output(policy: object) -> bool:
    """Whether the text of a policy, such as `p=f32,c=bf16,o=f32`, names an output other than its compute."""
    if not isinstance(policy, str):
        return False
    try:
        parsed = jmp.get_policy(policy)
    except ValueError:  # refused with the rest of the configuration
        return False
    return parsed.output_dtype != parsed.compute_dtype


def _default(config: "DataclassInstance | type[DataclassInstance]", name: str) -> object:
    return next(field.default for field in dataclasses.fields(config) if field.name == name)


def _numbers(value: Any, key: str) -> Iterator[tuple[str, float]]:
    """Every float below `value`, with its dotted key."""
    if isinstance(value, float):
        yield key, value
    elif isinstance(value, datetime.timedelta | type):
        return
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name), f"{key}.{field.name}" if key else field.name)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _numbers(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{key}[{index}]")


def check_loading(trainer: TrainerConfig) -> None:
    """Refuse every key by which Levanter would decide what a run begins from.

    Raises:
        TomatError: With tomat's own options.
    """
    for name in ("initialize_from", "load_checkpoint_path", "load_checkpoint", "allow_partial_checkpoint"):
        _refuse_if_set(f"trainer.{name}", getattr(trainer, name), _default(trainer, name), _OPTIONS)
    if trainer.checkpointer.keep_last_temporary_checkpoints < 1:
        raise TomatError(
            "trainer.checkpointer.keep_last_temporary_checkpoints is "
            f"{trainer.checkpointer.keep_last_temporary_checkpoints}; expected at least 1: with 0 a checkpoint is "
            "removed as soon as it is complete, and a killed run has none to continue from."
        )


def check_distillation(sharding: str, trainer: TrainerConfig) -> None:
    """Refuse what a model in few bits cannot be trained with.

    Raises:
        TomatError: With what to set.
    """
    if sharding != "replicated":
        raise TomatError(
            f"sharding is {sharding}, and distillation trains arrays without named axes, which cannot be split; set "
            "sharding: replicated."
        )
    for name in ("model_averaging", "quantization"):
        if getattr(trainer, name) is not None:
            raise TomatError(f"trainer.{name} does not go together with distillation; leave it out.")


def check_int8(model: LmConfig, trainer: TrainerConfig, *, distils: bool) -> None:
    """Refuse what `model.int8_matmuls` cannot be together with.

    Args:
        model: Any model; one without int8 products is not looked at further.
        trainer: Levanter's.
        distils: Whether the run trains a model in few bits.

    Raises:
        TomatError: With what to leave out.
    """
    products = int8_matmuls_of(model)
    if products is None:
        return
    if trainer.quantization is not None:
        raise TomatError(
            f"model.int8_matmuls is {products} and trainer.quantization is set, which would replace the same products "
            "by Levanter's own; leave out trainer.quantization."
        )
    if distils:
        raise TomatError(
            f"model.int8_matmuls is {products}, and distillation trains matrices that are in few bits already and "
            "multiplied as floats; leave model.int8_matmuls out."
        )


def check_scales(model: LmConfig, trainer: TrainerConfig) -> None:
    """Refuse products that keep their own scales where they are not one product a layer.

    Raises:
        TomatError: Two products share the scales of one layer, which Levanter would add up (`model.value_mix`), or one
            product has those of several, of which all but the first would be lost (`model.fused_*`).
    """
    names = ("value_mix", "fused_qkv", "fused_gate_up")
    found = [f"model.{name} is {value}" for name in names if (value := getattr(model, name, 0))]
    if found and trainer.quantization is not None:
        raise TomatError(
            f"{' and '.join(found)} and trainer.quantization is set, whose scales are of one product for each layer; "
            "leave out trainer.quantization (model.int8_matmuls keeps no scales), or what is not one product."
        )


def check_wandb(wandb: WandbConfig | None, run_name: str) -> None:
    """Refuse what would log a resumed run as another one.

    Raises:
        TomatError: An id other than the run's name, or another way to resume than by that id.
    """
    if wandb is None:
        return
    if wandb.id not in (None, run_name):
        raise TomatError(
            f"trackers.wandb.id is '{wandb.id}'; it follows from run_name, which is '{run_name}', so that a resumed "
            "run continues its own log. Set trackers.wandb.name for another title."
        )
    if wandb.resume != "allow":
        raise TomatError(
            f"trackers.wandb.resume is {wandb.resume!r}; tomat takes only 'allow': the first start makes the W&B run, "
            "every later one continues it."
        )
    if wandb.fork_from is not None:
        raise TomatError("trackers.wandb.fork_from is set; `tomat train --fork NEW_NAME` forks a run, model included.")
