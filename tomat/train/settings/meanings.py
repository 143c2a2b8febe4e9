"""What fields declare of dotted keys: whether a key may change on resume, and whether it can change the compiled step.

Keys that only decide how fast or where a model learns may change: those whose field says so, and no others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import Field
from typing import Any

from tomat.base.config_keys import Meaning, default_of, fields_below, meaning_of, section_of
from tomat.base.documents import flatten
from tomat.model.environment import FieldShape
from tomat.train.runs.former_keys import former_key
from tomat.train.settings.config import TrainConfig

Changes = dict[str, tuple[Any, Any]]


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Keys that decide what is learnt and whose value differs, each with its old and new value.

    A key that one side does not have counts as None there, or as what runs did before it was added. Keys that no longer
    exist (`runs/former_keys.py`) are no difference.
    """

    def value(flat: Mapping[str, Any], key: str) -> Any:
        field, entry = _declared(key)
        if key in flat or field is None or entry or not meaning_of(field).added:
            return flat.get(key)
        default = default_of(field)
        return list(default) if isinstance(default, tuple) else default  # as a `config.yaml` has it

    flat_old, flat_new = flatten(old), flatten(new)
    changed = {}
    for key in sorted(flat_old.keys() | flat_new.keys()):
        before, after = value(flat_old, key), value(flat_new, key)
        if before != after and not may_change(key) and former_key(key) is None:
            changed[key] = (before, after)
    return changed


def may_change(key: str) -> bool:
    """Whether a dotted key may have another value when a run is resumed; one that no field declares may not."""
    field, entry = _declared(key)
    if field is None:
        return False
    meaning = meaning_of(field)
    if isinstance(meaning.entries, tuple):
        return entry in meaning.entries
    return meaning.free is not None and (meaning.entries or not entry)


def said_of(key: str) -> Meaning:
    """What the field of a dotted key declares. A key that no field declares, or that is only an entry of one, has the
    closed meaning."""
    field, entry = _declared(key)
    return Meaning() if field is None or entry else meaning_of(field)


def keys_beside_step(cls: type = TrainConfig, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted keys, and sections, that cannot change the compiled step."""
    for name, (field, _) in fields_below(cls).items():
        here = (*path, name)
        if not meaning_of(field).step:
            yield ".".join(here)
        elif (below := _section(cls, here)) is not None:
            yield from keys_beside_step(below, here)


def _declared(key: str) -> "tuple[Field[Any] | None, str]":
    """The field that a dotted key names or is an entry of, and the rest of the key below it."""
    cls: type | None = TrainConfig
    names, path, field = key.split("."), (), None
    while names and cls is not None:
        if path == ("model",) and names[0] not in fields_below(cls):
            cls = FieldShape
        if names[0] not in fields_below(cls):
            return None, key
        path = (*path, names.pop(0))
        field = fields_below(cls)[path[-1]][0]
        if meaning_of(field).entries:
            break
        cls = _section(cls, path)
    return field, ".".join(names)


def _section(cls: type, path: tuple[str, ...]) -> type | None:
    """The class of the section at `path`, which ends in a field of `cls`; all decoders' fields mean what tomat's do.
    Those that a field model alone has are the ones of `model.field`."""
    if path == ("model",):
        from tomat.model.decoder import DensityDecoderConfig  # a prediction by a field model does not need it

        return DensityDecoderConfig
    return section_of(fields_below(cls)[path[-1]][1])
