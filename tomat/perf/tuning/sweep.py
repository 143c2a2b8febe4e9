"""Runs a sweep: plans every row, one after another or several at once, and records each when it is done.

A row is a plan, and the plan cache keeps its compile. A sweep that was stopped, or that has failed rows, continues
where it was when it is started again. `<tracking_dir>/sweeps/<name>.json` is rewritten after each row.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.layout import SWEEPS_DIR
from tomat.base.progress import Stages
from tomat.base.report.document import write_if_changed
from tomat.base.reporting import dump_json, to_jsonable
from tomat.perf.tuning.scaling import scaling_record
from tomat.perf.tuning.sweep_config import SweepConfig, SweepRow
from tomat.perf.tuning.sweep_record import RECORD_FORMAT, ranked, rows_on_record
from tomat.perf.tuning.sweep_rows import FITS, RowRecord, base_of, failed, planned, verdict


def run_sweep(
    sweep: SweepConfig, tracking_dir: Path, *, workers: int = 1, only: Sequence[str] = (), **how: Any
) -> dict[str, Any]:
    """Plan the rows of a sweep, or those that `only` names, and report progress. `workers` rows are planned at once; a
    compile keeps two cores busy and takes 4 GB. `how` is passed on as for `compile_step`. Each row is written to the
    record when it is done. A row that raises is recorded as failed, and the sweep continues. An interrupt drops waiting
    rows; their earlier entries in the record stay."""
    from tomat.perf.plan.compile.compiler import CHILD_MODULE
    from tomat.perf.plan.compile.process import end_pool
    from tomat.perf.plan.plan import make_plan

    sweep.check_rows(only)
    wanted = [row for row in sweep.rows if not only or row.name in only]
    path = record_path(tracking_dir, sweep.name)
    if (tracking_dir / "data" / f"{sweep.name}.json").exists():
        taken = f"a run called {sweep.name!r}, whose page the sweep would take"
        raise TomatError(f"{tracking_dir} has {taken}; rename the sweep.")
    earlier = rows_on_record(path, RowRecord)
    rows: dict[str, RowRecord] = {}
    for row in sweep.rows:
        known = earlier.get(row.name)
        if known is None or row.slice not in (None, known.slice) or known.overrides != to_jsonable(row.overrides):
            continue
        if row in wanted or _is_planned_as_now(row, known):
            rows[row.name] = dataclasses.replace(known, lines=row.lines)  # lines are not part of a plan
    lock = threading.Lock()
    stopping = threading.Event()
    numbers = itertools.count(1)

    def work(row: SweepRow) -> None:
        if stopping.is_set():
            return
        config, slice_ = None, None
        try:
            stages.show(row.name, "reading the configuration")
            config, slice_ = row.load()
            # The plan uses the calibration in the folder of the page.
            here = dataclasses.replace(config, tracking_dir=str(tracking_dir))
            plan = make_plan(here, slice_, on_stage=partial(stages.show, row.name), **how)
            record = planned(row, config, slice_, plan)
        except TomatError as error:
            record = failed(row, config, slice_, str(error))
        except Exception as error:  # the other rows do not depend on what a model or a library raises here
            record = failed(row, config, slice_, f"{type(error).__name__}: {error}")
        except BaseException:
            stopping.set()  # before another row begins
            raise
        # An interrupt also ends the compiles in progress. Their rows are not recorded as failed.
        if stopping.is_set():
            return
        with lock:
            rows[row.name] = record
            write_if_changed(path, dump_json(_record(sweep, rows)))
            known = list(rows.values())
        stages.done(row.name)
        # Not printed to standard output, where a terminal's live display would erase the line.
        said = verdict(record, base_of(record, known))
        stages.say(f"{next(numbers)} of {len(wanted)}, {row.name}: {said}")

    with Stages() as stages:
        # Threads suffice, because each compile runs in its own process.
        pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="sweep")
        futures = [pool.submit(work, row) for row in wanted]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            stopping.set()
            end_pool(pool, futures, CHILD_MODULE)
    return _record(sweep, rows)


def _is_planned_as_now(row: SweepRow, known: RowRecord) -> bool:
    """Whether the row's configuration is still the one that was planned. Rows that are not wanted are not replanned."""
    from tomat.train.settings.config import config_hash

    try:
        return known.config_hash in (None, config_hash(row.load()[0]))
    except TomatError:
        return known.config_hash is None


def _record(sweep: SweepConfig, rows: Mapping[str, RowRecord]) -> dict[str, Any]:
    in_order = [rows[row.name] for row in sweep.rows if row.name in rows]
    record = {
        "record_format": RECORD_FORMAT,
        "sweep": sweep.name,
        "title": sweep.title,
        "introduction": sweep.introduction,
        "n_rows": len(sweep.rows),
        "n_fitting": sum(row.status == FITS for row in in_order),
        "ranking": [row.name for row in ranked(in_order)],
        "rows": [row.to_dict() for row in in_order],
    }
    if any(row.lines for row in in_order):
        record["scaling"] = scaling_record(in_order)
    return to_jsonable(record)


def record_path(tracking_dir: Path, name: str) -> Path:
    return tracking_dir / SWEEPS_DIR / f"{name}.json"
