"""Read back what tomat has written as JSON, as the types that it was written from; damage is one TomatError.

A record is a dataclass or a `TypedDict` whose annotations say what each key holds. msgspec reads it. Types are strict
(no text for a number, no truth value for a count), and `__post_init__` may raise a `ValueError` for what an annotation
cannot say. Records hold no number beyond `MAX_FIGURE`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tomat.base.documents import parse_json, read_json
from tomat.base.errors import TomatError

MAX_FIGURE = 1e30
"""No flops, bytes or seconds of a step reach it: 10,000 chips of 1 PFLOP/s take 3,000 years for as many flops. Sums and
products of larger numbers may not be finite."""

Amount = Annotated[float, Meta(ge=0, le=MAX_FIGURE)]
"""Seconds, bytes, operations, shares: never negative."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A number of things; float64 holds it exactly, and NumPy takes it."""
Positive = Annotated[int, Meta(ge=1, le=2**53)]
"""A number of things, at least one."""
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}\\Z")]
"""A SHA-256 in hexadecimal digits."""

SHOWN = 60
"""Most characters of a wrong value in a message."""

_SAID = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$(.*)`)?", re.DOTALL)
"""The message of msgspec 0.22: what was expected, and where."""
_KEYS = re.compile(r"\[(\d+)\]|\.([^.\[`]+)")


def typed[T](
    value: Any,
    kind: type[T],
    origin: str | Path,
    remedy: str,
    *,
    version: tuple[str, int] | None = None,
    extra_keys: bool = True,
    text: bool = False,
) -> T:
    """A value of JSON as the type that it was written from: a dataclass, a `TypedDict`, or a container of them.

    An error names the file or URL `origin`, the key, what was found and what was expected, and ends with the `remedy`.
    `version` is the key that holds the format's version, with the version that this tomat reads. Keys that `kind`
    lacks, which later versions may write, are left out or, without `extra_keys`, refused. With `text`, a number or
    truth value may be a text, as in the cells of a CSV.
    """

    def refused(place: str, found: Any, expected: str) -> TomatError:
        words = " ".join(f"{place or 'it'} is {_shown(found)}; {expected}".split())
        return TomatError(f"{origin} is damaged: {words}. {remedy}")

    if version is not None:
        key, expected = version
        stated = value.get(key) if isinstance(value, Mapping) else None
        if type(stated) is not int or stated != expected:
            raise TomatError(f"{origin} has {key} {_shown(stated)}; this tomat reads {expected}. {remedy}")
    for place, number in _beyond(value):
        raise refused(place, number, f"expected a number up to {MAX_FIGURE:g}")
    try:
        found = msgspec.convert(value, kind, strict=not text)
    except (ValueError, TypeError, RecursionError) as error:
        said, place = _SAID.fullmatch(str(error)).groups()  # type: ignore[union-attr]  # matches every text
        place = (place or "").removeprefix(".")
        said = said.replace("`", "").replace("Object missing required field", "expected an object with the key")
        raise refused(place, _at(value, place), f"{said[:1].lower()}{said[1:]}") from None
    if not extra_keys:
        for place in _extra(value, found):
            raise TomatError(f"{origin} is damaged: no version of tomat writes its key {place!r}. {remedy}")
    return found


def typed_text[T](text: str | bytes, kind: type[T], origin: str | Path, remedy: str, **how: Any) -> T:
    """A JSON text as the type that it was written from; `how` as for `typed`."""
    return typed(parse_json(text, origin, remedy), kind, origin, remedy, **how)


def read_typed[T](path: Path, kind: type[T], remedy: str, **how: Any) -> T:
    """What a JSON file holds, as the type that it was written from; `how` as for `typed`."""
    return typed(read_json(path, remedy), kind, path, remedy, **how)


def _beyond(value: Any) -> Iterator[tuple[str, Any]]:
    """NaN and the numbers beyond `MAX_FIGURE`, each with its place; without recursion, since nesting may be deep."""
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        place, one = left.pop()
        if isinstance(one, Mapping):
            left += [(f"{place}.{key}" if place else str(key), inner) for key, inner in one.items()]
        elif isinstance(one, list | tuple):
            left += [(f"{place}[{number}]", inner) for number, inner in enumerate(one)]
        elif isinstance(one, int | float) and not abs(one) <= MAX_FIGURE:
            yield place or "it", one


def _at(value: Any, place: str) -> Any:
    """The value at a path as msgspec writes it; where the path names no existing key, the value that would hold it."""
    for number, key in _KEYS.findall(f".{place}" if place and place[0] != "[" else place):
        if number and isinstance(value, Sequence):
            value = value[int(number)]
        elif key and isinstance(value, Mapping) and key in value:
            value = value[key]
        else:
            break
    return value


def _extra(value: Any, found: Any) -> Iterator[str]:
    """The keys of `value` that the dataclasses in `found` lack."""
    if is_dataclass(found):
        names = {one.name for one in fields(found)}
        yield from (str(key) for key in value if key not in names)
        for name in names & set(value):
            yield from (f"{name}.{key}" for key in _extra(value[name], getattr(found, name)))
    elif isinstance(found, list | tuple):
        for number, (inner, made) in enumerate(zip(value, found, strict=True)):
            yield from (f"[{number}].{key}" for key in _extra(inner, made))
    elif isinstance(found, Mapping):
        for name, made in found.items():
            yield from (f"{name}.{key}" for key in _extra(value[name], made))


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 10**100:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write one of more than 4,300 digits
    text = repr(value) if not isinstance(value, Mapping | list) else f"{type(value).__name__} of {len(value)}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
