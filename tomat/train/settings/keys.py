"""Finds misspelt keys of a configuration, and values that a key cannot take, before JAX and Levanter are imported.

Only what is surely wrong is refused; where Levanter's own classes decide (`model`, `optimizer`, `trackers.wandb`),
`config.load_config` finds what is wrong.
"""

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tomat.base.config_keys import alternatives, fields_below, section_of
from tomat.base.documents import mapping
from tomat.base.errors import TomatError
from tomat.base.overrides import COMMAND_LINE, naming_words_of, parse_overrides, read_yaml
from tomat.hardware.chips import slice_named
from tomat.train.runs.former_keys import FOLLOWS, former_key
from tomat.train.settings.schema import RunSchema

TYPES = {
    "model": "apertus density_decoder field gemma gemma2 gemma3 gpt2 gpt2_hyena llama mistral mixtral modernbert olmo2 "
    "olmo3 qwen qwen3 qwen3_moe snowball whisper",
    "optimizer": "adafactor adam adamH adopt cautious grug_muon kron lion mars mini muon muonH namo namoD rmsprop "
    "scion soap",
}
"""Values of the key `type` of a section: the classes of Levanter (0.2.227) and of tomat."""


def check_words(
    config_path: str | Path | None,
    overrides: Sequence[str],
    schema: type = RunSchema,
    kind: str = "train",
    words_of: str = COMMAND_LINE,
) -> None:
    """Read a configuration's file and the overrides, which messages ascribe to `words_of`, and refuse keys without a
    field in `schema`; `kind` is as for `read_yaml`."""
    if config_path is not None:
        check_keys(read_yaml(config_path, kind), str(config_path), schema)
    with naming_words_of(words_of):
        try:
            values = parse_overrides(overrides)
        except TomatError:
            # A word that is no setting is refused as such, before its missing value is.
            key = overrides[-1].removeprefix("--").partition(".")[0].replace("-", "_")
            if overrides[-1].startswith("--") and key not in fields_below(schema):
                check_keys({key: None}, words_of, schema)
            raise
        check_keys(values, words_of, schema)


def check_keys(values: Mapping[str, Any], source: str, schema: type = RunSchema) -> None:
    """Refuse a key of `values`, from `source`, that has no field in `schema`, and a value that its field cannot take:
    one of another type, none of its choices, or an unknown slice."""
    for fault in _faults(values, schema, ""):
        raise TomatError(f"{source} sets {fault}")
    if schema is RunSchema:
        for section, known in TYPES.items():
            chosen = mapping(values.get(section)).get("type")
            if isinstance(chosen, str) and chosen not in known.split():
                said = f"{source} sets {section}.type to {chosen!r}"
                raise TomatError(f"{said}; expected one of {', '.join(known.split())}.")
        if isinstance(name := values.get("slice"), str):
            slice_named(name)


def _faults(values: Mapping[str, Any], cls: type, above: str) -> Iterator[str]:
    """Faults: unknown keys, each with a key that is spelt like it or with all keys, and wrong values."""
    fields = fields_below(cls)
    for key, value in values.items():
        dotted = f"{above}{key}"
        if key not in fields:
            if former_key(dotted) is not None or dotted in FOLLOWS:
                continue  # `config_from_dict` says what to use instead
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.7)
            near = near or [one for one in fields if one.startswith(str(key))]
            hint = f"did you mean {above}{near[0]}?" if near else f"there are {', '.join(sorted(fields))}."
            yield f"{dotted}, which is no setting; {hint}"
        elif (below := section_of(fields[key][1])) is None:
            if (expected := _expected(value, fields[key][1])) is not None:
                yield f"{dotted} to {value!r}; expected {expected}."
        elif isinstance(value, Mapping):
            yield from _faults(value, below, f"{dotted}.")


_SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "null"}


def _expected(value: Any, hint: Any) -> str | None:
    """What a key of this type takes, in words; None unless `value` is surely wrong. draccus reads texts as numbers."""
    kinds: list[type] = []
    choices: list[Any] = []
    parts = list(alternatives(hint))
    if isinstance(value, str) and tuple[str, ...] in parts and str not in parts:
        return f"a list, as in [{value}]"  # draccus would take it letter by letter
    for part in parts:
        if typing.get_origin(part) is Literal:
            choices += typing.get_args(part)
        elif part in _SCALARS:
            kinds.append(part)
        else:
            return None
    fits = value in choices or (value is None and types.NoneType in kinds)
    if isinstance(value, str):
        text = value.lower()
        fits = fits or str in kinds or (types.NoneType in kinds and text in ("null", "none"))
        fits = fits or (bool in kinds and text in ("true", "false"))
        is_number = re.fullmatch(r"[+-]?[\d._]*(e[+-]?\d+|inf|nan)?", text)
        fits = fits or (is_number and not {int, float}.isdisjoint(kinds))
    elif isinstance(value, bool | int | float):
        fits = fits or bool(set(kinds) - {types.NoneType})
    if fits:
        return None
    named = [f"one of {', '.join(map(str, choices))}"] if choices else []
    return " or ".join([*named, *(_SCALARS[kind] for kind in kinds)])
