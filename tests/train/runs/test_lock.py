"""One process trains a run at a time, whatever happens to the one before."""

import json
import os
import time
from pathlib import Path

import pytest
from forked import Forked, until

from tomat.base.errors import RetryableError, TomatError
from tomat.base.layout import LEASE_FILE, LOCK_FILE
from tomat.train.runs.lock import Holder, Lease, hold_run

HOLDS = """
import sys, time
from pathlib import Path
from tomat.train.runs.lock import hold_run

with hold_run({url!r}, Path({folder!r}), "a"):
    print("held", flush=True)
    time.sleep({seconds})
print("released", flush=True)
sys.exit()
"""


def start(url: str, folder: Path, seconds: float, **environment: str) -> Forked:
    """A process that holds the run, once it does."""
    holds = HOLDS.format(url=url, folder=str(folder), seconds=seconds)
    process = Forked(before=holds, env={**os.environ, **environment})
    assert until(lambda: "held\n" in process.said() or process.poll() is not None)
    return process


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    process = start(str(tmp_path), tmp_path, 600)
    try:
        said = rf"run 'a' is being trained by process {process.pid} on host \S+, since 20"
        with pytest.raises(TomatError, match=said), hold_run(str(tmp_path), tmp_path, "a"):
            raise AssertionError
    finally:
        process.kill()
        process.wait()
    with hold_run(str(tmp_path), tmp_path, "a"):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == os.getpid()
        with pytest.raises(TomatError, match="being trained"), hold_run(str(tmp_path), tmp_path, "a"):
            raise AssertionError
    (tmp_path / LOCK_FILE).unlink()
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(TomatError, match="cannot be written.*--output_dir"), hold_run(str(tmp_path), tmp_path, "a"):
        raise AssertionError


# The rules of the lease, on files that TensorStore writes under the same conditions as objects of a bucket.


def lease(folder: Path, lease_seconds: float = 10.0, renew_seconds: float = 0.1) -> Lease:
    return Lease(f"file://{folder}", "a", lease_seconds, renew_seconds)


def another_machine(taken: Lease) -> None:
    """What `taken` writes from now on says that its process is elsewhere, so that nobody can look whether it lives."""
    taken.holder = Holder(**{**vars(taken.holder), "machine": "elsewhere", "host": "other"})


def test_a_lease_that_is_renewed_refuses_everybody_else(tmp_path):
    first, second = lease(tmp_path), lease(tmp_path)
    another_machine(first)
    first.acquire()
    with pytest.raises(TomatError, match=r"being trained by process \d+ on host other, since .*the same command"):
        second.acquire()
    first.check()
    first.confirm()
    first.release()
    assert not (tmp_path / LEASE_FILE).exists()
    second.acquire()
    (tmp_path / LEASE_FILE).unlink()
    assert until(lambda: bool(second._lost))
    with pytest.raises(TomatError, match="nobody: it was deleted"):
        second.check()
    second.release()


def test_a_lease_that_is_no_longer_renewed_is_taken_over_and_its_holder_stops(tmp_path):
    """The first process is stopped in the middle of something, so long that another one goes on with the run."""
    first, second = lease(tmp_path, 1.5), lease(tmp_path, 1.5)
    another_machine(first)
    first.acquire()
    first._released.set()  # its thread ends; it does not know
    assert first._thread is not None
    first._thread.join()
    began = time.monotonic()
    second.acquire()
    assert time.monotonic() - began >= 1.5
    first.check()  # it has not looked yet
    with pytest.raises(TomatError, match=f"now belongs to process {os.getpid()} on host {second.holder.host}"):
        first.confirm()
    with pytest.raises(TomatError, match="without a save"):
        first.check()
    first.release()  # what is not its own any more stays
    second.confirm()
    assert (tmp_path / LEASE_FILE).exists()
    second.release()


def test_a_confirmation_waits_for_a_bucket_that_does_not_answer_as_long_as_a_lease_lasts(tmp_path, monkeypatch):
    taken = lease(tmp_path, 1.0, 600.0)
    taken.acquire()
    write, failures = Lease._write, iter([True, True, False, *[True] * 1000])

    def fails_twice_and_then_for_good(self: Lease, generation: bytes) -> bool:
        if next(failures):
            raise RetryableError("the storage did not answer")
        return write(self, generation)

    monkeypatch.setattr(Lease, "_write", fails_twice_and_then_for_good)
    taken.confirm()
    with pytest.raises(RetryableError, match="did not answer"):
        taken.confirm()
    taken.release()


def test_the_lease_of_a_process_that_is_gone_from_this_machine_is_taken_over_at_once(tmp_path):
    ended = Forked(before="import sys; sys.exit()")
    ended.wait()
    (tmp_path / LEASE_FILE).write_text(json.dumps({**vars(Holder.this_process()), "process": ended.pid}))
    taken = Lease(f"file://{tmp_path}", "a", lease_seconds=600.0)
    taken.acquire()
    taken.release()


def test_in_a_bucket_two_starts_get_one_lease_though_answers_are_lost(bucket, tmp_path):
    """Requests that are carried out and not answered are sent again, and then refused by their own condition."""
    bucket.faults.kinds, bucket.faults.share = ("drop", "503"), 0.25
    url = "gs://bucket/runs/a"
    first = start(url, tmp_path, 600, **bucket.environment)
    holder = json.loads(bucket.objects["runs/a/lease.json"][0])
    assert holder["process"] == first.pid
    first.kill()
    first.wait()
    # The same machine sees that the process is gone.
    second = start(url, tmp_path, 0.0, **bucket.environment)
    assert "held\nreleased\n" in second.communicate(timeout=60)[0]
    assert until(lambda: "runs/a/lease.json" not in bucket.objects, 1.0)
