"""What the command line makes of an error, and which faults of storage pass."""

import errno

import pytest
import requests

from tomat.app.cli import errors_told
from tomat.base.errors import RetryableError, TomatError
from tomat.base.storage import is_passing, storage_error, storage_errors


def test_every_kind_of_error_has_a_status_of_its_own(capsys):
    for error, status in ((TomatError("no"), 2), (RetryableError("later"), 75), (KeyboardInterrupt(), 130)):
        with errors_told() as outcome:
            raise error
        assert outcome.status == status and len(capsys.readouterr().err.splitlines()) == 1


# Texts of TensorStore 0.1.84, from a bucket with such faults and from a folder.
PASSING = [
    ValueError("ABORTED: All 6 retry attempts failed: injected [http_response_code='429'] [source locations='a']"),
    ValueError("UNAVAILABLE: connection closed [source locations='a']"),
    TimeoutError(),
    OSError(errno.ESTALE, "Stale file handle"),
]
LASTING = [
    ValueError('PERMISSION_DENIED: Failed to open: "/x": Permission denied [os_error_code="13"]'),
    ValueError("DATA_LOSS: Digest mismatch, UNAVAILABLE is not what it begins with"),
    PermissionError(errno.EACCES, "Permission denied"),
    OSError("Forbidden: bucket/x"),
]


@pytest.mark.parametrize("error", [*PASSING, *LASTING], ids=str)
def test_what_passes_is_worth_another_try_and_what_stays_says_what_to_do(error):
    found = storage_error("gs://b/x cannot be read", error, "Give rights.")
    assert isinstance(found, RetryableError) == (error in PASSING)
    assert ("try again" if error in PASSING else "Give rights.") in str(found) and "source locations" not in str(found)


def test_gcsfs_says_itself_what_is_worth_another_try():
    from gcsfs.retry import HttpError

    unavailable, refused = (HttpError({"code": code, "message": "no"}) for code in (503, 400))
    assert is_passing(unavailable) and is_passing(requests.exceptions.ProxyError()) and not is_passing(refused)
    assert isinstance(unavailable, storage_errors())
