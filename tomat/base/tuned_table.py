"""Tables of tuned sizes: JSON that ships beside the code that reads it, written by a benchmark."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError


def load_entries[Entry](
    path: Path, make: Callable[[Mapping[str, Any]], Entry], *, name: str, verb: str, keys: Sequence[str]
) -> tuple[Entry, ...]:
    """The entries of a table.

    Args:
        path: `{"entries": [...]}`.
        make: An entry of its JSON; what it raises where a key is missing or wrong is said.
        name: Of the table, in messages.
        verb: What writes it.
        keys: Of the configuration, that can be set instead.

    Raises:
        TomatError: It is missing, not what `verb` writes, or empty.
    """
    remedy = f"write it with `{verb}`, or set {', '.join(keys)}."
    try:
        entries = tuple(make(row) for row in json.loads(path.read_text(encoding="utf-8"))["entries"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TomatError(f"the table of {name} {path} cannot be read ({error}); {remedy}") from error
    if not entries:
        raise TomatError(f"the table of {name} {path} is empty; {remedy}")
    return entries
