"""SIGTERM, Ctrl-C and notices, without training: when a process ends, how, and with which status.

All cases run side by side, each in a process of its own.
"""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from forked import until

from tomat.base.regions import instance_metadata
from tomat.train.preemption import NOTICES, StopRequest

PROGRAM = """
import faulthandler, hashlib, sys, time, types

# JAX is asked for the number of processes alone, and takes two seconds of processor time to import.
sys.modules["jax"] = types.SimpleNamespace(process_count=lambda: 1)
sys.modules["jax.experimental"] = types.SimpleNamespace(multihost_utils=None)

from tomat.train.preemption import StopRequest

stop = StopRequest(grace_seconds={grace})
stop.on_overrun = lambda message: print("overrun", flush=True)

def ready():
    print("ready", flush=True)

def compile_something():
    # Native code that lets other threads run and cannot be interrupted, as a compilation is.
    ready()
    hashlib.pbkdf2_hmac("sha512", b"a", b"b", 300_000_000)
    print("compiled", flush=True)

def wait(closing_seconds=0.0):
    try:
        ready()
        time.sleep(60)
    finally:
        time.sleep(closing_seconds)
        print("closed", flush=True)

def save(seconds=0.0):
    stop.defer(3)
    ready()
    while not stop.reached():
        time.sleep(0.01)
    time.sleep(seconds)
    print("saved", stop.step, stop.cause, flush=True)

try:
    with stop.listening():
{body}
except KeyboardInterrupt:
    pass
sys.exit(stop.status if stop.asked else 0)
"""
AT_THE_END = """
stop.defer(3)
ready()
while not stop.asked:
    time.sleep(0.01)
print("saved", flush=True)
stop.resume_at_once()
print("evaluated", flush=True)
"""
IN_A_HANDLER = """
faulthandler.dump_traceback_later(20, exit=True)
stop.defer(3)
with stop._lock:
    ready()
    while not stop.asked:
        time.sleep(0.01)
print("saved", stop.step, flush=True)
"""
TERM, PRESS = signal.SIGTERM, signal.SIGINT
CASES = {
    # name: (grace in seconds, signals, seconds between them, status, expected in the output, not expected, program)
    "nothing to save": (60, [TERM], 0, 143, ["closed"], ["overrun"], "wait()"),
    "a step to save": (60, [TERM], 0, 143, ["saved 3"], ["overrun"], "save()"),
    "asked while the last step was saved": (60, [TERM], 0, 143, ["saved"], ["evaluated"], AT_THE_END),
    "the grace is over in a step": (
        0.6, [TERM], 0, 143, ["overrun", "1 s of grace are over", "last whole checkpoint"], ["compiled"],
        "stop.defer(3); compile_something()",
    ),
    "the grace is over in a compilation": (
        0.6, [TERM], 0, 143, ["overrun", "no step was left unsaved"], ["compiled"], "compile_something()",
    ),
    "a second signal": (
        600, [TERM, TERM], 0.1, 143, ["second SIGTERM"], ["overrun", "compiled"], "stop.defer(3); compile_something()",
    ),
    "hosts that do not answer": (
        0.6, [], 0, 1, ["did not answer"], ["compiled"], "stop.limit_exit(1); compile_something()",
    ),
    "a press with nothing to save": (60, [PRESS], 0, 130, ["closed"], ["saved first"], "wait()"),
    "a press with a step to save, which takes longer than the grace": (
        0.6, [PRESS], 0, 130, ["saved first", "saved 3 Ctrl-C"], ["overrun"], "save(seconds=1.0)",
    ),
    "one press that arrives twice": (
        0.6, [PRESS, PRESS], 0.05, 130, ["saved 3"], ["leaving at once"], "save(seconds=1.0)",
    ),
    "one press that arrives twice, with nothing to save": (
        0.6, [PRESS, PRESS], 0.05, 130, ["closed"], ["leaving at once"], "wait(closing_seconds=1.0)",
    ),
    "a second press while what is open is closed": (
        0.6, [PRESS, PRESS], 1.0, 130, ["a second Ctrl-C: leaving at once"], ["closed"], "wait(closing_seconds=30.0)",
    ),
    "a press that is handled while another's handler has the lock": (
        0.6, [PRESS], 0, 130, ["saved 3"], ["Timeout"], IN_A_HANDLER,
    ),
    "a second press": (
        0.6, [PRESS, PRESS], 1.0, 130, ["a second Ctrl-C: leaving at once", "last whole checkpoint"], ["compiled"],
        "stop.defer(3); compile_something()",
    ),
}  # fmt: skip


def end_of(name: str) -> tuple[int | None, float, str]:
    """Status, seconds from the first signal to the end, and output of a case."""
    grace, signals, seconds_between, *_, program = CASES[name]
    source = PROGRAM.format(grace=grace, body=textwrap.indent(program.strip(), " " * 8))
    # A process of its own: one that was forked from a worker's server did not always end when it was told to.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, "-c", source], stdout=output, stderr=subprocess.STDOUT)

        def said() -> str:
            return os.pread(output.fileno(), 1 << 20, 0).decode()

        assert until(lambda: "ready\n" in said() or process.poll() is not None, 60.0)
        time.sleep(0.2)  # into the native code
        started = time.monotonic()
        for number in signals:
            process.send_signal(number)
            time.sleep(seconds_between)
        return process.wait(timeout=60), time.monotonic() - started, said()


@pytest.fixture(scope="module")
def ends() -> dict[str, tuple[int | None, float, str]]:
    with ThreadPoolExecutor(len(CASES)) as pool:
        return dict(zip(CASES, pool.map(end_of, CASES), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_process_that_is_told_to_stop(ends, name):
    *_, expected_status, expected, unexpected, _ = CASES[name]
    status, seconds, said = ends[name]
    assert status == expected_status and seconds < 20, said
    assert all(text in said for text in expected) and not any(text in said for text in unexpected), said


def test_the_handler_is_gone_afterwards():
    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in (TERM, PRESS)]

    before, stop = handlers(), StopRequest()
    with stop.listening():
        assert not set(handlers()) & set(before)
        assert not stop.asked and stop.remaining_seconds == float("inf")
    assert handlers() == before

    def elsewhere() -> bool:
        stop = StopRequest()
        with stop.listening():
            stop.defer(1)
            return stop.reached()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(elsewhere).result() is False


def test_a_machine_that_is_taken_away_after_ctrl_c_has_its_grace_from_then():
    stop = StopRequest(grace_seconds=60.0)
    with stop.listening():
        stop.defer(1)
        os.kill(os.getpid(), PRESS)
        assert stop.reached() and stop.cause == "Ctrl-C" and stop.status == 130
        assert stop._asked_at is not None
        stop._asked_at -= 100.0
        os.kill(os.getpid(), TERM)
        assert until(lambda: stop.cause == "SIGTERM")
        assert stop.status == 143 and 50 < stop.remaining_seconds <= 60


@pytest.fixture
def metadata(bucket, monkeypatch) -> dict[str, str]:
    """What a virtual machine is told of itself."""
    bucket.worker_zone = "us-east5-b"
    bucket.machine = {"preempted": "FALSE", "maintenance-event": "NONE"}
    monkeypatch.setenv("GCE_METADATA_HOST", bucket.url.removeprefix("http://"))
    return bucket.machine


@pytest.mark.parametrize("key", NOTICES)
def test_a_notice_counts_as_the_first_signal(metadata, key):
    """The SIGTERM of the machine that goes down then follows; it must not be taken for a second one."""
    stop = StopRequest(grace_seconds=60.0)
    with stop.listening():
        stop.defer(1)
        stop.poll_notices(0.02)
        time.sleep(0.2)
        assert not stop.reached()
        metadata[key] = NOTICES[key][0]
        assert until(stop.reached)
        assert stop.cause == f"{key} {NOTICES[key][0]}"
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # a second signal would have ended this process
        assert stop.remaining_seconds > 50


def test_a_notice_that_was_there_already_does_not_stop_every_new_start(metadata, monkeypatch):
    metadata["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    stop = StopRequest()
    with stop.listening():
        stop.defer(1)
        stop.poll_notices(0.02)
        time.sleep(0.3)
        assert not stop.reached()
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")  # where nobody answers
    assert instance_metadata("preempted") is None
