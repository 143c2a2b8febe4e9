"""A run's folder, on this machine and, where `output_dir` names one, in a bucket; and its line in the log beside it.

With `output_dir` in a bucket the checkpoints go there by themselves. Log, metrics and configuration are written on
local disk, where they can be appended to; a machine that takes over a preempted run needs them too. The events in a
copy tell which one is ahead, never a clock: those of two machines differ.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from tomat.base import layout
from tomat.base.errors import TomatError
from tomat.base.reporting import warn, write_bytes, writing
from tomat.base.storage import explaining_storage, files_at, is_remote
from tomat.model.devices import found_devices
from tomat.train.preemption import StopRequest
from tomat.train.runs.devices import devices_details
from tomat.train.runs.history import append_event, file_content, read_events
from tomat.train.runs.lock import Lease, hold_run
from tomat.train.runs.record import read_config, read_record
from tomat.train.runs.run_log import END, RESUME, RUN, START, Asked, append_line, machine
from tomat.train.runs.summary import outcome
from tomat.train.settings.config import TrainConfig, config_hash

PAGE_FILES = (layout.EVALUATION_FILE, layout.PAGE_FILE, layout.LOSS_FIGURE, layout.DENSITY_FIGURE,
              layout.PREDICTION_FIGURE, layout.REFERENCE_DENSITY, layout.PREDICTED_DENSITY,
              layout.HTML_FILE)  # fmt: skip
LAST_WORDS_SECONDS = 20.0
"""How long a process that must end at once may take to bring its history into the bucket."""
PUBLISHED = (layout.CONFIG_FILE, layout.CODEC_FILE, layout.PROMOLECULE_FILE, layout.METRICS_FILE, layout.HISTORY_FILE,
             *PAGE_FILES)  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    config: TrainConfig
    path: Path
    """On a local disk: logs, metrics, profiles."""
    lease: Lease | None = None
    """The lease of the first process of a run in a bucket; it says whether the run is still this process's to train."""
    _sent: dict[str, int] = field(default_factory=dict, repr=False, compare=False)
    """What `publish_tree` has copied, and when each was last written."""

    @classmethod
    def of(cls, config: TrainConfig) -> "RunFolder":
        """The folder of a run, which need not exist."""
        remote = is_remote(config.output_dir)
        return cls(config, Path("runs") / config.run_name if remote else Path(config.run_dir))

    @property
    def names(self) -> tuple[str, ...]:
        """The files of the folder that are published if they exist: `PUBLISHED`, and Levanter's log."""
        return (*PUBLISHED, f"{self.config.run_name}.log")

    def make(self) -> None:
        with writing(self.path, "Set --output_dir to a folder that this user may write."):
            self.path.mkdir(parents=True, exist_ok=True)

    def fetch(self) -> bool:
        """Copy what another machine has written of the run from its bucket; return whether there was anything."""
        if not is_remote(self.config.output_dir):
            return False
        self._refuse_another_place()
        return bool(fetch(self.config.run_dir, self.path, self.names))

    def _refuse_another_place(self) -> None:
        """Stop if the folder on this machine belongs to a run of the same name elsewhere: its log would be cut, and its
        start would be taken for that of this run."""
        recorded, place = self.path / layout.CONFIG_FILE, self.config.output_dir.rstrip("/")
        if not recorded.exists() or not recorded.read_bytes().strip():
            return
        other = str(read_config(str(recorded)).get("output_dir")).rstrip("/")
        # A run that was copied to another bucket has its history there.
        if other != place and not read_events(self.config.run_dir):
            raise TomatError(
                f"{self.path} belongs to run '{self.config.run_name}' in {other}; output_dir is {place}, which has "
                "no such run yet. Use another run_name, or move that folder away."
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator["RunFolder"]:
        """This folder, with its run locked for this process while the context is open; for the first process."""
        with hold_run(self.config.run_dir, self.path, self.config.run_name) as lease:
            yield dataclasses.replace(self, lease=lease)

    def publish(self) -> None:
        """Bring the files in the bucket up to date, if they are still this process's to write."""
        if self.lease is not None:
            self.lease.confirm()
        if is_remote(self.config.output_dir) and jax.process_index() == 0:
            publish(self.config.run_dir, self.path, self.names)

    def publish_tree(self, folder: Path, to: str, pattern: str = "**/*") -> None:
        """Bring the new and changed files of `folder` into the folder `to` of the bucket; each process brings its own.
        A failure is only a warning: the run is whole without them."""
        if not is_remote(self.config.output_dir):
            return
        for path in (path for path in sorted(folder.glob(pattern)) if path.is_file()):
            written = path.stat().st_mtime_ns
            if self._sent.get(str(path)) == written:
                continue
            try:
                publish(f"{self.config.run_dir}/{to}", folder, [path.relative_to(folder).as_posix()])
                self._sent[str(path)] = written
            except TomatError as error:
                warn(f"{path} stays on this machine: {error}")

    def record(self, event: str, step: int, **details: Any) -> None:
        if jax.process_index() == 0:
            append_event(self.path, event, step, **details)

    @contextlib.contextmanager
    def recording_early_end(self, stop: StopRequest) -> Iterator[None]:
        """Write into the history what ends the run before its last step while the context is open."""
        stop.on_overrun = lambda message: self.record("stop", stop.step, reason=message)
        try:
            yield
        except BaseException as error:
            if isinstance(error, SystemExit | KeyboardInterrupt) and stop.asked:
                self.record("preempted", stop.step, cause=stop.cause, saved=stop.step > 0 and not stop.unsaved)
            else:
                self.record("stop", stop.step, reason=f"{type(error).__name__}: {error}"[:500])
            raise

    def record_loss(self, stop: StopRequest, said: str) -> None:
        """Write into the history that another host ends the run, here and in the bucket, within `LAST_WORDS_SECONDS`.
        For the first process or, if that is the lost one, for another."""

        def write() -> None:
            if jax.process_index() == 0:
                self.record("stop", stop.step, reason=said)
                self.publish()
            else:
                record_for_another(self.config.run_dir, self.path, "stop", stop.step, reason=said)

        last = threading.Thread(target=write, daemon=True)
        last.start()
        last.join(LAST_WORDS_SECONDS)

    @contextlib.contextmanager
    def logged(self, asked: Asked, first_step: int) -> Iterator[None]:
        """Write into the log of the output folder that the run begins or goes on and, when the context is left, how it
        ended. For the first process, before the run's history has this start."""
        config = self.config
        before = any(event["event"] in (START, RESUME) for event in read_events(self.path))
        about = {**dataclasses.asdict(asked), "purpose": " ".join(config.purpose.split())}
        about |= {**devices_details(found_devices(), config.slice), "configuration": config_hash(config), **machine()}
        append_line(config.output_dir, RUN, config.run_name, RESUME if before else START, step=first_step, **about)
        try:
            yield
        finally:
            self.log_end()

    def log_end(self) -> None:
        """Write the outcome of the run so far, as its folder shows it; on the first process. A failure is only a
        warning: the steps are saved."""
        if jax.process_index() != 0:
            return
        place, name = self.config.output_dir, self.config.run_name
        try:
            end, figures = outcome(read_record(str(self.path)), self.config.run_dir, time.time())
            said = {"status": end.state, "reason": end.state_detail, "figures": figures}
            append_line(place, RUN, name, END, step=end.steps_done, **said)
        except TomatError as error:
            warn(f"the log of {place} lacks the end of this run: {error}")


def fetch(run_url: str, run_dir: Path, names: Sequence[str] = PUBLISHED) -> list[str]:
    """Copy published files that `run_dir` lacks, or all if another machine continued the run; return their names."""
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    files_at(run_url)[0].invalidate_cache()
    events, known = read_events(run_url), read_events(run_dir)
    # Every start, and every end that could be recorded, is an event: here the bucket has one that this machine lacks.
    overtaken = known[: len(events)] != events
    copied = []
    for name in names:
        local = run_dir / name
        kept = local.exists() and not overtaken
        # Lines that were cut for a resume which never began may come back: the next resume cuts them again.
        if kept and (name != layout.METRICS_FILE or events != known):
            continue
        content = file_content(f"{run_url}/{name}")
        if content is not None and not (kept and len(content) <= local.stat().st_size):
            write_bytes(local, content)
            copied.append(name)
    return copied


def record_for_another(run_url: str, run_dir: Path, event: str, step: int, **details: Any) -> None:
    """Append an event to a run's history, whose events so far another process has written."""
    if not is_remote(run_url):
        return append_event(run_dir, event, step, **details)
    if (so_far := file_content(f"{run_url}/{layout.HISTORY_FILE}")) is not None:
        write_bytes(run_dir / layout.HISTORY_FILE, so_far)
    append_event(run_dir, event, step, **details)
    publish(run_url, run_dir, [layout.HISTORY_FILE])


def publish(run_url: str, run_dir: Path, names: Sequence[str] = PUBLISHED) -> None:
    """Copy those of the files `names` that exist in `run_dir` to the run's bucket. Log and history may be copied only
    while no other process can write them."""
    files, root = files_at(run_url)
    for name in (name for name in names if (run_dir / name).exists()):
        content = (run_dir / name).read_bytes()
        remedy = "Give this user the right to write it, or set another --output_dir."
        with explaining_storage(f"{run_url}/{name} cannot be written", remedy):
            files.pipe_file(f"{root}/{name}", content)
