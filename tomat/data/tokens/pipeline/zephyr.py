"""Units of a stage on the workers of a cluster, through Zephyr (`marin-zephyr`) on Fray and Iris.

Inside an Iris job Fray finds the cluster by itself; elsewhere it runs on threads of this machine. A shard is one
unit; Zephyr tries it again when its worker is lost. A unit leaves its own record in the output, so a second start
skips what is finished; Zephyr's own results are not kept.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.reporting import counted

WORKER_MEMORY = "2g"
"""Of a worker: the largest grid of the Materials Project set takes less than half of it (`tomat bench tokenize`)."""

WORKER_DISK = "4g"
"""Of a worker: nothing but Zephyr's messages lies on it. Fray's default of 64 GB would keep small machines out."""

MAX_EXECUTION_RETRIES = 3
"""Whole pools that Zephyr starts again; its default of 100 would hide a broken cluster for hours."""


@dataclass(frozen=True)
class ZephyrRunner:
    """Runs units as shards of a Zephyr pipeline."""

    temporary: str
    """Folder or URL that driver and workers reach, for Zephyr's own messages; removed by Zephyr."""
    workers: int | None = None
    """Most workers at a time; None for as many as there are units and the cluster allows."""
    memory: str = WORKER_MEMORY

    def run[Unit](self, function: Callable[[Unit], int], units: Sequence[Unit], on_done: Callable[[int], None]) -> None:
        """See `driver.Runner`. Zephyr reports a pipeline's results together, so the bar moves at its end;
        while it runs, Zephyr's log counts shards, and its counters `tomat/items` the materials or rows."""
        from fray.types import ResourceConfig
        from zephyr.context import ZephyrContext
        from zephyr.dataset import Dataset

        context = ZephyrContext(
            name="tomat-retokenize",
            max_workers=self.workers,
            resources=ResourceConfig(cpu=1, ram=self.memory, disk=WORKER_DISK),
            coordinator_resources=ResourceConfig(cpu=0.1, ram=self.memory, disk=WORKER_DISK, preemptible=False),
            chunk_storage_prefix=self.temporary,
            max_execution_retries=MAX_EXECUTION_RETRIES,
        )
        try:
            results: list[Any] = context.execute(
                Dataset.from_list(list(units)).map(partial(_run_one, function))
            ).results
        except Exception as error:  # a lost cluster shows as one of many classes of Fray, Iris and the RPC layer
            raise TomatError(
                f"The Zephyr pipeline failed ({type(error).__name__}: {error}). The same command goes on where it "
                "stopped."
            ) from error
        # Zephyr deletes what it wrote and leaves the empty folder; a bucket has none.
        with contextlib.suppress(OSError):
            Path(self.temporary).rmdir()
        for result in results:
            on_done(result.get("items", 0))
        if refusals := [result["refused"] for result in results if "refused" in result]:
            more = f" ({counted(len(refusals) - 1, 'more unit')} failed)" if len(refusals) > 1 else ""
            raise TomatError(f"{refusals[0]}{more}")


def _run_one[Unit](function: Callable[[Unit], int], unit: Unit) -> dict[str, Any]:
    """Run a unit on a worker. A refusal is a result: Zephyr would try it three times more and drop its message."""
    from zephyr import counters

    try:
        items = function(unit)
    except TomatError as error:
        return {"refused": str(error)}
    counters.pipeline.update_counter("tomat/items", items)
    return {"items": items}
