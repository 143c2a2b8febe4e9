"""Where input, output and worker are, and whether that is one place.

Reading a bucket from another region costs money by the byte and made a training step wait a minute for its data; so it
should be a decision.
"""

import itertools
import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from tomat.base.errors import TomatError
from tomat.base.retries import first_contact

DUAL_REGIONS: Mapping[str, tuple[str, ...]] = {
    "nam4": ("us-central1", "us-east1"),
    "eur4": ("europe-north1", "europe-west4"),
    "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"),
    "eur8": ("europe-west3", "europe-west6"),
    "asia1": ("asia-northeast1", "asia-northeast2"),
}
"""Predefined dual-regions of Cloud Storage (cloud.google.com/storage/docs/locations)."""

MULTI_REGIONS: Mapping[str, str] = {"us": "us-", "eu": "europe-", "asia": "asia-"}
"""Multi-regions of Cloud Storage and how the names of their regions begin (same page)."""

METADATA_HOST = "metadata.google.internal"
"""Metadata server of a Google virtual machine; `GCE_METADATA_HOST` names another, as Google's own libraries have it."""

METADATA_TIMEOUT_SECONDS = 2.0
"""A metadata server answers within milliseconds."""


@dataclass(frozen=True)
class Place:
    role: str
    """`input`, `output` or `worker`; of a run, `training data`, `checkpoints`, `machine`."""
    what: str
    """The bucket, or the machine."""
    region: str
    """`us-east5`; a multi- or dual-region, `us`, `nam4`; `amazon s3` for another provider's bucket."""


def same_region(first: str, second: str) -> bool:
    """True if data between the two stays in a region: they are the same, or one is a part of the other."""

    def is_of(part: str, whole: str) -> bool:
        return part in DUAL_REGIONS.get(whole, ()) or (whole in MULTI_REGIONS and part.startswith(MULTI_REGIONS[whole]))

    return first == second or is_of(first, second) or is_of(second, first)


def bucket_region(url: str) -> str | None:
    """Region of the bucket of a URL, in lower case; None for a folder, and where the bucket does not tell."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("gs", "gcs"):
        return "amazon s3" if separator and scheme == "s3" else None
    import fsspec

    # gcsfs logs what it raises, with a traceback; an unknown region is not worth that.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    try:
        first_contact(url)
        filesystem, _ = fsspec.core.url_to_fs(url)
        answer = filesystem.call("GET", "b/{}", rest.split("/")[0], json_out=True)
        return str(answer["location"]).lower()
    # A reader of objects need not be allowed to read the bucket itself; gcsfs has an exception of its own for each way.
    except Exception:
        return None


def instance_metadata(key: str) -> str | None:
    """`instance/<key>` of this Google virtual machine; None elsewhere, or where there is no answer."""
    host = os.environ.get("GCE_METADATA_HOST", METADATA_HOST)
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{key}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=METADATA_TIMEOUT_SECONDS) as answer:
            return answer.read().decode().strip()
    except (urllib.error.URLError, OSError, ValueError):
        return None


def known_places(urls: Mapping[str, str | None], machine: str) -> list[Place]:
    """The regions of folders and URLs by role, and of this machine, as far as they are known; folders are on the
    machine."""
    found = [Place(role, url, region) for role, url in urls.items() if url and (region := bucket_region(url))]
    # Asking where the machine is takes up to two seconds off Google's network. A zone is `.../us-east5-b`.
    zone = instance_metadata("zone") if found else None
    if zone and (region := zone.rsplit("/", 1)[-1].rsplit("-", 1)[0]):
        found.append(Place(machine, "this one", region))
    return found


def check_regions(
    places: list[Place],
    allow_cross_region: bool,
    *,
    cost: str = "Moving the data between them is slow and is charged by the byte",
    remedy: str = "Run where the data is, or add --allow_cross_region.",
) -> str | None:
    """Refuse to move data between regions unless that is allowed. Returns what to say about an allowed move, None if
    all is in one region. `cost` says what it costs (without a full stop), `remedy` what to do instead."""
    if all(same_region(first.region, second.region) for first, second in itertools.combinations(places, 2)):
        return None
    listed = ", ".join(f"{place.role} ({place.what}) in {place.region}" for place in places)
    if not allow_cross_region:
        roles = [place.role for place in places]
        named = f"{', '.join(roles[:-1])} and {roles[-1]}".capitalize()
        raise TomatError(f"{named} are in different regions: {listed}. {cost}. {remedy}")
    return f"data moves between regions: {json.dumps({place.role: place.region for place in places}, sort_keys=True)}"
