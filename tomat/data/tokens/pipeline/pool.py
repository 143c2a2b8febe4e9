"""Units of a stage on the cores of one machine: a process pool that survives the death of its workers."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, wait

from tomat.base.errors import TomatError
from tomat.base.reporting import counted, is_or_are

DEATHS_IN_A_ROW = 3
"""Pools that may break without one unit being finished in between. A worker that is killed for its memory will be
killed again."""


class PoolRunner:
    """Runs units in processes of their own.

    Processes are spawned, not forked: TensorStore, gcsfs and zarr have threads, which a fork would lose with their
    locks held. With one worker the units run in this process.
    """

    def __init__(self, workers: int | None = None) -> None:
        """Args: workers: number of processes; None for one a core."""
        self.workers = workers if workers is not None else len(os.sched_getaffinity(0))
        if self.workers < 1:
            raise TomatError(f"--workers is {self.workers}; expected at least 1.")

    def run[Unit](self, function: Callable[[Unit], int], units: Sequence[Unit], on_done: Callable[[int], None]) -> None:
        """See `driver.Runner`."""
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
                    f"Workers died {deaths} times in a row before finishing anything, "
                    f"{counted(len(left), 'unit')} {is_or_are(len(left))} left. They "
                    "may have run out of memory: use fewer --workers. The same command goes on where it stopped."
                )

    def _run_until_broken[Unit](
        self, function: Callable[[Unit], int], left: dict[int, Unit], on_done: Callable[[int], None]
    ) -> int:
        """Run the units that are left, and take those that are finished out; how many were."""
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
    itself, so it would otherwise wait for ever after the driver was killed.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel, driver_is_done])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
