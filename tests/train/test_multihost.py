"""Two processes under `jax.distributed`: they train what one does, and lose a host without losing the run."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forked import Forked, signalled
from run_facts import losses
from tiny_run import DEMO, tiny_run

from tomat.base.layout import LOST_STATUS
from tomat.train.run import train
from tomat.train.runs.checkpoints import newest_whole
from tomat.train.runs.history import read_events
from tomat.train.settings.config import load_config

STEPS = 8
TINY = tiny_run(STEPS, 3)
GRACE_SECONDS = 8
LOST_SECONDS = 15
IMPATIENT = f"""
from tomat.model import joining
from tomat.train.guards.hosts import HostWatch

joining.JOIN_SECONDS = 120
HostWatch.__init__.__kwdefaults__.update(beat_seconds=0.5, lost_seconds={LOST_SECONDS})
"""
"""A host that is gone is missed sooner than after a minute and a half."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A port that nobody else is given while it is held; who asks to share it, as the coordinator does, may listen."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def start_pair(
    output_dir: Path,
    port: int,
    second: tuple[object, ...] = (),
    second_environment: dict[str, str] | None = None,
    before_second: str = "",
    before_first: str = "",
) -> list[Forked]:
    """Both hosts of a slice, on one disk as with a bucket; only the first writes the log. `second`: of it alone."""
    address = f"127.0.0.1:{port}"
    words = ["train", "--config_path", DEMO, "--output_dir", output_dir, *TINY, "--sharding", "zero1"]
    words += ["--preemption.grace_seconds", GRACE_SECONDS]
    hosts = []
    for index in (0, 1):
        distributed = f"{{coordinator_address: '{address}', num_processes: 2, process_id: {index}}}"
        own, changed, before = (
            (second, second_environment or {}, before_second) if index == 1 else ((), {}, before_first)
        )
        own = ("--trainer.distributed", distributed, *own)
        hosts.append(Forked(*words, *own, env={**os.environ, **changed}, before=IMPATIENT + before))
    return hosts


def end_pair(hosts: list[Forked]) -> tuple[list[int], list[str]]:
    """Exit statuses and outputs; a host that is still there after ten minutes fails the test."""
    try:
        outputs = [host.communicate(timeout=600.0)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    return [host.returncode for host in hosts], outputs


@pytest.fixture(scope="module")
def pair(tmp_path_factory, port) -> tuple[Path, list[str]]:
    """A run on two hosts that nothing interrupted."""
    folder = tmp_path_factory.mktemp("pair")
    statuses, outputs = end_pair(start_pair(folder, port))
    assert statuses == [0, 0], [output[-3000:] for output in outputs]
    return folder / "demo", outputs


@pytest.mark.slow
def test_two_processes_train_what_one_does(pair, tmp_path):
    run, outputs = pair
    # This test's environment gives each process two CPU devices (conftest.py).
    assert "4 x cpu" in outputs[0]
    train(load_config(DEMO, [*TINY, "--output_dir", str(tmp_path)]))
    np.testing.assert_allclose(losses(run), losses(tmp_path / "demo"), rtol=1e-4)


@pytest.mark.slow
def test_hosts_that_were_started_unlike_end_together(port, tmp_path):
    """Without the comparison both train on, and the losses are those of neither seed."""
    words = ("--trainer.seed", 7, "--warm_start", "elsewhere")
    flags = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_cpu_enable_fast_math=true"}
    statuses, outputs = end_pair(start_pair(tmp_path, port, words, flags))
    assert statuses == [2, 2], [output[-3000:] for output in outputs]
    for output in outputs:
        (error,) = [line for line in output.splitlines() if "were not started alike" in line]
        assert error.count(" on host ") == 6
        for words in (
            "trainer.seed is 0 on host 0", "and 7 on host 1", "warm_start is null on host 0", 'and "elsewhere" on host',
            "XLA_FLAGS --xla_cpu_enable_fast_math is not set on host 0", 'and "true" on host 1',
        ):  # fmt: skip
            assert words in error
    assert not (tmp_path / "demo").exists()


def test_a_host_that_finds_no_other_says_what_is_missing_and_ends(port, tmp_path):
    """JAX alone waits for half an hour, and aborts then."""
    distributed = f"{{coordinator_address: '127.0.0.1:{port}', num_processes: 2, process_id: 0}}"
    words = ["train", "--config_path", DEMO, "--output_dir", tmp_path, *TINY, "--trainer.distributed", distributed]
    host = Forked(*words, before="from tomat.model import joining\n\njoining.JOIN_SECONDS = 1.0")
    output, _ = host.communicate(timeout=120)
    assert host.returncode == 124, output[-3000:]
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "host 0 of 2: waiting for" in error and "1 of 1 other hosts have not come" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_host_is_killed_one_is_told_to_stop_and_one_alone_goes_on(pair, port, tmp_path):
    """Nothing is lost; with half the devices and another sharding the losses are the same within float tolerance."""
    run, unbroken = tmp_path / "demo", losses(pair[0])
    began = time.monotonic()
    statuses, outputs = end_pair(start_pair(tmp_path, port, before_second=signalled(5, signal.SIGKILL)))
    # The host that is left does not wait for the other one for ever, says why in one line and leaves an event.
    assert statuses == [LOST_STATUS, -signal.SIGKILL], outputs[0][-3000:]
    assert time.monotonic() - began < LOST_SECONDS + GRACE_SECONDS + 120  # most of it the start
    (error,) = [line for line in outputs[0].splitlines() if line.startswith("error: ")]
    assert "host 0 of 2 ends, since host 1 (" in error and "is gone" in error
    assert "Traceback" not in outputs[0] and "stack trace" not in outputs[0]
    end = read_events(run)[-1]
    assert end["event"] == "stop" and "host 1 (" in end["reason"] and "is gone" in end["reason"]
    newest = newest_whole(str(run))
    assert newest is not None and newest.step == 3

    # Nor for the one that has the service of both, whose end JAX tells by SIGABRT; then it is this one that writes it.
    statuses, outputs = end_pair(start_pair(tmp_path, port, before_first=signalled(5, signal.SIGKILL)))
    assert statuses == [-signal.SIGKILL, LOST_STATUS], outputs[1][-3000:]
    (error,) = [line for line in outputs[1].splitlines() if line.startswith("error: ")]
    assert "host 1 of 2 ends, since host 0 (" in error and "is gone: its connection was cut. Exiting with" in error
    assert "Traceback" not in outputs[1] and "stack trace" not in outputs[1]
    end = read_events(run)[-1]
    assert end["event"] == "stop" and "host 0 (" in end["reason"] and end["step"] >= 4

    # One host alone is told; both stop after the same step.
    statuses, outputs = end_pair(start_pair(tmp_path, port, before_second=signalled(5, signal.SIGTERM)))
    assert statuses == [143, 143], [output[-3000:] for output in outputs]
    end, newest = read_events(run)[-1], newest_whole(str(run))
    assert end["event"] == "preempted" and end["saved"] and end["step"] < STEPS
    assert newest is not None and newest.step == end["step"] - 1
    assert losses(run) == unbroken[: end["step"]]

    result = train(load_config(DEMO, [*TINY, "--output_dir", str(tmp_path), "--sharding", "fsdp"]))
    assert (result.first_step, result.steps) == (end["step"], STEPS)
    np.testing.assert_allclose(losses(run), unbroken, rtol=1e-4)
