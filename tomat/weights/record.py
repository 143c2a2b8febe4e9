"""What a folder of weights says of itself in `weights.json`; read without JAX and without the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError

WEIGHTS_FILE = "weights.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class WeightsRecord:
    """The content of `weights.json`."""

    step: int
    weights: str
    """Of the run, as `LoadedRun.weights` says it, and how it was compressed."""
    quantised: Mapping[str, Any]
    """By array in few bits: how."""
    quantised_from: str | None
    """`arrays_sha256` of the arrays before they were quantised; None: nothing was quantised, or by an earlier tomat."""
    sha256: Mapping[str, str]
    """Of each other file, by name."""


def is_weights_folder(folder: Path) -> bool:
    """Whether a folder is one that `write_weights` made."""
    return (folder / WEIGHTS_FILE).is_file()


def read_weights_record(folder: Path) -> WeightsRecord:
    """The record of a folder of weights.

    Raises:
        TomatError: It is damaged, or of a later tomat.
    """
    try:
        values = json.loads((folder / WEIGHTS_FILE).read_text(encoding="utf-8"))
        version = values["format_version"]
        found = WeightsRecord(
            int(values["step"]), str(values["weights"]), dict(values["quantised"]), values.get("quantised_from"),
            dict(values["sha256"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TomatError(f"{folder / WEIGHTS_FILE} is damaged ({error!r}); write the folder again.") from None
    if version != FORMAT_VERSION:
        raise TomatError(
            f"{folder} has format version {version}; this tomat reads {FORMAT_VERSION}. Install a newer one."
        )
    return found
