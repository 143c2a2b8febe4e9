"""The place of a data set: a folder or a `gs://` URL, both read and written through TensorStore."""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

import tensorstore as ts

from tomat.base.errors import PASSING_ERRNOS, STORAGE_TRIES, RetryableError, TomatError

ARRAY_NAME = "tokens.zarr"
MANIFEST_NAME = "manifest.json"
CODEC_NAME = "codec.json"
STRUCTURES_NAME = "structures.npz"
PROMOLECULE_NAME = "promolecule.json"
PROGRESS_PREFIX = "progress/"
"""Prefix of one object for each written chunk, with its checksum. They are removed once the set is complete."""

COMPRESSION = {"cname": "zstd", "clevel": 3, "shuffle": "bitshuffle", "typesize": 2}
"""Blosc with bits shuffled. Normally distributed ids around 10,000 with a deviation of 3,000, 64 x 8,192: 90 % of the
raw size and 0.6 ms to read, against 93 % and 1.0 ms for plain zstd at level 3 (file://, one core)."""


def retry_context(tries: int) -> ts.Context:
    """TensorStore's settings for a bucket that is tried `tries` times: on 408, 429, 5xx and broken connections, with
    a wait that doubles from 0.5 s to 16 s."""
    return ts.Context(
        # At least one: TensorStore refuses 0.
        {"gcs_request_retries": {"max_retries": max(tries - 1, 1), "initial_delay": "500ms", "max_delay": "16s"}}
    )


def store_url(place: str | Path) -> str:
    """The TensorStore URL, with a final slash, of a folder or a `file://` or `gs://` URL; others are refused."""
    text = str(place)
    scheme = re.match(r"([a-z0-9]+)://", text)
    if scheme is None:
        text = Path(text).absolute().as_uri()
    elif scheme.group(1) not in ("file", "gs"):
        raise TomatError(f"{text} is neither a folder nor a gs:// URL; a shard set lies in one of these.")
    return text.rstrip("/") + "/"


def local_target(folder: Path, relative: str, origin: str) -> Path:
    """Where a remote object of that name is copied to in `folder`. A bucket may hold any name, such as `../../.bashrc`:
    a name that leads out of the folder is refused. `origin` names the place in the error."""
    root = folder.resolve()
    # No path has a zero byte; the folder itself is refused below.
    target = root if "\x00" in relative else (root / relative).resolve()
    if not target.is_relative_to(root) or target == root:
        what = f"{origin}: the name {relative!r} leads out of the folder it would be copied to"
        raise TomatError(f"{what}, so nothing is copied. Rename the object.")
    return target


def short_message(error: Exception) -> str:
    """TensorStore's error without its specification and source locations."""
    return str(error).split(" [")[0]


PASSING_CODES = ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
"""TensorStore's status codes for a fault that passes. `ABORTED: All 6 retry attempts failed` is what 0.1.84 says of a
bucket that went on answering 429 or 503, broke connections, cut answers short or could not be reached."""


def is_passing(error: BaseException) -> bool:
    """Whether an error of TensorStore, the operating system or gcsfs is one that passes, as far as it says."""
    if isinstance(error, RetryableError | TimeoutError | ConnectionError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in PASSING_ERRNOS
    if str(error).startswith(PASSING_CODES):
        return True
    # gcsfs is loaded once a gs:// URL was opened through fsspec, and has its own rule for what is worth another try.
    gcsfs_retry = sys.modules.get("gcsfs.retry")
    return gcsfs_retry is not None and gcsfs_retry.is_retriable(error)


def storage_errors() -> tuple[type[Exception], ...]:
    """What fsspec raises for a place that cannot be read or written: OSError, and, if gcsfs or botocore is loaded,
    their own classes, which are not OSErrors (2026.2.0, 1.43)."""
    found: list[type[Exception]] = [OSError]
    if (gcsfs_retry := sys.modules.get("gcsfs.retry")) is not None:
        found += [gcsfs_retry.HttpError, *gcsfs_retry.RETRIABLE_EXCEPTIONS]
    if (botocore := sys.modules.get("botocore.exceptions")) is not None:
        found += [botocore.BotoCoreError, botocore.ClientError]
    return tuple(found)


def is_remote(place: str) -> bool:
    return "://" in place


PLACEHOLDER = re.compile(r'Invalid GCS bucket name: "BUCKET"')
"""What TensorStore says about the address that stands for the user's bucket in the recipes of pods."""
READ_REMEDY = "Give this user the right to read it."


@contextlib.contextmanager
def explaining_storage(what: str, remedy: str = "") -> Iterator[None]:
    """Turn what a folder or a bucket raises in the block, through fsspec or TensorStore, into one error, as
    `storage_error`."""
    try:
        yield
    except (ValueError, *storage_errors()) as error:
        raise storage_error(what, error, remedy) from error


def storage_error(what: str, error: Exception, remedy: str) -> TomatError:
    """The error to raise for a place that could not be read or written: a `RetryableError` if the fault passes. `what`
    says what failed, such as "gs://b/x cannot be read"; the `remedy` is for a fault that stays."""
    cause = " ".join(short_message(error).split()).rstrip(".") or type(error).__name__
    if is_passing(error):
        return RetryableError(f"{what}: {cause}. The storage did not answer; try again.")
    if "Cannot connect to host" in cause:  # from aiohttp, which gives no errno for a name that cannot be looked up
        remedy = "Is there a network here, and is the address right?"
    elif PLACEHOLDER.search(cause):
        remedy = "BUCKET stands for the name of your own; give it."
    return TomatError(f"{what}: {cause}.{f' {remedy}' if remedy else ''}")


def files_at(url: str) -> tuple[Any, str]:
    """The file system of fsspec that a folder or URL lies on, and its path there, after `first_contact`."""
    import fsspec

    _look_for_host(url)
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a kind of place that fsspec, or what is installed here, does not know
        raise TomatError(f"{url} cannot be reached: {short_message(error).rstrip('.')}.") from error


def _look_for_host(url: str) -> None:
    """`first_contact` for a bucket. It is not imported for a local folder."""
    if url.startswith(("gs://", "gcs://")):
        from tomat.base.retries import first_contact

        first_contact(url)


class Store:
    """The objects of one data set in a folder or `gs://` URL, by name. What cannot be read or written raises a
    `TomatError` or, if the storage does not answer after `tries` tries, a `RetryableError`."""

    def __init__(self, place: str | Path, tries: int = STORAGE_TRIES) -> None:
        self.url = store_url(place)
        self.context = retry_context(tries)
        _look_for_host(self.url)
        with explaining_storage(f"Cannot open {self.url}"):
            self.objects = ts.KvStore.open(self.url, context=self.context).result()

    def read(self, name: str) -> bytes | None:
        with explaining_storage(f"Cannot read {self.url}{name}"):
            found = self.objects.read(name).result()
        return found.value if found.state == "value" else None

    def write(self, name: str, content: bytes) -> None:
        """Write an object in one step: a reader sees the old or the new one."""
        with explaining_storage(f"Cannot write {self.url}{name}"):
            self.objects.write(name, content).result()

    def names(self, prefix: str) -> list[str]:
        """Names, without the prefix, of the objects that begin with `prefix`, sorted."""
        with explaining_storage(f"Cannot list {self.url}{prefix}"):
            found = self.objects.list(_beginning_with(prefix), strip_prefix_length=len(prefix)).result()
        return sorted(name.decode() for name in found)

    def delete(self, prefix: str) -> None:
        with explaining_storage(f"Cannot delete {self.url}{prefix}"):
            self.objects.delete_range(_beginning_with(prefix)).result()
        if self.url.startswith("file://") and prefix.endswith("/"):
            # A bucket has no folders; on disk TensorStore leaves the empty one.
            with contextlib.suppress(OSError):
                Path(url2pathname(self.url.removeprefix("file://") + prefix)).rmdir()

    def open_array(self) -> ts.TensorStore:
        remedy = "The set is damaged: copy or tokenize it again."
        with explaining_storage(f"Cannot open the token array {self.url}{ARRAY_NAME}", remedy):
            spec = {"driver": "zarr3", "kvstore": self.url + ARRAY_NAME + "/"}
            return ts.open(spec, open=True, context=self.context).result()

    def create_array(self, rows: int, context: int, block_rows: int) -> ts.TensorStore:
        """The token array, uint16 [rows, context], in chunks of [block_rows, context]. It is opened if it exists;
        another array in its place is refused."""
        metadata = {
            "shape": [rows, context],
            "data_type": "uint16",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [block_rows, context]}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "blosc", "configuration": COMPRESSION},
                {"name": "crc32c"},
            ],
            "fill_value": 0,
        }
        spec = {"driver": "zarr3", "kvstore": self.url + ARRAY_NAME + "/", "metadata": metadata}
        with explaining_storage(f"Cannot create the token array {self.url}{ARRAY_NAME}"):
            return ts.open(spec, open=True, create=True, context=self.context).result()


def _beginning_with(prefix: str) -> ts.KvStore.KeyRange:
    return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))
