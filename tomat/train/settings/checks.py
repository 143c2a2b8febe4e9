"""Values that cannot be meant, or that do nothing, each refused with what to use instead."""

import dataclasses
import datetime
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig
from levanter.optim.config import LrSchedule, OptimizerConfig
from levanter.tracker.wandb import WandbConfig

from tomat.base.config_keys import fields_below, meaning_of
from tomat.base.documents import take_out
from tomat.base.errors import TomatError
from tomat.model.any_decoder import int8_matmuls_of
from tomat.model.decoder import DensityDecoderConfig
from tomat.train.settings.levanter import without_former
from tomat.train.settings.trainer import TrainerSettings, without_output

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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
"""Fields of Levanter's optimizers (0.2.227) that nothing reads, by kind: what to use instead."""

_TREE_MAP = "Levanter 0.2.227 writes it with jax.tree_map, which JAX 0.11 no longer has"
OPTIMIZERS_THAT_CANNOT_RUN: Mapping[str, str] = {
    "grug_muon": "it takes plain arrays, and the model has named ones; use muon",
    "mars": _TREE_MAP + "; use adam or muon",
    "rmsprop": _TREE_MAP + "; use adam",
    "scion": _TREE_MAP + "; use muon",
}
"""Kinds whose step cannot be built, each with the reason and what to use."""


def check_model(model: LmConfig) -> None:
    """Refuse a setting of a Llama-like decoder that would do nothing.

    Raises:
        TomatError: With the key, and what to use instead.
    """
    for name, instead in _unused_of_model(type(model)).items():
        _refuse_if_set(f"model.{name}", getattr(model, name), _default(model, name), instead)


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Refuse an optimizer that cannot run, settings of it that would do nothing, and numbers that cannot be meant.

    Raises:
        TomatError: With the key, and what to use instead.
    """
    kind = optimizer.get_choice_name(type(optimizer))
    if kind in OPTIMIZERS_THAT_CANNOT_RUN:
        raise TomatError(f"optimizer.type is '{kind}', which cannot run: {OPTIMIZERS_THAT_CANNOT_RUN[kind]}.")
    for name, instead in OPTIMIZER_NO_EFFECT.get(kind, {}).items():
        _refuse_if_set(f"optimizer.{name}", getattr(optimizer, name), _default(optimizer, name), instead)
    for field in dataclasses.fields(optimizer):
        value = getattr(optimizer, field.name)
        if (field.name in ("learning_rate", "lr") or field.name.endswith("_lr")) and value is not None and value < 0:
            raise TomatError(f"optimizer.{field.name} is {value}; expected 0 or more.")
    schedule = optimizer.lr_schedule
    if isinstance(schedule, str) and schedule not in LrSchedule.get_known_choices():
        known = ", ".join(sorted(LrSchedule.get_known_choices()))
        raise TomatError(f"optimizer.lr_schedule is '{schedule}'; expected one of {known}.")


def drop_without_effect(values: dict[str, Any]) -> list[str]:
    """Take the settings that did nothing for what was learnt out of what an earlier version recorded.

    Args:
        values: A whole configuration as plain values; changed in place.

    Returns:
        The dotted keys whose value was another than the one they must keep.
    """
    # What decided no number of a model, and is no key any more, goes without a word.
    dropped = [key for key in without_former(values) if key.startswith("trainer.")]
    model, optimizer = values.get("model") or {}, values.get("optimizer") or {}
    kind = str(optimizer.get("type"))
    model_class = LmConfig.get_known_choices().get(str(model.get("type")))
    optimizer_class = OptimizerConfig.get_known_choices().get(kind)
    kept: dict[str, object] = {}
    if model_class is not None:
        kept |= {f"model.{name}": _default(model_class, name) for name in _unused_of_model(model_class)}
    if optimizer_class is not None:
        kept |= {f"optimizer.{name}": _default(optimizer_class, name) for name in OPTIMIZER_NO_EFFECT.get(kind, {})}
    for key, value in kept.items():
        was_there, found = take_out(values, key)
        if was_there and found != value:
            dropped.append(key)
    trainer = values.get("trainer")
    if isinstance(trainer, dict) and isinstance(trainer.get("mp"), str):
        policy = without_output(trainer["mp"])
        if policy != trainer["mp"]:
            trainer["mp"] = policy
            dropped.append("trainer.mp (output)")
    return dropped


def _unused_of_model(model: type[LmConfig]) -> dict[str, str]:
    """Fields that Levanter's Llama-like decoders (0.2.227) have and never read while they are built or trained, with
    what to use instead; as `DensityDecoderConfig` says it."""
    if not issubclass(model, LlamaConfig):
        return {}
    meanings = {name: meaning_of(field) for name, (field, _) in fields_below(DensityDecoderConfig).items()}
    return {name: meaning.unused for name, meaning in meanings.items() if meaning.unused is not None}


def check_finite(settings: "DataclassInstance") -> None:
    """Refuse a number that is not finite, anywhere in a whole configuration.

    Raises:
        TomatError: With its key.
    """
    for key, value in _numbers(settings, ""):
        if not math.isfinite(value):
            raise TomatError(f"{key} is {value}; expected a finite number.")


def _refuse_if_set(key: str, value: object, kept: object, instead: str) -> None:
    if value != kept:
        raise TomatError(f"{key} is {value!r}, which tomat does not take (it must stay {kept!r}): {instead}.")


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


def check_distillation(sharding: str, trainer: TrainerSettings) -> None:
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


def check_int8(model: LmConfig, trainer: TrainerSettings, *, distils: bool) -> None:
    """Refuse what `model.int8_matmuls` cannot be together with.

    Args:
        model: Any model; one without int8 products is not looked at further.
        trainer: Its `trainer` block.
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


def check_scales(model: LmConfig, trainer: TrainerSettings) -> None:
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
