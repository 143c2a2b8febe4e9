"""xprof's converters, which its documentation describes as a page in the browser and not as functions."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

VERSION = "2.24.2"


def hlo_stats(files: list[str]) -> list[dict[str, Any]]:
    """Rows of xprof's table of operations, by the ids of its columns; none where it finds no device operations.

    Among them `hlo_op_name` (`IDLE` stands for no operation), `total_self_time` (us) and `occurrences`.

    Args:
        files: xplane files of one session. xprof writes its caches beside them.
    """
    from xprof.convert import raw_to_tool_data

    with _quiet():
        data, _ = raw_to_tool_data.xspace_to_tool_data(files, "hlo_stats", {"use_saved_result": False})
    if not data:
        return []
    table = json.loads(data)
    table = table[0] if isinstance(table, list) else table
    names = [column["id"] for column in table["cols"]]
    return [dict(zip(names, (cell["v"] for cell in row["c"]), strict=True)) for row in table["rows"]]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """xprof's C++ side logs to file descriptor 2 whatever the log level."""
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
