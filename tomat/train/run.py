"""One training run: start or resume, train, and leave a folder that says what happened (`tomat/base/layout.py`).
`train` lists the whole start in order, up to the loop of `loop.py`."""

import contextlib
import dataclasses
from collections.abc import Callable

import jax
import yaml
from levanter.trainer_state import TrainerState
from rich.text import Text

from tomat.base.documents import signed
from tomat.base.errors import TomatError
from tomat.base.layout import CODEC_FILE, CONFIG_FILE, METRICS_FILE, PROMOLECULE_FILE, RETRY_STATUS
from tomat.base.reporting import console, tell, warn, write_text
from tomat.base.shipped import code_details
from tomat.base.stages import StartStages
from tomat.data.codec.files import write_codec
from tomat.model.any_decoder import environment_of, is_field
from tomat.model.devices import found_devices
from tomat.train.datasets import Datasets, open_datasets, run_tables, value_table
from tomat.train.folder import RunFolder
from tomat.train.guards.alike import refuse_differences
from tomat.train.guards.hosts import HostWatch
from tomat.train.guards.process import HangGuard
from tomat.train.guards.storage import StorageWatch
from tomat.train.guards.watch import RunGuards
from tomat.train.loop import TrainingLoop, TrainResult, count_parameters, with_statistics
from tomat.train.origins import Continuation, Start, plan_start
from tomat.train.preemption import StopRequest
from tomat.train.restore import initial_state
from tomat.train.runs.devices import asked_but_not_found, devices_details
from tomat.train.runs.history import SUBJECT_EVENT, last_event, read_events, truncate_metrics
from tomat.train.runs.run_log import Asked
from tomat.train.settings.config import TrainConfig, config_hash
from tomat.train.startup import forget_tracker, initialise, join, settle
from tomat.train.step import Subject, build_trainer, check_quantised
from tomat.train.tracking import end_wandb


def train(
    config: TrainConfig,
    continuation: Continuation | None = None,
    stop: StopRequest | None = None,
    asked: Asked | None = None,
    open_subject: Callable[[TrainConfig, Datasets], Subject] | None = None,
) -> TrainResult:
    """Train until `trainer.num_train_steps`, from the newest whole checkpoint of the run where there is one.

    Args:
        stop: Listening already, where a command does more than train; None: `train` listens to SIGTERM and Ctrl-C.
        asked: How the run was started, for the log of its output folder; None: from Python.
        open_subject: Loads what is trained, if that is not the model of the configuration alone (`distillation`).
    """
    with contextlib.ExitStack() as process:
        if stop is None:
            stop = StopRequest(config.preemption.grace_seconds)
            process.enter_context(stop.listening())

        # Watched from here on, before anything that waits for another host, a chip or a bucket.
        folder = RunFolder.of(config)
        hang = HangGuard(folder)
        watchdog = process.enter_context(hang.watching())
        stages = process.enter_context(StartStages().watching())

        # The devices, and whether all hosts agree, before anything that could stop one host alone.
        continuation = continuation or Continuation()
        join(config, stages)
        hosts = process.enter_context(HostWatch(stages).watching())
        trainer_config = settle(config, dataclasses.asdict(continuation), stages)
        stop.take_over()  # the TPU's library has installed a handler of its own
        if config.preemption.maintenance_notice and jax.default_backend() == "tpu":
            stop.poll_notices(config.preemption.poll_seconds)

        with stop.limiting_exit_on_error(), contextlib.ExitStack() as run:
            # The run's folder, with what another machine has written of the run.
            stages.begin("reading what the run has left so far")
            folder.fetch()

            # What the run begins from, and if that is allowed. Files are only read: a refused start changes nothing.
            plan = plan_start(config, continuation, folder.path)
            folder.make()

            # The lock. Another process may have continued the run before this one had its turn.
            first = jax.process_index() == 0
            if first:
                stages.begin("waiting for the run's lock")
                folder = process.enter_context(folder.locked())
                if folder.fetch() or plan.is_outdated:
                    plan = plan_start(config, continuation, folder.path)
            guards = RunGuards(folder, hang, watchdog)
            run.enter_context(guards.active())

            # The data, then the checkpoint that all processes begin with.
            longest = config.guards.startup_hang_seconds
            hosts.barrier("the data", longest)
            stages.begin("opening the data")
            known = plan.promolecule if config.data.source == "embedded" else None
            datasets = open_datasets(config, folder.path, known)
            refuse_differences(config, _contents(datasets))
            guards.check_start(datasets)
            start = plan.settle(datasets)

            # The state. Trackers are opened only now: TensorBoard drops the last steps as it opens, even if the run
            # then cannot go on.
            run.callback(forget_tracker)
            initialise(config, trainer_config, folder.path, start.first_step)
            trainer_config.load_checkpoint = start.source is not None
            trainer_config.load_checkpoint_path = None if start.source is None else start.source.path
            tables = run_tables(datasets, environment_of(config.model))
            subject = None if open_subject is None else open_subject(config, datasets)
            if subject is not None:
                refuse_differences(config, subject.record)
                _check_subject(subject, start, folder)
            built = build_trainer(config, trainer_config, value_table(datasets.codec), tables, subject)
            trainer = run.enter_context(built)
            run.callback(folder.publish)
            run.callback(end_wandb, config.trackers.wandb)
            run.callback(trainer.tracker.finish)
            hosts.barrier("the first weights", longest)
            stages.begin("making the first weights" if start.source is None else f"restoring {start.source.path}")
            others = start.taken("weights"), start.taken("field")
            state = initial_state(config, trainer, start.source, *others, subject)
            check_quantised(config, state.model)
            if is_field(config.model) and start.source is None and start.taken("weights") is None:
                state = with_statistics(config, trainer, datasets, state, tables)

            # The start is recorded only now: a resume that fails leaves the run as it was.
            if first:
                start = _record(start, datasets, guards, folder)
                begun = None if start.first_step == 0 else last_event(read_events(folder.path), SUBJECT_EVENT)
                if subject is not None and begun is None:
                    folder.record(SUBJECT_EVENT, start.first_step, **subject.record)
            stop.step = int(state.step)
            if first and stop.step < config.trainer.num_train_steps:
                run.enter_context(folder.logged(asked or Asked(), stop.step))
            run.enter_context(folder.recording_early_end(stop))
            hosts.on_loss = lambda said: folder.record_loss(stop, said)
            storage = StorageWatch(config.run_dir)
            storage.on_end = lambda said: _tell_of_storage(folder, hosts, stop, said)
            run.enter_context(hosts.explaining_errors())
            if first:
                _announce(datasets, state, start, folder)
            folder.publish()

            # The steps.
            if stop.step >= config.trainer.num_train_steps:
                console.print(f"training is complete: {stop.step} of {config.trainer.num_train_steps} steps are done.")
                nan = float("nan")
                return TrainResult(folder.path, stop.step, stop.step, nan, nan, 0.0, count_parameters(state))
            hosts.barrier("the first step", longest)
            stages.begin("compiling and taking the first step")
            loop = TrainingLoop(folder, datasets, start, trainer, state, guards, stop, storage)
            trainer.add_hook(lambda _: stages.end(), every=1)
            return loop.run(state)


def _tell_of_storage(folder: RunFolder, hosts: HostWatch, stop: StopRequest, said: str) -> None:
    """Before a process ends because its storage stalls: end the other hosts, and record it on this machine."""
    hosts.tell(RETRY_STATUS, said)
    folder.record("stop", stop.step, reason=said)


def _contents(datasets: Datasets) -> dict[str, object]:
    contents = {f"{key} (content)": sha256 for key, sha256 in datasets.contents.items()}
    promolecule = datasets.train.promolecule and datasets.train.promolecule.sha256
    return {**contents, "codec": datasets.codec.sha256, "promolecule": promolecule}


def _check_subject(subject: Subject, start: Start, folder: RunFolder) -> None:
    """Refuse to resume with another teacher or other first weights than the run had, and refuse a warm start."""
    if start.taken("weights") is not None:
        raise TomatError("--warm_start does not go with distillation, which begins with distillation.quantised.")
    begun = last_event(read_events(folder.path), SUBJECT_EVENT)
    if begun is None or start.first_step == 0:
        return
    for key, now in subject.record.items():
        if begun.get(key) != now:
            said = f"run '{folder.config.run_name}' began with {key} {begun.get(key)}, which is {now} now"
            raise TomatError(f"{said}; put back what it began with, or use another run_name.")


def _record(start: Start, datasets: Datasets, guards: RunGuards, folder: RunFolder) -> Start:
    start.record(datasets)
    guards.record_start()
    write_text(folder.path / CONFIG_FILE, signed(yaml.safe_dump(folder.config.to_dict(), sort_keys=False)))
    write_codec(datasets.codec, folder.path / CODEC_FILE)
    if datasets.train.promolecule is not None:
        write_text(folder.path / PROMOLECULE_FILE, datasets.train.promolecule.to_text())
    if start.taken("state") is None:
        return start
    # A large checkpoint takes minutes to copy; a machine that takes over meanwhile must know what the run is.
    folder.publish()
    return start.with_fork_copied()


def _announce(datasets: Datasets, state: TrainerState, start: Start, folder: RunFolder) -> None:
    config, first_step = folder.config, int(state.step)
    again = truncate_metrics(folder.path / METRICS_FILE, first_step)
    before = [event for event in read_events(folder.path) if event["event"] in ("start", "resume", "stop", "preempted")]
    found = found_devices()
    details = {**devices_details(found, config.slice), "configuration": config_hash(config), **code_details()}
    if not before:
        folder.record("start", first_step, **details)
    elif first_step < config.trainer.num_train_steps:
        # A process that was killed has left no event of its end.
        after = before[-1]["event"] if before[-1]["event"] in ("stop", "preempted") else "killed"
        saved = start.checkpoint.path if start.checkpoint is not None else None
        folder.record("resume", first_step, after=after, checkpoint=saved, steps_again=again, **details)
    said = f": {count_parameters(state) / 1e6:,.1f} M parameters, {datasets.train.rows:,} rows of {config.seq_len} "
    said += f"tokens, batch {config.batch_size}, loss {config.loss.kind}, {found.words}"
    said += f", resumed at step {first_step}" if first_step else ""
    tell(Text.assemble("run ", (config.run_name, "bold"), said))
    if asked_but_not_found(found, config.slice):
        warn(f"the run is meant for {config.slice}, but runs on {found}.")
    if (warning := config.loss.warning()) is not None:
        warn(warning)
