"""What a key of a configuration means, said on the field that declares it, and the keys below a dataclass.

A resume is closed by default: a field without a meaning decides what is learnt, and may not change under a run's name.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass
from functools import cache
from typing import Any, Literal

from tomat.base.errors import TomatError

Free = Literal["label", "speed", "rounding", "watching", "saving", "nothing"]
"""Why a key may change when a run is resumed. `label`: names and places. `speed`: devices, hosts, caches. `rounding`:
kernels, their tiles, what is kept for the backward pass: the same numbers up to rounding. `watching`: logs,
evaluations, profiles, guards. `saving`: when and where checkpoints are written. `nothing`: nothing reads it."""


@dataclass(frozen=True)
class Meaning:
    """What follows from another value of a key."""

    free: Free | None = None
    """Why it may change when a run is resumed; None: it may not."""
    entries: bool | tuple[str, ...] = False
    """Whether `free` also holds for the entries of a mapping that the user names; names: for these entries alone."""
    step: bool = True
    """Whether it can change the compiled step; False holds for everything below it."""
    host: bool = False
    """Whether each host of a run may have a value of its own."""
    added: bool = False
    """Runs of earlier versions have it not on record, and did what its default does."""
    unused: str | None = None
    """Nothing of tomat's reads it, so that it must keep its default: what to use instead."""


def key(default: Any = MISSING, *, factory: Any = MISSING, **meaning: Any) -> Any:
    """A field of a configuration with its default, or what makes it, and its `Meaning`."""
    metadata = {Meaning: Meaning(**meaning)}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def meaning_of(field: "Field[Any]") -> Meaning:
    """The meaning that a field was declared with; that of a plain field is the closed one."""
    return field.metadata.get(Meaning, Meaning())


def check_range(section: str, settings: object, **limits: float | tuple[float, float]) -> None:
    """Refuse a value of a section's dataclass, unless it is None, that is below the least one of its field, or outside
    the least and the largest, or no number; `section` with its dot."""
    for name, limit in limits.items():
        least, most = limit if isinstance(limit, tuple) else (limit, math.inf)
        value = getattr(settings, name)
        if value is not None and not least <= value <= most:
            expected = f"{least:g} to {most:g}" if most < math.inf else f"at least {least:g}"
            raise TomatError(f"{section}{name} is {value}; expected {expected}.")


def default_of(field: "Field[Any]") -> Any:
    """The value of a field that nobody sets; `MISSING` where there is none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


@cache
def fields_below(cls: type) -> "dict[str, tuple[Field[Any], Any]]":
    """Every field of a dataclass by name, with its type."""
    hints = typing.get_type_hints(cls)
    return {field.name: (field, hints[field.name]) for field in dataclasses.fields(cls)}


def alternatives(hint: Any) -> Iterator[Any]:
    """The types of a union; a type that is none is its own."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from alternatives(part)
    else:
        yield hint


def section_of(hint: Any) -> type | None:
    """The one dataclass that `X` or `X | None` names; None for anything else."""
    kinds = [part for part in alternatives(hint) if part is not types.NoneType]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and dataclasses.is_dataclass(kinds[0]) else None
