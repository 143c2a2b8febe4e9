"""Configuration files and `--a.b value` overrides as plain nested values, before any dataclass sees them.

It does not import JAX, so that the configuration of a tokenizing worker is read in milliseconds.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tomat.base.documents import parse_yaml
from tomat.base.errors import TomatError, causes

TEXTS = ("run_name", "purpose", "output_dir", "tracking_dir", "baseline", "data.input", "data.train", "data.validation")
"""Keys of names and places. A word that YAML takes for a number, a date or a truth value is itself there: a run named
`1e-4`, `007` or `yes` would otherwise be `0.0001`, `7` or `True`."""


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`["--a.b", "1", "--c=x"]` as `{"a": {"b": 1}, "c": "x"}`; values are read as YAML, and `--a-b` is `--a_b`."""
    result: dict[str, Any] = {}
    words = list(overrides)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) < 3:
            said = f"found '{word}' where an override of the form --a.b VALUE was expected"
            raise TomatError(f"{said}; a configuration is named by --config_path, a run by --run_name or --run.")
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        if not equals:
            if not words:
                raise TomatError(f"override --{name} has no value; give one, as in --{name} VALUE.")
            text = words.pop(0)
        value = parse_yaml(text, f"the value of --{name}, {text!r},", "Give another.")
        if name in TEXTS:
            value = value if isinstance(value, str | list | dict | None) else text
        # YAML 1.1 reads 1e-3 (without a dot) as text, which no user of a learning rate means.
        elif isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
            value = float(value)
            value = int(value) if value.is_integer() and abs(value) < 2**53 and "-" not in text else value
        *parents, leaf = name.split(".")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise TomatError(f"override --{name} goes below --{parent}, which was given a value of its own.")
        if isinstance(node.get(leaf), dict):
            raise TomatError(
                f"override --{name} would replace what was given below it before; give the one or the other."
            )
        node[leaf] = value
    return result


COMMAND_LINE = "the command line"
"""Where overrides come from, unless a sweep's row has them."""


def set_by(parts: Sequence[str], source: str, overrides: Mapping[str, Any], words_of: str) -> str:
    """Who set a key or a section, for a message: `source`, the configuration's file, or `words_of`, where `overrides`
    come from, or both."""
    values: Any = overrides
    for part in parts:
        if not isinstance(values, Mapping) or part not in values:
            return source
        values = values[part]
    if not isinstance(values, Mapping):
        return words_of
    return f"{source} with {words_of} over it" if values else source


@contextlib.contextmanager
def naming_words_of(words_of: str) -> Iterator[None]:
    """Put `words_of` before an error raised inside, if it is a sweep's file and the error does not name it."""
    try:
        yield
    except TomatError as error:
        if words_of == COMMAND_LINE or words_of in str(error):
            raise
        raise TomatError(f"{words_of}: {error}") from None


def read_yaml(config_path: str | Path, kind: str | None = None) -> dict[str, Any]:
    """The keys and values of a YAML file, or of one that ships with tomat under that name; an empty file has none.
    `kind`: of the configurations that ship (`shipped.shipped_folder`); None: no name is looked for."""
    path, missing = Path(config_path), f"config file {config_path} does not exist"
    if kind is not None:
        from tomat.base.shipped import named_configuration, none_of_that_name

        path = named_configuration(str(config_path), kind) or path
        missing = none_of_that_name(str(config_path), kind)
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise TomatError(f"{missing}.") from error
    except OSError as error:
        raise TomatError(f"config file {path} cannot be read: {error.strerror or error}.") from error
    loaded = parse_yaml(text, f"config file {path}", "Correct it.")
    if not isinstance(loaded, dict | None):
        raise TomatError(f"config file {path} holds a {type(loaded).__name__}; expected keys and values.")
    return loaded or {}


def tomat_cause(error: BaseException | None) -> TomatError | None:
    return next((cause for cause in causes(error) if isinstance(cause, TomatError)), None)
