"""Changes of a run's configuration as dotted keys and values, for searches and for the rows of sweeps."""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from tomat.base.documents import flatten
from tomat.base.errors import TomatError
from tomat.base.overrides import naming_words_of, parse_overrides

if TYPE_CHECKING:
    from tomat.train.settings.config import TrainConfig


PLAIN_WORD = re.compile(r"[A-Za-z_][\w./-]*")


def override_words(overrides: Mapping[str, Any]) -> list[str]:
    """`{"model.num_heads": 8}` as the words of a command line, `["--model.num_heads", "8"]`."""
    # Values of overrides are read as YAML, which includes JSON. A plain word needs no quotes.
    words = []
    for key, value in overrides.items():
        plain = isinstance(value, str) and PLAIN_WORD.fullmatch(value) and yaml.safe_load(value) == value
        words += [f"--{key}", value if plain else json.dumps(value, sort_keys=True)]
    return words


def changed(config: "TrainConfig", overrides: Mapping[str, Any]) -> "TrainConfig":
    from tomat.train.settings.config import config_from_dict

    return config_from_dict(config.to_dict(), "the configuration", parse_overrides(override_words(overrides)))


def checked_keys(overrides: Any, where: str) -> dict[str, Any]:
    """`overrides`, a mapping or a list of command-line words, as dotted keys and values."""
    if overrides is None:
        return {}
    if isinstance(overrides, list):
        with naming_words_of(where):
            return flatten(parse_overrides([word if isinstance(word, str) else json.dumps(word) for word in overrides]))
    if isinstance(overrides, Mapping) and all(isinstance(key, str) and key for key in overrides):
        return {key.removeprefix("--"): value for key, value in overrides.items()}
    expected = "a mapping such as {model.num_heads: 8} or words such as [--model.num_heads, 8]"
    raise TomatError(f"{where} has overrides {overrides!r}; expected {expected}.")
