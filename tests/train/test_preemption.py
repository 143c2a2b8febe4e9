"""SIGTERM and notices, without training: when a process ends, how, and with which status. About 15 seconds, in which
all cases run side by side."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tomat.base.errors import TomatError
from tomat.base.regions import instance_metadata
from tomat.train.preemption import NOTICES, StopRequest
from tomat.train.settings.preemption import PreemptionConfig

PROLOGUE = """
import atexit, faulthandler, hashlib, sys, time
from tomat.base.layout import STOPPED_STATUS
from tomat.train.preemption import StopRequest
stop = StopRequest(grace_seconds=float(sys.argv[1]))
stop.on_overrun = lambda message: print("overrun", flush=True)

def compile_something():
    # Native code that lets other threads run and cannot be interrupted, as a compilation is.
    hashlib.pbkdf2_hmac("sha512", b"a", b"b", 300_000_000)

def ready():
    print("ready", flush=True)

"""
CASES = {
    # name: (grace in seconds, signals, status, longest wait in seconds, expected in the output, not expected, program)
    "nothing to save": (
        60.0, 1, 143, 20.0, ["closed"], ["overrun"],
        """
        with stop.listening():
            try:
                ready()
                time.sleep(60)
            finally:
                print("closed", flush=True)
        """,
    ),
    "a step to save": (
        60.0, 1, 143, 20.0, ["saved 3"], ["overrun"],
        """
        with stop.listening():
            stop.defer(3)
            ready()
            while not stop.reached():
                time.sleep(0.01)
            print(f"saved {stop.step}", flush=True)
        sys.exit(STOPPED_STATUS)
        """,
    ),
    "asked while the last step was saved": (
        60.0, 1, 143, 20.0, ["saved"], ["evaluated"],
        """
        with stop.listening():
            stop.defer(3)
            ready()
            while not stop.asked:
                time.sleep(0.01)
            print("saved", flush=True)
            stop.resume_at_once()
            print("evaluated", flush=True)
        """,
    ),
    "the grace is over": (
        1.0, 1, 143, 20.0, ["overrun", "1 s of grace are over", "last whole checkpoint"], ["saved"],
        """
        with stop.listening():
            stop.defer(3)
            ready()
            compile_something()
            print("saved", flush=True)
        """,
    ),
    "the grace is over in a compilation": (
        1.0, 1, 143, 20.0, ["overrun", "no step was left unsaved"], ["compiled"],
        """
        with stop.listening():
            ready()
            compile_something()
            print("compiled", flush=True)
        """,
    ),
    "a second signal": (
        600.0, 2, 143, 20.0, ["second SIGTERM"], ["overrun", "saved"],
        """
        with stop.listening():
            stop.defer(3)
            ready()
            compile_something()
            print("saved", flush=True)
        """,
    ),
    "hosts that do not answer": (
        1.0, 0, 1, 20.0, ["did not answer"], ["went on"],
        """
        stop.limit_exit(1)
        ready()
        compile_something()
        print("went on", flush=True)
        """,
    ),
}  # fmt: skip


INTERRUPTED = {
    # name: (Ctrl-Cs, seconds between them, status, expected in the output, not expected, program)
    "nothing to save": (
        1, 0.0, 130, ["closed"], ["saved first"],
        """
        with stop.listening():
            try:
                ready()
                time.sleep(60)
            except KeyboardInterrupt:
                print("closed", flush=True)
        sys.exit(stop.status)
        """,
    ),
    "a step to save, which takes longer than the grace": (
        1, 0.0, 130, ["saved first", "saved 3 Ctrl-C"], ["overrun"],
        """
        with stop.listening():
            stop.defer(3)
            ready()
            while not stop.reached():
                time.sleep(0.01)
            time.sleep(1.5)
            print(f"saved {stop.step} {stop.cause}", flush=True)
        sys.exit(stop.status)
        """,
    ),
    "one press that arrives twice": (
        2, 0.05, 130, ["saved 3"], ["leaving at once"],
        """
        with stop.listening():
            stop.defer(3)
            ready()
            while not stop.reached():
                time.sleep(0.01)
            time.sleep(1.5)
            print(f"saved {stop.step}", flush=True)
        sys.exit(stop.status)
        """,
    ),
    "one press that arrives twice, with nothing to save": (
        2, 0.05, 130, ["closed"], ["leaving at once"],
        """
        with stop.listening():
            try:
                ready()
                time.sleep(60)
            except KeyboardInterrupt:
                time.sleep(1)  # as long as it takes to publish a log and give a lease back
                print("closed", flush=True)
        sys.exit(stop.status)
        """,
    ),
    "a second press while what is open is closed": (
        2, 2.0, 130, ["a second Ctrl-C: leaving at once"], ["closed"],
        """
        with stop.listening():
            try:
                ready()
                time.sleep(60)
            except KeyboardInterrupt:
                time.sleep(30)
                print("closed", flush=True)
        """,
    ),
    "a signal that is handled while the handler of another has the lock": (
        1, 0.0, 130, ["saved 3"], ["Timeout"],
        """
        faulthandler.dump_traceback_later(20, exit=True)
        with stop.listening():
            stop.defer(3)
            with stop._lock:
                ready()
                while not stop.asked:
                    time.sleep(0.01)
            print(f"saved {stop.step}", flush=True)
        sys.exit(stop.status)
        """,
    ),
    "a second press": (
        2, 2.0, 130, ["a second Ctrl-C: leaving at once", "last whole checkpoint"], ["compiled"],
        """
        with stop.listening():
            stop.defer(3)
            ready()
            compile_something()
            print("compiled", flush=True)
        """,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def interrupted() -> dict[str, tuple[int, str]]:
    """Status and output of every case; the grace is one second."""
    processes = {}
    for name, (*_, program) in INTERRUPTED.items():
        command = [sys.executable, "-c", PROLOGUE + textwrap.dedent(program), "1.0"]
        processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    result = {}
    for name, process in processes.items():
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        for _ in range(INTERRUPTED[name][0]):
            process.send_signal(signal.SIGINT)
            time.sleep(INTERRUPTED[name][1])
        output = process.stdout.read()
        result[name] = (process.wait(timeout=60), output)
        process.stdout.close()
    return result


@pytest.mark.parametrize("name", INTERRUPTED)
def test_a_process_that_is_interrupted_by_a_person(interrupted, name):
    _, _, status, expected, unexpected, _ = INTERRUPTED[name]
    code, output = interrupted[name]
    assert code == status, output
    assert all(text in output for text in expected), output
    assert not any(text in output for text in unexpected), output


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, float, str]]:
    """Status, seconds from the first signal to the end, and output of every case."""
    processes = {}
    for name, (grace, *_, program) in CASES.items():
        command = [sys.executable, "-c", PROLOGUE + textwrap.dedent(program), str(grace)]
        processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    result = {}
    for name, process in processes.items():
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)  # into the native code
        started = time.monotonic()
        for _ in range(CASES[name][1]):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        output = process.stdout.read()  # to the end of the process; `communicate` would miss what readline buffered
        result[name] = (process.wait(timeout=60), time.monotonic() - started, output)
        process.stdout.close()
    return result


@pytest.mark.parametrize("name", CASES)
def test_a_process_that_is_told_to_stop(ended, name):
    _, _, status, longest, expected, unexpected, _ = CASES[name]
    code, seconds, output = ended[name]
    assert code == status, output
    assert seconds < longest
    assert all(text in output for text in expected), output
    assert not any(text in output for text in unexpected), output


def test_the_handler_is_gone_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stop = StopRequest()
    with stop.listening():
        assert signal.getsignal(signal.SIGTERM) != before[0] and signal.getsignal(signal.SIGINT) != before[1]
        assert not stop.asked and stop.remaining_seconds == float("inf")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_machine_that_is_taken_away_after_ctrl_c_has_its_grace_from_then():
    stop = StopRequest(grace_seconds=60.0)
    with stop.listening():
        stop.defer(1)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reached() and stop.cause == "Ctrl-C" and stop.status == 130
        assert stop._asked_at is not None
        stop._asked_at -= 100.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for(lambda: stop.cause == "SIGTERM")
        assert stop.status == 143 and 50 < stop.remaining_seconds <= 60


def test_in_another_thread_nothing_listens_and_nothing_breaks():
    seen = []

    def work() -> None:
        stop = StopRequest()
        with stop.listening():
            stop.defer(1)
            seen.append(stop.reached())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_times_are_positive():
    with pytest.raises(TomatError, match="preemption.grace_seconds"):
        PreemptionConfig(grace_seconds=0.0)
    with pytest.raises(TomatError, match="preemption.poll_seconds"):
        PreemptionConfig(poll_seconds=-1.0)


class MetadataServer(BaseHTTPRequestHandler):
    """The two keys of a virtual machine's metadata server; it answers nobody who does not name the flavour."""

    values: dict[str, str] = {}

    def do_GET(self) -> None:
        value = self.values.get(self.path.removeprefix("/computeMetadata/v1/instance/"))
        asked_rightly = self.headers.get("Metadata-Flavor") == "Google"
        self.send_response(200 if value is not None and asked_rightly else 403)
        self.end_headers()
        self.wfile.write((value or "").encode())

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""


@pytest.fixture
def metadata(monkeypatch) -> Iterator[dict[str, str]]:
    values = {"preempted": "FALSE", "maintenance-event": "NONE"}
    monkeypatch.setattr(MetadataServer, "values", values)
    with ThreadingHTTPServer(("127.0.0.1", 0), MetadataServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        yield values
        server.shutdown()


def wait_for(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


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
        assert wait_for(stop.reached)
        assert stop.cause == f"{key} {NOTICES[key][0]}"
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # a second signal would have ended this process
        assert stop.remaining_seconds > 50


def test_a_notice_that_was_there_already_does_not_stop_every_new_start(metadata):
    metadata["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    stop = StopRequest()
    with stop.listening():
        stop.defer(1)
        stop.poll_notices(0.02)
        time.sleep(0.3)
        assert not stop.reached()


def test_without_a_metadata_server_there_is_no_notice(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    assert instance_metadata("preempted") is None
