"""The record of a launch, `launch.json` in the bucket beside the run: launcher, pack, and time with a slice.

The record outlives the laptop and the slice. Another start of the same command continues the launch, and a start by
another login sees that it belongs to somebody else. Its age is read from the bucket, as clocks of laptops differ.
"""

import contextlib
import datetime
import fcntl
import getpass
import hashlib
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tomat.base.errors import TomatError
from tomat.base.records import typed_text
from tomat.launch.pack import Pack

RECORD_FILE = "launch.json"
NOW_FILE = "launch.now"
"""An empty object beside `RECORD_FILE`, written to get the current time of the bucket."""
_LISTED = re.compile(
    rf"^\s*\d+\s+(?P<time>\S+)\s+gs://\S*/(?P<name>{re.escape(RECORD_FILE)}|{re.escape(NOW_FILE)})$", re.M
)
"""A line of `gcloud storage ls --long`: bytes, creation time, URL
(https://cloud.google.com/sdk/gcloud/reference/storage/ls)."""
WATCHED_SECONDS = 600
"""A launcher that has renewed its record within this time is still running. It renews it every `RENEW_SECONDS`."""
RENEW_SECONDS = 240


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One launch of a run, from its first slice to its end."""

    login: str
    """Google account and user on the hosts, as `Login` writes them."""
    machine: str
    seen: float
    """Unix time of the launcher's last sign of life, by the clock of its machine, like `held_since`."""
    watching: bool = True
    """False: the launcher has stopped and recorded that."""
    sha256: str
    commit: str
    dirty: bool
    config_path: str
    overrides: list[str]
    tpu_name: str
    zone: str
    held_seconds: float = 0.0
    """Seconds with a slice before `held_since`."""
    held_since: float | None = None
    """Unix time since when there is a slice; None if there is none."""
    asked: bool = False
    """A slice was asked for, so it may come, or may have come since."""
    unwatched_hours: float | None = 1.0
    """What the hosts of the slice were told when it was made; a later command may have another value."""
    endings: list[str] = []
    ended: str | None = None
    """Why the launch is over; None while it is not."""

    def is_of(self, login: "Login") -> bool:
        return (self.login, self.machine) == (str(login), login.machine)

    @property
    def text(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"

    def pack(self, path: Path) -> Pack:
        """The pack of this launch; `path` is where its archive would be written on this machine."""
        return Pack(path, self.sha256, self.commit, self.dirty, self.config_path, tuple(self.overrides))

    def held(self, age: float, unwatched_seconds: float) -> float:
        """Seconds with a slice so far, if the record is `age` seconds old. A slice whose launcher is silent counts for
        at most `unwatched_seconds` more, because its hosts then give it back."""
        if self.held_since is None:
            return self.held_seconds
        return self.held_seconds + max(0.0, self.seen + min(age, unwatched_seconds) - self.held_since)


@dataclass(frozen=True)
class Login:
    account: str
    user: str
    """The name that gcloud's ssh logs in with."""
    machine: str
    """Name of the machine and the checkout. Launchers of two checkouts differ, and keep separate logs and packs."""

    @classmethod
    def here(cls, account: str) -> "Login":
        return cls(account, getpass.getuser(), f"{platform.node()}:{Path.cwd()}")

    def __str__(self) -> str:
        return f"{self.account} as {self.user}"

    def label(self, run_url: str) -> str:
        """The label of a slice of this run and login: at most 63 lower-case letters, digits and `-`."""
        of_both = hashlib.sha256(f"{run_url}\0{self}".encode()).hexdigest()[:12]
        return f"{of_both}-{re.sub('[^a-z0-9]+', '-', self.user.lower()).strip('-')}"[:63].rstrip("-")


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "launcher.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TomatError(f"another `tomat launch` of this run is at work here ({folder}); let it go on.") from None
        yield


def parse_record(text: str, url: str) -> LaunchRecord:
    remedy = "If `gcloud compute tpus tpu-vm list` shows no slice of the run, delete that file."
    return typed_text(text, LaunchRecord, url, remedy)


def age_in_bucket(listing: str) -> float:
    """Age of the record in seconds: the time between the record and `NOW_FILE` in a listing of both."""
    try:
        at = {one["name"]: datetime.datetime.fromisoformat(one["time"]) for one in _LISTED.finditer(listing)}
        return max(0.0, (at[NOW_FILE] - at[RECORD_FILE]).total_seconds())
    except (KeyError, ValueError, TypeError):
        said = f"asked when {RECORD_FILE} and {NOW_FILE} were written, the bucket says '{listing.strip()[:200]}'"
        raise TomatError(f"{said}; expected two lines of bytes, time and URL. Nothing was started.") from None


def other_launcher(record: LaunchRecord, me: Login, age: float) -> str | None:
    """Another launcher that is running for this record; None if there is none."""
    if record.ended is not None or not record.watching or record.is_of(me):
        return None
    said = f"{record.login} on {record.machine}, whose launcher looked {age:.0f} s ago"
    return None if age >= WATCHED_SECONDS else said
