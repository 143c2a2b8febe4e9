"""Finds the weights of a run, and reads the record of a folder of weights, without JAX and without the arrays."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from tomat.base.documents import flatten, mapping, parse_checked, parse_json, read_bytes
from tomat.base.errors import TomatError
from tomat.base.layout import CHECKSUM_FILE, CONFIG_FILE, EVALUATION_FILE, WEIGHTS_FOLDER
from tomat.base.overrides import read_yaml
from tomat.base.records import Count, Positive, Sha256, typed
from tomat.base.storage import is_remote
from tomat.train.runs.checkpoints import find_checkpoint, weights_kind

ARRAYS_FILE = "model.safetensors"
WEIGHTS_FILE = "weights.json"
FORMAT_VERSION = 1
AGAIN = "Write the folder again."

Scheme = Literal["affine", "lut"]


class Description(TypedDict):
    """How a matrix is quantised (`quantise.py`)."""

    scheme: Scheme
    bits: Positive
    group: Positive
    shape: tuple[Positive, Positive]


@dataclass(frozen=True)
class WeightsRecord:
    """The keys of `weights.json` that are read again."""

    step: Count
    weights: str
    """Kind of the weights, as in `LoadedRun.weights`, and how they were compressed."""
    quantised: Mapping[str, Description]
    sha256: Mapping[str, Sha256]
    """SHA-256 of each other file, by name."""
    error: str | None = None
    """The run's error on held-out cells, in words; None: there was no evaluation, or an earlier tomat wrote this."""
    quantised_from: Sha256 | None = None
    """`arrays_sha256` of the arrays before quantisation; None: nothing was quantised, or by an earlier tomat."""


def is_weights_folder(folder: Path) -> bool:
    return (folder / WEIGHTS_FILE).is_file()


def read_weights_record(folder: Path) -> WeightsRecord:
    place = folder / WEIGHTS_FILE
    content = read_bytes(place)
    stated = mapping(parse_json(content, f"{place} is damaged: it", AGAIN)).get("format_version")
    # Checked before the hash, because a later version may compute the hash in another way.
    if isinstance(stated, int) and stated > FORMAT_VERSION:
        said = f"{place} has format_version {stated}"
        raise TomatError(f"{said}; this tomat reads {FORMAT_VERSION}. Install a newer one.")
    values, _ = parse_checked(content, str(place), "a record of weights", AGAIN)
    found = typed(values, WeightsRecord, place, AGAIN, version=("format_version", FORMAT_VERSION))
    if ARRAYS_FILE not in found.sha256:
        raise TomatError(f"{place} is damaged: it has no hash of {ARRAYS_FILE}. {AGAIN}")
    return found


@dataclass(frozen=True)
class FoundWeights:
    """The weights that are used for a run, or for a folder of weights."""

    folder: Path
    """Holds configuration, codec and promolecule. For a run with `distillation` it is the folder of its result."""
    run_name: str
    step: int
    kind: str
    checkpoint: str | None
    """Folder or URL; None: the arrays are in `folder`."""
    error: str | None = None
    """`WeightsRecord.error`; for a checkpoint, the same words from the evaluation of its run."""
    model_type: str = ""
    sha256: str | None = None
    """SHA-256 of the file of arrays, or of the checksum file of a local checkpoint; None: there is none."""

    def __str__(self) -> str:
        return f"run {self.run_name} step {self.step}, weights {self.kind}"


def find_weights(run_dir: str | Path, step: int | None = None) -> FoundWeights:
    """The newest whole checkpoint of a run, or that of `step`; or the weights of a folder that `tomat export` wrote."""
    folder = Path(run_dir)
    config_path = folder / CONFIG_FILE
    if not config_path.exists():
        raise TomatError(f"{folder} is not a run: it has no {CONFIG_FILE}.")
    config = read_yaml(config_path)
    if config.get("distillation") is not None and not is_weights_folder(folder):
        if step is not None:
            said = f"{folder} trained a model in few bits: its checkpoints cannot predict"
            raise TomatError(f"{said}. To get one that can: `tomat export --run {folder} --step {step} --output OUT`.")
        if not is_weights_folder(folder / WEIGHTS_FOLDER):
            said = f"{folder} has not ended: it has no {WEIGHTS_FOLDER} yet. Go on with `tomat train`, or make them"
            raise TomatError(f"{said} from its newest checkpoint: `tomat export --run {folder} --output OUT`.")
        folder = folder / WEIGHTS_FOLDER
    name, model_type = str(config.get("run_name")), str(flatten(config).get("model.type"))
    if is_weights_folder(folder):
        record = read_weights_record(folder)
        if step not in (None, record.step):
            raise TomatError(f"{folder} holds the weights of step {record.step} alone; leave out --step {step}.")
        sha256 = record.sha256[ARRAYS_FILE]
        return FoundWeights(folder, name, record.step, record.weights, None, record.error, model_type, sha256)
    output = str(config.get("output_dir")).rstrip("/")
    temporary = flatten(config).get("trainer.checkpointer.temporary_base_path")
    place = f"{output}/{name}" if is_remote(output) else str(folder)
    found = find_checkpoint(place, step, None if temporary is None else f"{str(temporary).rstrip('/')}/{name}")
    checksums = Path(found.path, CHECKSUM_FILE)
    sha256 = hashlib.sha256(checksums.read_bytes()).hexdigest() if checksums.is_file() else None
    error = held_out_error(folder, found.step)
    return FoundWeights(folder, name, found.step, weights_kind(found.path), found.path, error, model_type, sha256)


def held_out_error(run_dir: Path, step: int, after: str = "") -> str | None:
    """The error on whole held-out cells, beside the sum of atoms, from the run's own evaluation of that step, in words;
    None: there is no such evaluation. `after` is inserted after the figures."""
    try:
        found = json.loads((run_dir / EVALUATION_FILE).read_text(encoding="utf-8"))["free_running"]
        if found["settings"].get("step", step) != step:
            return None
        pairs = [(each["free_running_nmae"], each["promolecule_nmae"]) for each in found["materials"]]
        over = [found["over_materials"][name] for name in ("free_running_nmae", "promolecule_nmae")]
        ours, atoms = (f"median {100 * each['median']:.2f} %, mean {100 * each['mean']:.2f} %" for each in over)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    better = sum(model < sum_of_atoms for model, sum_of_atoms in pairs)
    said = f"NMAE of {len(pairs)} held-out cells, predicted from their structures alone: {ours}{after}"
    return f"{said}; sum of atoms: {atoms}; the model is the better one on {better}."
