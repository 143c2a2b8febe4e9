"""A folder that predicts: weights as safetensors, whole or quantised, and all that is needed to use them.

`model.safetensors` holds the arrays; `config.yaml`, `codec.json` and `promolecule.json` are the run's; `weights.json`
describes the arrays and has the SHA-256 of each other file; `README.md` is the model card. `tomat predict` and `tomat
eval` accept the folder in place of a run.
"""

import hashlib
import math
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tomat.base.documents import with_checksum
from tomat.base.errors import TomatError
from tomat.base.layout import CODEC_FILE, CONFIG_FILE, PAGE_FILE, PROMOLECULE_FILE
from tomat.base.reporting import first_line, readable_bytes, replacing, to_jsonable, write_json, write_text
from tomat.predict.weights.arrays import Part, arrays_sha256, part_of
from tomat.predict.weights.hub import front_matter
from tomat.predict.weights.quantise import Quantised, Scheme, check_offered, quantise
from tomat.predict.weights.record import (
    AGAIN,
    ARRAYS_FILE,
    FORMAT_VERSION,
    WEIGHTS_FILE,
    held_out_error,
    read_weights_record,
)

SEPARATOR = "|"
"""Separates the name of an array and the part of its quantised form. It occurs in no name."""


@dataclass(frozen=True)
class Compression:
    scheme: Scheme
    group: int
    bits: Mapping[Part, int]
    """Bits for each part of the decoder to quantise. Other parts stay whole."""

    def __post_init__(self) -> None:
        for bits in self.bits.values():
            check_offered(bits, self.scheme)

    def __str__(self) -> str:
        bits = ", ".join(f"{part} {bits}" for part, bits in self.bits.items())
        return f"{self.scheme}, bits: {bits}, groups of {self.group}"


@dataclass(frozen=True)
class WrittenWeights:
    """The size of a folder of weights, and its error relative to the run's weights."""

    weights_bytes: int
    """Bytes of the arrays as stored."""
    float32_bytes: int
    relative_error: Mapping[str, float]
    """For each array that was quantised here: the norm of its error divided by the norm of the array."""


@dataclass(frozen=True)
class StoredWeights:
    stored: Mapping[str, np.ndarray | Quantised]
    weights: str
    quantised_from: str | None
    """As in `WeightsRecord`."""

    @property
    def quantised(self) -> dict[str, Quantised]:
        return {name: its for name, its in self.stored.items() if isinstance(its, Quantised)}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {name: its.values() if isinstance(its, Quantised) else its for name, its in self.stored.items()}


def write_weights(
    run_dir: Path,
    arrays: Mapping[str, np.ndarray | Quantised],
    step: int,
    weights: str,
    output: Path,
    *,
    compression: Compression | None = None,
    licence: str | None = None,
    for_hub: bool = False,
    workers: int = 1,
    on_array: Callable[[str], None] = lambda name: None,
) -> WrittenWeights:
    """Write the folder, which must not exist yet; it appears whole or not at all. Quantised arrays are stored as they
    are. With `for_hub`, the card has the head that the Hugging Face hub reads."""
    if output.exists():
        raise TomatError(f"{output} is there already; give another folder, or remove it.")
    quantised_from = None
    if compression is not None:
        quantised_from = arrays_sha256({n: its for n, its in arrays.items() if not isinstance(its, Quantised)})
    stored: dict[str, np.ndarray] = {}
    how: dict[str, Any] = {}
    errors: dict[str, float] = {}

    def made(item: tuple[str, np.ndarray | Quantised]) -> tuple[str, np.ndarray | Quantised, float]:
        name, array = item
        if isinstance(array, Quantised):
            return name, array, 0.0
        if bad := np.count_nonzero(~np.isfinite(array)):
            said = f"{name} has {bad:,} values of {array.size:,} that are not finite numbers"
            raise TomatError(f"{said}, so the model predicts none; take an earlier checkpoint of {run_dir}.")
        part = part_of(name, array.shape)
        if compression is None or part is None or part not in compression.bits:
            return name, array, 0.0
        found = quantise(array, compression.bits[part], compression.scheme, compression.group)
        size = float(np.linalg.norm(array))
        return name, found, float(np.linalg.norm(found.values() - array)) / size if size else 0.0

    with ThreadPoolExecutor(workers) as pool:
        for name, found, error in pool.map(made, arrays.items()):
            if isinstance(found, Quantised):
                stored |= {f"{name}{SEPARATOR}{part}": its for part, its in found.arrays().items()}
                how[name] = found.description
                if found is not arrays[name]:
                    errors[name] = error
            else:
                stored[name] = np.ascontiguousarray(found)
            on_array(name)
    kind = weights if compression is None else f"{weights}, {compression}"
    size = sum(array.nbytes for array in stored.values())
    written = WrittenWeights(size, 4 * sum(math.prod(array.shape) for array in arrays.values()), errors)
    with replacing(output) as folder:
        folder.mkdir()
        try:
            save_file(stored, folder / ARRAYS_FILE, metadata={"format": "np"})
        except SafetensorError as error:  # also raised for a full disk
            raise TomatError(f"{output} cannot be written: {first_line(error)}. Make room.") from error
        for name in (CONFIG_FILE, CODEC_FILE, PROMOLECULE_FILE):
            if (run_dir / name).exists():
                shutil.copyfile(run_dir / name, folder / name)
        measures = " before it was compressed (`tomat eval --free_running` measures this folder's)"
        error = held_out_error(run_dir, step, measures if written.relative_error else "")
        write_text(folder / PAGE_FILE, _card(run_dir, step, kind, written, error, licence, for_hub))
        hashes = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
        values = {"format_version": FORMAT_VERSION, "step": step, "weights": kind, "error": error, "sha256": hashes}
        values |= {"quantised": how, "quantised_from": quantised_from}
        values |= {"weights_bytes": written.weights_bytes, "float32_bytes": written.float32_bytes}
        write_json(folder / WEIGHTS_FILE, with_checksum(to_jsonable(values)))
    return written


def read_weights(folder: Path) -> StoredWeights:
    found = read_weights_record(folder)
    for name, expected in found.sha256.items():
        if name == PAGE_FILE:  # yours to edit
            continue
        path = folder / name
        if not path.is_file():
            raise TomatError(f"{path} is missing. {AGAIN}")
        if _sha256(path) != expected:
            said = f"{path} is not the file that was written ({WEIGHTS_FILE} has another SHA-256)"
            raise TomatError(f"{said}: it is cut off, damaged or from another run. {AGAIN}")
    try:
        stored = load_file(folder / ARRAYS_FILE)
    except (OSError, SafetensorError) as error:
        raise TomatError(f"{folder / ARRAYS_FILE} cannot be read ({error}); write the folder again.") from None
    arrays: dict[str, np.ndarray | Quantised] = {}
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, array in stored.items():
        name, _, part = name.partition(SEPARATOR)
        if part:
            parts.setdefault(name, {})[part] = array
        else:
            arrays[name] = array
    if set(parts) != set(found.quantised):
        name = min(set(parts) ^ set(found.quantised))
        raise TomatError(f"{folder / WEIGHTS_FILE} and {ARRAYS_FILE} differ in whether {name} is quantised. {AGAIN}")
    for name, its in parts.items():
        try:
            arrays[name] = Quantised.of_arrays(its, found.quantised[name])
        except TomatError as error:
            raise TomatError(f"{folder / ARRAYS_FILE}, {name}: {error} {AGAIN}") from None
    return StoredWeights(arrays, found.weights, found.quantised_from)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _card(
    run_dir: Path, step: int, kind: str, written: WrittenWeights, error: str | None, licence: str | None, for_hub: bool
) -> str:
    size, share = readable_bytes(written.weights_bytes), written.weights_bytes / written.float32_bytes
    use = ("bash", "tomat predict --run THIS_FOLDER --structure POSCAR --output OUT")
    if for_hub:
        use = ("python", 'import tomat\n\ntomat.load("hf://ORG/NAME").predict("POSCAR").write("CHGCAR")')
    return f"""{front_matter(licence) if for_hub else ""}# {run_dir.resolve().name}

Predicts electron densities of crystals from their structures, with tomat:

```{use[0]}
{use[1]}
```

- Weights: {kind}, step {step}; {size}, {share:.3f} of float32.
- Data and settings: `{CONFIG_FILE}`; bins `{CODEC_FILE}`, sum of atoms `{PROMOLECULE_FILE}`.
- Error: {error or "not known; `tomat eval --free_running` measures it, of the run or of this folder."}
- Licence of the weights: {licence or "not stated by who wrote this folder"}.
"""
