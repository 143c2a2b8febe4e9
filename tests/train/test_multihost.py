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
from gcs_server import serve_bucket
from run_facts import losses
from tiny_run import DEMO, tiny_run

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
    output_dir: Path | str,
    port: int,
    second: tuple[object, ...] = (),
    second_environment: dict[str, str] | None = None,
    before_second: str = "",
    disks: Path | None = None,
    environment: dict[str, str] | None = None,
) -> list[Forked]:
    """Both hosts of a slice; only the first writes the log. `second`: of it alone. They share a disk, or have each one
    below `disks`."""
    address = f"127.0.0.1:{port}"
    words = ["train", "--config_path", DEMO, "--output_dir", output_dir, *TINY, "--sharding", "zero1"]
    words += ["--preemption.grace_seconds", GRACE_SECONDS]
    hosts = []
    for index in (0, 1):
        distributed = f"{{coordinator_address: '{address}', num_processes: 2, process_id: {index}}}"
        own, changed, before = (second, second_environment or {}, before_second) if index == 1 else ((), {}, "")
        own = ("--trainer.distributed", distributed, *own)
        disk = None if disks is None else disks / f"disk-{index}"
        if disk is not None:
            disk.mkdir()
        env = {**os.environ, **(environment or {}), **changed}
        hosts.append(Forked(*words, *own, cwd=disk, env=env, before=IMPATIENT + before))
    return hosts


def end_pair(hosts: list[Forked], seconds: float = 600.0) -> tuple[list[int], list[str]]:
    """Exit statuses and outputs; a host that is still there after `seconds` fails the test."""
    try:
        outputs = [host.communicate(timeout=seconds)[0] for host in hosts]
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


def test_a_host_that_finds_no_other_says_what_is_missing_and_ends(tmp_path):
    """Either of two: JAX alone waits for half an hour, and aborts then."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        for index, missing in ((0, "1 of 1 other hosts have not come"), (1, f"nothing answers at {address}")):
            distributed = f"{{coordinator_address: '{address}', num_processes: 2, process_id: {index}}}"
            words = ["train", "--config_path", DEMO, "--output_dir", tmp_path, *TINY]
            before = "from tomat.model import joining\n\njoining.JOIN_SECONDS = 1.0"
            host = Forked(*words, "--trainer.distributed", distributed, before=before)
            output, _ = host.communicate(timeout=120)
            assert host.returncode == 124, output[-3000:]
            (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
            assert f"host {index} of 2: waiting for" in error and missing in error
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_host_whose_bucket_is_cut_in_a_save_ends_both_to_be_started_again(port, tmp_path):
    """The second reaches the same objects by a server of its own, which answers none of its uploads from step 5 on."""
    limits = "say_seconds=0.5, end_seconds=4"
    impatient = (
        f"from tomat.train.guards import storage\n\nstorage.StorageWatch.__init__.__kwdefaults__.update({limits})\n"
    )
    with serve_bucket() as bucket, serve_bucket() as cut:
        cut.stored, cut.lock, cut.generation = bucket.stored, bucket.lock, 10**9
        cut.faults.kinds, cut.faults.share = ("stall",), 1.0
        cut.faults.only = lambda method, path: method != "GET" and any("step-3/meta" in name for name in bucket.objects)
        hosts = start_pair("gs://bucket/runs", port, (), cut.environment, impatient, tmp_path, bucket.environment)
        statuses, outputs = end_pair(hosts, 300)
    assert statuses == [75, 75], [output[-3000:] for output in outputs]
    first, second = ([line for line in output.splitlines() if line.startswith("error: ")] for output in outputs)
    assert len(first) == len(second) == 1
    assert "host 1 of 2: gs://bucket/runs/demo: nothing came of" in second[0]
    assert "host 0 of 2 ends, since host 1 (" in first[0] and "nothing came of" in first[0]
    assert "without progress); after 4 s this process ends" in outputs[1]


@pytest.mark.slow
def test_a_host_is_killed_one_is_told_to_stop_and_one_alone_goes_on(pair, port, tmp_path):
    """Nothing is lost; with half the devices and another sharding the losses are the same within float tolerance."""
    run, unbroken = tmp_path / "demo", losses(pair[0])
    began = time.monotonic()
    statuses, outputs = end_pair(start_pair(tmp_path, port, before_second=signalled(5, signal.SIGKILL)))
    # The host that is left does not wait for the other one for ever, says why in one line and leaves an event.
    assert statuses == [1, -signal.SIGKILL], outputs[0][-3000:]
    assert time.monotonic() - began < LOST_SECONDS + GRACE_SECONDS + 120  # most of it the start
    (error,) = [line for line in outputs[0].splitlines() if line.startswith("error: ")]
    assert "host 0 of 2 ends, since host 1 (" in error and "is gone" in error
    assert "Traceback" not in outputs[0] and "stack trace" not in outputs[0]
    end = read_events(run)[-1]
    assert end["event"] == "stop" and "host 1 (" in end["reason"] and "is gone" in end["reason"]
    newest = newest_whole(str(run))
    assert newest is not None and newest.step == 3

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
