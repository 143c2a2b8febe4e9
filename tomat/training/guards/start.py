"""What is checked before the first step: regions, clocks."""

import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from tomat.base.clocks import clock_warnings, storage_clock_skew
from tomat.base.regions import check_regions, known_places
from tomat.base.reporting import readable_bytes
from tomat.training.config import TrainConfig
from tomat.training.datasets import Datasets

USD_PER_GIB_BETWEEN_REGIONS = 0.02
"""Least that Cloud Storage charges for data that leave a region (cloud.google.com/storage/pricing, "data transfer
within Google Cloud", between regions of North America or of Europe); between continents it is more."""

_NOT_KNOWN = np.iinfo(np.int32).max


def check_run_regions(config: TrainConfig, datasets: Datasets) -> str | None:
    """Refuse to read data or write checkpoints across regions unless `guards.allow_cross_region` is set.

    Returns:
        What to say when it is allowed and happens; None when all is in one region.

    Raises:
        TomatError: Naming the regions and the cost.
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

    Args:
        config: The run.
        now: This host's clock, seconds since 1970.

    Returns:
        A warning for each clock beyond `guards.max_clock_skew_seconds`.

    Raises:
        TomatError: A clock is too far off for Google's tokens.
    """
    buckets = [url for url in (config.output_dir, config.data.train) if url and url.startswith(("gs://", "gcs://"))]
    server_skew = storage_clock_skew(now) if buckets else None
    if jax.process_count() > 1:
        # So that all read their clocks within the time that a barrier takes to open.
        multihost_utils.sync_global_devices("tomat: clocks")
    seconds, fraction = divmod(now(), 1.0)
    server = _NOT_KNOWN if server_skew is None else round(1000 * server_skew)
    # Integers of 32 bits: JAX would make float32 of a double, which is exact to two minutes today.
    row = np.array([int(seconds), int(1e6 * fraction), server], np.int32)
    rows = np.asarray(multihost_utils.process_allgather(row)).reshape(-1, 3)
    return clock_warnings(
        [int(s) + int(micro) / 1e6 for s, micro, _ in rows],
        [None if skew == _NOT_KNOWN else int(skew) / 1000 for *_, skew in rows],
        config.guards.max_clock_skew_seconds,
    )
