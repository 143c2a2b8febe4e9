"""The keys of `--json` reports, as on file: a script that reads a report must find what it read."""

from collections.abc import Iterator
from pathlib import Path

import yaml

FILE = Path(__file__).parents[1] / "fixtures" / "json_keys.yaml"
BEFORE: dict[str, dict[str, str]] = yaml.safe_load(FILE.read_text())
"""Verb -> key -> kind. The file changes where a key is added, and for nothing else."""
EMPTY = {"NoneType", "list", "dict"}
"""Kinds of what has no keys this time."""
NAMED_BY_THE_CALL = {
    "rows[].overrides", "rows[].failed", "rows[].figures", "relative_error", "collectives", "models_seconds",
    "candidates[].categories",
}  # fmt: skip
"""Of these the keys are settings, seeds, measures, arrays or operations of whatever was asked for: all are `*`."""


def keys_of(value: object, above: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a report, dotted, with the kind of what is there; a list's items have one key."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            name = "*" if above in NAMED_BY_THE_CALL else key
            yield from keys_of(below, f"{above}.{name}" if above else name)
    elif isinstance(value, list) and value:
        for item in value:
            yield from keys_of(item, f"{above}[]")
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        yield above, "number" if number else type(value).__name__


def assert_keys_of_before(verb: str, report: object) -> None:
    found, before = dict(keys_of(report)), BEFORE[verb]
    empty = [key for key, kind in found.items() if kind in EMPTY]
    absent = [(key, above) for key in before for above in empty if key.startswith((f"{above}.", f"{above}["))]
    gone = before.keys() - found.keys() - {key for key, _ in absent}
    assert not gone, f"{verb}: {sorted(gone)}"
    new = {key: found[key] for key in sorted(found.keys() - before.keys() - {above for _, above in absent})}
    assert not new, f"{verb}: add {new}"
    kinds = [(key, found[key], before[key]) for key in found.keys() & before.keys() if key[-1] != "*"]
    assert not [one for one in kinds if one[1] != one[2] and not EMPTY & {*one[1:]}], verb
