"""JSON and YAML of files that may be damaged: values, or one TomatError that names the file; and files of lines."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import yaml

from tomat.base.errors import TomatError

YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""What PyYAML 6 raises: it lets through what its constructors of dates, numbers and truth values raise (`!!bool x` is a
KeyError), and deep nesting ends in a RecursionError."""

_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""A run's `config.yaml` takes 10 ms with libyaml and 40 ms without."""


def parse_json(text: str | bytes, origin: str | Path, remedy: str = "Write it again.") -> Any:
    """The value of a JSON text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TomatError(f"{origin} is not JSON ({error}). {remedy}") from None


def read_json(path: Path, remedy: str = "Write it again.") -> Any:
    """The value in a JSON file."""
    return parse_json(read_bytes(path), path, remedy)


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise TomatError(f"{path}: cannot be read ({error.strerror or error}).") from None


def append_whole_line(file: BinaryIO, line: str) -> None:
    """Write a line, with its newline, at the end of a file that is open for reading and appending (`a+b`), and wait
    until it is on disk."""
    # A kill may have cut the last line short; this one must not become part of it.
    if file.seek(0, os.SEEK_END) > 0:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            line = "\n" + line
    file.write(line.encode())
    file.flush()
    os.fsync(file.fileno())


def parse_yaml(text: str | bytes, origin: str | Path, remedy: str = "Restore it.") -> Any:
    """The value of a YAML text."""
    # libyaml recurses without a limit: 100,000 brackets end the process, where the slow loader raises.
    whole = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
    shallow = whole.count("[") + whole.count("{") < 500 and not re.search(r"^[ ?:-]{200}", whole, re.MULTILINE)
    try:
        return yaml.load(text, Loader=_FAST_LOADER if shallow else yaml.SafeLoader)
    except YAML_ERRORS as error:
        raise TomatError(f"{origin} is not YAML ({' '.join(str(error).split())}). {remedy}") from None


def is_figure(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a finite number that a float can hold; truth values are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def mapping(value: Any) -> Mapping[str, Any]:
    """A value's keys, none where it is something else."""
    return value if isinstance(value, Mapping) else {}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as `a.b.c` -> value; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def in_common(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keys that all have with the same value; of none, none."""
    first, *others = settings or [{}]
    return {key: value for key, value in first.items() if all(key in one and one[key] == value for one in others)}


def take_out(values: dict[str, Any], dotted: str) -> tuple[bool, Any]:
    """Remove the key `a.b` from nested `values`: whether it was there, and what it was."""
    *parents, leaf = dotted.split(".")
    node: Any = values
    for part in parents:
        node = node.get(part)
        if not isinstance(node, dict):
            return False, None
    if leaf not in node:
        return False, None
    return True, node.pop(leaf)
