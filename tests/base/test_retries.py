import errno
import gzip

import pytest

from tomat.base import retries
from tomat.base.errors import TomatError
from tomat.base.retries import UnreachableError, local_fault, with_retries
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
