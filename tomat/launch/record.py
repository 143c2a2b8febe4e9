"""Who launches a run, with which pack, and what was held for it: `launch.json`, in the bucket beside the run.

It outlives the laptop and the slice, so that another start of the same command goes on with the same launch, and one by
another login finds out that it is somebody else's. How old it is, the bucket alone says: clocks of laptops differ.
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
"""An empty object beside it, written to see what time it is in the bucket."""
_LISTED = re.compile(
    rf"^\s*\d+\s+(?P<time>\S+)\s+gs://\S*/(?P<name>{re.escape(RECORD_FILE)}|{re.escape(NOW_FILE)})$", re.M
)
"""As `gcloud storage ls --long` lists objects: bytes, creation time, URL
(https://cloud.google.com/sdk/gcloud/reference/storage/ls)."""
WATCHED_SECONDS = 600
"""A launcher that has renewed its record within this time is at work; it does so every `RENEW_SECONDS`."""
RENEW_SECONDS = 240


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One launch of a run, from its first slice to its end."""

    login: str
    """Google account, and the user on the hosts."""
    machine: str
    seen: float
    """Unix time of the launcher's last sign of life, by its machine's clock, as `held_since`."""
    watching: bool = True
    """False: it has stopped, and said so."""
    sha256: str
    commit: str
    dirty: bool
    config_path: str
    overrides: list[str]
    tpu_name: str
    zone: str
    held_seconds: float = 0.0
    """For which there was a slice, up to `held_since`."""
    held_since: float | None = None
    """Unix time since when there is one."""
    asked: bool = False
    """One may come, or have come since: Google's queue has been asked for it."""
    endings: list[str] = []
    ended: str | None = None
    """Why the launch is over; None while it is not."""

    def is_of(self, login: "Login") -> bool:
        return (self.login, self.machine) == (str(login), login.machine)

    @property
    def text(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"

    def pack(self, path: Path) -> Pack:
        """What runs; `path` is where its archive would be written here."""
        return Pack(path, self.sha256, self.commit, self.dirty, self.config_path, tuple(self.overrides))

    def held(self, age: float, unwatched_seconds: float) -> float:
        """Seconds with a slice so far, of a record of that age. What was held when its launcher fell silent is counted
        for as long as its hosts keep it then, at most."""
        if self.held_since is None:
            return self.held_seconds
        return self.held_seconds + max(0.0, self.seen + min(age, unwatched_seconds) - self.held_since)


@dataclass(frozen=True)
class Login:
    account: str
    user: str
    """The name that gcloud's ssh logs in with."""
    machine: str
    """Its name and the checkout: two launchers of one machine are two, and keep their logs and packs apart."""

    @classmethod
    def here(cls, account: str) -> "Login":
        return cls(account, getpass.getuser(), f"{platform.node()}:{Path.cwd()}")

    def __str__(self) -> str:
        return f"{self.account} as {self.user}"

    def label(self, run_url: str) -> str:
        """What a slice of this run and login is labelled with (lower-case letters, digits, `-`; at most 63)."""
        of_both = hashlib.sha256(f"{run_url}\0{self}".encode()).hexdigest()[:12]
        return f"{of_both}-{re.sub('[^a-z0-9]+', '-', self.user.lower()).strip('-')}"[:63].rstrip("-")


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "launcher.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TomatError(f"another `tomat launch` of this run is at work here ({folder}); let it.") from None
        yield


def parse_record(text: str, url: str) -> LaunchRecord:
    remedy = "If `gcloud compute tpus tpu-vm list` shows no slice of the run, delete that file."
    return typed_text(text, LaunchRecord, url, remedy)


def age_in_bucket(listing: str) -> float:
    """Seconds between the record and `NOW_FILE`, of a listing of both."""
    try:
        at = {one["name"]: datetime.datetime.fromisoformat(one["time"]) for one in _LISTED.finditer(listing)}
        return max(0.0, (at[NOW_FILE] - at[RECORD_FILE]).total_seconds())
    except (KeyError, ValueError, TypeError):
        said = f"the bucket does not say when {RECORD_FILE} and {NOW_FILE} were written, but '{listing.strip()[:200]}'"
        raise TomatError(f"{said}; expected two lines of bytes, time and URL. Nothing was started.") from None


def other_launcher(record: LaunchRecord, me: Login, age: float) -> str | None:
    """Whose launcher is at work on this run, other than this machine's own; None: nobody's."""
    if record.ended is not None or not record.watching or record.is_of(me):
        return None
    said = f"{record.login} on {record.machine}, whose launcher looked {age:.0f} s ago"
    return None if age >= WATCHED_SECONDS else said
