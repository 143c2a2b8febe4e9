import errno
import gzip
import socket
import time

import pytest

from tomat.base import retries
from tomat.base.errors import TomatError
from tomat.base.retries import FIRST_CONTACT_SECONDS, UnreachableError, first_contact, local_fault, with_retries
from tomat.base.storage import is_passing

CUT_OFF, LOST = ConnectionRefusedError("refused"), OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("cause", "place", "tries"),
    [
        (CUT_OFF, "gs://bucket/a", 3), (TimeoutError(), "gs://bucket/a", 3), (CUT_OFF, "folder/a", 1),
        (LOST, "folder/a", 3),  # a lost sector: the fault of the file
        (FileNotFoundError(), "gs://bucket/a", 1), (gzip.BadGzipFile(), "gs://bucket/a", 1), (None, "gs://bucket/a", 1),
    ],
)  # fmt: skip
def test_an_outage_is_tried_again_and_told_from_a_broken_material(monkeypatch, cause, place, tries):
    waits = []
    monkeypatch.setattr(retries.time, "sleep", waits.append)

    def read():
        raise TomatError("cannot read") from cause

    with pytest.raises(TomatError) as error:
        with_retries(read, place, 3)
    assert len(waits) == tries - 1
    unreachable = tries > 1 and cause is not LOST
    assert isinstance(error.value, UnreachableError) == unreachable
    assert not unreachable or f"{place} cannot be reached after 3 tries: {type(cause).__name__}" in str(error.value)


def test_densities_and_shard_sets_agree_on_what_passes():
    for number in (errno.EBUSY, errno.EMFILE, errno.ENOTCONN, errno.EHOSTDOWN, errno.EAGAIN):
        assert is_passing(OSError(number, "")) and local_fault(OSError(number, ""))


def test_the_first_contact_of_a_command_with_a_bucket_ends_soon_and_its_next_ones_are_not_looked_after(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{host}")
        first_contact("gs://bucket/a")
    first_contact("gs://bucket/a")  # of a training that has lost its bucket: its retries decide
    # Of another host, where nobody listens any more; a folder needs none.
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
    first_contact("runs")
    began = time.monotonic()
    with pytest.raises(
        UnreachableError, match=f"^gs://bucket/a cannot be reached: no connection to {host} in 5 s .*refused"
    ):
        # As a density is read: not once more after it.
        with_retries(lambda: first_contact("gs://bucket/a"), "gs://bucket/a")
    assert time.monotonic() - began < FIRST_CONTACT_SECONDS + 1
