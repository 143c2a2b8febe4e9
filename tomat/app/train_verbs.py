"""`tomat train`: checks the settings of a run and whether it fits into memory before anything starts."""

import argparse
import logging
import shlex
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.arguments import add_verb, config_file, count, report_file, run_folder
from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE
from tomat.base.progress import Stages
from tomat.base.reporting import tell, write_report

if TYPE_CHECKING:  # imported only when the verb runs
    from tomat.train.settings.config import TrainConfig

logger = logging.getLogger(__name__)

DEFAULT_CONFIG = "demo"
DISTILLATION_OPTIMIZER: dict[str, Any] = {
    "type": "adam",
    "learning_rate": 1.5e-3,
    "weight_decay": 0.0,
    "warmup": 20,
    "min_lr_ratio": 0.0,
    "lr_schedule": "cosine",
}
"""Optimizer for `TrainedArrays`, whose numbers are relative to a scale: 1.5e-3 moves one by 0.15 % of it in a step."""
DISTILLATION_STEPS = 800
"""Steps that the demo needs in 2 bits: its divergence from the teacher falls from 3.3 nats a voxel to 0.15 after 500
steps and 0.09 after 800. In 3 and 4 bits, 400 and 300 steps are enough (`docs/tracking/small-models.md`)."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "train a model, evaluate it on held-out materials, write the run's page"
    settings = "Settings: tomat/train/settings/schema.py and the sections beside it document every field."
    parser = add_verb(subparsers, "train", text, _run_train, epilog=settings)
    text = f"configuration, a file or the name of one that ships (default: {DEFAULT_CONFIG})"
    parser.add_argument("--config_path", type=config_file("train"), metavar="FILE", help=text)
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures of the run")
    text = "settings, such as optimizer.learning_rate, that may differ from those the run began with; recorded"
    parser.add_argument("--allow_change", default="", metavar="KEY[,KEY...]", help=text)
    text = "begin run NEW_NAME with model, optimizer state and step of a checkpoint of the run that run_name names"
    parser.add_argument("--fork", metavar="NEW_NAME", help=text)
    text = "fork checkpoint step-N (default: the newest whole one)"
    parser.add_argument("--fork_step", type=count, metavar="N", help=text)
    text = "begin a new run with the weights alone of another one: fresh optimizer, step 0, its own warm-up"
    parser.add_argument("--warm_start", metavar="RUN_OR_CHECKPOINT", help=text)
    text = "train the model in few bits of --quantised on the distributions of this run or folder of weights"
    parser.add_argument("--teacher", type=run_folder, metavar="RUN", help=text)
    text = "folder that `tomat compress` wrote; its configuration is used"
    parser.add_argument("--quantised", type=Path, metavar="DIR", help=text)
    parser.add_argument("--train", choices=("mlp", "all"), help="part of --quantised to train (default: all)")
    text = "compile the step for the configured TPU slice first, and do not start a run that cannot fit"
    parser.add_argument("--plan_first", action="store_true", help=text)
    parser.set_defaults(takes_overrides=True)


def _run_train(args: argparse.Namespace) -> int:
    """Train a model, evaluate it on held-out materials and write the run's page. The same run_name continues the same
    run, from its newest whole checkpoint. Any setting of the configuration can follow as --a.b VALUE."""
    from tomat.app.workflow.folder_run import folder_words
    from tomat.train.settings.keys import check_words

    # The flags of a distillation go together and bring their own configuration.
    distils = any((args.teacher, args.quantised, args.train))
    if distils and None in (args.teacher, args.quantised):
        raise TomatError("a distillation needs --teacher RUN and --quantised DIR, a folder of `tomat compress`.")
    if distils and args.config_path is not None:
        raise TomatError("--config_path does not go with --quantised, whose configuration is used; override that.")
    if distils and not (args.quantised / CONFIG_FILE).is_file():
        raise TomatError(f"--quantised {args.quantised} has no {CONFIG_FILE}; give a folder of `tomat compress`.")
    path = args.config_path or (args.quantised / CONFIG_FILE if distils else config_file("train")(DEFAULT_CONFIG))
    started = time.monotonic()
    if args.fork_step is not None and args.fork is None:
        raise TomatError("--fork_step needs --fork NEW_NAME.")
    # Checked before JAX and Levanter are imported, which takes seconds.
    check_words(path, args.overrides)
    overrides = args.overrides if distils else folder_words(path, args.overrides)

    from tomat.app.workflow.train import train_and_report
    from tomat.predict.inference.trained import outside_event_loop
    from tomat.train.origins import Continuation
    from tomat.train.preemption import StopRequest
    from tomat.train.runs.run_log import Asked
    from tomat.train.settings.config import config_from_dict, load_config

    def load(words: Sequence[str]) -> "TrainConfig":
        if not distils:
            return load_config(path, words)
        return config_from_dict(*distillation_values(args.quantised, str(args.teacher), args.train, words))

    config = load(overrides)
    fork_of = None
    if args.fork is not None:
        fork_of = config.run_name
        config = load([*overrides, "--run_name", args.fork])
    if args.plan_first:
        refuse_what_cannot_fit(config)
    allow = tuple(key for key in args.allow_change.split(",") if key)
    continuation = Continuation(allow, fork_of, args.fork_step, args.warm_start)
    stop = StopRequest(config.preemption.grace_seconds)
    asked = Asked.by_words(args.words, path, overrides)
    logger.info("%s, with settings that are not its own: %s", path, dict(asked.settings) or "none")
    try:
        with stop.listening():
            # Levanter 0.2.227 reads and saves with `asyncio.run`, which a notebook's own loop refuses.
            figures = outside_event_loop(lambda: train_and_report(config, started, continuation, stop, asked))
            write_report(args.json, figures)
        return stop.status if figures["training"]["preempted"] else 0
    finally:
        if stop.asked:
            said = f"the same command continues the run: {shlex.join(['tomat', *args.words])}"
            tell(said, soft_wrap=True, highlight=False)


def distillation_values(
    quantised: Path, teacher: str, train: str | None, overrides: Sequence[str]
) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The arguments of `config_from_dict` for a distillation: the configuration of the folder `quantised` with its own
    optimizer and steps, the file it comes from, and the parsed `overrides`."""
    import mergedeep

    from tomat.base.overrides import parse_overrides, read_yaml

    path = quantised / CONFIG_FILE
    values = read_yaml(path, "a folder of `tomat compress`")
    name = quantised.resolve().name
    distillation = {"teacher": teacher, "quantised": str(quantised)} | ({} if train is None else {"train": train})
    own: dict[str, Any] = {
        "run_name": f"{name}-distilled",
        "purpose": f"Brings {name} back to its teacher, {teacher}.",
        "distillation": distillation,
        "trainer": {"num_train_steps": DISTILLATION_STEPS, "model_averaging": None},
        "sharding": "replicated",
    }
    values.pop("optimizer", None)
    merged = mergedeep.merge({}, values, own, {"optimizer": DISTILLATION_OPTIMIZER})
    return dict(merged), str(path), parse_overrides(overrides)


def refuse_what_cannot_fit(config: "TrainConfig") -> None:
    """Plan the run's step for its slice as `tomat plan` does, on any machine, and raise an error if it does not fit."""
    from tomat.perf.plan.compile.compiler import compile_step
    from tomat.perf.plan.compile.topology import planned_slice

    slice_ = planned_slice(config, None)
    with Stages() as stages:
        show = partial(stages.show, f"planning {config.run_name} on {slice_.name}")
        step = compile_step(config, slice_, memory_only=True, on_stage=show)
    memory = step.memory
    said = f"{memory.required_bytes / 2**30:.2f} of {memory.capacity_bytes / 2**30:.2f} GiB of each device"
    if not step.fits:
        refused = f"run '{config.run_name}' does not fit {slice_.name}: it needs {said}"
        raise TomatError(f"{refused}. `tomat plan` with the same arguments looks for the nearest changes that fit.")
    tell(f"planned: needs {said}")
