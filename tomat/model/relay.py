"""Connects to the coordinator through a small process beside this one, which outlives the coordinator's host.

JAX's client (0.11.1) ends its process by SIGABRT and a page of stacks at the moment when its connection is cut, even
with `jax_enable_recoverability`, and takes no callback from Python instead (`std::bad_cast`). The relay keeps the near
end of a cut connection open and reports the cut, so that the run can say which host is lost, and leave an event. It is
a process, since whatever waits for the coordinator here may hold Python's lock. This file is also its program.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

SILENT_SECONDS = 90
"""Seconds after which a coordinator that acknowledges nothing counts as gone, as `guards.hosts.LOST_SECONDS`."""
_BYTES = 1 << 16


class Relay:
    """Takes connections here and carries them to `host:port`."""

    def __init__(self, host: str, port: int) -> None:
        self.on_cut: Callable[[], bool] = lambda: False
        """Called when the far end has cut a connection. If it returns False, the near end is cut too."""
        self.coordinator = f"{host}:{port}"
        command = [sys.executable, "-I", "-S", __file__, host, str(port)]
        self._process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        _exempt_from_proxies(self.address.partition(":")[0])
        threading.Thread(target=self._listen, name="relay", daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        for _ in self._process.stdout:
            if not self.on_cut():
                with contextlib.suppress(OSError):
                    print("close", file=self._process.stdin, flush=True)

    def close(self) -> None:
        """End the relay's process, and with it the connections that it carries."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()


def _exempt_from_proxies(host: str) -> None:
    """Exempt `host` from proxies: gRPC asks a proxy for addresses of this machine, too."""
    if any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        exempt = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", ""))
        os.environ["no_grpc_proxy"] = f"{exempt},{host}".removeprefix(",")


def _carry(near: socket.socket, far: socket.socket, cut: list[socket.socket]) -> None:
    """Carry data both ways until either end closes; a near end whose far end has closed first is kept in `cut`."""
    left = threading.Event()

    def up() -> None:
        while True:
            try:
                data = near.recv(_BYTES)
            except OSError:
                data = b""
            if not data:
                left.set()
                _close(far)
                return
            try:
                far.sendall(data)
            except OSError:
                return

    threading.Thread(target=up, daemon=True).start()
    with contextlib.suppress(OSError):
        while data := far.recv(_BYTES):
            near.sendall(data)
    if left.is_set():
        _close(near)
    else:
        cut.append(near)
        print("cut", flush=True)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _serve(host: str, port: int) -> None:
    """Serve until standard input ends, as it does with the parent process; each line there closes what was cut."""
    for number in (signal.SIGTERM, signal.SIGINT):  # meant for the training, whose process group this is in
        signal.signal(number, signal.SIG_IGN)
    listener, cut = socket.create_server(("127.0.0.1", 0)), []

    def accept() -> None:
        while True:
            near, _ = listener.accept()
            try:
                far = socket.create_connection((host, port), timeout=10)
            except OSError:
                _close(near)  # JAX tries again
                continue
            far.settimeout(None)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                far.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)
            threading.Thread(target=_carry, args=(near, far, cut), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
    for _ in sys.stdin:
        while cut:
            _close(cut.pop())


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
