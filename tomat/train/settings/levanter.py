"""Levanter's `TrainerConfig`, made of a run's settings, and what configurations of before have of it."""

import dataclasses
from functools import cache
from typing import Any

import draccus
import levanter.config  # noqa: F401  (registers draccus codecs for jmp policies, time deltas and checkpoint policies)
import mergedeep
from levanter.trainer import TrainerConfig

from tomat.base.documents import flatten, take_out
from tomat.train.runs.former_keys import FORMER
from tomat.train.settings.schema import RunSchema

DEFAULTS: dict[str, Any] = {
    # Levanter would stop on a CPU; whether a run belongs there is the user's `slice`, checked in `startup.py`.
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
"""What tomat sets where Levanter's own default does not fit, and no key of tomat's is."""


def levanter_trainer(config: RunSchema, checkpoints: str, temporary_checkpoints: str | None) -> TrainerConfig:
    """The `trainer` block, and everything that follows from other keys.

    Args:
        config: The run.
        checkpoints: Folder or URL of those that are kept.
        temporary_checkpoints: Of the others; None: the same.
    """
    own = dataclasses.asdict(config.trainer)
    own["mesh"]["param_mapping"] = {} if config.sharding == "replicated" else {"embed": "data"}
    own["checkpointer"] |= {
        "base_path": checkpoints,
        "temporary_base_path": temporary_checkpoints,
        "append_run_id_to_base_path": False,
    }
    jax_config = own.pop("jax_config")
    values = mergedeep.merge({}, DEFAULTS, own, {"id": config.run_name, "log_dir": config.output_dir})
    # draccus 0.11.6 decodes a bool of this field's `str | int | float | bool | None` as the text "True".
    return dataclasses.replace(draccus.decode(TrainerConfig, values), jax_config=jax_config)


def without_former(values: dict[str, Any]) -> dict[str, str]:
    """Take the keys of earlier versions (`runs/former_keys.py`) out of a configuration.

    Args:
        values: As plain values; changed in place.

    Returns:
        The dotted keys that had another value than the one with which they did nothing, and what to use instead.
    """
    acting: dict[str, str] = {}
    for key, instead in FORMER.items():
        was_there, value = take_out(values, key)
        if was_there:
            kept = _former_values()
            acting |= {name: instead for name, found in flatten({key: value}).items() if kept.get(name) != found}
    return acting


@cache
def _former_values() -> dict[str, Any]:
    """Every key of Levanter's `TrainerConfig` with the value that did nothing; None for those that had to be absent."""
    return flatten({"trainer": draccus.encode(draccus.decode(TrainerConfig, DEFAULTS))})
