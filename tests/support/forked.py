"""The command `tomat` as a process of its own, without the 6 s of processor time that importing JAX and Levanter takes.

One process imports them for all workers and touches no device; every command is forked from it. A command has
its own environment, folder, signals and devices; only what was imported before is shared.
"""

import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

IMPORTED = ["tomat.train.run", "tomat.data.tokens.demo", "tomat.app.workflow.run_page"]
LONGEST_REQUEST_BYTES = 1 << 16


def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether it holds, waited for so long."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def as_users_fuse() -> dict[str, str]:
    """The environment of a process that compiles with XLA's own emitters of fusions, which `tests/conftest.py` turns
    off. For tests that two different programs agree to the bit: without the emitters they round differently."""
    flags = os.environ["XLA_FLAGS"].split()
    return os.environ | {"XLA_FLAGS": " ".join(flag for flag in flags if "fusion_emitters" not in flag)}


class Forked:
    """`tomat WORDS` in the background; the methods are those of `subprocess.Popen`.

    JAX reads its own variables on import, so those of `env` must be the tests'. `before` is Python that the process
    runs first, or alone if it ends by `sys.exit`; both its streams go to `output`, or to what `communicate` gives, and
    the second one to `errors` if there is such a file.
    """

    def __init__(self, *words: object, cwd: Path | None = None, env: dict[str, str] | None = None, before: str = "",
                 output: IO[Any] | None = None, errors: IO[bytes] | None = None):  # fmt: skip
        env = dict(os.environ) if env is None else env
        differing = [name for name in env.keys() | os.environ.keys() if env.get(name) != os.environ.get(name)]
        assert not [name for name in differing if name.startswith("JAX_")], differing
        self.returncode: int | None = None
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8") if output is None else output
        self._status, its_status = os.pipe()
        asked = {"words": [*map(str, words)], "cwd": str(cwd or Path.cwd()), "env": env, "before": before}
        request = json.dumps(asked).encode()
        assert len(request) < LONGEST_REQUEST_BYTES
        requests = _server()
        socket.send_fds(requests, [request], [self._output.fileno(), (errors or self._output).fileno(), its_status])
        os.close(its_status)
        self.pid = int(requests.recv(32))

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(os.read(self._status, 32))
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit status, when it has ended; after `timeout` seconds a `subprocess.TimeoutExpired`."""
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("tomat", timeout or 0.0)
        return self.poll()

    def said(self) -> str:
        """What it has written to both streams so far; without a seek, which would move where it writes."""
        return os.pread(self._output.fileno(), os.fstat(self._output.fileno()).st_size, 0).decode()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for its end as `wait` does; what it wrote to both streams."""
        self.wait(timeout)
        return self.said(), None


SIGNALLED = """
import os
from tomat.train.tracking import TrainingProgress

update = TrainingProgress.update

def signalled(self, next_step, *args):
    update(self, next_step, *args)
    if next_step == {step}:
        os.kill(os.getpid(), {number})

TrainingProgress.update = signalled
"""


def signalled(step: int, number: signal.Signals) -> str:
    """For `before`: a training sends itself a signal once so many steps are done."""
    return SIGNALLED.format(step=step, number=int(number))


def instead_of_starting(monkeypatch: "pytest.MonkeyPatch") -> list[Forked]:
    """What `tomat.measure.bench.processes.started` starts is forked; those that it has started."""
    from tomat.measure.bench import processes

    forked: list[Forked] = []

    def start(command: list[str], stdout: IO[str], env: dict[str, str] | None = None, **_: object) -> Forked:
        assert command[:3] == processes.tomat_command()
        forked.append(Forked(*command[3:], env=env, output=stdout))
        return forked[-1]

    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))
    return forked


COMPILES = """
import runpy
import sys

import jax

from tomat.perf.plan.compile import process

# As no variable of JAX's reaches a compile; and its parent is not who asked.
jax.config.update("jax_enable_compilation_cache", False)
process._end_with_parent = lambda parent: None
sys.argv[1:] = [{request!r}]
runpy.run_module({module!r}, run_name="__main__")
sys.exit()
"""


def instead_of_compiling(monkeypatch: "pytest.MonkeyPatch") -> None:
    """Processes of the TPU compiler that `tomat.perf.plan.compile.process.ask` starts are forked."""
    from tomat.perf.plan.compile import process

    def start(command: list[str], env: dict[str, str], stdout: IO[bytes], stderr: IO[bytes], cwd: Path) -> Forked:
        _, _, module, request = command
        env = env | {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
        before = COMPILES.format(module=module, request=request)
        return Forked(cwd=cwd, env=env, before=before, output=stdout, errors=stderr)

    monkeypatch.setattr(process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))


@cache
def _server() -> socket.socket:
    """Where requests of this process go. Whoever comes first starts the server, which ends with its last client."""
    place = Path(os.environ["TOMAT_TESTS_FOLDER"])
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open(place / "server.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = place / "server"
        if not path.exists():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(str(path))
                listener.listen()
                quiet: dict[str, int] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
                command = [sys.executable, __file__, str(listener.fileno())]
                subprocess.Popen(command, pass_fds=[listener.fileno()], **quiet)
        server.connect(str(path))
    return server


def _serve(listener: socket.socket) -> None:
    import importlib

    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("kept_data").keep_data()
    # So that collections in the children do not copy the memory that they share.
    gc.freeze()
    # Keepers are not waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    clients = [listener.accept()[0]]
    while clients:
        for ready in select.select([listener, *clients], [], [])[0]:
            if ready is listener:
                clients.append(listener.accept()[0])
                continue
            request, files, *_ = socket.recv_fds(ready, LONGEST_REQUEST_BYTES, 3)
            if not request:
                clients.remove(ready)
                ready.close()
            elif os.fork() == 0:
                _keep(ready, [listener, *clients], json.loads(request), *files)
            for file in files:
                os.close(file)


def _keep(
    client: socket.socket, sockets: list[socket.socket], request: dict, output: int, errors: int, status: int
) -> None:
    """Start the command, say its process id, wait for it and say its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        for each in sockets:
            each.close()
        _become(request, output, errors)
    os.close(output)
    os.close(errors)
    client.send(str(pid).encode())
    for each in sockets:
        each.close()
    os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _become(request: dict, output: int, errors: int) -> None:
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    from tomat.app.cli import main

    exec(request["before"], {})
    sys.argv = ["tomat", *request["words"]]
    sys.exit(main(request["words"]))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
