"""What a folder of weights says of itself in `weights.json`; read without JAX and without the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tomat.base.checked_json import parse_checked
from tomat.base.documents import mapping, parse_json, read_bytes
from tomat.base.errors import TomatError
from tomat.base.records import Count, Sha256, typed
from tomat.predict.weights.quantise import Description

ARRAYS_FILE = "model.safetensors"
WEIGHTS_FILE = "weights.json"
FORMAT_VERSION = 1
AGAIN = "Write the folder again."


@dataclass(frozen=True)
class WeightsRecord:
    """`weights.json`, as far as it is read again."""

    step: Count
    weights: str
    """Of the run, as `LoadedRun.weights` says it, and how it was compressed."""
    quantised: Mapping[str, Description]
    """By array in few bits: how."""
    sha256: Mapping[str, Sha256]
    """Of each other file, by name."""
    quantised_from: Sha256 | None = None
    """`arrays_sha256` of the arrays before they were quantised; None: nothing was quantised, or by an earlier tomat."""


def is_weights_folder(folder: Path) -> bool:
    """Whether a folder is one that `write_weights` made."""
    return (folder / WEIGHTS_FILE).is_file()


def read_weights_record(folder: Path) -> WeightsRecord:
    """The record of a folder of weights."""
    place = folder / WEIGHTS_FILE
    content = read_bytes(place)
    stated = mapping(parse_json(content, f"{place} is damaged: it", AGAIN)).get("format_version")
    if stated != FORMAT_VERSION:  # before the hash, which a later version may make in another way
        raise TomatError(
            f"{folder} has format version {stated!r}; this tomat reads {FORMAT_VERSION}. Install a newer one."
        )
    values, _ = parse_checked(content, str(place), "a record of weights", AGAIN)
    found = typed(values, WeightsRecord, place, AGAIN)
    if ARRAYS_FILE not in found.sha256:
        raise TomatError(f"{place} is damaged: it has no hash of {ARRAYS_FILE}. {AGAIN}")
    return found
