"""The meaning of a configuration's key, stated on the field that declares it, and the keys below a dataclass.

By default a resume allows no change: a field without a meaning decides what is learnt, and may not change in a run.
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
    """What a change of a key's value affects."""

    free: Free | None = None
    """Why the key may change when a run is resumed; None: it may not."""
    entries: bool | tuple[str, ...] = False
    """Whether `free` also holds for the entries of a mapping that the user names; a tuple: only for these names."""
    step: bool = True
    """Whether the key can change the compiled step; False holds for everything below it."""
    host: bool = False
    """Whether each host of a run may have a value of its own."""
    added: bool = False
    """Whether runs of earlier versions have no record of the key, and did what its default does."""
    unused: str | None = None
    """What to use instead of a key that nothing in tomat reads, so that it must keep its default."""


def key(default: Any = MISSING, *, factory: Any = MISSING, **meaning: Any) -> Any:
    """A field of a configuration with its default, or the factory of its default, and its `Meaning`."""
    metadata = {Meaning: Meaning(**meaning)}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def meaning_of(field: "Field[Any]") -> Meaning:
    """The meaning that a field was declared with; for a plain field the one that allows no change."""
    return field.metadata.get(Meaning, Meaning())


def check_range(section: str, settings: object, **limits: float | tuple[float, float]) -> None:
    """Refuse a value of a section's dataclass that is NaN or outside the limits of its field: the least value, or the
    least and the largest. None is allowed. `section`: with its dot."""
    for name, limit in limits.items():
        least, most = limit if isinstance(limit, tuple) else (limit, math.inf)
        value = getattr(settings, name)
        if value is not None and not least <= value <= most:
            expected = f"{least:g} to {most:g}" if most < math.inf else f"at least {least:g}"
            raise TomatError(f"{section}{name} is {value}; expected {expected}.")


def default_of(field: "Field[Any]") -> Any:
    """The default value of a field; `MISSING` where there is none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


@cache
def fields_below(cls: type) -> "dict[str, tuple[Field[Any], Any]]":
    """Every field of a dataclass by name, with its type."""
    hints = typing.get_type_hints(cls)
    return {field.name: (field, hints[field.name]) for field in dataclasses.fields(cls)}


def alternatives(hint: Any) -> Iterator[Any]:
    """The types of a union; for any other type that type itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from alternatives(part)
    else:
        yield hint


def section_of(hint: Any) -> type | None:
    """The one dataclass that `X` or `X | None` names; None for anything else."""
    kinds = [part for part in alternatives(hint) if part is not types.NoneType]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and dataclasses.is_dataclass(kinds[0]) else None
