"""Places that cannot be reached now: they are told from broken data, and tried again.

A place that does not answer must never be taken for a broken material. Reads from such a place are tried again, and
then end the run.
"""

import errno
import gzip
import logging
import multiprocessing
import os
import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from functools import cache
from urllib.parse import urlsplit

from tomat.base.errors import PASSING_ERRNOS, STORAGE_TRIES, RetryableError, causes
from tomat.base.reporting import counted

LONGEST_WAIT_SECONDS = 16.0
"""Longest wait between two tries; the wait doubles from half a second."""


STORAGE_HOST = "https://storage.googleapis.com"
FIRST_CONTACT_SECONDS = 5.0
"""How long a command looks for the host of its buckets before its first request."""


class UnreachableError(RetryableError):
    """A place could not be read, which is not a fault of the material."""


def storage_host() -> str:
    """Where buckets are asked for: Cloud Storage, or `STORAGE_EMULATOR_HOST` as in Google's own libraries."""
    return os.environ.get("STORAGE_EMULATOR_HOST", STORAGE_HOST)


def first_contact(url: str) -> None:
    """Refuse a bucket whose host cannot be connected to, in a process's first request for any bucket. Without a network
    gcsfs says so after 53 s and TensorStore after 34 s, since their retries are for a training that loses its bucket.
    Nothing is checked in the workers of a pool, whose retries have the same purpose, or with a proxy."""
    if not url.startswith(("gs://", "gcs://")) or multiprocessing.parent_process():
        return
    from urllib.request import getproxies

    if getproxies():
        return
    host = storage_host()
    error, ended = _connection(host)
    if error is not None and time.monotonic() - ended > FIRST_CONTACT_SECONDS:
        # This is not the next place of the same command: a caller in Python may have a network by now.
        _connection.cache_clear()
        error, _ = _connection(host)
    if error is not None:
        raise UnreachableError(
            f"{url} cannot be reached: no connection to {host} in {FIRST_CONTACT_SECONDS:.0f} s ({error}). "
            "Is there a network here, and is the address right?"
        )


@cache
def _connection(host: str) -> tuple[OSError | None, float]:
    """The error of connecting to a host, tried for `FIRST_CONTACT_SECONDS` (None: it connects), and when that was."""
    where = urlsplit(host if "://" in host else f"http://{host}")
    address = where.hostname, where.port or (443 if where.scheme == "https" else 80)
    end, found = time.monotonic() + FIRST_CONTACT_SECONDS, queue.SimpleQueue[OSError | None]()

    def connect() -> None:
        wait = 0.5
        while True:
            try:
                socket.create_connection(address, timeout=FIRST_CONTACT_SECONDS).close()
                return found.put(None)
            except OSError as error:
                if time.monotonic() + wait > end:
                    return found.put(error)
            time.sleep(wait)
            wait *= 2

    # A name is looked up without a limit of time, by some resolvers for half a minute.
    threading.Thread(target=connect, daemon=True).start()
    try:
        return found.get(timeout=FIRST_CONTACT_SECONDS), time.monotonic()
    except queue.Empty:
        return TimeoutError("no answer"), time.monotonic()


def with_retries[Result](read: Callable[[], Result], place: str, tries: int = STORAGE_TRIES) -> Result:
    """Call `read`. If it fails because a place cannot be reached, wait and call it again; then `UnreachableError`.

    gcsfs tries a request six times by itself; this is for longer outages, and for file systems behind a network.
    """
    # gcsfs logs what it raises, with a traceback, which a user would take for a crash; here it becomes one line.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    remote = "://" in place
    for attempt in range(tries):
        try:
            return read()
        except MemoryError:
            raise
        except Exception as error:
            cause = outage(error) if remote else local_fault(error)
            # A disk also reports EIO for a sector that is lost for good: after the last try that is the file's fault.
            lost = isinstance(cause, OSError) and cause.errno == errno.EIO and not remote
            if cause is None or (lost and attempt + 1 == tries):
                raise
            if attempt + 1 == tries:
                check = "the bucket, the credentials and the network" if remote else "the disk or the network"
                raise UnreachableError(
                    f"{place} cannot be reached after {counted(tries, 'try', 'tries')}: {type(cause).__name__}: "
                    f"{cause}. Check {check}, then run the same command again; it goes on where it stopped."
                ) from error
        # Many workers meet the same outage; a random part keeps them from coming back at the same moment.
        time.sleep(min(0.5 * 2**attempt, LONGEST_WAIT_SECONDS) * random.uniform(0.75, 1.25))
    raise AssertionError("tries is at least 1")


def outage(error: BaseException | None) -> BaseException | None:
    """The cause of `error` that says that a place cannot be reached; None if the data is at fault."""
    for cause in causes(error):
        # What a decompressor says of damaged data, and what a store says of a missing object.
        if isinstance(cause, gzip.BadGzipFile | FileNotFoundError | IsADirectoryError | NotADirectoryError):
            return None
        # aiohttp, requests, botocore, google-auth and gcsfs have no common base class, and importing them to ask costs
        # a second.
        module = type(cause).__module__.split(".")[0]
        if isinstance(cause, OSError) or module in ("aiohttp", "requests", "botocore", "google", "gcsfs"):
            return cause
    return None


def local_fault(error: BaseException | None) -> OSError | None:
    """The cause of `error` that says that a file system could not answer; None if the file is at fault."""
    # EIO is worth another try, but from a disk of this machine it stays.
    faults = PASSING_ERRNOS | {errno.EIO}
    return next((each for each in causes(error) if isinstance(each, OSError) and each.errno in faults), None)
