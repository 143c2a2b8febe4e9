"""What is checked before the first step: regions, clocks."""

import email.utils
import os
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

import jax
from jax.experimental import multihost_utils

from tomat.base.errors import TomatError
from tomat.base.regions import check_regions, known_places
from tomat.base.reporting import readable_bytes
from tomat.train.datasets import Datasets
from tomat.train.guards.alike import NO_LIMIT_SECONDS, gathered
from tomat.train.settings.config import TrainConfig

USD_PER_GIB_BETWEEN_REGIONS = 0.02
"""Least that Cloud Storage charges for data that leave a region (cloud.google.com/storage/pricing, "data transfer
within Google Cloud", between regions of North America or of Europe); between continents it is more."""

REFUSED_CLOCK_SKEW_SECONDS = 300.0
"""Google refuses the tokens of a service account (`invalid_grant`) if the clock of the machine that asks is five
minutes off, so a run with such a clock ends at its first save."""

STORAGE_HOST = "https://storage.googleapis.com"
CLOCK_TIMEOUT_SECONDS = 5.0


def check_run_regions(config: TrainConfig, datasets: Datasets) -> str | None:
    """Refuse to read data or write checkpoints across regions unless `guards.allow_cross_region` is set.

    Returns:
        What to say when it is allowed and happens; None when all is in one region.
    """
    data = config.data
    urls = {"training data": data.train, "validation data": data.validation, "checkpoints": config.output_dir}
    size = sum(shards.uncompressed_bytes for shards in (datasets.train, datasets.validation) if shards is not None)
    return check_regions(
        known_places(urls, "machine"),
        config.guards.allow_cross_region,
        cost=f"Read from another region, an epoch of {readable_bytes(size)} costs at least "
        f"USD {size / 2**30 * USD_PER_GIB_BETWEEN_REGIONS:.2g} (uncompressed; USD {USD_PER_GIB_BETWEEN_REGIONS} per "
        "GiB), and the same data halved the MFU of runs that read them so",
        remedy="Use a slice and buckets of one region, or set --guards.allow_cross_region true.",
    )


def check_clocks(config: TrainConfig, now: Callable[[], float] = time.time) -> list[str]:
    """Compare the clocks of all hosts with one another and, where a bucket is used, with Cloud Storage's.

    Every host gets the same answer. Checkpoints carry the time of the host that wrote them, and the tokens that open a
    bucket that of the host that asks.

    Returns:
        A warning for each clock beyond `guards.max_clock_skew_seconds`.
    """
    buckets = [url for url in (config.output_dir, config.data.train) if url and url.startswith(("gs://", "gcs://"))]
    skew = storage_clock_skew(now) if buckets else None
    if jax.process_count() > 1:
        # So that all read their clocks within the time that a barrier takes to open.
        multihost_utils.sync_global_devices("tomat: clocks")
    hosts, skews = zip(*gathered((now(), skew), NO_LIMIT_SECONDS), strict=True)
    return clock_warnings(hosts, skews, config.guards.max_clock_skew_seconds)


def clock_warnings(hosts: Sequence[float], skews: Sequence[float | None], limit: float) -> list[str]:
    """What to say of the clocks.

    Args:
        hosts: Each host's clock at one moment, seconds since 1970.
        skews: Each host's clock less Cloud Storage's, seconds; None where that is not known.
        limit: Seconds above which a clock is warned of.
    """
    middle = statistics.median(hosts)
    offs = [(time - middle, f"the clock of host {i}", "the median of all hosts") for i, time in enumerate(hosts)]
    offs += [(skew, f"the clock of host {i}", "Cloud Storage") for i, skew in enumerate(skews) if skew is not None]
    warnings = []
    for off, whose, against in offs:
        if abs(off) <= limit:
            continue
        found = f"{whose} is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} {against}"
        if abs(off) > REFUSED_CLOCK_SKEW_SECONDS:
            raise TomatError(
                f"{found}; beyond {REFUSED_CLOCK_SKEW_SECONDS:.0f} s Google refuses its tokens, and the times of "
                "checkpoints mean nothing. Set the clock (`sudo chronyc makestep`, or restart the machine)."
            )
        warnings.append(f"{found}; set it with `sudo chronyc makestep`.")
    return warnings


def storage_clock_skew(now: Callable[[], float] = time.time) -> float | None:
    """This machine's clock less Cloud Storage's in seconds, to about one; None where the server does not answer.

    The server is the one of `STORAGE_EMULATOR_HOST`, as in Google's own libraries, where that is set.
    """
    host = os.environ.get("STORAGE_EMULATOR_HOST", STORAGE_HOST)
    before = now()
    try:
        with urllib.request.urlopen(f"{host}/", timeout=CLOCK_TIMEOUT_SECONDS) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:  # nothing lies at `/`; the answer has a date all the same
        headers = error.headers
    except (OSError, ValueError):
        return None
    try:
        # The header has whole seconds: on average it is half a second old.
        server = email.utils.parsedate_to_datetime(headers["Date"]).timestamp() + 0.5
    except ValueError:
        return None
    return (before + now()) / 2 - server
