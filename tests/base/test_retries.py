import errno
import gzip

import pytest

from tomat.base import retries
from tomat.base.errors import TomatError
from tomat.base.retries import UnreachableError, local_fault, outage, with_retries
from tomat.base.storage import is_passing


@pytest.fixture
def waits(monkeypatch):
    found = []
    monkeypatch.setattr(retries.time, "sleep", found.append)
    return found


def test_outage_is_told_from_a_broken_material():
    def wrapped(cause):
        error = TomatError("cannot read")
        error.__cause__ = cause
        return error

    assert outage(wrapped(ConnectionResetError())) and outage(wrapped(TimeoutError()))
    for harmless in (FileNotFoundError(), gzip.BadGzipFile(), ValueError(), None):
        assert outage(wrapped(harmless)) is None


def test_only_remote_outages_are_tried_again(waits):
    calls = []

    def read():
        calls.append(1)
        raise TomatError("cannot read") from ConnectionRefusedError("refused")

    match = "gs://bucket/a cannot be reached after 2 tries: ConnectionRefusedError.*Check the bucket, the credentials"
    with pytest.raises(UnreachableError, match=match):
        with_retries(read, "gs://bucket/a", 2)
    assert len(calls) == 2
    with pytest.raises(TomatError, match="^cannot read$"):
        with_retries(read, "folder/a", 2)
    assert len(calls) == 3


def test_densities_and_shard_sets_agree_on_what_passes():
    for number in (errno.EBUSY, errno.EMFILE, errno.ENOTCONN, errno.EHOSTDOWN, errno.EAGAIN):
        assert is_passing(OSError(number, "")) and local_fault(OSError(number, ""))


def test_a_lost_sector_is_tried_again_but_the_fault_of_the_file(waits):
    calls = []

    def read():
        calls.append(1)
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        with_retries(read, "folder/a", 3)
    assert len(calls) == 3 and len(waits) == 2
