"""Ways to damage a valid file: bytes, and values of a document; and what every reader has to do with the result.

Strategies draw what to do; nothing here is random.
"""

import contextlib
import copy
import json
import math
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError

ODD_INTEGERS = (-1, 0, 1, 2, 7, 10**6, 10**12, 2**31, 2**62, -(2**62), 2**63 - 1, -(2**63))
ODD_VALUES = (
    None, True, False, -1, 0, 1, 0.5, 10**12, 10**400, 2**63, -1e-300, 1e308, math.inf, -math.inf, math.nan, "", "x",
    "nan", "1e999", "\x00", "\ud800", "²", "../../x", "2026-99-99", [], [None], {}, {"a": 1}, [[1]],
)  # fmt: skip

BYTE_DAMAGE = st.lists(
    st.tuples(
        st.sampled_from(("flip", "cut", "zero", "repeat", "drop", "write")),
        st.floats(0, 1),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=3,
)
"""What to do, where in the file as a share of it, and a bit, byte or length."""


def damaged_bytes(data: bytes, damage: Sequence[tuple[str, float, int]]) -> bytes:
    """`data` after each of `damage`."""
    for kind, where, number in damage:
        at = min(int(where * len(data)), max(0, len(data) - 1))
        if kind == "cut":
            data = data[:at]
        elif kind == "flip" and data:
            data = data[:at] + bytes([data[at] ^ (1 << number % 8)]) + data[at + 1 :]
        elif kind == "zero":
            data = data[:at] + bytes(min(number, len(data) - at)) + data[at + number :]
        elif kind == "repeat":
            data = data[: at + number] + data[at:]
        elif kind == "drop":
            data = data[:at] + data[at + number :]
        elif kind == "write":
            data = data[:at] + bytes([number]) + data[at + 1 :]
    return data


def damaged_file(data: bytes) -> st.SearchStrategy[bytes]:
    return BYTE_DAMAGE.map(lambda damage: damaged_bytes(data, damage))


VALUE_DAMAGE = st.lists(
    st.tuples(
        st.integers(0, 10**6),
        st.sampled_from(("set", "set", "set", "delete", "rename", "double", "swap")),
        st.sampled_from(range(len(ODD_VALUES))),
    ),
    min_size=1,
    max_size=3,
)
"""Which value of the document, what to do with it, and the odd value to set, or the one beside it to swap it with."""


def damaged_document(document: Any, damage: Sequence[tuple[int, str, int]]) -> Any:
    """A copy of `document` after each of `damage`."""
    document = copy.deepcopy(document)
    for place, kind, odd in damage:
        places = list(_places(document))
        if not places:
            return ODD_VALUES[odd]
        holder, key = places[place % len(places)]
        if kind == "delete":
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        elif kind == "double" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif kind == "swap":
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            other = keys[odd % len(keys)]
            holder[key], holder[other] = holder[other], holder[key]
        else:
            holder[key] = copy.deepcopy(ODD_VALUES[odd])
    return document


def _places(node: Any) -> list[tuple[Any, Any]]:
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    return [place for key in keys for place in ((node, key), *_places(node[key]))]


SEEDS = st.integers(0, 2**32 - 1)
ODD_WORDS = (
    "nan", "inf", "-inf", "1e999", "-1e999", "1e30", "-1e30", "****", "1,5", "x", "1.2.3", "0x10", "1_000", "²", "\0",
    "", "1e", "--1", "+", "10001", "99999999", "9" * 20, "-9223372036854775808", "1" * 400,
)  # fmt: skip


def damage_lines(
    lines: list[str],
    how: str,
    first_value: int,
    last_value: int,
    rng: np.random.Generator,
    odd: Sequence[str] = ODD_WORDS,
) -> bool:
    """Remove, repeat or cut at a line, or put an odd word into one of the values; False for other ways."""
    place = int(rng.integers(len(lines)))
    if how == "remove":
        del lines[place]
    elif how == "repeat":
        lines.insert(place, lines[place])
    elif how == "cut":
        del lines[place:]
        lines[-1:] = [line[: rng.integers(len(line) + 1)] for line in lines[-1:]]
    elif how == "number":
        place = int(rng.integers(first_value, last_value + 1))
        words = lines[place].split() or [""]
        words[rng.integers(len(words))] = str(rng.choice(odd))
        lines[place] = " ".join(words)
    else:
        return False
    return True


def damaged_texts(document: Any, write: Callable[[Any], str] = json.dumps) -> st.SearchStrategy[bytes]:
    """Bytes of `document` as `write` gives it, with damage to its values or to the bytes."""
    whole = write(document).encode()
    values = VALUE_DAMAGE.map(lambda damage: write(damaged_document(document, damage)).encode())
    return st.one_of(values, values, damaged_file(whole))


def damaged_lines(rows: list[Any]) -> st.SearchStrategy[bytes]:
    """Bytes of a file of JSON lines, with damage to values, lines or bytes."""
    return damaged_texts(rows, lambda found: "".join(json.dumps(row) + "\n" for row in _as_rows(found)))


def _as_rows(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


FACTOR = 1
"""How many times as many inputs as in CI are tried; `tests/fuzz/conftest.py` sets it."""
HANG_SECONDS = 10
"""Of CPU, so that a busy machine is no hang."""
MEMORY_BYTES = 4 * 2**30


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Raise in a reader that hangs or takes far more memory than its file."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"the reader took more than {HANG_SECONDS} s of CPU")

    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(whole: Any, inputs: st.SearchStrategy[Any], read: Callable[[Any], None], count: int) -> None:
    """Read `count` damaged inputs: each gives a result that `read` finds whole, or a TomatError of one line.

    The undamaged input, `whole`, is read first: where that is refused, no damage would ever be seen.
    """
    refused = 0
    with limits():
        read(whole)

    @settings(
        max_examples=count * FACTOR, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(inputs)
    def one(damaged: Any) -> None:
        nonlocal refused
        note(repr(damaged)[:2000])
        try:
            with limits():
                read(damaged)
        except TomatError as error:
            refused += 1
            assert str(error).strip() and "Traceback" not in str(error) and "\n" not in str(error)

    one()
    assert refused  # the damage reaches the reader


def fuzz_file(
    path: Path, whole: bytes, inputs: st.SearchStrategy[bytes], read: Callable[[Path], Any], count: int
) -> None:
    """`fuzz` of what is read of a file; `read` gets its path."""

    def written(data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        read(path)

    fuzz(whole, inputs, written, count)


def fuzz_json(path: Path, document: Any, read: Callable[[Path], Any], count: int) -> None:
    fuzz_file(path, json.dumps(document).encode(), damaged_texts(document), read, count)


def fuzz_lines(path: Path, rows: list[Any], read: Callable[[Path], Any], count: int) -> None:
    whole = "".join(json.dumps(row) + "\n" for row in rows).encode()
    fuzz_file(path, whole, damaged_lines(rows), read, count)
