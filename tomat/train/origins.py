"""What a process begins from: its run's newest whole checkpoint, another run's, another run's weights, or nothing.

`plan_start` only reads, and refuses what cannot work before anything is written. `Start.settle` then lets the first
process decide for all of them. Once the state has been loaded, `Start.record` leaves what was decided in the run's
history: a start that fails leaves a run as it was.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from tomat.base.errors import TomatError
from tomat.base.layout import CHECKPOINT_FOLDER, CODEC_FILE, CONFIG_FILE
from tomat.base.reporting import console, warn
from tomat.data.codec.base import DensityCodec
from tomat.train.datasets import Datasets
from tomat.train.resume import (
    Changes,
    allowed_changes,
    changed_keys,
    plain_values,
    refuse_changes,
    refuse_unnamed,
)
from tomat.train.runs.checkpoints import (
    Checkpoint,
    copy,
    examine,
    find_checkpoint,
    list_checkpoints,
    newest_whole,
    run_of,
    say_if_unchecked,
    weights_kind,
    with_data_read,
)
from tomat.train.runs.history import (
    DATA_EVENT,
    Contents,
    Event,
    append_event,
    last_event,
    read_events,
    recorded_contents,
)
from tomat.train.runs.record import read_codec, read_config, temporary_place
from tomat.train.settings.config import TrainConfig

ONE_PLACE = "every host must see the same checkpoints: put output_dir into a bucket or on a disk that all share."


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


@dataclass(frozen=True)
class Parent:
    """The run that a new run takes its first checkpoint from."""

    taken: Literal["state", "weights"]
    """`state`: model, optimizer state and step (a fork); `weights`: the weights alone (a warm start)."""
    asked: str
    """As the command names it: a fork's parent by its name, a warm start's by the place of the run or checkpoint."""
    url: str
    """Folder or URL of the run."""
    temporary_url: str | None
    """Where its configuration sends its temporary checkpoints; None: beside the permanent ones."""
    checkpoint: Checkpoint

    def __str__(self) -> str:
        return f"run '{self.asked}'" if self.taken == "state" else f"'{self.asked}'"


@dataclass(frozen=True)
class RecordedData:
    """Which data a run was trained on. The configuration names a place, where another set may lie by now, which would
    train on without a word in the middle of an epoch of other rows."""

    whose: str
    """Names the run in errors, such as "run 'a'"."""
    contents: Contents | None
    """None: an earlier version left no record of them, and they are compared with nothing."""

    def changes(self, found: Contents, urls: Mapping[str, str | None], allow: Sequence[str]) -> Changes:
        """Old and new hash by key of what differs in the data that are there, all of which must be named."""
        if self.contents is None:
            return {}
        changed = {key: (self.contents.get(key), now) for key, now in found.items() if self.contents.get(key) != now}
        lines = {
            key: f"{key} ({urls[key] or 'none'}): content {(now or 'none')[:12]}, expected {(before or 'none')[:12]}"
            for key, (before, now) in changed.items()
        }
        refuse_unnamed(f"{self.whose} was trained on other data than lie there now", lines, allow)
        return changed


@dataclass(frozen=True)
class Start:
    """What was asked for, and what was found of the run before its data were opened; once it is settled, also what the
    run begins with, the same on every process."""

    config: TrainConfig
    run_dir: Path
    allow_change: tuple[str, ...] = ()
    """Keys that may differ from the run on record."""
    changes: Changes = field(default_factory=dict)
    """Those that do."""
    parent: Parent | None = None
    """None for a run that has checkpoints of its own, or begins with fresh weights."""
    data: RecordedData | None = None
    """What the data must be; None for a run that begins with data of its choice."""
    newest: Checkpoint | None = None
    """The newest whole checkpoint of the run, as far as the sizes of its files say."""
    events: tuple[Event, ...] = ()
    """The run's history."""
    checkpoint: Checkpoint | None = None
    """Of the run itself; settled."""
    partial: tuple[Checkpoint, ...] = ()
    """Checkpoints of the run that are not whole; settled, known on the first process."""
    changed_data: Changes = field(default_factory=dict)
    """Old and new hash of each set whose content may differ and does, by key; settled."""

    @property
    def is_outdated(self) -> bool:
        """Another process has gone on with the run since the start was planned."""
        newest = newest_whole(self.config.run_dir, self.config.temporary_checkpoints)
        return newest != self.newest or tuple(read_events(self.run_dir)) != self.events

    def settle(self, datasets: Datasets) -> "Start":
        """Check the data, and find the checkpoint to begin with: the same on every process, each of which must call it.
        Writes nothing."""
        if self.newest is not None and (self.run_dir / CODEC_FILE).exists():
            refuse_codec(str(self.run_dir), datasets.codec, f"run '{self.config.run_name}'")
        changed = {} if self.data is None else self.data.changes(datasets.contents, datasets.urls, self.allow_change)
        if self.parent is not None:
            refuse_codec(self.parent.url, datasets.codec, str(self.parent))
        own, partial, parent = None, (), self.parent
        if jax.process_index() == 0:
            every = with_data_read(list_checkpoints(self.config.run_dir, self.config.temporary_checkpoints))
            partial = tuple(one for one in every if not one.whole)
            own = next((one for one in reversed(every) if one.whole), None)
            for one in partial:
                warn(f"{one.path} is passed over: {one.reason}.")
            if own is not None:
                say_if_unchecked(own)
        if jax.process_count() > 1:
            own, parent = self._as_on_first_process(own, parent)
        parent = None if own is not None else parent
        return replace(self, checkpoint=own, parent=parent, partial=partial, changed_data=changed)

    def _as_on_first_process(
        self, own: Checkpoint | None, parent: Parent | None
    ) -> tuple[Checkpoint | None, Parent | None]:
        """The checkpoints that the first process has found, as this host sees them."""
        permanent, temporary = f"{self.config.run_dir}/{CHECKPOINT_FOLDER}", self.config.temporary_checkpoints
        found = np.array([-1, 0, -1])
        if own is not None:
            found[:2] = own.step, temporary is not None and own.path.startswith(temporary)
        elif parent is not None:
            found[2] = parent.checkpoint.step
        own_step, is_temporary, parent_step = (int(x) for x in multihost_utils.broadcast_one_to_all(found))
        if jax.process_index() == 0:
            return own, parent
        host = f"host {jax.process_index()}"
        if own_step >= 0:
            own = examine(f"{temporary if is_temporary else permanent}/step-{own_step}", own_step)
            if not own.whole:
                raise TomatError(
                    f"the first host continues from {own.path}, which {host} does not have ({own.reason}); {ONE_PLACE}"
                )
        elif parent_step >= 0:
            if parent is None:
                raise TomatError(f"the first host begins with another run's checkpoint, unknown to {host}; {ONE_PLACE}")
            parent = replace(parent, checkpoint=find_checkpoint(parent.url, parent_step, parent.temporary_url))
        return own, parent

    @property
    def fork(self) -> Parent | None:
        """The run that everything is taken from."""
        return self.parent if self.parent is not None and self.parent.taken == "state" else None

    @property
    def weights(self) -> Checkpoint | None:
        """What weights alone are loaded from."""
        return self.parent.checkpoint if self.parent is not None and self.parent.taken == "weights" else None

    @property
    def source(self) -> Checkpoint | None:
        """What the whole state is loaded from: the run's own checkpoint, or the one that a fork takes over."""
        return self.fork.checkpoint if self.checkpoint is None and self.fork is not None else self.checkpoint

    @property
    def first_step(self) -> int:
        """The step to begin with, which is the number of steps done."""
        return 0 if self.source is None else self.source.step + 1

    def record(self, datasets: Datasets) -> None:
        """Write into the run's history what was decided; on the first process, once the state has been loaded."""
        for found in self.partial:
            append_event(self.run_dir, "partial_checkpoint", found.step + 1, path=found.path, reason=found.reason)
        changes = {} if self.fork is not None else dict(self.changes)
        for key in self.allow_change:
            if key not in self.changes and key not in self.changed_data:
                console.print(f"--allow_change {key}: it does not differ from the run on record.")
        changes |= {f"{key} (content)": hashes for key, hashes in self.changed_data.items()}
        for key, (before, after) in changes.items():
            console.print(f"changed, as --allow_change permits: {key}: {before!r} -> {after!r}")
            append_event(self.run_dir, "allow_change", self.first_step, key=key, old=before, new=after)
        if self.data is not None and self.data.contents is None:
            warn(
                f"{self.data.whose} has no record of its data's content, as an earlier "
                "version left it: whether they are the same data could not be checked. They are recorded now."
            )
        if recorded_contents(read_events(self.run_dir)) != datasets.contents:
            names = {key.removeprefix("data."): sha256 for key, sha256 in datasets.contents.items()}
            append_event(self.run_dir, DATA_EVENT, self.first_step, **names)
        if self.parent is not None:
            name, details = self._origin(self.parent, datasets.codec)
            if last_event(read_events(self.run_dir), name) is None:
                append_event(self.run_dir, name, self.first_step, **details)

    def _origin(self, parent: Parent, codec: DensityCodec) -> tuple[str, dict[str, Any]]:
        """Say what the run is made of; the event that records it, and its details."""
        source = parent.checkpoint
        if self.fork is not None:
            console.print(f"fork of {parent} after step {source.step}: model, optimizer state and step.")
            changes = {key: {"old": before, "new": after} for key, (before, after) in self.changes.items()}
            return "fork", {"parent": parent.asked, "checkpoint": source.path, "changes": changes}
        weights, warmup = weights_kind(source.path), self.config.optimizer.warmup
        console.print(
            f"warm start: the weights of {source.path} ({weights}), a fresh optimizer, step 0, warm-up {warmup}."
        )
        return "warm_start", {
            "source": parent.asked,
            "checkpoint": source.path,
            "source_step": source.step,
            "weights": weights,
            "codec_sha256": codec.sha256,
            "warmup": warmup,
        }

    def with_fork_copied(self) -> "Start":
        """Copy a fork's checkpoint into the run; on the first process, once its history and configuration are where
        another machine would find them."""
        if self.fork is None:
            return self
        source = self.fork.checkpoint
        copied = f"{self.config.run_dir}/{CHECKPOINT_FOLDER}/step-{source.step}"
        copy(source, copied)
        return replace(self, checkpoint=examine(copied, source.step))


def plan_start(config: TrainConfig, wanted: Continuation, run_dir: Path) -> Start:
    if wanted.warm_start is not None and wanted.fork_of is not None:
        raise TomatError("--warm_start and --fork exclude each other: one takes weights alone, the other everything.")
    if wanted.fork_step is not None and wanted.fork_of is None:
        raise TomatError("--fork_step needs --fork NEW_NAME.")
    events = tuple(read_events(run_dir))
    newest = newest_whole(config.run_dir, config.temporary_checkpoints)
    plan = Start(config, run_dir, wanted.allow_change, newest=newest, events=events)
    forked, warmed = last_event(events, "fork"), last_event(events, "warm_start")
    if newest is None:
        if wanted.fork_of is not None:
            return _plan_fork(plan, wanted.fork_of, wanted.fork_step, forked)
        if wanted.warm_start is None and forked is not None and forked.get("parent") is not None:
            # Killed before its copy was complete: the fork again, never silently without its parent's checkpoint.
            return _plan_fork(plan, str(forked["parent"]), None, forked)
    elif wanted.fork_of is not None:
        _check_same_fork(config.run_name, wanted, forked)
    plan = replace(plan, changes=refuse_changes(run_dir / CONFIG_FILE, config, wanted.allow_change))
    if wanted.warm_start is not None and (newest is not None or warmed is not None):
        _check_same_weights(config.run_name, wanted.warm_start, warmed)
    if newest is not None:
        return replace(plan, data=RecordedData(f"run '{config.run_name}'", recorded_contents(events)))
    if warmed is not None:
        # Killed before its first checkpoint: with the same weights again, never silently without them.
        return _plan_warm_start(plan, str(warmed["source"]), str(warmed["checkpoint"]))
    if wanted.warm_start is not None:
        return _plan_warm_start(plan, wanted.warm_start, wanted.warm_start)
    return plan


def refuse_codec(run_url: str, codec: DensityCodec, what: str) -> None:
    """Stop if a run was trained with another codec than the data have: the same id would be another density."""
    theirs = read_codec(run_url, what)
    if theirs.sha256 != codec.sha256:
        raise TomatError(
            f"{what} was trained with codec {theirs.sha256[:12]} ({theirs.n_density_tokens} density ids), the data "
            f"have codec {codec.sha256[:12]} ({codec.n_density_tokens} density ids): the same id stands for another "
            "density in each. Use data tokenized with its codec (`tomat retokenize --codec FILE`)."
        )


def _plan_fork(plan: Start, parent: str, step: int | None, begun: Event | None) -> Start:
    """`plan` for a fork of `parent` at `step` (None: the newest); `begun` is the event of a fork that was cut short."""
    config = plan.config
    if parent == config.run_name:
        raise TomatError(f"--fork {parent}: a run cannot be forked into its own name; give a new one.")
    url = f"{config.output_dir.rstrip('/')}/{parent}"
    recorded = read_config(f"{url}/{CONFIG_FILE}")
    changes = allowed_changes(recorded, config, plan.allow_change, f"run '{parent}', to be forked, was trained")
    temporary_url = temporary_place(recorded, parent)
    if begun is not None and begun.get("parent") == parent and step in (None, begun["step"] - 1):
        checkpoint = find_checkpoint(str(begun["checkpoint"]))
    else:
        checkpoint = find_checkpoint(url, step, temporary_url)
    return replace(
        plan,
        changes=changes,
        parent=Parent("state", parent, url, temporary_url, checkpoint),
        data=RecordedData(f"run '{parent}', to be forked,", recorded_contents(read_events(url))),
    )


def _check_same_fork(name: str, wanted: Continuation, fork: Event | None) -> None:
    if fork is None or fork.get("parent") != wanted.fork_of or wanted.fork_step not in (None, fork["step"] - 1):
        origin = "no fork" if fork is None else f"a fork of '{fork.get('parent')}' after step {fork['step'] - 1}"
        raise TomatError(f"--fork {name}: a run of that name exists and is {origin}; give a new name.")
    console.print(f"run '{name}' was forked from '{wanted.fork_of}' when it began; it continues.")


def _check_same_weights(name: str, asked: str, warm: Event | None) -> None:
    if warm is None or warm["source"] != asked:
        origin = "without" if warm is None else f"with the weights of {warm['source']}"
        raise TomatError(
            f"--warm_start {asked}: run '{name}' has begun, {origin}; a run that has checkpoints is resumed. Leave "
            "--warm_start out to resume it, or give a new run_name."
        )
    console.print(f"run '{name}' was started warm from {asked} when it began; this resumes it.")


def _plan_warm_start(plan: Start, asked: str, place: str) -> Start:
    warmup = plan.config.optimizer.warmup
    if not (math.isfinite(warmup) and warmup > 0):
        raise TomatError(
            f"optimizer.warmup is {warmup}; a warm start has a fresh optimizer, whose first steps at the full learning "
            "rate would undo the weights. Set optimizer.warmup above 0 (steps, or a fraction of all steps below 1)."
        )
    run = run_of(asked)
    recorded = read_config(f"{run}/{CONFIG_FILE}")
    temporary_url = temporary_place(recorded, run.rsplit("/", 1)[-1])
    source = find_checkpoint(place, temporary_url=temporary_url)
    differences = {
        key: values
        for key, values in changed_keys(recorded, plain_values(plan.config)).items()
        if key.startswith("model.") or key in ("data.n_density_tokens", "data.vocabulary_rows")
    }
    if differences:
        lines = "\n".join(f"  {key}: {before!r} -> {after!r}" for key, (before, after) in differences.items())
        raise TomatError(f"the weights of {source.path} are those of another model:\n{lines}\nSet what they had.")
    return replace(plan, parent=Parent("weights", asked, run, temporary_url, source))
