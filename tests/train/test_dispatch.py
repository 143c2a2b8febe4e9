"""Steps that are dispatched ahead: the same run, stopped and saved with nothing in flight, and durations that are true.

What a guard does with steps in flight is in `guards/test_run.py`.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import levanter.tracker
import numpy as np
import optax
import pytest
from levanter.tracker.tracker import NoopTracker
from levanter.trainer_state import TrainerState
from run_facts import assert_same_model
from tiny_run import DEMO, tiny_run

from tomat.train import dispatch
from tomat.train.dispatch import CompiledStep, ReadState, training_steps
from tomat.train.guards.loss import GuardedState
from tomat.train.loop import TrainingLoop
from tomat.train.preemption import StopRequest
from tomat.train.run import train
from tomat.train.runs.history import read_metrics
from tomat.train.settings.config import TrainConfig, load_config
from tomat.train.settings.schema import PauseConfig
from tomat.train.tracking import TrainingProgress

STEPS = 10
TINY = tiny_run(STEPS, 7, "--trainer.steps_per_eval", "4", "--trainer.max_eval_batches", "1")
CLOCKS = ("seconds", "_time", "/timing/", "tokens_per_second")


def tiny(output_dir: Path, ahead: int) -> TrainConfig:
    return load_config(DEMO, [*TINY, "--output_dir", str(output_dir), "--dispatch_ahead", str(ahead)])


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory) -> Path:
    """A run in Levanter's own loop."""
    return train(tiny(tmp_path_factory.mktemp("one_by_one"), 0)).run_dir


def assert_same_run(run: Path, expected: Path) -> None:
    """The same checkpoints, the same last parameters, and the same lines of log but for the clocks."""
    names = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (run, expected)]
    assert names[0] == names[1]
    logs = [
        [{key: row[key] for key in row if not any(word in key for word in CLOCKS)} for row in read_metrics(path)]
        for path in (run / "metrics.jsonl", expected / "metrics.jsonl")
    ]
    assert logs[0] == logs[1] and [row["step"] for row in logs[0]] == list(range(STEPS))
    assert_same_model(run, expected)


@pytest.fixture(scope="module")
def ahead(tmp_path_factory) -> tuple[Path, list[tuple[int, int, bool]]]:
    """The run two steps ahead; for each step read its index, how many were in flight, whether its state was whole."""
    dispatched, seen = [], []
    take, ended = CompiledStep.__call__, TrainingLoop._is_ended_by

    def counted(self: CompiledStep, batch: Any) -> Any:
        dispatched.append(batch)
        return take(self, batch)

    def watched(self: TrainingLoop, info: Any) -> bool:
        seen.append((info.step, len(dispatched) - info.next_step, isinstance(info.state, TrainerState)))
        return ended(self, info)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledStep, "__call__", counted)
        patch.setattr(TrainingLoop, "_is_ended_by", watched)
        return train(tiny(tmp_path_factory.mktemp("ahead"), 2)).run_dir, seen


def test_the_run_is_the_same_with_steps_dispatched_ahead(one_by_one, ahead):
    run, seen = ahead
    assert_same_run(run, one_by_one)
    # Whole states: after the first step, at evaluations (4 and 8 steps done), the save of step 7, the end.
    assert [step for step, _, whole in seen if whole] == [0, 3, 7, 9]
    assert [in_flight for _, in_flight, _ in seen] == [0, 2, 1, 0, 2, 2, 1, 0, 1, 0]


def test_told_to_stop_it_finishes_what_is_in_flight_and_saves_it(one_by_one, tmp_path, monkeypatch):
    update, close = TrainingProgress.update, TrainingLoop._close
    stop, unsaved = StopRequest(600.0), []

    def interrupted(self, next_step, *args):
        update(self, next_step, *args)
        if next_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    def closing(self, info, complete):
        unsaved.append(stop.unsaved)  # what is told if the grace is over while a trace is closed
        close(self, info, complete)

    with monkeypatch.context() as patch, stop.listening():
        patch.setattr(TrainingProgress, "update", interrupted)
        patch.setattr(TrainingLoop, "_close", closing)
        result = train(tiny(tmp_path, 2), stop=stop)
    # The steps with index 5 and 6 had been dispatched when that with 4 was read.
    assert result.preempted and result.steps == 7 and unsaved == [False]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [path.name for path in (tmp_path / "demo" / "checkpoints").iterdir()] == ["step-6"]
    assert train(tiny(tmp_path, 2)).first_step == 7  # whose last save removes what the stop left
    assert_same_run(tmp_path / "demo", one_by_one)


DEVICE_SECONDS, HOST_SECONDS = 0.2, 0.1


@dataclass
class FakeStep:
    """A step whose devices are a function of the batch, here its number."""

    step: Callable[[int], Any]
    done: int = 0

    @property
    def state(self) -> Any:
        return SimpleNamespace(step=self.done)

    def __call__(self, batch: int) -> Any:
        self.done += 1
        return self.step(batch)


class Later:
    """A scalar that a device is still to compute."""

    def __init__(self, found: Future):
        self._found = found

    def copy_to_host_async(self) -> None: ...

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        return np.asarray(self._found.result(), np.float32)


GUARDED = GuardedState(optax.EmptyState(), jnp.zeros(8), jnp.zeros((), jnp.int32), jnp.zeros(3, jnp.int32))


def fake_steps(n_steps: int, after_each: Callable[[], None] = lambda: None, **how: Any) -> Iterator[Any]:
    """`training_steps` of a trainer whose compiled step the test has replaced."""
    trainer: Any = SimpleNamespace(
        num_train_steps=n_steps,
        device_mesh=None,
        hooks=SimpleNamespace(emit_event=lambda event: None),
        run_hooks=lambda info: after_each(),
    )
    start: Any = SimpleNamespace(step=0, opt_state=GUARDED)
    batches: Any = iter(range(n_steps))
    with levanter.tracker.current_tracker(NoopTracker()):
        yield from training_steps(trainer, start, batches, pauses_after=lambda done: False, asks=lambda: False, **how)


def test_the_device_does_not_wait_for_the_host_and_durations_are_its_own(monkeypatch):
    """A device that takes 0.2 s a step, in order, and a host that takes 0.1 s after each: one step ahead is enough."""
    busy: list[tuple[float, float]] = []

    def computed(loss: int) -> int:
        began = time.monotonic()
        time.sleep(DEVICE_SECONDS)
        busy.append((began, time.monotonic()))
        return loss

    with ThreadPoolExecutor(1) as device:

        def dispatched(batch: int) -> Any:
            return Later(device.submit(computed, batch)), {}, GUARDED

        monkeypatch.setattr(dispatch, "CompiledStep", lambda trainer, state: FakeStep(dispatched))
        began = time.monotonic()
        infos = list(fake_steps(8, lambda: time.sleep(HOST_SECONDS), ahead=1))
        elapsed = time.monotonic() - began
    assert [(info.step, info.loss) for info in infos] == [(step, float(step)) for step in range(8)]
    assert [isinstance(info.state, ReadState) for info in infos] == [False, *[True] * 6, False]
    waited = sum(one[0] - before[1] for before, one in pairwise(busy[1:]))
    assert waited < 6 * HOST_SECONDS / 2
    assert 8 * DEVICE_SECONDS <= sum(info.step_duration for info in infos) <= elapsed


@pytest.mark.parametrize("every", [1, 3])
def test_nothing_is_in_flight_while_the_devices_are_left_to_others(monkeypatch, every):
    dispatched: list[int] = []
    read: list[int] = []
    slept: list[tuple[int, int, float]] = []

    def step(batch: int) -> Any:
        dispatched.append(batch)
        return jnp.zeros(()), {}, GUARDED

    monkeypatch.setattr(dispatch, "CompiledStep", lambda trainer, state: FakeStep(step))
    clock = SimpleNamespace(
        monotonic=time.monotonic, sleep=lambda seconds: slept.append((len(dispatched), len(read), seconds))
    )
    monkeypatch.setattr(dispatch, "time", clock)
    for info in fake_steps(7, ahead=2, rest=PauseConfig(0.25, every)):
        read.append(info.step)
    assert read == list(range(7))
    assert slept == [(done, done, 0.25) for done in range(every, 8, every)]
