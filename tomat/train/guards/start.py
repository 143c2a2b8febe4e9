"""What a run needs around it: one region, clocks that are right, room for its checkpoints.

All of it is checked before the first step; room that runs out later ends the run with one clear error.
"""

import contextlib
import email.utils
import shutil
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from tomat.base.errors import FULL_ERRNOS, RetryableError, TomatError
from tomat.base.regions import check_regions, known_places
from tomat.base.reporting import first_line, readable_bytes
from tomat.base.retries import storage_host
from tomat.base.storage import is_passing, is_remote, storage_errors
from tomat.train.datasets import Datasets
from tomat.train.guards.alike import gathered
from tomat.train.settings.config import TrainConfig

USD_PER_GIB_BETWEEN_REGIONS = 0.02
"""Least that Cloud Storage charges for data that leave a region (cloud.google.com/storage/pricing, "data transfer
within Google Cloud", between regions of North America or of Europe); between continents it is more."""

REFUSED_CLOCK_SKEW_SECONDS = 300.0
"""Google refuses the tokens of a service account (`invalid_grant`) if the clock of the machine that asks is five
minutes off, so a run with such a clock ends at its first save."""

CLOCK_TIMEOUT_SECONDS = 5.0

FREE_CHECKPOINTS = 2
"""Checkpoints that must fit before a run begins: a save is whole before the one it replaces is removed."""

FULL_WORDS = ("no space left on device", "disk quota exceeded", "resource_exhausted", "quota exceeded", "quotaexceeded")
"""How TensorStore, the operating system and Cloud Storage (reasons of its JSON API: `quotaExceeded`) say "full"."""


def check_run_regions(config: TrainConfig, datasets: Datasets) -> str | None:
    """Refuse to read data or write checkpoints across regions unless `guards.allow_cross_region` is set. Return what to
    say if it is set and regions are crossed; None where all is in one region."""
    data = config.data
    urls = {"training data": data.train, "validation data": data.validation, "checkpoints": config.output_dir}
    urls["temporary checkpoints"] = config.temporary_checkpoints
    size = sum(shards.uncompressed_bytes for shards in (datasets.train, datasets.validation) if shards is not None)
    return check_regions(
        known_places(urls, "machine"),
        config.guards.allow_cross_region,
        cost=f"Reading an epoch of {readable_bytes(size)} from another region costs at least "
        f"USD {size / 2**30 * USD_PER_GIB_BETWEEN_REGIONS:.2g} (uncompressed; USD {USD_PER_GIB_BETWEEN_REGIONS} per "
        "GiB), and halved the MFU of runs that did so",
        remedy="Use a slice and buckets of one region, or set --guards.allow_cross_region true.",
    )


def check_clocks(config: TrainConfig, now: Callable[[], float] = time.time) -> list[str]:
    """Compare the clocks of all hosts with one another and, where a bucket is used, with Cloud Storage's. Return a
    warning for each beyond `guards.max_clock_skew_seconds`, the same on every host. A checkpoint carries the time of
    the host that wrote it, and a token that opens a bucket that of the host that asks."""
    buckets = [url for url in (config.output_dir, config.data.train) if url and url.startswith(("gs://", "gcs://"))]
    skew = storage_clock_skew(now) if buckets else None
    if jax.process_count() > 1:
        # So that all read their clocks within the time that a barrier takes to open.
        multihost_utils.sync_global_devices("tomat: clocks")
    hosts, skews = zip(*gathered((now(), skew)), strict=True)
    return clock_warnings(hosts, skews, config.guards.max_clock_skew_seconds)


def clock_warnings(hosts: Sequence[float], skews: Sequence[float | None], limit: float) -> list[str]:
    """Warnings of clocks that are off by more than `limit` seconds. `hosts` are the hosts' clocks at one moment, in
    seconds since 1970; `skews` are these minus Cloud Storage's, None where that is not known."""
    middle = statistics.median(hosts)
    offs = [(time - middle, f"the clock of host {i}", "the median of all hosts") for i, time in enumerate(hosts)]
    offs += [(skew, f"the clock of host {i}", "Cloud Storage") for i, skew in enumerate(skews) if skew is not None]
    warnings = []
    for off, whose, against in offs:
        if abs(off) <= limit:
            continue
        found = f"{whose} is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} {against}"
        if abs(off) > REFUSED_CLOCK_SKEW_SECONDS:
            found += f"; beyond {REFUSED_CLOCK_SKEW_SECONDS:.0f} s Google refuses its tokens"
            raise TomatError(f"{found}. Set it (`sudo chronyc makestep`, or restart the machine).")
        warnings.append(f"{found}; set it with `sudo chronyc makestep`.")
    return warnings


def storage_clock_skew(now: Callable[[], float] = time.time) -> float | None:
    """This machine's clock minus Cloud Storage's in seconds, to about one; None where the server does not answer."""
    before = now()
    with contextlib.suppress(OSError, ValueError):
        try:
            with urllib.request.urlopen(f"{storage_host()}/", timeout=CLOCK_TIMEOUT_SECONDS) as answer:
                headers = answer.headers
        except urllib.error.HTTPError as error:  # nothing lies at `/`; the answer has a date all the same
            headers = error.headers
        # The header has whole seconds: on average it is half a second old.
        server = email.utils.parsedate_to_datetime(headers["Date"]).timestamp() + 0.5
        return (before + now()) / 2 - server
    return None


def check_free_space(output_dir: str, needed: int) -> None:
    """Refuse to begin a run whose disk has no room for its checkpoints; a bucket has no limit to ask for."""
    if not is_remote(output_dir) and (free := shutil.disk_usage(output_dir).free) < FREE_CHECKPOINTS * needed:
        said = f"{output_dir} has {readable_bytes(free)} free; a checkpoint of this run takes up to "
        said += f"{readable_bytes(needed)}, and {FREE_CHECKPOINTS} must fit"
        raise TomatError(f"{said}. Free space or set another output_dir.")


@contextlib.contextmanager
def explaining_full_storage(run_dir: Path, run_url: str, needed: Callable[[], int]) -> Iterator[None]:
    """Turn whatever a full disk or bucket, or one that does not answer, raises into one error; `needed` gives the bytes
    of a checkpoint, 0 while that is not known."""
    try:
        yield
    except Exception as error:
        cause = full_storage_cause(error)
        # XLA's errors begin with the same codes, which there are about another host.
        storage = (ValueError, *storage_errors())
        passing = [one for one in _causes(error) if isinstance(one, storage) and is_passing(one)]
        if cause is None and passing and not isinstance(error, TomatError):
            raise RetryableError(
                f"{run_url}: the storage did not answer ({first_line(passing[0])}). The checkpoints written before are "
                "whole, and the same command continues from the last of them."
            ) from error
        if cause is None:
            raise
        path = str(getattr(cause, "filename", None) or run_url)
        free = "" if is_remote(path) else f"; {readable_bytes(shutil.disk_usage(run_dir).free)} are free"
        checkpoint = f" A checkpoint takes up to {readable_bytes(needed())}." if needed() else ""
        raise TomatError(
            f"{path}: no room left while writing{free} ({first_line(cause)}).{checkpoint} The checkpoints written "
            "before are whole, and the same command continues from the last of them once there is room."
        ) from error


def full_storage_cause(error: BaseException) -> BaseException | None:
    """The error, among `error` and what led to it, that says a disk or a quota is full; None where none does."""
    seen = _causes(error)
    # The operating system's own error names the file; what quotes it in its text comes second.
    full = [item for item in seen if getattr(item, "errno", None) in FULL_ERRNOS]
    # XLA says RESOURCE_EXHAUSTED too, about a device's memory; that is no storage, and its own text is the better one.
    others = (item for item in seen if not isinstance(item, TomatError | jax.errors.JaxRuntimeError))
    full += [item for item in others if any(words in str(item).lower() for words in FULL_WORDS)]
    return full[0] if full else None


def _causes(error: BaseException) -> list[BaseException]:
    """`error`, and what led to it, the nearest first."""
    seen = [error]
    for current in seen:
        # Errors that Levanter's trainer gathers while it closes are in the arguments of one RuntimeError.
        nested = [item for arg in current.args if isinstance(arg, list) for item in arg]
        for item in (current.__cause__, current.__context__, *nested):
            if isinstance(item, BaseException) and item not in seen:
                seen.append(item)
    return seen
