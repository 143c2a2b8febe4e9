"""Compares tokens a second of tomat's step and loader with Levanter's own trainer and loader.

Both sides have the same decoder (Levanter's Qwen3, which tomat's decoder equals without the atoms), rows, batch size
and optimizer, but each has its own loss, loader and loop. Levanter's rows lie in memory and are shuffled one by one.
Its loss is the next-token cross-entropy over the whole vocabulary at all positions except padding, as its `train_lm`
computes for token rows. Both run in one process, in alternating windows of steps.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from decode_speed import said, spread_of
from haliax import Axis
from jaxtyping import PRNGKeyArray
from levanter.callbacks import StepInfo
from levanter.data.dataset import ListAsyncDataset
from levanter.data.text.datasets import CausalLmDataset, NamedLmDataset, TokenSeqDict
from levanter.models.lm_model import LmExample, LmHeadModel
from levanter.models.qwen import Qwen3Config
from levanter.trainer import Trainer, TrainerConfig

from tomat.app.cli import main
from tomat.base.arguments import Parser, add_flag, config_file, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.reporting import console, write_report
from tomat.data.tokens.shards import ShardSet
from tomat.data.tokens.vocabulary import PAD
from tomat.model.any_decoder import environment_of
from tomat.model.decoder import DensityDecoderConfig, parameter_count
from tomat.train.datasets import Datasets, open_datasets, value_table
from tomat.train.dispatch import training_steps
from tomat.train.loader import training_loader
from tomat.train.loop import shuffled_rows
from tomat.train.restore import initial_state
from tomat.train.settings.config import TrainConfig, load_config
from tomat.train.startup import connect, initialise
from tomat.train.step import build_trainer

WITHOUT_ATOMS = ["--model.environment", "null", "--density_dropout", "0"]
"""Overrides that leave out the atoms, because Levanter has no model that reads them."""

ENDLESS_STEPS = 10**9


def build_parser() -> Parser:
    """The argument parser of this script."""
    parser = Parser(
        description="Tokens a second of the same decoder on the same rows: tomat's loss, loader and loop, and those of "
        "Levanter, in turn. The atoms are left out, which Levanter's models do not read.",
    )
    text = "of the model, its data, batch and optimizer; a file or the name of one that ships"
    add_flag(parser, "--config_path", "demo-decoder", text, type=config_file("train"), metavar="FILE")
    add_flag(parser, "--steps", 10, "steps that are timed together", type=positive_int)
    add_flag(parser, "--rounds", 6, "turns of each", type=positive_int)
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Time both sides in turn, print and write the figures.

    Raises:
        TomatError: The model is not tomat's own decoder, or has no counterpart in Levanter's Qwen3.
    """
    config = load_config(args.config_path)
    if environment_of(config.model) is not None:
        config = load_config(args.config_path, WITHOUT_ATOMS)
    qwen = levanter_model(config)
    trainer_config = connect(config)
    with tempfile.TemporaryDirectory(prefix="tomat-bench-") as name, ExitStack() as stack:
        datasets = open_datasets(config, Path(name))
        initialise(config, trainer_config, Path(name), 0)
        trainer_config.load_checkpoint, trainer_config.load_checkpoint_path = False, None
        sides = {
            "tomat": tomat_steps(config, trainer_config, datasets, args.steps + 1, stack),
            "levanter": levanter_steps(config, trainer_config, qwen, datasets.train, stack),
        }
        console.print(f"{args.config_path}: compiling both steps, without atoms", highlight=False)
        losses = {side: [timed(steps, args.steps)[1]] for side, steps in sides.items()}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(args.rounds):
            # The two sides take turns in going first.
            for side in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                found = timed(sides[side], args.steps)
                seconds[side].append(found[0])
                losses[side].append(found[1])
    tokens = config.batch_size * config.seq_len
    ratios = [theirs / ours for ours, theirs in zip(seconds["tomat"], seconds["levanter"], strict=True)]
    figures: dict[str, Any] = {
        "config": str(args.config_path),
        "parameters": parameter_count(config.model_config(), config.data.model_vocabulary),
        "batch_sequences": config.batch_size,
        "sequence_tokens": config.seq_len,
        "optimizer": config.optimizer.get_choice_name(type(config.optimizer)),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "cores": os.cpu_count(),
        "rounds": args.rounds,
        "steps_per_window": args.steps,
        **{f"{side}_tokens_per_s": spread_of([tokens / one for one in times]) for side, times in seconds.items()},
        "times_levanter": spread_of(ratios),
        **{f"{side}_first_and_last_loss": [found[0], found[-1]] for side, found in losses.items()},
    }
    console.print(
        f"{figures['parameters'] / 1e6:.2f} M parameters, {config.batch_size} x {config.seq_len} tokens a step: tomat "
        f"{said(figures['tomat_tokens_per_s'])} tokens/s, Levanter {said(figures['levanter_tokens_per_s'])}; times as "
        f"many: {said(figures['times_levanter'])}",
        soft_wrap=True,
    )
    write_report(args.json, figures)
    return 0


def levanter_model(config: TrainConfig) -> Qwen3Config:
    """The same decoder as a configuration of Levanter.

    Raises:
        TomatError: Levanter has no such decoder.
    """
    model = config.model_config()
    if not isinstance(model, DensityDecoderConfig):
        raise TomatError(f"model.type is {config.model.get_choice_name(type(config.model))}; expected density_decoder.")
    without = {
        "sliding_window": model.window is not None,
        "embedding_skip": model.embedding_skip != 0,
        "value_mix": model.value_mix != 0,
        "paired_heads": model.paired_heads,
        "int8_matmuls": model.int8_matmuls is not None,
    }
    if any(without.values()):
        names = ", ".join(f"model.{name}" for name, differs in without.items() if differs)
        raise TomatError(f"{names}: there is no counterpart in Levanter's Qwen3; leave it out.")
    shared = {field.name for field in dataclasses.fields(Qwen3Config)} - {"sliding_window", "use_sliding_window"}
    values = {name: getattr(model, name) for name in shared}
    if values["attn_backend"] == "cudnn":  # None: Levanter's own choice for a GPU
        values["attn_backend"] = None
    return Qwen3Config(**{**values, "gradient_checkpointing": model.checkpoint_policy})


def tomat_steps(
    config: TrainConfig, trainer_config: TrainerConfig, datasets: Datasets, window: int, stack: ExitStack
) -> Iterator[StepInfo[Any]]:
    """An endless iterator over tomat's own steps. After every `window` steps, none is in flight."""
    trainer = build_trainer(config, trainer_config, value_table(datasets.codec))
    trainer_config.num_train_steps = ENDLESS_STEPS
    stack.enter_context(trainer)
    loader = training_loader(config, trainer, shuffled_rows(config, datasets.train))
    return training_steps(
        trainer,
        initial_state(config, trainer, None, None),
        loader.iter_from_step(0),
        ahead=config.dispatch_ahead,
        pauses_after=lambda done: done % window == 0,
        asks=lambda: False,
    )


def levanter_steps(
    config: TrainConfig, trainer_config: TrainerConfig, model: Qwen3Config, shards: ShardSet, stack: ExitStack
) -> Iterator[StepInfo[Any]]:
    """Levanter's own steps: its model, loss, data sets, loader and loop, put together as in its `train_lm`."""

    def loss(model: LmHeadModel, example: LmExample, *, key: PRNGKeyArray | None = None) -> Any:
        return model.compute_next_token_loss(example, key=key)

    Pos, Vocab = Axis("position", config.seq_len), Axis("vocab", config.data.model_vocabulary)
    rows = shards.read_rows(0, shards.rows)[:, : config.seq_len].astype(np.int32)
    weights = (np.roll(rows, -1, axis=1) != PAD).astype(np.float32)
    each = [TokenSeqDict(input_ids=ids, loss_weights=weight) for ids, weight in zip(rows, weights, strict=True)]
    data_key, model_key, training_key = jax.random.split(jax.random.PRNGKey(config.trainer.seed), 3)
    dataset = NamedLmDataset(CausalLmDataset(ListAsyncDataset(each), Pos), Pos).shuffle(data_key)
    optimizer = config.optimizer.build(config.trainer.num_train_steps)
    trainer = stack.enter_context(Trainer(trainer_config, optimizer, cast(Any, loss), add_default_hooks=False))
    state = trainer.initial_state(training_key, model_init=lambda: model.build(Vocab, key=model_key))
    return iter(trainer.training_steps(state, trainer.data_loader(dataset)))


def timed(steps: Iterator[StepInfo[Any]], n: int) -> tuple[float, float]:
    """Mean seconds of the next `n` steps and the loss of the last; one step before them is not counted."""
    next(steps)
    began = time.monotonic()
    for _ in range(n - 1):
        next(steps)
    last = float(next(steps).loss)
    return (time.monotonic() - began) / n, last


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
