"""The words of a training run that is as small as one can be: one layer on the embedded densities.

All tests that train something use these words and few others, so that what one of them has compiled serves the rest
(`tests/conftest.py` keeps it).
"""

import sys
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "configs" / "train" / "demo-decoder.yaml"
ONE_LAYER = [
    "--model.num_layers", "1", "--model.hidden_dim", "32", "--model.intermediate_dim", "64", "--model.num_heads", "2",
    "--model.num_kv_heads", "2", "--data.n_density_tokens", "64",
]  # fmt: skip
ONE_STEP = [
    "--preset", "demo", "--data.source", "embedded", "--data.layout", "v3-p7", "--trainer.mp", "f32", *ONE_LAYER,
    "--model.head_dim", "16",
]  # fmt: skip
"""Of a step that is built without a run."""

WITHOUT_ATOMS = ["--model.environment", "null", "--density_dropout", "0"]

STEADY = ["--optimizer.warmup", "2", "--optimizer.lr_schedule", "constant"]
"""With these runs of any number of steps have the same program, which is compiled once for all tests."""


TINY_FIELD = [
    "--data.patches_per_material", "2", "--data.n_density_tokens", "64", "--data.embedded_grid", "refined",
    "--data.groups", "[crystals]",
    "--model.channels", "2", "--model.products", "2", "--model.hidden_dim", "16", "--model.hidden_layers", "1",
    "--model.members", "2", "--trainer.num_train_steps", "8", "--optimizer.warmup", "2",
    "--optimizer.learning_rate", "1e-3",
    "--trainer.checkpointer.keep", "[{every: 4, until: null}]", "--trainer.max_eval_batches", "1",
    "--evaluation.free_running", "false",
]  # fmt: skip
"""Of a field model, for the configuration `demo`; the rate is that of the example of `train`, whose program this is."""


def tiny_run(
    steps: int, keep_every: int, *words: str, atoms: bool = False, steady: bool = True, name: str = "demo"
) -> list[str]:
    """Words for `load_config` or the command `train`: batches of four sequences, no evaluation unless `words` ask.

    `atoms`: with the environment and dropout of the demo, whose programs take a third more time to compile (28 against
    21 s of processor time for a whole run of four steps).
    """
    keep = f"[{{every: {keep_every}, until: null}}]"
    return [
        *ONE_LAYER, "--data.patches_per_material", "4", "--trainer.train_batch_size", "4",
        "--trainer.num_train_steps", str(steps), "--trainer.checkpointer.keep", keep,
        "--trainer.max_eval_batches", "0", "--evaluation.patches_per_material", "0",
        "--evaluation.free_running", "false", *([] if atoms else WITHOUT_ATOMS),
        *(STEADY if steady else []), *([] if not name or "--run_name" in words else ["--run_name", name]), *words,
    ]  # fmt: skip


def demo_config(words: list[str], output_dir: Path, *more: str) -> Any:
    """The demo's decoder as those words have it, in a folder of runs."""
    from tomat.train.settings.config import load_config

    return load_config(DEMO, [*words, "--output_dir", str(output_dir), *more])


def tomat(*words: object) -> list[str]:
    """The command line of a process of its own."""
    return [sys.executable, "-m", "tomat.app.cli", *map(str, words)]
