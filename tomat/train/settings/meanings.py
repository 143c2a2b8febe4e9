"""What the fields of a configuration say of dotted keys: may one change on resume, can it change the compiled step."""

from collections.abc import Iterator
from dataclasses import Field
from typing import Any

from tomat.base.config_keys import default_of, fields_below, meaning_of, section_of
from tomat.model.decoder import DensityDecoderConfig
from tomat.train.settings.config import TrainConfig


def may_change(key: str) -> bool:
    """Whether a dotted key may have another value when a run is resumed; one that no field declares may not."""
    field, entry = _declared(key)
    if field is None:
        return False
    meaning = meaning_of(field)
    if isinstance(meaning.entries, tuple):
        return entry in meaning.entries
    return meaning.free is not None and (meaning.entries or not entry)


def value_before(key: str) -> Any:
    """What a run did whose record, of an earlier version, does not have a dotted key; None: it has no such value."""
    field, entry = _declared(key)
    if field is None or entry or not meaning_of(field).added:
        return None
    value = default_of(field)
    return list(value) if isinstance(value, tuple) else value  # as a `config.yaml` has it


def is_label(key: str) -> bool:
    """Whether a dotted key is a name or a place, and says nothing about how a run computes."""
    field, entry = _declared(key)
    return field is not None and not entry and meaning_of(field).free == "label"


def is_of_host(key: str) -> bool:
    """Whether each host of a run may have a value of its own for a dotted key: a place, or data compared by content."""
    field, entry = _declared(key)
    return field is not None and not entry and meaning_of(field).host


def keys_beside_step(cls: type = TrainConfig, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted keys, and sections, that cannot change the compiled step."""
    for name, (field, _) in fields_below(cls).items():
        here = (*path, name)
        if not meaning_of(field).step:
            yield ".".join(here)
        elif (below := _section(cls, here)) is not None:
            yield from keys_beside_step(below, here)


def _declared(key: str) -> "tuple[Field[Any] | None, str]":
    """The field that a dotted key names or is an entry of, and the key's rest below it."""
    cls: type | None = TrainConfig
    names, path, field = key.split("."), (), None
    while names and cls is not None:
        if names[0] not in fields_below(cls):
            return None, key
        path = (*path, names.pop(0))
        field = fields_below(cls)[path[-1]][0]
        if meaning_of(field).entries:
            break
        cls = _section(cls, path)
    return field, ".".join(names)


def _section(cls: type, path: tuple[str, ...]) -> type | None:
    """The dataclass of the section at `path`, whose last part is a field of `cls`. The fields of any decoder mean what
    those of tomat's own do."""
    return DensityDecoderConfig if path == ("model",) else section_of(fields_below(cls)[path[-1]][1])
