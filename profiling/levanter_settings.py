"""Finds the settings of Levanter's optimizers, schedules and rotary embeddings that have no effect.

Those of the optimizers are the table `OPTIMIZER_NO_EFFECT` in `tomat/train/settings/checks.py`. Another version of
Levanter may need another table.
"""

import argparse
import dataclasses
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from levanter.layers.rotary import RotaryEmbeddingsConfig
from levanter.optim.clip_update_norm import ClipUpdateNormConfig
from levanter.optim.config import LrSchedule, LrScheduleContext, OptimizerConfig
from levanter.optim.skipstep import SkipStepConfig
from levanter.trainer import TrainerConfig

from tomat.app.cli import main
from tomat.base.arguments import Parser, report_file
from tomat.base.errors import TomatError
from tomat.base.reporting import console, write_report
from tomat.model.devices import ignore_absent_tpu
from tomat.train.settings import adafactor as adafactor  # registers its name among Levanter's optimizers
from tomat.train.settings.checks import OPTIMIZER_NO_EFFECT, OPTIMIZERS_THAT_CANNOT_RUN


class Small(eqx.Module):
    """A model with one parameter of each kind that optimizers treat differently."""

    embeddings: hnn.Embedding
    linear: hnn.Linear
    norm: hnn.RmsNorm
    lm_head: hnn.Linear
    layers: hnn.Stacked

    @staticmethod
    def init() -> "Small":
        key = jax.random.PRNGKey(0)
        embed, vocab, mlp = hax.Axis("embed", 8), hax.Axis("vocab", 12), hax.Axis("mlp", 6)
        layers = hnn.Stacked.init(hax.Axis("layers", 2), hnn.Linear)
        return Small(
            hnn.Embedding.init(vocab, embed, key=key),
            hnn.Linear.init(embed, mlp, key=key, out_first=True),
            hnn.RmsNorm.init(embed),
            hnn.Linear.init(embed, vocab, key=key, out_first=True, use_bias=False),
            layers(embed, mlp, key=jax.random.split(key, 2)),
        )


CHANGES: dict[str, Any] = {
    # The schedule.
    "cooldown": 0.2, "cycle_length": 50, "cycles": 2, "decay": 0.3, "haps": [40], "lr_schedule": "linear",
    "rewarmup": 0.2, "warmup": 0.4,
    # Weight decay and bad steps.
    "clip_update_norm": ClipUpdateNormConfig(), "default_weight_decay_mask": False, "skip_bad_steps": SkipStepConfig(),
    "weight_decay_modules": ["linear"],
    # Preconditioners.
    "block_size": 4, "coefficient_type": "polar_express", "max_precond_dim": 4, "max_size_triangular": 4,
    "memory_save_mode": "all_diag", "min_ndim_triangular": 3, "mu_dtype": "bfloat16", "precond_dtype": "bfloat16",
    "precond_grads_precision": "float32", "precond_update_precision": "float32", "target_merged_dim_size": 48,
}  # fmt: skip
"""Other values for fields for which `changed_value` cannot derive one from the type."""


CHANGES_OF_KIND: dict[str, dict[str, Any]] = {
    "adafactor": {"min_dim_size_to_factor": 4},
    "kron": {"lax_map_batch_size": 1, "params_sharding": (), "preconditioner_sharding": ("data", None)},
    "soap": {"max_precond_dim": 9, "mu_dtype": "float32", "precond_dtype": "float32"},
}
"""The same for one optimizer that needs another value. `soap` cannot be traced with other types than these."""

BESIDE: dict[str, dict[str, dict[str, Any]]] = {
    # A batch of all layers is one vmap, the same as without lax.map.
    "kron": {
        "lax_map_batch_size": {"lax_map_scanned_layers": True},
        "lax_map_scanned_layers": {"lax_map_batch_size": 1},
    },
    # With merged dimensions only vectors would remain, which have no preconditioner to limit. Blocks have one size.
    "soap": {
        name: {"merge_small_dims": False, "partition_grads_into_blocks": False}
        for name in ("max_precond_dim", "one_diag")
    },
}
"""Optimizer -> field -> settings without which the field has no effect."""


SCHEDULE = {"lr_schedule", "min_lr_ratio", "decay", "rewarmup", "cooldown", "cycle_length", "cycles", "haps"}
"""Fields of every optimizer that only `lr_scheduler` reads."""


def changed_value(kind: str, name: str, value: Any) -> Any:
    if name in CHANGES_OF_KIND.get(kind, {}):
        return CHANGES_OF_KIND[kind][name]
    if name in CHANGES:
        return CHANGES[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return 0.037 if value is None else value * 0.5 + 0.013


def optimizer_text(config: OptimizerConfig) -> str:
    """The optimizer's part of a step as the text of its jaxpr."""
    shape = eqx.filter_eval_shape(Small.init)

    def update(params: Small, grads: Small) -> list[Any]:
        transform = config.build(100)

        def objective(model: Small) -> jax.Array:
            return jnp.asarray(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(model)))

        more: Any = {"obj_fn": objective, "loss": jnp.float32(1.0)}
        return jax.tree.leaves(transform.update(grads, transform.init(params), params=params, **more))

    mesh = TrainerConfig().device_mesh
    with warnings.catch_warnings(), hax.partitioning.set_mesh(mesh), hax.axis_mapping({"embed": "data"}):
        warnings.simplefilter("ignore")  # Levanter warns of deprecated keys, which still act
        jaxpr = jax.make_jaxpr(update)(shape, shape)
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr)) + str(jaxpr.consts)


def of_optimizer(kind: str) -> Iterator[tuple[str, bool]]:
    """The fields of an optimizer, and whether each changes the step."""
    cls: Any = OptimizerConfig.get_choice_class(kind)
    # Some optimizers have no weight decay by default, and without it a mask would show no effect.
    base = cls() if "weight_decay" in OPTIMIZER_NO_EFFECT.get(kind, {}) else cls(weight_decay=0.01)
    text = optimizer_text(base)
    # The schedule's fields act through `lr_scheduler` in every optimizer: all are tried in one, the warm-up in each.
    assert cls.lr_scheduler is OptimizerConfig.lr_scheduler and text == optimizer_text(base)
    skipped = set() if kind == "adam" else SCHEDULE
    for field in (field for field in dataclasses.fields(cls) if field.name not in skipped):
        if field.name == "params_sharding":  # it would not be a tree like the model, and Levanter would assert
            continue
        beside = {"cycles": 2} if field.name == "rewarmup" else BESIDE.get(kind, {}).get(field.name, {})
        both = dataclasses.replace(base, **beside)
        value = changed_value(kind, field.name, getattr(both, field.name))
        changed = optimizer_text(dataclasses.replace(both, **{field.name: value}))
        yield field.name, changed != (optimizer_text(both) if beside else text)


def doubled(base: Any, what: Callable[[Any], np.ndarray]) -> Iterator[tuple[str, bool]]:
    """The fields of a configuration, and whether doubling each changes the result of `what`."""
    for field in dataclasses.fields(base):
        value = getattr(base, field.name)
        changed = dataclasses.replace(base, **{field.name: type(value)(value * 2)})
        yield field.name, not np.array_equal(what(changed), what(base))


def of_rotary(kind: str) -> Iterator[tuple[str, bool]]:
    def table(config: RotaryEmbeddingsConfig) -> np.ndarray:
        positions = hax.arange(hax.Axis("position", 64))
        x = hax.ones((hax.Axis("position", 64), hax.Axis("head_size", 64)))
        return np.asarray(config.build(hax.Axis("head_size", 64))(x, positions).array)

    # Long wavelengths, so that the range where Llama-3 and YaRN interpolate is not empty, and a scale that is not 1.
    cls: Any = RotaryEmbeddingsConfig.get_choice_class(kind)
    yield from doubled(dataclasses.replace(cls(), factor=4.0), table)


def of_schedule(kind: str) -> Iterator[tuple[str, bool]]:
    # These values act within the steps that are tried, after the rate has come down from its ceiling.
    given: Any = {"power": {"batch_size": 8, "seq_length": 16}, "inv_sqrt": {"timescale": 20.0}}.get(kind, {})
    context = LrScheduleContext(10, 90, 1.0, 0.1, 0.1)

    def rates(config: LrSchedule) -> np.ndarray:
        return np.asarray([typing.cast(Any, config.build(context))(step) for step in range(1, 90)])

    yield from doubled(typing.cast(Any, LrSchedule.get_choice_class(kind))(**given), rates)


ASKED = {"optimizer": (OptimizerConfig, of_optimizer), "rotary": (RotaryEmbeddingsConfig, of_rotary),
         "schedule": (LrSchedule, of_schedule)}  # fmt: skip


def build_parser() -> Parser:
    """The flags of this script."""
    parser = Parser(
        prog="python profiling/levanter_settings.py",
        description="Change each setting of Levanter's optimizers, schedules and rotary embeddings, and see whether "
        "what is made of it changes; exit status 1 where the table of those that nothing reads says otherwise.",
    )
    parser.add_argument("--kinds", nargs="*", default=[], metavar="KIND", help="these alone (default: all)")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write what was found")
    parser.set_defaults(run=run)
    parser.examples = (f"{parser.prog} --kinds lion cosine",)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the settings without effect, and the differences from the table. Returns 1 if there are differences."""
    ignore_absent_tpu()
    every = {kind for registry, _ in ASKED.values() for kind in registry.get_known_choices()}
    kinds = sorted(every - set(OPTIMIZERS_THAT_CANNOT_RUN))
    if unknown := sorted(set(args.kinds) - set(kinds)):
        raise TomatError(f"--kinds names {unknown[0]}; expected some of {', '.join(kinds)}.")
    unread: dict[str, list[str]] = {}
    wrong: list[str] = []
    for section, (registry, ask) in ASKED.items():
        for kind in sorted(set(registry.get_known_choices()) - set(OPTIMIZERS_THAT_CANNOT_RUN)):
            if args.kinds and kind not in args.kinds:
                continue
            known = OPTIMIZER_NO_EFFECT.get(kind, {}) if section == "optimizer" else {}
            found = dict(ask(kind))
            unread[f"{section} {kind}"] = sorted(name for name, acts in found.items() if not acts)
            wrong += [f"{section} {kind}: {name}" for name, acts in found.items() if acts == (name in known)]
            console.print(f"{section} {kind}: {', '.join(unread[f'{section} {kind}']) or 'all of it acts'}")
    for text in wrong:
        console.print(f"not as the table says: {text}")
    write_report(args.json, {"unread": unread, "not_as_the_table": wrong})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
