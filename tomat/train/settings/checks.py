"""Values that cannot be meant, or that do nothing, each refused with what to use instead."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import draccus
import jax
import levanter.config  # noqa: F401  (registers draccus codecs for jmp policies, time deltas and checkpoint policies)
from levanter.layers.scan_checkpoint import ScanCheckpointPolicy
from levanter.models.lm_model import LmConfig
from levanter.optim.config import LrSchedule, OptimizerConfig
from levanter.tracker.wandb import WandbConfig
from levanter.trainer import TrainerConfig

from tomat.base.config_keys import fields_below, meaning_of
from tomat.base.documents import flatten, mapping, take_out
from tomat.base.errors import TomatError
from tomat.model.any_decoder import environment_of, field_of, int8_matmuls_of, is_density_decoder, is_field
from tomat.train.runs.former_keys import FORMER
from tomat.train.settings.schema import RunSchema
from tomat.train.settings.trainer import TrainerSettings, without_output

LEVANTER_DEFAULTS: dict[str, Any] = {
    # Levanter would stop on a CPU; the user's `slice`, checked in `startup.py`, says whether a run belongs there.
    "require_accelerator": False,
    # `guards` judge the loss inside the step, and name step and materials.
    "crash_on_nan": False,
    "crash_on_inf": False,
    # Both write the step's text on every start (tens of MB for 1B); the planner gives the same and more.
    "log_jaxprs": False,
    "log_xla_hlo": False,
    # Levanter's default watches gradients, which compiles a second step.
    "watch": {"watch_targets": []},
    # With these options a CPU trace of the demo is 2.7 MB instead of 44 MB, and holds the HLO that the parser needs.
    "profiler": {
        "profile_options": {"enable_hlo_proto": True, "python_tracer_level": 0, "host_tracer_level": 2},
        "upload": {"enabled": False},
    },
}
"""What tomat sets in Levanter's `TrainerConfig` where Levanter's default does not fit and tomat has no key."""

_NO_DECAY: dict[str, str] = dict.fromkeys(
    ("weight_decay", "weight_decay_modules", "default_weight_decay_mask"),
    "this optimizer keeps the norms of matrices fixed and decays nothing; leave it out, or use another optimizer.type",
)
OPTIMIZER_NO_EFFECT: Mapping[str, Mapping[str, str]] = {
    "adamH": _NO_DECAY,
    "adopt": {"schedule_list": "optimizer.lr_schedule sets the schedule"},
    "cautious": {"gamma": "it uses optimizer.beta1, beta2 and epsilon instead"},
    "kron": {
        "params_sharding": "the model's named axes set the sharding",
        "preconditioner_sharding": "Levanter shards preconditioners along the mesh axis `data` in any case",
    },
    "lion": {"epsilon": "the update is a sign, without a division; leave it out"},
    "mini": {"lr": "the schedule reads optimizer.learning_rate", "nesterov": "leave it out"},
    "muon": {"lr": "the schedule reads optimizer.learning_rate"},
    "muonH": _NO_DECAY,
    "soap": {
        "mu_dtype": "the step of Levanter 0.2.227 is built for float32 alone; leave it out",
        "precond_dtype": "its QR decomposition takes float32 alone; leave it out",
        "schedule_list": "optimizer.lr_schedule sets the schedule",
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


def refuse_what_cannot_work(config: RunSchema) -> None:
    """Refuse numbers that are not finite, settings that would do nothing, and settings that exclude each other."""
    for path, value in jax.tree.leaves_with_path(dataclasses.asdict(config)):
        if isinstance(value, float) and not math.isfinite(value):
            key = jax.tree_util.keystr(path, simple=True, separator=".")
            raise TomatError(f"{key} is {value}; expected a finite number.")
    if config.data.codec_relative and environment_of(config.model) is None:
        said = "data.codec_relative is true, and a model without model.environment does not know the sum of atoms"
        raise TomatError(f"{said}. Set model.environment (`{{}}` for its defaults), or leave data.codec_relative out.")
    _check_optimizer(config.optimizer)
    for section, settings in (("optimizer", config.optimizer), ("model", config.model)):
        for name, kept, instead in _unused(section, type(settings), settings.get_choice_name(type(settings))):
            if (value := getattr(settings, name)) != kept:
                raise TomatError(f"{section}.{name} is {value!r}, which tomat takes as {kept!r} alone: {instead}.")
    if config.distillation is not None:
        if config.sharding != "replicated":
            said = f"sharding is {config.sharding}, and distillation trains arrays that cannot be split"
            raise TomatError(f"{said}; set sharding: replicated.")
        for name in ("model_averaging", "quantization"):
            if getattr(config.trainer, name) is not None:
                raise TomatError(f"trainer.{name} does not go together with distillation; leave it out.")
    if config.model.get_choice_name(type(config.model)) == "modernbert":
        said = "model.type is modernbert, which has one more layer before its logits, which tomat would leave out"
        raise TomatError(f"{said}; use density_decoder.")
    _check_checkpointing(config.model)
    _check_int8(config.model, config.trainer, config.distillation is not None)
    _check_field(config)
    _check_wandb(config.trackers.wandb, config.run_name)


def without_former(values: dict[str, Any]) -> dict[str, str]:
    """Remove the keys of earlier versions from a configuration's plain values, in place. Return those that acted, each
    with what to use instead."""
    acting: dict[str, str] = {}
    for key, instead in FORMER.items():
        was_there, value = take_out(values, key)
        if was_there:
            acting |= {n: instead for n, found in flatten({key: value}).items() if _former_values().get(n) != found}
    return acting


def drop_without_effect(values: dict[str, Any]) -> list[str]:
    """Remove, in place, the settings without effect on what was learnt from the plain values that an earlier version
    recorded. Return those whose value was another than the one they must keep."""
    # A former key outside `trainer` decided no number of a model, and goes without a word.
    dropped = [key for key in without_former(values) if key.startswith("trainer.")]
    for section, registry in (("model", LmConfig), ("optimizer", OptimizerConfig)):
        kind = str(mapping(values.get(section)).get("type"))
        if kind == "field" or (cls := registry.get_known_choices().get(kind)) is None:
            continue
        for name, kept, _ in _unused(section, cls, kind):
            was_there, found = take_out(values, f"{section}.{name}")
            if was_there and found != kept:
                dropped.append(f"{section}.{name}")
    trainer = values.get("trainer")
    if isinstance(trainer, dict) and isinstance(before := trainer.get("mp"), str):
        trainer["mp"] = without_output(before)
        dropped += ["trainer.mp (output)"] if trainer["mp"] != before else []
    return dropped


@cache
def _former_values() -> dict[str, Any]:
    """Every key of Levanter's `TrainerConfig` with the value that did nothing; None for those that had to be absent."""
    return flatten({"trainer": draccus.encode(draccus.decode(TrainerConfig, LEVANTER_DEFAULTS))})


def _unused(section: str, cls: type, kind: str) -> Iterator[tuple[str, Any, str]]:
    """Fields that nothing reads, of an optimizer of that kind or of a Llama-like decoder of Levanter (0.2.227): name,
    the value that it must keep, and what to use instead."""
    unused: Mapping[str, str | None] = {}
    if section == "optimizer":
        unused = OPTIMIZER_NO_EFFECT.get(kind, {})
    elif kind != "field":  # a field model has none, and is known without an import of Levanter's decoders
        from levanter.models.llama import LlamaConfig

        from tomat.model.decoder import DensityDecoderConfig

        if issubclass(cls, LlamaConfig):
            unused = {name: meaning_of(field).unused for name, (field, _) in fields_below(DensityDecoderConfig).items()}
    for field in dataclasses.fields(cls):
        if (instead := unused.get(field.name)) is not None:
            yield field.name, field.default, instead


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    kind = optimizer.get_choice_name(type(optimizer))
    if kind in OPTIMIZERS_THAT_CANNOT_RUN:
        raise TomatError(f"optimizer.type is '{kind}', which cannot run: {OPTIMIZERS_THAT_CANNOT_RUN[kind]}.")
    for name, value in vars(optimizer).items():
        amount = name in ("learning_rate", "lr", "weight_decay", "max_grad_norm") or name.endswith("_lr")
        if amount and value is not None and value < 0:
            raise TomatError(f"optimizer.{name} is {value}; expected 0 or more.")
    schedule, known = optimizer.lr_schedule, LrSchedule.get_known_choices()
    if isinstance(schedule, str) and schedule not in known:
        raise TomatError(f"optimizer.lr_schedule is '{schedule}'; expected one of {', '.join(sorted(known))}.")


def _check_checkpointing(model: LmConfig) -> None:
    """Refuse a name that is no checkpoint policy of Levanter's decoders; `DensityDecoderConfig` knows its own."""
    choice = getattr(model, "gradient_checkpointing", None)
    if isinstance(choice, str) and not is_density_decoder(model):
        try:
            ScanCheckpointPolicy.from_bool_or_str(choice)
        except ValueError:
            said = f"model.gradient_checkpointing is {choice!r}, which is no policy of Levanter (0.2.227)"
            raise TomatError(f"{said}; expected true, false, full, save_all, offload or nested.") from None


def _check_int8(model: LmConfig, trainer: TrainerSettings, distils: bool) -> None:
    """Refuse tomat's products in few bits beside Levanter's, and Levanter's where a layer is not one product: scales of
    products that share a layer would add up (`value_mix`), and all but the first of several be lost (`fused_*`)."""
    products = int8_matmuls_of(model)
    for is_set, other, why in (
        (distils, "distillation", "whose matrices are in few bits already and multiplied as floats"),
        (trainer.quantization, "trainer.quantization", "which would replace the same products by Levanter's own"),
    ):
        if products is not None and is_set:
            raise TomatError(f"model.int8_matmuls is {products} and {other} is set, {why}; leave one of them out.")
    quantised = trainer.quantization
    if quantised is not None and quantised.fp8 and field_of(model) and not isinstance(quantised.targets, list):
        raise TomatError(
            "model.field is set and trainer.quantization.fp8 is true, and layers that are not trained lose the scales "
            "that a step gives the others. Name the others, as in trainer.quantization.targets: [q_proj, k_proj, "
            "v_proj, o_proj, gate_proj, up_proj, down_proj], or leave one of both out."
        )
    names = ("value_mix", "fused_qkv", "fused_gate_up")
    found = [f"model.{name} is {value}" for name in names if (value := getattr(model, name, 0))]
    if found and trainer.quantization is not None:
        raise TomatError(
            f"{' and '.join(found)} and trainer.quantization is set, which has scales for one product in each layer; "
            "leave out trainer.quantization (model.int8_matmuls keeps no scales), or the model keys."
        )


def _check_field(config: RunSchema) -> None:
    """A field model, the layout of scattered voxels and the loss `nmae` need each other; no other model takes them."""
    layout = config.data.layout
    parts = {
        f"model.type is {config.model.get_choice_name(type(config.model))}": is_field(config.model),
        f"data.layout is {layout}": config.data.sequence_layout.is_scattered,
        f"loss.kind is {config.loss.kind}": config.loss.kind == "nmae",
    }
    if len({*parts.values()}) > 1:
        whole = "a field model (model.type: field) has a layout of scattered voxels and loss.kind nmae"
        raise TomatError(f"{' and '.join(parts)}; {whole}, other models have neither.")
    if all(parts.values()):
        if config.density_dropout:
            raise TomatError("density_dropout is set, and a field model reads no density; leave it out.")
        if config.distillation is not None:
            said = "distillation is set, and a field model has no distribution over bins to learn from a teacher"
            raise TomatError(f"{said}; leave it out, or take a decoder (configs/train/demo-decoder.yaml).")


def _check_wandb(wandb: WandbConfig | None, run_name: str) -> None:
    """A resumed run must continue its own W&B log, and no other."""
    if wandb is None:
        return
    if wandb.id not in (None, run_name):
        said = f"trackers.wandb.id is '{wandb.id}'; it follows from run_name, which is '{run_name}'"
        raise TomatError(f"{said}. Set trackers.wandb.name for another title.")
    if wandb.resume != "allow":
        raise TomatError(f"trackers.wandb.resume is {wandb.resume!r}; expected 'allow', with which a run is continued.")
    if wandb.fork_from is not None:
        raise TomatError("trackers.wandb.fork_from is set; `tomat train --fork NEW_NAME` forks a run, model included.")
