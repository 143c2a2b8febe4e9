from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.base.storage import explaining_storage, files_at, local_target


@given(st.lists(st.sampled_from(["..", ".", "a", "b", "", "/", "~"]), max_size=6).map("/".join))
def test_a_target_lies_below_its_folder_or_is_refused(name):
    folder = Path("/somewhere/scratch")
    try:
        target = local_target(folder, name, "gs://bucket")
    except TomatError as error:
        assert repr(name) in str(error) and "gs://bucket" in str(error)
        return
    assert folder in target.parents and ".." not in target.parts


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "a/\x00", "..", ""])
def test_names_that_lead_out(name):
    with pytest.raises(TomatError, match="leads out of the folder"):
        local_target(Path("/somewhere/scratch"), name, "gs://bucket")


@pytest.mark.parametrize("url, message", [("nothing://b/x", "Protocol not known"), ("az://b/x", "Install adlfs")])
def test_a_kind_of_place_that_nothing_here_reaches_is_one_error(url, message):
    with pytest.raises(TomatError, match=f"{url} cannot be reached: {message}"):
        files_at(url)


def test_a_bucket_of_amazon_without_credentials_is_one_error():
    """They are no OSError, and were a traceback of 60 lines."""
    from botocore.exceptions import NoCredentialsError

    with pytest.raises(TomatError, match="s3://b/x cannot be read: Unable to locate credentials. Give this user"):
        with explaining_storage("s3://b/x cannot be read", "Give this user the right to read it."):
            raise NoCredentialsError()
