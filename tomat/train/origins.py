"""What a process begins from: its run's newest whole checkpoint, another run's, another run's weights, or nothing.

`plan_start` only reads, and refuses what cannot work before anything is written. `Start.settle` then lets the first
process decide for all of them. Once the state is loaded, `Start.record` writes the decision into the run's history: a
start that fails leaves a run as it was.

A setting that decides what a model learns may not change under a run's name, unless the change is named; one that only
decides how fast or where may (`settings/meanings.py`). Four early scripts in a row went on with other data, unnoticed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax

from tomat.base.documents import flatten
from tomat.base.errors import TomatError
from tomat.base.layout import CHECKPOINT_FOLDER, CODEC_FILE, CONFIG_FILE, PROMOLECULE_FILE
from tomat.base.reporting import tell, warn
from tomat.base.storage import is_remote
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.files import codec_from_text
from tomat.data.density.promolecule import Promolecule
from tomat.data.tokens.shards import ShardSet
from tomat.model.any_decoder import environment_of, field_of
from tomat.train.datasets import Datasets
from tomat.train.guards.alike import gathered
from tomat.train.runs import checkpoints, history
from tomat.train.runs.checkpoints import Checkpoint
from tomat.train.runs.history import Contents, Event
from tomat.train.runs.record import needed, read_config, temporary_place
from tomat.train.settings.config import TrainConfig
from tomat.train.settings.meanings import Changes, changed_keys

NOT_OF_WEIGHTS = ("type", "max_seq_len", "max_atoms", "max_elements")
"""Keys of a field model that its weights do not depend on."""
Taken = Literal["state", "weights", "field"]
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
    taken: Taken
    """`state`: model, optimizer state and step (a fork); `weights`: the weights alone (a warm start); `field`: the
    weights of a field model, which become `model.field`."""
    asked: str
    """As the command names it: a fork's parent by its name, a warm start's by the place of the run or checkpoint."""
    url: str
    temporary_url: str | None
    """Where the parent's configuration puts its temporary checkpoints; None: beside the permanent ones."""
    checkpoint: Checkpoint
    promolecule: Promolecule | None = None

    def __str__(self) -> str:
        return f"run '{self.asked}'" if self.taken == "state" else f"'{self.asked}'"


@dataclass(frozen=True)
class Start:
    """What was asked for, and what was found of the run before its data were opened. Once settled, also what the run
    begins with, the same on every process."""

    config: TrainConfig
    run_dir: Path
    allow_change: tuple[str, ...] = ()
    changes: Changes = field(default_factory=dict)
    parent: Parent | None = None
    """None for a run that has checkpoints of its own, or begins with fresh weights."""
    data_of: str = ""
    """The run, such as "run 'a'", whose data these must be. They are compared by content, since another set may lie by
    now at the place that its configuration names. Empty for a run that begins with data of its choice."""
    contents: Contents | None = None
    """The content of that run's data; None: an earlier version left no record, and nothing is compared."""
    newest: Checkpoint | None = None
    """The newest whole checkpoint of the run, as far as the sizes of its files say."""
    events: tuple[Event, ...] = ()
    checkpoint: Checkpoint | None = None
    """The run's own checkpoint; known once settled."""
    partial: tuple[Checkpoint, ...] = ()
    """Checkpoints of the run that are not whole; known once settled, on the first process."""
    changed_data: Changes = field(default_factory=dict)
    """Old and new hash, by key, of each set whose content may differ and does; known once settled."""

    @property
    def is_outdated(self) -> bool:
        """Whether another process has continued the run since the start was planned."""
        newest = checkpoints.newest_whole(self.config.run_dir, self.config.temporary_checkpoints)
        return newest != self.newest or tuple(history.read_events(self.run_dir)) != self.events

    def settle(self, datasets: Datasets) -> "Start":
        """Check the data, and find the checkpoint to begin with: the same on every process, each of which must call it.
        Writes nothing."""
        config = self.config
        if self.newest is not None and (self.run_dir / CODEC_FILE).exists():
            _refuse_codec(str(self.run_dir), datasets.codec, f"run '{config.run_name}'")
        changed: Changes = {}
        if self.contents is not None:
            lines = {}
            for key, shards in (("data.train", datasets.train), ("data.validation", datasets.validation)):
                before, now = self.contents.get(key), datasets.contents[key]
                if before != now:
                    place = "none" if shards is None else shards.url
                    lines[key] = f"{key} ({place}): content {(now or 'none')[:12]}, expected {(before or 'none')[:12]}"
                    changed[key] = (before, now)
            what = f"{self.data_of} was trained on other data than are there now"
            _refuse_unnamed(what, lines, self.allow_change)
        if self.parent is not None and self.parent.taken != "field":
            _refuse_codec(self.parent.url, datasets.codec, str(self.parent))
        if environment_of(config.model) is not None and (learnt := self.promolecule) is not None:
            _refuse_promolecule(str(self.parent or f"run '{config.run_name}'"), learnt, datasets.train)
        own, partial, parent = None, (), self.parent
        if jax.process_index() == 0:
            listed = checkpoints.list_checkpoints(config.run_dir, config.temporary_checkpoints)
            every = checkpoints.with_data_read(listed)
            partial = tuple(one for one in every if not one.whole)
            own = next((one for one in reversed(every) if one.whole), None)
            for one in partial:
                warn(f"{one.path} is passed over: {one.reason}.")
            if own is not None:
                checkpoints.say_if_unchecked(own)
        if jax.process_count() > 1:
            own, parent = self._as_on_first_process(own, parent)
        parent = None if own is not None else parent
        return replace(self, checkpoint=own, parent=parent, partial=partial, changed_data=changed)

    def _as_on_first_process(
        self, own: Checkpoint | None, parent: Parent | None
    ) -> tuple[Checkpoint | None, Parent | None]:
        """The checkpoints that the first process has found, as this host sees them."""
        mine = [own and [own.path, own.step], parent and parent.checkpoint.step]
        first_own, first_parent = gathered(mine)[0]
        if jax.process_index() == 0:
            return own, parent
        host = f"host {jax.process_index()}"
        if first_own is not None:
            own = checkpoints.examine(*first_own)
            if not own.whole:
                said = f"the first host continues from {own.path}, which {host} does not have ({own.reason})"
                raise TomatError(f"{said}; {ONE_PLACE}")
        elif first_parent is not None:
            if parent is None:
                raise TomatError(f"the first host begins with another run's checkpoint, unknown to {host}; {ONE_PLACE}")
            found = checkpoints.find_checkpoint(parent.url, first_parent, parent.temporary_url)
            parent = replace(parent, checkpoint=found)
        return own, parent

    def taken(self, what: Taken) -> Checkpoint | None:
        """The checkpoint of another run if exactly `what` is taken from it; else None."""
        return self.parent.checkpoint if self.parent is not None and self.parent.taken == what else None

    @property
    def promolecule(self) -> Promolecule | None:
        """The promolecule that the run, or the field model it begins from, has learnt to correct; None: unknown."""
        if self.newest is not None and (self.run_dir / PROMOLECULE_FILE).exists():
            return Promolecule.load(self.run_dir / PROMOLECULE_FILE)
        return None if self.parent is None else self.parent.promolecule

    @property
    def source(self) -> Checkpoint | None:
        """What the whole state is loaded from: the run's own checkpoint, or the one that a fork takes over."""
        return self.checkpoint or self.taken("state")

    @property
    def first_step(self) -> int:
        """The step to begin with, which is the number of steps done."""
        return 0 if self.source is None else self.source.step + 1

    def record(self, datasets: Datasets) -> None:
        """Write into the run's history what was decided; on the first process, once the state has been loaded."""
        for found in self.partial:
            details = {"path": found.path, "reason": found.reason}
            history.append_event(self.run_dir, "partial_checkpoint", found.step + 1, **details)
        forked = self.taken("state") is not None
        changes = {} if forked else dict(self.changes)
        for key in self.allow_change:
            if key not in self.changes and key not in self.changed_data:
                tell(f"--allow_change {key}: it does not differ from the run on record.")
        changes |= {f"{key} (content)": hashes for key, hashes in self.changed_data.items()}
        for key, (before, after) in changes.items():
            tell(f"changed, as --allow_change permits: {key}: {before!r} -> {after!r}")
            history.append_event(self.run_dir, "allow_change", self.first_step, key=key, old=before, new=after)
        if self.data_of and self.contents is None:
            warn(
                f"{self.data_of} has no record of its data's content, because an earlier version wrote none: "
                "whether the data are the same could not be checked. They are recorded now."
            )
        if history.recorded_contents(history.read_events(self.run_dir)) != datasets.contents:
            names = {key.removeprefix("data."): sha256 for key, sha256 in datasets.contents.items()}
            history.append_event(self.run_dir, history.DATA_EVENT, self.first_step, **names)
        if (parent := self.parent) is None:
            return
        source = parent.checkpoint
        if forked:
            tell(f"fork of {parent} after step {source.step}: model, optimizer state and step.")
            name = "fork"
            changed = {key: {"old": before, "new": after} for key, (before, after) in self.changes.items()}
            details: dict[str, Any] = {"parent": parent.asked, "checkpoint": source.path, "changes": changed}
        else:
            name = "warm_start"
            weights, warmup = checkpoints.weights_kind(source.path), self.config.optimizer.warmup
            what = f"the weights of {source.path} ({weights})"
            how = "as model.field" if parent.taken == "field" else f"a fresh optimizer, step 0, warm-up {warmup}"
            tell(f"warm start: {what}, {how}.")
            details = {"source": parent.asked, "checkpoint": source.path, "source_step": source.step}
            details |= {"weights": weights, "codec_sha256": datasets.codec.sha256, "warmup": warmup}
        if history.last_event(history.read_events(self.run_dir), name) is None:
            history.append_event(self.run_dir, name, self.first_step, **details)

    def with_fork_copied(self) -> "Start":
        """Copy a fork's checkpoint into the run; on the first process, once its history and configuration are where
        another machine would find them."""
        if (source := self.taken("state")) is None:
            return self
        copied = f"{self.config.run_dir}/{CHECKPOINT_FOLDER}/step-{source.step}"
        return replace(self, checkpoint=checkpoints.copy(source, copied))


def plan_start(config: TrainConfig, wanted: Continuation, run_dir: Path) -> Start:
    name, fork_of, asked_weights = config.run_name, wanted.fork_of, wanted.warm_start
    if asked_weights is not None and fork_of is not None:
        raise TomatError("--warm_start and --fork exclude each other: one takes weights alone, the other everything.")
    if wanted.fork_step is not None and fork_of is None:
        raise TomatError("--fork_step needs --fork NEW_NAME.")
    events = tuple(history.read_events(run_dir))
    newest = checkpoints.newest_whole(config.run_dir, config.temporary_checkpoints)
    _refuse_forgotten(config, run_dir, newest)
    plan = Start(config, run_dir, wanted.allow_change, newest=newest, events=events)
    forked, warmed = history.last_event(events, "fork"), history.last_event(events, "warm_start")
    if newest is None:
        if fork_of is not None:
            return _plan_fork(plan, fork_of, wanted.fork_step, forked)
        if asked_weights is None and forked is not None and forked.get("parent") is not None:
            # Killed before its copy was complete: the fork again, never silently without its parent's checkpoint.
            return _plan_fork(plan, str(forked["parent"]), None, forked)
    elif fork_of is not None:
        if forked is None or forked.get("parent") != fork_of or wanted.fork_step not in (None, forked["step"] - 1):
            origin = "no fork"
            if forked is not None:
                origin = f"a fork of '{forked.get('parent')}' after step {forked['step'] - 1}"
            raise TomatError(f"--fork {name}: a run of that name exists and is {origin}; give a new name.")
        tell(f"run '{name}' was forked from '{fork_of}' when it began; it continues.")
    plan = replace(plan, changes=refuse_changes(run_dir / CONFIG_FILE, config, wanted.allow_change))
    if asked_weights is not None and (newest is not None or warmed is not None):
        if warmed is None or warmed["source"] != asked_weights:
            origin = "without" if warmed is None else f"with the weights of {warmed['source']}"
            said = f"--warm_start {asked_weights}: run '{name}' has begun, {origin}"
            raise TomatError(f"{said}; a run that has checkpoints is resumed. Leave it out, or give a new run_name.")
        tell(f"run '{name}' was started warm from {asked_weights} when it began; this resumes it.")
    if newest is not None:
        return replace(plan, data_of=f"run '{name}'", contents=history.recorded_contents(events))
    if warmed is not None:
        # Killed before its first checkpoint: with the same weights again, never silently without them.
        return _plan_warm_start(plan, str(warmed["source"]), str(warmed["checkpoint"]))
    if asked_weights is not None:
        return _plan_warm_start(plan, asked_weights, asked_weights)
    if field_of(config.model) is not None:
        raise TomatError("model.field is set, and nothing gives it weights: add --warm_start with a run of that model.")
    return plan


def _refuse_forgotten(config: TrainConfig, run_dir: Path, newest: Checkpoint | None) -> None:
    """Stop if newer temporary checkpoints lie where the configuration used to put them and no longer does."""
    recorded = run_dir / CONFIG_FILE
    if not recorded.exists() or not recorded.read_bytes().strip():
        return
    before = temporary_place(read_config(str(recorded)), config.run_name)
    if before is None or before == config.temporary_checkpoints:
        return
    found = checkpoints.newest_whole(config.run_dir, before)
    if found is not None and (newest is None or found.step > newest.step):
        known = "no checkpoint" if newest is None else f"step {newest.step} alone"
        raise TomatError(
            f"run '{config.run_name}' has {found.path}, and trainer.checkpointer.temporary_base_path leads to {known}. "
            f"Set it to {before.rpartition('/')[0]} as before, or move that checkpoint to where it leads now."
        )


def refuse_changes(recorded: Path, config: TrainConfig, allow: Sequence[str] = ()) -> Changes:
    """The changes since the `config.yaml` in a run's folder. All must be named in `allow`. There are none where the run
    has no checkpoint."""
    run_url = config.run_dir if is_remote(config.output_dir) else str(recorded.parent)
    if checkpoints.survey(run_url, config.temporary_checkpoints) == (None, []):
        return {}
    if not recorded.exists() or not recorded.read_bytes().strip():
        raise TomatError(
            f"run '{config.run_name}' has checkpoints, but {recorded.name} in {run_url} is "
            f"{'empty' if recorded.exists() else 'missing'}: nothing shows whether this is the same run. Put it back "
            "from a copy, or use another run_name."
        )
    return _allowed_changes(read_config(str(recorded)), config, allow, f"run '{config.run_name}' exists")


def _allowed_changes(old: Mapping[str, Any], config: TrainConfig, allow: Sequence[str], what: str) -> Changes:
    """The changes since the record `old`. All must be named in `allow`. `what` names its run: "run 'a' exists"."""
    new = config.to_dict()
    changed = changed_keys(old, new)
    for key in allow:
        if key not in flatten(new).keys() | flatten(old).keys():
            below = sorted(name for name in changed if name.startswith(key + "."))
            hint = f"; below it these differ: {', '.join(below)}" if below else ""
            said = f"--allow_change names '{key}', which is no key of the configuration{hint}"
            raise TomatError(f"{said}. Give each key in full, such as optimizer.learning_rate.")
    lines = {key: f"{key}: {before!r} -> {after!r}" for key, (before, after) in changed.items()}
    _refuse_unnamed(f"{what} with another configuration", lines, allow)
    return changed


def _refuse_unnamed(what: str, lines: Mapping[str, str], allow: Sequence[str]) -> None:
    """Refuse differences, a line for each by its key, that are not all named in `allow`."""
    refused = {key: line for key, line in lines.items() if key not in allow}
    if refused:
        shown = "\n".join(f"  {line}" for line in refused.values())
        raise TomatError(
            f"{what}:\n{shown}\nPut back what the run began with, or use another run_name. To make a change on "
            f"purpose, name it, and it is recorded: --allow_change {','.join(refused)}"
        )


def _refuse_codec(run_url: str, codec: DensityCodec, what: str) -> None:
    url = f"{run_url}/{CODEC_FILE}"
    content = needed(url, f", so that the codec of {what} is not known; it is needed")
    theirs = codec_from_text(content.decode(errors="replace"), url)
    if theirs.sha256 != codec.sha256:
        raise TomatError(
            f"{what} was trained with codec {theirs.sha256[:12]} ({theirs.n_density_tokens} density ids), the data "
            f"have codec {codec.sha256[:12]} ({codec.n_density_tokens} density ids): the same id means a "
            "different density in each. Use data tokenized with its codec (`tomat retokenize --codec FILE`)."
        )


def _refuse_promolecule(what: str, learnt: Promolecule, shards: ShardSet) -> None:
    """Stop if a model has learnt to correct another promolecule than that of the data."""
    found = "none" if shards.promolecule is None else shards.promolecule.sha256
    if learnt.sha256 != found:
        raise TomatError(
            f"{what} has learnt with the promolecule {learnt.sha256[:12]}, but {shards.url} has {found[:12]}: it "
            "predicts relative to its own. Use the set that it was trained on, tokenize with its promolecule.json "
            "(`tomat retokenize --promolecule`), or take another run_name."
        )


def _plan_fork(plan: Start, parent: str, step: int | None, begun: Event | None) -> Start:
    """`plan` for a fork of `parent` at `step` (None: the newest); `begun` is the event of a fork that was cut short."""
    config = plan.config
    if parent == config.run_name:
        raise TomatError(f"--fork {parent}: a run cannot be forked into its own name; give a new one.")
    url = f"{config.output_dir.rstrip('/')}/{parent}"
    recorded = read_config(f"{url}/{CONFIG_FILE}")
    changes = _allowed_changes(recorded, config, plan.allow_change, f"run '{parent}', to be forked, was trained")
    temporary_url = temporary_place(recorded, parent)
    if begun is not None and begun.get("parent") == parent and step in (None, begun["step"] - 1):
        checkpoint = checkpoints.find_checkpoint(str(begun["checkpoint"]))
    else:
        checkpoint = checkpoints.find_checkpoint(url, step, temporary_url)
    taken = Parent("state", parent, url, temporary_url, checkpoint)
    contents = history.recorded_contents(history.read_events(url))
    return replace(plan, changes=changes, parent=taken, data_of=f"run '{parent}', to be forked,", contents=contents)


def _plan_warm_start(plan: Start, asked: str, place: str) -> Start:
    run = checkpoints.run_of(asked)
    recorded = read_config(f"{run}/{CONFIG_FILE}")
    old, new = recorded, plan.config.to_dict()
    of_field = old["model"].get("type") == "field" and field_of(plan.config.model) is not None
    warmup, steps = plan.config.optimizer.warmup, plan.config.trainer.num_train_steps
    # Levanter (0.2.227) takes a value up to 1 for a share of all steps, and rounds down.
    if not of_field and not (int(warmup * steps) if warmup <= 1 else warmup) >= 1:
        raise TomatError(
            f"optimizer.warmup is {warmup}, which gives no step of {steps}; a warm start has a fresh optimizer, whose "
            "first steps at the full learning rate would undo the weights. Set optimizer.warmup to 2 steps or more, or "
            "to a larger share of all steps."
        )
    if of_field:
        old, new = (
            {"model": {"field": {key: value for key, value in model.items() if key not in NOT_OF_WEIGHTS}}}
            for model in (old["model"], new["model"]["field"])
        )
    temporary_url = temporary_place(recorded, run.rsplit("/", 1)[-1])
    source = checkpoints.find_checkpoint(place, temporary_url=temporary_url)
    shown = "".join(
        f"  {key}: {before!r} -> {after!r}\n"
        for key, (before, after) in changed_keys(old, new).items()
        if key.startswith("model.") or key in ("data.n_density_tokens", "data.vocabulary_rows")
    )
    if shown:
        raise TomatError(f"the weights of {source.path} are those of another model:\n{shown}Set the old values.")
    parent = Parent("field" if of_field else "weights", asked, run, temporary_url, source)
    if of_field:
        url = f"{run}/{PROMOLECULE_FILE}"
        content = needed(url, f", so that what {parent} has learnt to correct is not known; it is needed")
        parent = replace(parent, promolecule=Promolecule.from_text(content, url))
    return replace(plan, parent=parent)
