"""JSON and YAML of files that may be damaged: values, or one TomatError that names the file; and files of lines.

A flipped bit in a name or a number leaves valid JSON, so some files carry a checksum. It is of the content and not of
the bytes, so that a file with only another layout counts as whole. Older files without a checksum are read, and their
reader is told.
"""

import hashlib
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
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TomatError(f"{origin} is not JSON ({error}). {remedy}") from None


def read_json(path: Path, remedy: str = "Write it again.") -> Any:
    return parse_json(read_bytes(path), path, remedy)


def read_bytes(path: str | os.PathLike[str], remedy: str = "") -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TomatError(f"{path}: cannot be read ({error.strerror or error}). {remedy}".rstrip()) from None


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
    # libyaml recurses without a limit: 100,000 brackets end the process, where the slow loader raises.
    whole = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
    shallow = whole.count("[") + whole.count("{") < 500 and not re.search(r"^[ ?:-]{200}", whole, re.MULTILINE)
    try:
        return yaml.load(text, Loader=_FAST_LOADER if shallow else yaml.SafeLoader)
    except YAML_ERRORS as error:
        raise TomatError(f"{origin} is not YAML ({' '.join(str(error).split())}). {remedy}") from None


def is_figure(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a finite number that a float can hold; a truth value is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping; otherwise an empty one."""
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
    """The keys that all settings have with the same value; without settings none."""
    first, *others = settings or [{}]
    return {key: value for key, value in first.items() if all(key in one and one[key] == value for one in others)}


def take_out(values: dict[str, Any], dotted: str) -> tuple[bool, Any]:
    """Remove the key `a.b` from nested `values`. Returns whether it was there, and its value."""
    *parents, leaf = dotted.split(".")
    node: Any = values
    for part in parents:
        node = node.get(part)
        if not isinstance(node, dict):
            return False, None
    if leaf not in node:
        return False, None
    return True, node.pop(leaf)


CHECKSUM_KEY = "content_sha256"
"""Key of the checksum of everything else in the file."""


def content_checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of the content as JSON with sorted keys and no white space, without `CHECKSUM_KEY`."""
    rest = {key: value for key, value in content.items() if key != CHECKSUM_KEY}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content, CHECKSUM_KEY: content_checksum(content)}


def parse_checked(text: str | bytes, source: str, what: str, remedy: str) -> tuple[dict[str, Any], bool]:
    """The content of a JSON object, and whether it had a checksum, which is taken out. Errors name the `source`, `what`
    it should be, and the `remedy` for damage."""
    content = parse_json(text, f"{source} is not {what}: it", remedy)
    if not isinstance(content, dict):
        raise TomatError(f"{source} is not {what}: it holds a {type(content).__name__}. {remedy}")
    if CHECKSUM_KEY not in content:
        return content, False
    expected = content.pop(CHECKSUM_KEY)
    found = content_checksum(content)
    if found != expected:
        hashes = f"its content hashes to {found[:12]}..., the file says {str(expected)[:12]}..."
        raise TomatError(f"{source} is damaged: {hashes} {remedy}")
    return content, True


def refuse_unknown_keys(content: Mapping[str, Any], known: frozenset[str], source: str, remedy: str) -> None:
    """Refuse a key that no version writes, in a file without a checksum: it may be a known key that was damaged."""
    if unknown := sorted(set(content) - known):
        raise TomatError(f"{source} is damaged: it has no checksum, and an unknown key {unknown[0]!r}. {remedy}")


SIGNATURE = "# sha256 of the lines above: "


def signed(text: str) -> str:
    """A YAML text with its own hash as a comment in its last line."""
    return f"{text}{SIGNATURE}{hashlib.sha256(text.encode()).hexdigest()}\n"


def is_as_signed(text: str | bytes) -> bool | None:
    """Whether a text is still the one that `signed` was given; None if it has no hash, as older texts."""
    content, separator, stated = (text if isinstance(text, bytes) else text.encode()).rpartition(SIGNATURE.encode())
    if not separator:
        return None
    return hashlib.sha256(content).hexdigest().encode() == stated.strip()
