"""One process trains a run at a time: a locked file in the run's folder, a lease in its bucket.

Two such processes would write one log and remove each other's checkpoints. Of several hosts, the first holds it.

- In a folder `train.lock` is locked with `flock`: the system lets go of it when the process ends, however it ends.
- In a bucket `lease.json` is created where there is none, renewed while the run is trained, and deleted at its end,
  each on the condition that nobody else has written it (`ifGenerationMatch`). Another process watches it, and takes
  it over if it is not renewed for `LEASE_SECONDS` by the watcher's own clock. No clock of another machine is believed.
"""

import contextlib
import datetime
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import tensorstore as ts

from tomat.base.errors import RetryableError, TomatError
from tomat.base.layout import LEASE_FILE, LOCK_FILE
from tomat.base.reporting import tell, warn, writing
from tomat.base.storage import Store, explaining_storage, is_remote

LEASE_SECONDS = 60.0
"""A lease that is not renewed for so long is given up. A run waits at most this long if it follows one that was killed
on another machine; getting a TPU slice again takes longer."""

RENEW_SECONDS = 15.0
"""Seconds between renewals: three may fail."""

LEASE_TRIES = 4
"""How often a request for the lease is tried, in 3.5 s of waiting."""


@dataclass(frozen=True)
class Holder:
    process: int
    host: str
    machine: str
    """Names the running system and its process ids, so that "this process is gone" can be said; empty where unknown."""
    since: str
    """UTC, by the holder's own clock."""
    token: str
    """Different for every start."""

    @classmethod
    def this_process(cls) -> "Holder":
        now = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
        return cls(os.getpid(), socket.gethostname(), _machine(), f"{now} UTC", uuid.uuid4().hex)

    @classmethod
    def from_text(cls, text: str | bytes) -> "Holder":
        """The holder as it was written; an unknown one if the text is damaged."""
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(text, type=cls)
        return cls(0, "unknown", "", "an unknown time", "")

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host}, since {self.since}"

    @property
    def is_gone(self) -> bool:
        """Whether it ran on this machine and there is no such process any more."""
        if self.machine and self.machine == _machine():
            try:
                os.kill(self.process, 0)
            except OSError as error:
                return isinstance(error, ProcessLookupError)
        return False


@contextlib.contextmanager
def hold_run(run_url: str, run_dir: Path, run_name: str) -> "Iterator[Lease | None]":
    """Be the only process that trains the run while the context is open; for the first process alone. Yields the lease
    of a bucket, or None in a folder, whose lock nothing can take away."""
    if not is_remote(run_url):
        with _locked(run_dir / LOCK_FILE, run_name):
            yield None
        return
    lease = Lease(run_url, run_name)
    lease.acquire()
    try:
        yield lease
    finally:
        lease.release()


@contextlib.contextmanager
def _locked(path: Path, run_name: str) -> Iterator[None]:
    with writing(path, "Set --output_dir to a folder that this user may write."):
        file = path.open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = Holder.from_text(file.read())
            said = f"run '{run_name}' is being trained by {holder} ({path} is locked)"
            remedy = f"Wait for it, stop it (`kill {holder.process}`; it saves first), or use another run_name."
            raise TomatError(f"{said}. {remedy}") from error
        except OSError as error:  # some network file systems have no locks
            warn(f"{path} cannot be locked ({error.strerror}): make sure that no other process trains this run.")
        with writing(path):
            file.truncate(0)
            file.write(json.dumps(asdict(Holder.this_process())) + "\n")
            file.flush()
        yield


class Lease:
    def __init__(
        self, run_url: str, run_name: str, lease_seconds: float = LEASE_SECONDS, renew_seconds: float = RENEW_SECONDS
    ):
        self._store = Store(run_url, tries=LEASE_TRIES)
        self.url = self._store.url + LEASE_FILE
        self._run_name, self._lease_seconds, self._renew_seconds = run_name, lease_seconds, renew_seconds
        self.holder = Holder.this_process()
        self._generation = b""
        self._renewals = 0
        self._lost = ""
        """Who has the lease now, once that is somebody else."""
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        first: bytes | None = None
        since = time.monotonic()
        limit = f"{self._lease_seconds:.0f} s"
        while True:
            found = self._read()
            generation = found.stamp.generation
            theirs = self.holder if found.state == "missing" else Holder.from_text(found.value)
            if theirs.token == self.holder.token or theirs.is_gone:  # nobody has it
                if self._write(generation):
                    break
                continue
            if first is None:
                first = generation
                tell(f"{self.url} is held by {theirs}; waiting up to {limit} to see whether it is renewed.")
            elif generation != first:
                raise TomatError(
                    f"run '{self._run_name}' is being trained by {theirs} ({self.url} has just been renewed). Stop it "
                    f"there, or use another run_name. If it was killed, the same command takes over {limit} later."
                )
            elif time.monotonic() - since >= self._lease_seconds:
                tell(f"{self.url} was not renewed for {limit}: taking over.")
                if self._write(generation):
                    break
                continue
            time.sleep(min(2.0, self._lease_seconds / 10))
        self._thread = threading.Thread(target=self._renew_until_released, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        if self._lost:
            said = f"the lease {self.url} of run '{self._run_name}' now belongs to {self._lost}"
            raise TomatError(f"{said}; this process stops, without a save, so that only one process trains the run.")

    def confirm(self) -> None:
        """Renew the lease, then `check`: while a machine is suspended its clock stands still."""
        since = time.monotonic()
        while True:
            try:
                self._renew()
                break
            except RetryableError:
                if time.monotonic() - since >= self._lease_seconds:
                    raise
            time.sleep(min(1.0, self._lease_seconds / 10))
        self.check()

    def release(self) -> None:
        """Let go of the lease. Where the bucket does not answer, it ends by itself."""
        self._released.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(ValueError, OSError):
            self._store.objects.write(LEASE_FILE, None, if_equal=self._generation).result()

    def _renew_until_released(self) -> None:
        while not self._released.wait(self._renew_seconds) and not self._lost:
            # If the bucket does not answer, `confirm` finds out before it matters.
            with contextlib.suppress(TomatError):
                self._renew()

    def _renew(self) -> None:
        with self._lock:
            if self._lost or self._write(self._generation):
                return
            found = self._read()
            self._lost = "nobody: it was deleted" if found.state == "missing" else str(Holder.from_text(found.value))

    def _write(self, generation: bytes) -> bool:
        """Write the lease if it is still at `generation`; return whether it is this process's now."""
        # The number differs each time: the generation in a folder is made of what the file system records of it.
        self._renewals += 1
        content = json.dumps({**asdict(self.holder), "renewals": self._renewals}).encode()
        with explaining_storage(f"Cannot write {self.url}", "Give this user the right to write it."):
            written: Any = self._store.objects.write(LEASE_FILE, content, if_equal=generation).result()
        if not written.generation:
            # Either refused, or carried out without an answer and refused when TensorStore tried again.
            found = self._read()
            if found.state == "missing" or Holder.from_text(found.value).token != self.holder.token:
                return False
            written = found.stamp
        self._generation = written.generation
        return True

    def _read(self) -> ts.KvStore.ReadResult:
        with explaining_storage(f"Cannot read {self.url}", "Give this user the right to read it."):
            return self._store.objects.read(LEASE_FILE).result()


def _machine() -> str:
    """Names this start of the system and this space of process ids; empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
