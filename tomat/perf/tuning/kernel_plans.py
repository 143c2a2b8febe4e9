"""Plans of single kernels, each compiled in a process of its own and kept; and the tables that the best ones go to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tomat.base.reporting import console, write_json
from tomat.hardware.chips import slice_named
from tomat.perf.cost.chip_model import record_digest
from tomat.perf.plan.compile.process import Limits, ask, request_key
from tomat.perf.plan.compile.topology import compiler_version
from tomat.perf.plan.plan_cache import open_cache, open_result


def planned(
    child_module: str, request: dict[str, Any], cache_dir: Path, limits: Limits | None = None
) -> dict[str, Any]:
    """What the compiler makes of a request, from the cache or by compiling.

    Args:
        child_module: What lowers, compiles and measures it; its imports are part of what decides an answer.
        request: With `slice_name`; the rest is the child's.
        cache_dir: Made if it is missing.
        limits: Of one compile, which takes 40 to 300 s on two cores, by how much else runs on them.

    Returns:
        What the child answers, or `{"refused": why}`.

    Raises:
        TomatError: No compiler, or a compiling process that failed or passed a limit.
    """
    key = request_key([request, compiler_version(), record_digest()], child_module)
    kept = open_result(open_cache(cache_dir) / key)
    if kept is None:
        slice_, say = slice_named(request["slice_name"]), partial(console.print, highlight=False)
        kept = ask(child_module, {**request, "key": key}, slice_, cache_dir, limits or Limits(), on_removed=say)
    kept.lock.close()
    return kept.result


def put_entry(entry: dict[str, Any], keys: Sequence[str], table_file: Path) -> None:
    """Put an entry into a table of tuned sizes, in the place of one with the same values of `keys`."""
    entries = json.loads(table_file.read_text(encoding="utf-8"))["entries"] if table_file.exists() else []
    others = [e for e in entries if any(e[key] != entry[key] for key in keys)]
    write_json(table_file, {"entries": sorted([*others, entry], key=lambda e: tuple(e[key] for key in keys))})
