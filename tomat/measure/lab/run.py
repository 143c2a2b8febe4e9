"""`tomat lab run`: measures every row of a sweep beside its base, round by round.

In a round each row is started once, with its base in a second process beside it. Their windows alternate in changing
order, so that a drift of the machine affects both. An accelerator is held by one process, so there the base is measured
and ended before the row starts (with `LabConfig.minutes` once a round). The record is rewritten after each row, and a
lab that was stopped continues with the missing rows and rounds.
"""

import fcntl
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import IO, Any

from tomat.base.errors import TomatError
from tomat.base.progress import Stages
from tomat.base.reporting import to_jsonable, write_json, writing
from tomat.hardware.mfu import MFU_KEYS
from tomat.measure.lab.messages import DEVICE, MEASURED, LabConfig, Request, RowError
from tomat.measure.lab.process import RowProcess
from tomat.measure.lab.record import LabRow, Setup, Start, Window, question_key, record_path
from tomat.measure.lab.speedup import start_noise
from tomat.perf.tuning.changes import override_words
from tomat.perf.tuning.sweep_config import SweepConfig, SweepRow
from tomat.perf.tuning.sweep_record import RECORD_FORMAT, KeptRows, ranked, read_record

OF_A_START = tuple(Start.__annotations__)
OF_A_WINDOW = (
    "step_seconds", "tokens_per_second", "waiting_for_data_seconds", "others_busy_share", "loss", "step_joules",
)  # fmt: skip
Pair = tuple[Mapping[str, Any], Mapping[str, Any] | None]
"""A window of a row, and the base's window beside it."""

OF_ALL_WINDOWS = ("repeats", "window_seconds", "steps", "warmup_steps")
"""Fields of `LabConfig` that must be the same for all windows of a record; its page states them once."""

LOCK_FILE = "lab.lock"


@dataclass
class Lab:
    """Measures one sweep. `work_dir` holds data, compiled programs and logs of the rows."""

    sweep: SweepConfig
    tracking_dir: Path
    work_dir: Path
    config: LabConfig
    stages: Stages = field(default_factory=Stages)
    """Shows what each row is doing, except while it stands by as a base."""
    on_done: Callable[[LabRow], None] = lambda row: None
    """Called with each row at the end of its round, measured or failed."""
    start: Callable[[Request, Callable[[str], None]], RowProcess] = RowProcess
    rows: dict[str, LabRow] = field(default_factory=dict)
    devices: str | None = None
    _process: RowProcess | None = None
    """Process of the base that is running."""
    _base: str | None = None
    _base_windows: list[dict[str, Any]] = field(default_factory=list)
    """Windows of the base, measured before its rows if it cannot run beside them."""
    _waited_seconds: float = 0.0
    _measured_starts: int = 0
    _overhead: float | None = None
    _began: float = 0.0
    _longest_seconds: float = 0.0
    """Longest time of one row so far, including its base."""

    def run(self, only: Sequence[str] = (), *, again: bool = False) -> dict[str, Any]:
        """Measure what is not on record (`again`: everything) and return the record, which is also on disk and survives
        an interruption. `only`: names of the rows to measure, besides their bases; empty: all."""
        self.sweep.check_rows(only)
        with alone_in(self.work_dir):
            self._begin(only, again)
            began = self._began = time.monotonic()
            try:
                for number in range(self.config.rounds):
                    self._round(number, [row for row in self.sweep.rows if not only or row.name in only])
            finally:
                self._end_base()
                shutil.rmtree(self.work_dir / "scratch", ignore_errors=True)
            if self._measured_starts:  # else what is on record stays
                self._overhead = (time.monotonic() - began - self._waited_seconds) / self._measured_starts
            self._write()
        return self.record()

    def _begin(self, only: Sequence[str], again: bool) -> None:
        path = record_path(self.tracking_dir, self.sweep.name)
        anew = not path.exists() or (again and not only)
        record = KeptRows[LabRow](rows=[]) if anew else read_record(path, KeptRows[LabRow])
        how = record.get("measured_with", {}) if record["rows"] else {}
        for key in OF_ALL_WINDOWS:
            asked = getattr(self.config, key)
            if how.get(key, asked) != asked:
                raise TomatError(
                    f"the record of {self.sweep.name} was measured with {key} {how[key]}, but {asked} is asked for; "
                    "give --again to measure all rows anew, or another --tracking_dir."
                )
        earlier = {row.name: row for row in record["rows"]}
        self._overhead = record.get("overhead_seconds_per_start")
        self.devices = record.get("devices")
        keys = {row.name: question_key(row) for row in self.sweep.rows}
        for row in self.sweep.rows:
            self.rows[row.name] = fresh = LabRow(
                name=row.name, key=keys[row.name], config_file=row.config_path.name, base=row.base,
                overrides=to_jsonable(row.overrides), question=row.question,
            )  # fmt: skip
            before = earlier.get(row.name)
            # A row that failed is measured again: the reason may be gone.
            if again and row.name in only:
                continue
            if before is not None and before.is_whole and before.status in ("", MEASURED):
                # Its windows are paired with those of its base, which may ask something else now.
                base = earlier.get(before.base or row.name)
                same_base = base is None or base.key == keys.get(base.name)
                if same_base and (before.key, before.base) == (fresh.key, fresh.base):
                    self.rows[row.name] = before

    def _round(self, number: int, wanted: Sequence[SweepRow]) -> None:
        """Measure all rows once, each beside its base."""
        for base in dict.fromkeys(row.base or row.name for row in wanted):
            if self._lacks(base, number) and self.rows[base].base is None and self._has_time():
                began = time.monotonic()
                self._start_base(base)
                self._measure_base(number, keep=True)
                self._end_base(keep_windows=self._measures_once(base))
                self._longest_seconds = max(self._longest_seconds, time.monotonic() - began)
            for row in wanted:
                if row.base == base and row.name != base and self._lacks(row.name, number) and self._has_time():
                    began = time.monotonic()
                    self._measure(row, base, number)
                    # A process keeps its speed for its life: the luck of one base process would affect all rows.
                    self._end_base(keep_windows=self._measures_once(base))
                    self._longest_seconds = max(self._longest_seconds, time.monotonic() - began)
            self._end_base()

    def _has_time(self) -> bool:
        minutes = self.config.minutes
        return minutes is None or time.monotonic() - self._began + self._longest_seconds <= 60 * minutes

    def _measures_once(self, base: str) -> bool:
        """Whether the windows of a base are measured once for all rows of a round."""
        return self.config.minutes is not None and self.rows[base].setup.get("memory_source") == DEVICE

    def _lacks(self, name: str, number: int) -> bool:
        row = self.rows[name]
        return row.status in ("", MEASURED) and row.rounds_done <= number

    def _start(self, row: SweepRow) -> RowProcess:
        """Start a process whose programs come from the cache.

        A process that compiled them is recorded only for its compile and then started again: what the compiler leaves
        in memory made a process up to 9 % slower for its life, on two processors (`lab-same`, where the base had
        compiled). With a limit on minutes, a process on an accelerator is timed anyway.
        """
        process = self._started(row)
        hurried = self.config.minutes is not None and process.described["memory_source"] == DEVICE
        if hurried or not process.described["compiled_programs"]:
            return process
        if not any(start["compiled_programs"] for start in self.rows[row.name].starts):
            self._record_start(row.name, process, process.described["peak_memory_bytes"])
        self._close(process)
        return self._started(row)

    def _started(self, row: SweepRow) -> RowProcess:
        kept = self.rows[row.name]
        name = "".join(letter if letter.isalnum() else "-" for letter in row.name)[:60]
        request = Request(
            str(row.config_path), override_words(row.overrides), self.work_dir.absolute(), f"{name}-{kept.key[:6]}",
            self.config, words_of=row.words_of,
        )  # fmt: skip
        began = time.monotonic()
        try:
            process = self.start(request, partial(self.stages.show, row.name))
        except BaseException:
            self._waited_seconds += time.monotonic() - began
            raise
        self._measured_starts += 1
        found = process.described["devices"]
        if self.devices not in (None, found):
            self._close(process)
            raise TomatError(
                f"the record of {self.sweep.name} was measured on {self.devices}, but here is {found}; give another "
                "--tracking_dir, or delete the record to measure anew."
            )
        self.devices = found
        kept.setup = Setup(**{key: value for key, value in process.described.items() if key not in OF_A_START})
        kept.memory_limit_bytes = self.config.limits.memory_bytes
        self.stages.done(row.name)
        return process

    def _start_base(self, name: str) -> None:
        base = next(row for row in self.sweep.rows if row.name == name)
        self._base, self._base_windows = name, []
        if self.rows[name].status not in ("", MEASURED):
            return
        try:
            self._process = self._start(base)
        except RowError as error:
            if self.rows[name].base is None:
                self._refuse(name, error)

    def _measure_base(self, number: int, keep: bool) -> None:
        """Measure the base's windows of a round without a row beside it. `keep`: also put them on record."""
        if self._process is None or self._base is None:  # the base failed
            return
        try:
            self._base_windows = [self._process.window() for _ in range(self.config.repeats)]
        except RowError as error:
            self._refuse(self._base, error)
            self._end_base()
            return
        if keep:
            self._keep(self._base, number, self._process, [(one, None) for one in self._base_windows])
        if self._process.described["memory_source"] == DEVICE:
            self._end_base(keep_windows=True)

    def _measure(self, row: SweepRow, base: str, number: int) -> None:
        """Measure a row beside its base for one round. They take turns in starting first, because the later of two
        processes was 1.5 % faster (`lab-same`: standard error 0.3). An accelerator is held by one process, so there the
        base has ended before the row starts."""
        process = None
        base_first = number % 2 == 0 or self.rows[base].setup.get("memory_source") == DEVICE
        try:
            if base_first and not (self._measures_once(base) and self._base_windows):
                self._start_base(base)
                if self._process is not None and self._process.described["memory_source"] == DEVICE:
                    self._measure_base(number, keep=False)
            process = self._start(row)
            if not base_first:
                self._start_base(base)
            self.stages.show(row.name, "measuring")
            self._keep(row.name, number, process, self._pairs(process))
        except RowError as error:
            self._refuse(row.name, error)
        finally:
            if process is not None:
                self._close(process)

    def _pairs(self, process: RowProcess) -> list[Pair]:
        pairs: list[Pair] = []
        for repeat in range(self.config.repeats):
            before = None if repeat % 2 else self._base_window(repeat)
            mine = process.window()
            pairs.append((mine, self._base_window(repeat) if repeat % 2 else before))
        return pairs

    def _base_window(self, repeat: int) -> dict[str, Any] | None:
        if self._process is None:
            return self._base_windows[repeat] if repeat < len(self._base_windows) else None
        self._process.extend()
        try:
            return self._process.window()
        except RowError as error:
            # The rows of this base are still measured, but not compared.
            if self._base is not None:
                self._refuse(self._base, error)
            self._end_base()
            return None

    def _keep(self, name: str, number: int, process: RowProcess, pairs: Sequence[Pair]) -> None:
        row = self.rows[name]
        for one, base in pairs:
            known: dict[str, Any] = {key: one[key] for key in OF_A_WINDOW}
            known["mfu"] = {key: one[key] for key in MFU_KEYS if key in one}
            theirs = None if base is None else base["tokens_per_second"]
            row.windows.append(Window(round=number, base_tokens_per_second=theirs, **known))
        self._record_start(name, process, max(one["peak_memory_bytes"] for one, _ in pairs))
        row.status, row.rounds_done = MEASURED, number + 1
        self._write()
        self.on_done(row)

    def _record_start(self, name: str, process: RowProcess, peak_memory_bytes: int) -> None:
        known = process.described | {"start_seconds": process.start_seconds, "peak_memory_bytes": peak_memory_bytes}
        self.rows[name].starts.append(Start(**{key: known[key] for key in OF_A_START}))

    def _refuse(self, name: str, error: RowError) -> None:
        row = self.rows[name]
        # Earlier windows of the row stay on record.
        row.status, row.reason = error.status, error.reason
        self._write()
        self.on_done(row)

    def _end_base(self, keep_windows: bool = False) -> None:
        if self._process is not None:
            self._close(self._process)
            self._process = None
        if not keep_windows:
            self._base_windows = []

    def _close(self, process: RowProcess) -> None:
        self._waited_seconds += process.waited_seconds
        process.close()

    def _write(self) -> None:
        write_json(record_path(self.tracking_dir, self.sweep.name), self.record())

    def record(self) -> dict[str, Any]:
        # Empty before the lab has begun: another lab may hold the folder.
        in_order = [self.rows[row.name] for row in self.sweep.rows if row.name in self.rows]
        begun = [row for row in in_order if row.status]
        noise = start_noise(row.start_ratios for row in begun)
        for row in begun:
            row.start_noise = noise
        how = {one.name: getattr(self.config, one.name) for one in fields(LabConfig) if one.name != "limits"}
        how["rounds"] = max([self.config.rounds, *(row.rounds_done for row in begun)])
        groups = defaultdict(list)
        for row in begun:
            groups[row.setup.get("config_hash")].append(row.name)
        return to_jsonable(
            {
                "record_format": RECORD_FORMAT,
                "sweep": self.sweep.name,
                "title": self.sweep.title,
                "introduction": self.sweep.introduction,
                "devices": self.devices,
                "n_processors": os.cpu_count(),
                "measured_with": {**how, "row_seconds_limit": self.config.limits.seconds},
                "n_rows": len(self.sweep.rows),
                "n_measured": sum(row.measured for row in begun),
                "overhead_seconds_per_start": self._overhead,
                "ranking": [row.name for row in ranked(begun)],
                # Groups of rows that turned out to be the same setting: their differences are noise.
                "same_settings": [names for key, names in groups.items() if key is not None and len(names) > 1],
                "rows": [row.to_dict() for row in begun],
            }
        )


@contextmanager
def alone_in(work_dir: Path) -> Iterator[IO[str]]:
    """Lock a folder, so that no other process measures or trains in it; yields the lock file."""
    with writing(work_dir, "Make room, or give another --work_dir."):
        work_dir.mkdir(parents=True, exist_ok=True)
        file = (work_dir / LOCK_FILE).open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            said = f"another process works in {work_dir} (it holds {LOCK_FILE})"
            raise TomatError(f"{said}; wait for it, or name another folder.") from None
        yield file
