"""The meaning of Google's answer to a request for a slice: never, not now, there already, or no answer."""

import enum
import re

_QUOTA = re.compile(
    r"Quota (?:limit )?'(?P<names>[^']+)' (?:has been exceeded|exhausted)\.?\s+Limit:? (?P<limits>[\d,]+)"
)
"""Matches `RESOURCE_EXHAUSTED: Quota limit 'TPUV2sPodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone
...` (BioMedBERT/biomedbert nohup.out; for v6e in a region: marin-community/marin 1612), and for a queued resource
`Quota '...' exhausted. Limit 20800 in region us-central2` (marin 87, where suspended resources still counted)."""
_WAIT = (
    # thevasudevgupta/gsoc-wav2vec2 11, GoogleCloudPlatform/magic-modules 7297: `... in the zone "us-central1-b"; you
    # can try in another zone where Cloud TPU Nodes are offered`, as code 8.
    "no more capacity",
    # https://cloud.google.com/compute/docs/resource-error
    "resource_pool_exhausted",
    "stockout",
    "does not have enough resources available",
    # skypilot-org/skypilot 4579, also without a reservation.
    "insufficient reserved capacity",
    "insufficient capacity",
    "no available capacity",
    # A spot slice that is taken away while it is created, as code 3 (skypilot-org/skypilot, cloud_vm_ray_backend.py):
    # `Cloud TPU received a bad request. update is not supported while in state PREEMPTED`.
    "while in state preempted",
    # A rate quota, which is free again after a minute: marin-community/marin 6198.
    "requests per minute",
    "resource_exhausted",
)
_UNREACHABLE = (
    # Messages of gcloud 528 without a network: when it renews its token in vain (with the advice to log in), when a
    # request fails (it says that it crashed), and after half a minute of answers of status 500 or more (the last one).
    "max retries exceeded",
    "failed to establish a new connection",
    "connection aborted",
    "network connectivity issues",
    "gcloud crashed",
)
_FAULT = (
    # `Error code 13, message: an internal error has occurred`, for TPU VMs (hashicorp/terraform-provider-google 16147).
    "internal error",
)
_EXISTS = ("already_exists", "already exists")
_LOGIN = (
    # Messages of gcloud itself if there is no login, or it has expired.
    "reauthentication",
    "gcloud auth login",
    "problem refreshing your current auth tokens",
    "unauthenticated",
    "do not currently have an active account",
)


class Refusal(enum.Enum):
    QUOTA = "quota"
    """The project has no quota for it; asking again does not help."""
    NO_CAPACITY = "no capacity"
    UNREACHABLE = "unreachable"
    """Google was not asked, or did not answer; a request may have reached it all the same."""
    FAULT = "fault"
    """Google failed by itself, now or for days; a request may have left something all the same."""
    EXISTS = "exists"
    LOGIN = "login"
    OTHER = "other"


def refusal(said: str) -> Refusal:
    lower = said.lower()
    if _QUOTA.search(said):
        return Refusal.QUOTA
    for meaning, words in (
        (Refusal.EXISTS, _EXISTS),
        (Refusal.NO_CAPACITY, _WAIT),
        (Refusal.UNREACHABLE, _UNREACHABLE),  # before LOGIN: without a network, gcloud also advises to log in
        (Refusal.LOGIN, _LOGIN),
        (Refusal.FAULT, _FAULT),
    ):
        if any(one in lower for one in words):
            return meaning
    return Refusal.OTHER


def quota_words(said: str, project: str | None) -> str:
    found = _QUOTA.search(said)
    named = f"{found['names']} is {found['limits']}" if found else "a quota is used up"
    page = "https://console.cloud.google.com/iam-admin/quotas" + (f"?project={project}" if project else "")
    return f"quota: {named}; asking again does not help. Ask for more of it on {page} (service tpu.googleapis.com)"
