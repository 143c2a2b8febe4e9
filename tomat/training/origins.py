"""What a process begins from: its run's newest whole checkpoint, another run's, another run's weights, or nothing.

`plan_start` only reads, and refuses what cannot work before anything is written. `Start.settle` then lets the first
process decide for all of them. Once the state has been loaded, `Start.record` leaves what was decided in the run's
history: a start that fails leaves a run as it was.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
from jax.experimental import multihost_utils

from tomat.base.errors import TomatError
from tomat.base.reporting import console
from tomat.base.storage import storage_error, storage_errors
from tomat.codec.base import DensityCodec
from tomat.codec.files import codec_from_text
from tomat.runs.checkpoints import (
    CHECKPOINT_FOLDER,
    Checkpoint,
    copy,
    examine,
    find_checkpoint,
    is_checkpoint_name,
    list_checkpoints,
    newest_whole,
    say_if_unchecked,
    weights_kind,
    with_data_read,
)
from tomat.runs.history import append_event, read_events
from tomat.runs.published import CODEC_FILE, CONFIG_FILE
from tomat.training.config import TrainConfig
from tomat.training.data_record import DATA_EVENT, Contents, changed_contents, data_contents, recorded_contents
from tomat.training.datasets import Datasets
from tomat.training.resume import Changes, allowed_changes, changed_keys, plain_values, read_config, refuse_changes


@dataclass(frozen=True)
class Continuation:
    """What a command asks for beyond its configuration; none of it is part of the run's settings."""

    allow_change: tuple[str, ...] = ()
    """Dotted keys of the configuration that may differ from the run on record."""
    fork_of: str | None = None
    """Name of the run, beside this one, whose checkpoint this new run begins with."""
    fork_step: int | None = None
    """Which of its checkpoints; None: the newest whole one."""
    warm_start: str | None = None
    """Folder or URL of a run, or of a checkpoint, whose weights alone this new run begins with."""


@dataclass
class Start:
    """What was found and asked for."""

    config: TrainConfig
    run_dir: Path
    changes: Changes = field(default_factory=dict)
    """What differs from the run on record, all of it by leave."""
    unchanged: list[str] = field(default_factory=list)
    """Keys that may differ and do not."""
    fork: Checkpoint | None = None
    """To be copied into the run."""
    fork_of: str = ""
    weights: Checkpoint | None = None
    """To be loaded without the optimizer's state."""
    asked: str = ""
    """The weights as the user named them."""
    origin: str = ""
    """Folder or URL of the run that the fork or the weights come from."""
    origin_temporary: str | None = None
    """Where that run's configuration sends its temporary checkpoints; None: beside the permanent ones."""
    checkpoint: Checkpoint | None = None
    """Of the run itself; known once `settle` has been called."""
    partial: list[Checkpoint] = field(default_factory=list)
    """Checkpoints of the run that are not whole; known on the first process once `settle` has been called."""
    newest: Checkpoint | None = None
    """The newest whole checkpoint of the run as its files looked when the start was planned."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """The run's history when the start was planned."""
    allow_change: tuple[str, ...] = ()
    """Keys that may differ."""
    data_of: str = ""
    """The run whose data these must be, as an error names it; empty for a run that begins."""
    recorded_data: Contents | None = None
    """What is on record of that run's data; None: nothing."""
    changed_data: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    """Hashes of sets whose content has changed, by leave."""

    @property
    def source(self) -> Checkpoint | None:
        """What the state is loaded from: the run's own checkpoint, or the one that a fork takes over."""
        return self.checkpoint if self.checkpoint is not None else self.fork

    @property
    def first_step(self) -> int:
        """The step that the run is to begin with, which is that of steps done; known once `settle` has been called."""
        return 0 if self.source is None else self.source.step + 1

    @property
    def is_outdated(self) -> bool:
        """Another process has gone on with the run since the start was planned."""
        newest = newest_whole(self.config.run_dir, self.config.temporary_checkpoints)
        return newest != self.newest or read_events(self.run_dir) != self.events

    def check_data(self, datasets: Datasets) -> None:
        """Compare the data with those that the run, or the fork's parent, was trained on.

        Raises:
            TomatError: Other data, without leave.
        """
        self.changed_data = changed_contents(self.recorded_data, datasets, self.allow_change, self.data_of)
        self.unchanged = [key for key in self.unchanged if key not in self.changed_data]

    def settle(self, codec: DensityCodec) -> None:
        """Find the checkpoint to begin with, the same on every process; each must call it. Writes nothing.

        Raises:
            TomatError: Weights of another codec, or a checkpoint that another host cannot see.
        """
        for found, what in ((self.fork, f"run '{self.fork_of}'"), (self.weights, f"'{self.asked}'")):
            if found is not None:
                refuse_codec(self.origin, codec, what)
        config, steps = self.config, np.array([-1, 0, -1])
        if jax.process_index() == 0:
            found = with_data_read(list_checkpoints(config.run_dir, config.temporary_checkpoints))
            self.partial = [item for item in found if not item.whole]
            whole = [item for item in found if item.whole]
            for item in self.partial:
                console.print(f"[yellow]warning:[/yellow] {item.path} is passed over: {item.reason}.")
            if whole:
                self.checkpoint = whole[-1]
                say_if_unchecked(self.checkpoint)
                steps[:2] = self.checkpoint.step, self.checkpoint.path.startswith(config.temporary_checkpoints or "\0")
            elif (elsewhere := self.fork or self.weights) is not None:
                steps[2] = elsewhere.step
        if jax.process_count() > 1:
            steps = np.asarray(multihost_utils.broadcast_one_to_all(steps))
        step, temporary, elsewhere_step = (int(value) for value in steps)
        if jax.process_index() != 0:
            self.checkpoint = self._of_first_process(step, bool(temporary)) if step >= 0 else None
            if elsewhere_step >= 0:
                chosen = find_checkpoint(self.origin, elsewhere_step, self.origin_temporary)
                self.fork, self.weights = (chosen if found else None for found in (self.fork, self.weights))
        if self.checkpoint is not None:
            self.fork = self.weights = None

    def record(self, datasets: Datasets) -> None:
        """Write into the run's history what was decided; on the first process, once the state has been loaded."""
        for item in self.partial:
            append_event(self.run_dir, "partial_checkpoint", item.step + 1, path=item.path, reason=item.reason)
        self._record_changes()
        self._record_data(datasets)
        if self.fork is not None:
            self._record_fork(self.fork)
        if self.weights is not None:
            self._record_warm_start(self.weights, datasets.codec)

    def copy_fork(self) -> None:
        """Copy the checkpoint of a fork into the run; on the first process, once its history and configuration are
        where another machine would find them.

        Raises:
            TomatError: The copy is not whole.
        """
        if self.fork is not None:
            copied = f"{self.config.run_dir}/{CHECKPOINT_FOLDER}/step-{self.fork.step}"
            copy(self.fork, copied)
            self.checkpoint = examine(copied, self.fork.step)

    def _of_first_process(self, step: int, temporary: bool) -> Checkpoint:
        base = self.config.temporary_checkpoints if temporary else f"{self.config.run_dir}/{CHECKPOINT_FOLDER}"
        found = examine(f"{base}/step-{step}", step)
        if not found.whole:
            raise TomatError(
                f"the first host continues from {found.path}, which host {jax.process_index()} does not have "
                f"({found.reason}); every host must see the same checkpoints: put output_dir into a bucket or on a "
                "disk that all share."
            )
        return found

    def _record_changes(self) -> None:
        for key in self.unchanged:
            console.print(f"--allow_change {key}: it does not differ from the run on record.")
        if self.fork is None:
            for key, (before, after) in self.changes.items():
                self._record_change(key, before, after)

    def _record_change(self, key: str, before: Any, after: Any) -> None:
        console.print(f"changed by leave: {key}: {before!r} -> {after!r}")
        append_event(self.run_dir, "allow_change", self.first_step, key=key, old=before, new=after)

    def _record_data(self, datasets: Datasets) -> None:
        for key, (before, after) in self.changed_data.items():
            self._record_change(f"{key} (content)", before, after)
        contents = data_contents(datasets)
        if self.data_of and self.recorded_data is None:
            console.print(
                f"[yellow]warning:[/yellow] {self.data_of} has no record of its data's content, as an earlier version "
                "left it: whether they are the same data could not be checked. They are recorded now."
            )
        if recorded_contents(read_events(self.run_dir)) != contents:
            names = {key.removeprefix("data."): sha256 for key, sha256 in contents.items()}
            append_event(self.run_dir, DATA_EVENT, self.first_step, **names)

    def _record_fork(self, source: Checkpoint) -> None:
        console.print(f"fork of run '{self.fork_of}' after step {source.step}: model, optimizer state and step.")
        if not any(event["event"] == "fork" for event in read_events(self.run_dir)):
            append_event(
                self.run_dir,
                "fork",
                source.step + 1,
                parent=self.fork_of,
                checkpoint=source.path,
                changes={key: {"old": before, "new": after} for key, (before, after) in self.changes.items()},
            )

    def _record_warm_start(self, source: Checkpoint, codec: DensityCodec) -> None:
        weights = weights_kind(source.path)
        console.print(
            f"warm start: the weights of {source.path} ({weights}), a fresh optimizer, step 0, warm-up "
            f"{self.config.optimizer.warmup}."
        )
        if not any(event["event"] == "warm_start" for event in read_events(self.run_dir)):
            append_event(
                self.run_dir,
                "warm_start",
                0,
                source=self.asked,
                checkpoint=source.path,
                source_step=source.step,
                weights=weights,
                codec_sha256=codec.sha256,
                warmup=self.config.optimizer.warmup,
            )


def plan_start(config: TrainConfig, wanted: Continuation, run_dir: Path) -> Start:
    """Find out what the run is to begin from; reads only.

    Args:
        config: The configuration about to run.
        wanted: What the command asks for.
        run_dir: The run's local folder.

    Raises:
        TomatError: Changes without leave, a fork or a warm start under a name that has trained already, or from
            something that it cannot be made from.
    """
    if wanted.warm_start is not None and wanted.fork_of is not None:
        raise TomatError("--warm_start and --fork exclude each other: one takes weights alone, the other everything.")
    if wanted.fork_step is not None and wanted.fork_of is None:
        raise TomatError("--fork_step needs --fork NEW_NAME.")
    start = Start(config, run_dir)
    events = start.events = read_events(run_dir)
    start.newest = newest_whole(config.run_dir, config.temporary_checkpoints)
    begun = start.newest is not None
    start.allow_change = wanted.allow_change
    if begun:
        start.data_of, start.recorded_data = f"run '{config.run_name}'", recorded_contents(events)
    parent = next((event.get("parent") for event in reversed(events) if event["event"] == "fork"), None)
    if parent is not None and not begun and wanted.fork_of is None and wanted.warm_start is None:
        # Killed before its copy was complete: the fork again, never silently without its parent's checkpoint.
        wanted = replace(wanted, fork_of=str(parent))
    if wanted.fork_of is not None and not begun:
        _plan_fork(start, wanted, events)
        return start
    if wanted.fork_of is not None:
        _same_parent(config.run_name, wanted, events)
    start.changes, start.unchanged = refuse_changes(run_dir / CONFIG_FILE, config, wanted.allow_change)
    warm = next((event for event in reversed(events) if event["event"] == "warm_start"), None)
    if begun:
        if wanted.warm_start is not None:
            _same_weights(config.run_name, wanted.warm_start, warm)
    elif warm is not None:
        # Killed before its first checkpoint: with the same weights again, never silently without them.
        if wanted.warm_start is not None:
            _same_weights(config.run_name, wanted.warm_start, warm)
        _plan_warm_start(start, str(warm["source"]), str(warm["checkpoint"]))
    elif wanted.warm_start is not None:
        _plan_warm_start(start, wanted.warm_start, wanted.warm_start)
    return start


def refuse_codec(run_url: str, codec: DensityCodec, what: str) -> None:
    """Stop if a run was trained with another codec than the data have: the same id would be another density.

    Raises:
        TomatError: With both codecs, or if the run's codec is not on record or cannot be read.
    """
    url = f"{run_url}/{CODEC_FILE}"
    files, path = fsspec.core.url_to_fs(url)
    try:
        theirs = codec_from_text(files.cat_file(path).decode(), url)
    except FileNotFoundError as error:
        raise TomatError(f"{url} does not exist, so that the codec of {what} is not known; it is needed.") from error
    except storage_errors() as error:
        raise storage_error(f"{url} cannot be read", error, "Give this user the right to read it.") from error
    if theirs.sha256 != codec.sha256:
        raise TomatError(
            f"{what} was trained with codec {theirs.sha256[:12]} ({theirs.n_density_tokens} density ids), the data "
            f"have codec {codec.sha256[:12]} ({codec.n_density_tokens} density ids): the same id stands for another "
            "density in each. Use data tokenised with its codec (`tomat retokenize --codec FILE`)."
        )


def _run_of(asked: str) -> str:
    """The run that the user has named: itself, or by one of its checkpoints, `<run>/checkpoints/step-N`."""
    asked = asked.rstrip("/")
    return asked.rsplit("/", 2)[0] if is_checkpoint_name(asked) else asked


def _temporary_of(url: str, recorded: Mapping[str, Any]) -> str | None:
    """Where the run at `url` keeps its temporary checkpoints, by its own configuration; None: beside the others."""
    base = ((recorded.get("trainer") or {}).get("checkpointer") or {}).get("temporary_base_path")
    return None if base is None else f"{str(base).rstrip('/')}/{url.rsplit('/', 1)[-1]}"


def _plan_fork(start: Start, wanted: Continuation, events: list[dict[str, Any]]) -> None:
    config, parent = start.config, str(wanted.fork_of)
    if parent == config.run_name:
        raise TomatError(f"--fork {parent}: a run cannot be forked into its own name; give a new one.")
    url = f"{config.output_dir.rstrip('/')}/{parent}"
    recorded = read_config(f"{url}/{CONFIG_FILE}")
    start.changes, start.unchanged = allowed_changes(
        recorded, config, wanted.allow_change, f"run '{parent}', to be forked, was trained"
    )
    begun = next((event for event in reversed(events) if event["event"] == "fork"), None)
    if begun is not None and begun.get("parent") == parent and wanted.fork_step in (None, begun["step"] - 1):
        start.fork = find_checkpoint(str(begun["checkpoint"]))  # the copy was cut short
    else:
        start.fork = find_checkpoint(url, wanted.fork_step, _temporary_of(url, recorded))
    start.fork_of, start.origin, start.origin_temporary = parent, url, _temporary_of(url, recorded)
    start.data_of, start.recorded_data = f"run '{parent}', to be forked,", recorded_contents(read_events(url))


def _same_parent(name: str, wanted: Continuation, events: list[dict[str, Any]]) -> None:
    fork = next((event for event in events if event["event"] == "fork"), None)
    if fork is None or fork.get("parent") != wanted.fork_of or wanted.fork_step not in (None, fork["step"] - 1):
        origin = "no fork" if fork is None else f"a fork of '{fork.get('parent')}' after step {fork['step'] - 1}"
        raise TomatError(f"--fork {name}: a run of that name exists and is {origin}; give a new name.")
    console.print(f"run '{name}' was forked from '{wanted.fork_of}' when it began; it continues.")


def _same_weights(name: str, asked: str, warm: Mapping[str, Any] | None) -> None:
    if warm is None or warm["source"] != asked:
        origin = "without" if warm is None else f"with the weights of {warm['source']}"
        raise TomatError(
            f"--warm_start {asked}: run '{name}' has begun, {origin}; a run that has checkpoints is resumed. Leave "
            "--warm_start out to resume it, or give a new run_name."
        )
    console.print(f"run '{name}' was started warm from {asked} when it began; this resumes it.")


def _plan_warm_start(start: Start, asked: str, place: str) -> None:
    config = start.config
    warmup = config.optimizer.warmup
    if not (math.isfinite(warmup) and warmup > 0):
        raise TomatError(
            f"optimizer.warmup is {warmup}; a warm start has a fresh optimizer, whose first steps at the full learning "
            "rate would undo the weights. Set optimizer.warmup above 0 (steps, or a fraction of all steps below 1)."
        )
    run = _run_of(asked)
    recorded = read_config(f"{run}/{CONFIG_FILE}")
    source = find_checkpoint(place, temporary_url=_temporary_of(run, recorded))
    differences = {
        key: values
        for key, values in changed_keys(recorded, plain_values(config)).items()
        if key.startswith("model.") or key == "data.n_density_tokens"
    }
    if differences:
        lines = "\n".join(f"  {key}: {before!r} -> {after!r}" for key, (before, after) in differences.items())
        raise TomatError(f"the weights of {source.path} are those of another model:\n{lines}\nSet what they had.")
    start.weights, start.asked = source, asked
    start.origin, start.origin_temporary = run, _temporary_of(run, recorded)
