"""Which weights of a run are taken, and the words for all that decides its densities. Without JAX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE, WEIGHTS_FOLDER
from tomat.base.overrides import read_yaml
from tomat.data.density.promolecule import Promolecule
from tomat.predict.inference.choice import Choice
from tomat.predict.weights.record import is_weights_folder, read_weights_record
from tomat.train.runs.checkpoints import find_checkpoint, weights_kind
from tomat.train.runs.published import is_remote

DecoderName = Literal["parallel", "autoregressive"]


@dataclass(frozen=True)
class FoundWeights:
    """The weights that are taken of a run, or of a folder of weights."""

    folder: Path
    """Holds configuration, codec and promolecule; of a run that trained a model in few bits the folder of that."""
    run_name: str
    step: int
    kind: str
    """As `LoadedRun.weights`."""
    checkpoint: str | None
    """Folder or URL; None: the arrays are in `folder`."""


def find_weights(run_dir: str | Path, step: int | None = None) -> FoundWeights:
    """The newest whole checkpoint of a run, or that of `step`; or the weights of a folder that `tomat export` wrote."""
    folder = Path(run_dir)
    config_path = folder / CONFIG_FILE
    if not config_path.exists():
        raise TomatError(f"{folder} is not a run: it has no {CONFIG_FILE}.")
    config = read_yaml(config_path)
    if config.get("distillation") is not None and not is_weights_folder(folder):
        folder = _distilled(folder, step)
    name = str(config.get("run_name"))
    if is_weights_folder(folder):
        record = read_weights_record(folder)
        if step not in (None, record.step):
            raise TomatError(f"{folder} holds the weights of step {record.step} alone; leave out --step {step}.")
        return FoundWeights(folder, name, record.step, record.weights, None)
    output, temporary = str(config.get("output_dir")).rstrip("/"), _temporary(config)
    place = f"{output}/{name}" if is_remote(output) else str(folder)
    found = find_checkpoint(place, step, None if temporary is None else f"{temporary}/{name}")
    return FoundWeights(folder, name, found.step, weights_kind(found.path), found.path)


def _temporary(config: dict[str, Any]) -> str | None:
    """`trainer.checkpointer.temporary_base_path`, where it is set."""
    found: Any = config
    for key in ("trainer", "checkpointer", "temporary_base_path"):
        found = found.get(key) if isinstance(found, dict) else None
    return None if found is None else str(found).rstrip("/")


def _distilled(folder: Path, step: int | None) -> Path:
    """The folder of weights that a run with `distillation` has left."""
    if step is not None:
        raise TomatError(
            f"{folder} trained a model in few bits, whose checkpoints hold what is trained alone: `tomat export --run "
            f"{folder} --step {step} --output OUT` makes a folder that predicts."
        )
    if not is_weights_folder(folder / WEIGHTS_FOLDER):
        raise TomatError(
            f"{folder} has not ended: its {WEIGHTS_FOLDER} are not there. Go on with `tomat train`, or make a folder "
            f"that predicts of its newest checkpoint: `tomat export --run {folder} --output OUT`."
        )
    return folder / WEIGHTS_FOLDER


def identity_of(
    weights: tuple[str, int, str],
    codec_sha256: str,
    promolecule: Promolecule,
    rounds: int,
    decoder: DecoderName,
    choice: Choice,
    kv_cache_dtype: str,
) -> str:
    """All that decides the densities of a run, in words; `weights` is the run's name, the step, and their kind."""
    how = f"parallel, rounds {rounds}" if decoder == "parallel" else f"autoregressive, {choice}"
    if kv_cache_dtype != "compute":
        how += f", kv_cache_dtype {kv_cache_dtype}"
    name, step, kind = weights
    return f"run {name} step {step}, weights {kind}, codec {codec_sha256}, promolecule {promolecule.sha256}, {how}"
