"""The process of one setting of the lab: takes the trainer's own steps and times them in windows.

State, step, loader and dispatch are those of `train/run.py`, without the work between steps (log, evaluation,
checkpoints). The process is forked from one that has imported JAX and touched no device (`process.py`).
"""

import contextlib
import dataclasses
import hashlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.monitoring

from tomat.base.errors import TomatError
from tomat.base.memory import peak_memory_bytes
from tomat.base.reporting import dump_json, first_line
from tomat.measure.bench.processes import compile_cache
from tomat.measure.lab.energy import energy_counter
from tomat.measure.lab.messages import DEVICE, FAILED, OUT_OF_MEMORY, PROCESS, Request
from tomat.model.any_decoder import environment_of
from tomat.model.devices import found_devices
from tomat.perf.plan.compile.topology import data_axis_size
from tomat.train.datasets import open_datasets, run_tables, value_table
from tomat.train.dispatch import training_steps
from tomat.train.loader import training_loader
from tomat.train.loop import count_parameters, shuffled_rows
from tomat.train.mfu import live_mfu
from tomat.train.restore import initial_state
from tomat.train.runs.devices import devices_details
from tomat.train.settings.config import TrackersConfig, TrainConfig, config_hash, load_config
from tomat.train.startup import connect, initialise
from tomat.train.step import build_trainer
from tomat.train.tracking import PhaseClock, listening_to_durations

SAVED_EVENT = "/jax/compilation_cache/compile_time_saved_sec"
"""jax 0.11.1 reports this for a program from the cache: the seconds of its former compile minus those of reading it."""
MISS_EVENT = "/jax/compilation_cache/cache_misses"
ENDLESS_STEPS = 10**9
IDLE_SECONDS, LONGEST_WAIT_SECONDS = 0.1, 10.0
"""A process is idle if it used less than a tenth of a processor for this long. The wait for that has a maximum."""


def accumulations(config: TrainConfig, n_devices: int) -> int:
    """Microbatches of a step on so many devices."""
    microbatch = config.trainer.per_device_parallelism
    return config.batch_size // (data_axis_size(config, n_devices) * microbatch) if microbatch > 0 else 1


class Session:
    """A setting that is ready to take steps. `on_stage` is called with what the process does and, once devices are
    known, the source of its memory use (`DEVICE` or `PROCESS`)."""

    def __init__(self, request: Request, on_stage: Callable[[str, str | None], None]):
        on_stage("reading the configuration", None)
        config = load_config(request.config_path, request.words, request.words_of)
        # Computed before the lab's own settings are added, so that two rows of the same setting have the same hash.
        own_hash = config_hash(config)
        # The same step, but the process leaves nothing behind except compiled programs.
        jax_config = {**config.trainer.jax_config, **compile_cache(request.work_dir / "compiled")}
        trainer = dataclasses.replace(config.trainer, jax_config=jax_config)
        own = {"output_dir": str(request.scratch_dir), "trackers": TrackersConfig(), "trainer": trainer}
        config = dataclasses.replace(config, **own)
        trainer_config = connect(config)
        source = peak_memory()[1]
        on_stage("opening the data", source)
        # Rows with the same data share the tokenized embedded densities.
        data = config.data
        made_of = [data.layout, data.n_density_tokens, data.codec_objective, data.patches_per_material]
        made_of += [] if data.embedded_grid == "refined" else [data.embedded_grid]
        made_of += ["relative"] if data.codec_relative else []
        made_of += [] if data.groups == ("crystals",) else [list(data.groups)]
        data_name = hashlib.sha256(dump_json({"made_of": made_of}).encode()).hexdigest()[:12]
        datasets = open_datasets(config, request.work_dir / "data" / data_name)
        initialise(config, trainer_config, request.scratch_dir, 0)
        trainer_config.load_checkpoint, trainer_config.load_checkpoint_path = False, None
        tables = run_tables(datasets, environment_of(config.model))
        trainer = build_trainer(config, trainer_config, value_table(datasets.codec), tables)
        # The schedule is built for the configured steps. The lab may take more steps, at the last learning rate.
        trainer_config.num_train_steps = ENDLESS_STEPS
        trainer.__enter__()  # never left; the process ends
        start_memory_bytes = peak_memory()[0]
        on_stage("compiling the initial state", source)
        state = initial_state(config, trainer, None, None)
        parameters = count_parameters(state)
        loader = training_loader(config, trainer, shuffled_rows(config, datasets.train))
        self._loading_seconds = 0.0
        self._done = self._pause_at = 0
        self._steps = training_steps(
            trainer,
            state,
            self._timed(loader.iter_from_step(0)),
            ahead=config.dispatch_ahead,
            pauses_after=lambda done: done == self._pause_at,
            asks=lambda: False,
            rest=config.pause,
        )
        on_stage("compiling and taking the first step", source)
        began = time.monotonic()
        clock = PhaseClock()
        with clock.listening_to_compiles(), self._listening_to_the_cache():
            losses = self._take(1)
        first_step_seconds = time.monotonic() - began
        on_stage("warming up", source)
        losses += self._take(request.config.warmup_steps)
        self._settle_steps = request.settle_steps
        if request.config.steps:
            self._window_steps = request.config.steps
        else:  # the first half of the warm-up may still be slow
            late = statistics.median(self._times[len(self._times) // 2 :])
            self._window_steps = max(2, round(request.config.window_seconds / max(late, 1e-6)))
        devices = jax.local_devices()
        counter = energy_counter(devices[0].platform, [device.local_hardware_id or 0 for device in devices])
        self._energy = None if isinstance(counter, str) else counter
        self._mfu = live_mfu(config, jax.devices()[0].device_kind, jax.device_count())
        shuffle = config.data.shuffle
        self._described = {
            "config_hash": own_hash,
            "platform": devices[0].platform,
            **devices_details(found_devices(), config.slice),
            "batch_sequences": config.batch_size,
            "sequence_tokens": config.seq_len,
            "accumulations": accumulations(config, jax.device_count()),
            "dispatch_ahead": config.dispatch_ahead,
            "shuffle_rows": shuffle.io_block_size * shuffle.window_blocks if shuffle.perm_type == "feistel" else None,
            "shuffle": shuffle.perm_type,
            "compute_dtype": config.trainer.compute_dtype,
            "optimizer": config.optimizer.get_choice_name(type(config.optimizer)),
            "parameters": parameters,
            "train_rows": datasets.train.rows,
            "first_step_seconds": first_step_seconds,
            "compile_seconds": clock.row(0.0)["compile_seconds"],
            "compile_saved_seconds": self._saved_seconds,
            "compiled_programs": self._compiled_programs,
            "start_memory_bytes": start_memory_bytes,
            "first_loss": losses[0],
            "warm_loss": losses[-1],
            "warm_loss_step": len(losses) - 1,
            "energy_source": counter if isinstance(counter, str) else counter.source,
        }

    def described(self) -> dict[str, Any]:
        """The facts that are known after the warm-up: seconds, bytes (up to now), counts."""
        peak, source = peak_memory()
        return {**self._described, "peak_memory_bytes": peak, "memory_source": source}

    def window(self) -> dict[str, Any]:
        """Time one window of steps, after the untimed settle steps."""
        self._take(self._settle_steps)
        self._loading_seconds = 0.0
        counter = self._energy
        if counter is not None:
            counter.joules()
        began = time.monotonic()
        losses = self._take(self._window_steps)
        seconds = (time.monotonic() - began) / self._window_steps
        joules = None if counter is None else counter.joules() / self._window_steps
        peak, _ = peak_memory()
        wait_until_idle()
        return {
            "step_seconds": seconds,
            "waiting_for_data_seconds": self._loading_seconds / self._window_steps,
            "peak_memory_bytes": peak,
            "loss": losses[-1],
            "step_joules": joules,
            **self._mfu.row(seconds),
        }

    def _take(self, steps: int) -> list[float]:
        """Take the next steps and return their losses. Afterwards no step is in flight."""
        self._pause_at = self._done + steps
        self._times: list[float] = []
        losses = []
        for _ in range(steps):
            info = next(self._steps, None)
            if info is None:
                raise TomatError("the data loader ended; the lab needs data without an end.")
            losses.append(float(info.loss))
            self._times.append(info.step_duration)
        self._done += steps
        return losses

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            began = time.monotonic()
            batch = next(batches, None)
            self._loading_seconds += time.monotonic() - began
            if batch is None:
                return
            yield batch

    @contextlib.contextmanager
    def _listening_to_the_cache(self) -> Iterator[None]:
        self._compiled_programs, self._saved_seconds = 0, 0.0

        def listen(event: str, **_: str | int) -> None:
            self._compiled_programs += event == MISS_EVENT

        def listen_to_duration(event: str, duration_secs: float, **_: str | int) -> None:
            self._saved_seconds += duration_secs if event == SAVED_EVENT else 0.0

        jax.monitoring.register_event_listener(listen)
        try:
            with listening_to_durations(listen_to_duration):
                yield
        finally:
            jax.monitoring.unregister_event_listener(listen)


def describe(connection: Connection, config_path: str, words: list[str]) -> None:
    """Send the facts about a configuration on this machine's devices that a search for the largest batch needs."""
    try:
        config = load_config(config_path, words)
        trainer_config = connect(config)
        policy = getattr(config.model, "gradient_checkpointing", None)
        found = {
            **devices_details(found_devices(), config.slice),
            "data_axis_size": trainer_config.data_axis_size,
            "memory_source": peak_memory()[1],
            "batch_sequences": config.batch_size,
            "sequence_tokens": config.seq_len,
            "policy": policy if isinstance(policy, str | bool | None) else str(policy),
        }
        connection.send(("described", found))
    except TomatError as error:
        connection.send(("failed", str(error)))


def wait_until_idle() -> None:
    """Wait until this process uses no processor time. After the last step the loader still fills its prefetch buffer,
    which would slow down the process that is timed next."""
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    while time.monotonic() < deadline:
        before = time.process_time()
        time.sleep(IDLE_SECONDS)
        if time.process_time() - before < 0.1 * IDLE_SECONDS:
            return


def peak_memory() -> tuple[int, str]:
    """Peak memory so far and its source: the fullest device, or the process if devices do not report memory."""
    found = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    if all(found):
        return max(one for one in found if one), DEVICE
    return peak_memory_bytes(), PROCESS


def serve(connection: Connection, request: Request) -> None:
    """The process's main function: get ready, then measure a window for each `True`, until `False`. Never returns."""
    with request.log.open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:

        def tell(stage: str, source: str | None) -> None:
            connection.send(("stage", {"stage": stage, "memory_source": source}))

        session = Session(request, tell)
        wait_until_idle()
        connection.send(("ready", session.described()))
        while connection.recv():
            connection.send(("window", session.window()))
    except (EOFError, BrokenPipeError):
        pass
    except BaseException as error:
        import traceback

        traceback.print_exc()
        text, status = str(error), FAILED
        plain = isinstance(error, TomatError)
        said = " ".join(text.split()) if plain else f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
            status, said = OUT_OF_MEMORY, first_line(error) or "out of memory"
        with contextlib.suppress(OSError):
            connection.send(("failed", {"status": status, "reason": said}))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # `os._exit`, because a normal exit would wait for the threads of the loader and the compiler.
        os._exit(0)


def _end_with_parent() -> None:
    """End this process when the lab ends: nobody waits for the answer any more, and the process holds the devices."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
