"""Runners of the units of a stage: a process pool on one machine that survives the death of its workers, or the workers
of a cluster, through Zephyr (`marin-zephyr`) on Fray and Iris."""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tomat.base.errors import RetryableError, TomatError
from tomat.base.reporting import counted

DEATHS_IN_A_ROW = 3
"""So many pools in a row that finish no unit end the stage: a worker killed for its memory will be killed again."""
WORKER_MEMORY = "2g"
"""Memory of a worker: the largest Materials Project grid takes less than half (`profiling/tokenize_speed.py`)."""
WORKER_DISK = "4g"
"""Disk of a worker: it holds only Zephyr's messages. Fray's default of 64 GB would keep small machines out."""
MAX_EXECUTION_RETRIES = 3
"""How often Zephyr starts a whole pool again; its default of 100 would hide a broken cluster for hours."""


class PoolRunner:
    """Runs the units of a stage in processes of their own, spawned and not forked: TensorStore, gcsfs and zarr have
    threads, which a fork would lose with their locks held. With one worker they run in this process."""

    def __init__(self, workers: int | None = None) -> None:
        """Args: workers: number of processes; None for one per core."""
        self.workers = workers if workers is not None else len(os.sched_getaffinity(0))
        if self.workers < 1:
            raise TomatError(f"--workers is {self.workers}; expected at least 1.")

    def run[Unit](self, function: Callable[[Unit], int], units: Sequence[Unit], on_done: Callable[[int], None]) -> None:
        """Call `function` for every unit, in any order, anywhere, and `on_done` in the driver with what it returns."""
        if self.workers == 1:
            for unit in units:
                on_done(function(unit))
            return
        left = dict(enumerate(units))
        deaths = 0
        while left:
            finished = self._run_until_broken(function, left, on_done)
            deaths = 0 if finished else deaths + 1
            if left and deaths == DEATHS_IN_A_ROW:
                raise TomatError(
                    f"Workers died {deaths} times in a row and finished nothing, {counted(len(left), 'unit')} left. "
                    "Out of memory? Use fewer --workers; the same command goes on where it stopped."
                )

    def _run_until_broken[Unit](
        self, function: Callable[[Unit], int], left: dict[int, Unit], on_done: Callable[[int], None]
    ) -> int:
        """Run the units in `left`, and remove those that are finished. Returns how many were."""
        finished = 0
        context = multiprocessing.get_context("spawn")
        driver_is_done, done = context.Pipe(duplex=False)
        with (
            driver_is_done,
            done,
            ProcessPoolExecutor(
                min(self.workers, len(left)), context, initializer=_end_with_driver, initargs=(driver_is_done,)
            ) as pool,
        ):
            futures = {pool.submit(function, unit): index for index, unit in left.items()}
            try:
                for future in as_completed(futures):
                    on_done(future.result())
                    del left[futures[future]]
                    finished += 1
            except BrokenProcessPool:
                return finished
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            # A worker that is killed while it waits for the next unit keeps the lock of the queue: the others would
            # wait for it, and the pool for them, for ever (CPython 3.12). So they end by themselves.
            done.close()
        return finished


def _end_with_driver(driver_is_done: Connection) -> None:
    """End this worker when the driver needs it no more, or is gone. A worker waits on a queue whose other end it holds
    itself, so it would otherwise wait for ever after the driver was killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel, driver_is_done])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True)
class ZephyrRunner:
    """Runs units as shards of a Zephyr pipeline, which tries a unit again when its worker is lost. Inside an Iris job
    Fray finds the cluster by itself; elsewhere it runs on threads. A unit leaves its own record in the output."""

    temporary: str
    """Folder or URL that driver and workers reach, for Zephyr's own messages; removed by Zephyr."""
    workers: int | None = None
    """Most workers at a time; None for as many as there are units and the cluster allows."""
    memory: str = WORKER_MEMORY

    def run[Unit](self, function: Callable[[Unit], int], units: Sequence[Unit], on_done: Callable[[int], None]) -> None:
        """As `PoolRunner.run`. Zephyr reports a pipeline's results together, so the bar moves only at the end.
        Meanwhile Zephyr's log counts shards, and its counters `tomat/items` count materials or rows."""
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
            what = f"{type(error).__name__}: {error}"
            raise TomatError(f"The Zephyr pipeline failed ({what}). The same command goes on from there.") from error
        # Zephyr deletes what it wrote and leaves the empty folder; a bucket has none.
        with contextlib.suppress(OSError):
            Path(self.temporary).rmdir()
        for result in results:
            on_done(result.get("items", 0))
        _raise_refusals(results)


def _raise_refusals(results: Sequence[dict[str, Any]]) -> None:
    """Raise what units refused, as an outage only where all refusals are: then starting again may help."""
    if refusals := [result for result in results if "refused" in result]:
        more = f" ({counted(len(refusals) - 1, 'more unit')} failed)" if len(refusals) > 1 else ""
        kind = RetryableError if all(result["retry"] for result in refusals) else TomatError
        raise kind(f"{refusals[0]['refused']}{more}")


def _run_one[Unit](function: Callable[[Unit], int], unit: Unit) -> dict[str, Any]:
    """Run a unit on a worker. A refusal is a result: Zephyr would try it three times more and drop its message."""
    from zephyr import counters

    try:
        items = function(unit)
    except TomatError as error:
        return {"refused": str(error), "retry": isinstance(error, RetryableError)}
    counters.pipeline.update_counter("tomat/items", items)
    return {"items": items}
