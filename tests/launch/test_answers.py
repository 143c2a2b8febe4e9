"""Google's own words, as they were seen, and what they mean for a launch."""

import pytest

from tomat.launch.answers import Refusal, quota_words, refusal


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        (
            "RESOURCE_EXHAUSTED: Quota limit 'TPUV2sPodPerProjectPerRegionForTPUAPI,TPUV2sPodPerProjectPerZoneForTPUAPI"
            "' has been exceeded. Limit: 0,0 in region us-central1,zone us-central1-a.",
            Refusal.QUOTA,
        ),
        (
            "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0 in region us-east5"
            ".",
            Refusal.QUOTA,
        ),
        (
            "Quota 'TPUV4sPreemptiblePodPerProjectPerRegionForTPUAPI' exhausted.\n      Limit 20800 in region us-c2",
            Refusal.QUOTA,
        ),
        ('There is no more capacity in the zone "us-central1-b"; you can try in another zone', Refusal.NO_CAPACITY),
        ("Got return code 8: 'Insufficient reserved capacity. Contact customer support'", Refusal.NO_CAPACITY),
        ("code: ZONE_RESOURCE_POOL_EXHAUSTED", Refusal.NO_CAPACITY),
        # A spot slice that is taken away before it is there.
        (
            '{\n  "code": 3,\n  "message": "Cloud TPU received a bad request. update is not supported while in state '
            'PREEMPTED [EID: 0x73013519f5b7feb2]"\n}',
            Refusal.NO_CAPACITY,
        ),
        # Of a rate: a minute later it is another matter.
        (
            "RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'CreateNode requests' and limit 'Maximum number of "
            "CreateNode requests per minute' of service 'tpu.googleapis.com'",
            Refusal.NO_CAPACITY,
        ),
        ("Error code 13, message: an internal error has occurred", Refusal.FAULT),
        ("ALREADY_EXISTS: Resource already exists", Refusal.EXISTS),
        ("There was a problem refreshing your current auth tokens: Reauthentication failed", Refusal.LOGIN),
        ("PERMISSION_DENIED: Permission 'tpu.nodes.create' denied", Refusal.OTHER),
        # A cut network, as it is told where the token of the hour before has to be renewed first.
        (
            "There was a problem refreshing your current auth tokens: HTTPSConnectionPool(host='oauth2.googleapis.com'"
            ", port=443): Max retries exceeded with url: /token (Caused by NameResolutionError(...))\nPlease run:\n\n"
            "  $ gcloud auth login",
            Refusal.UNREACHABLE,
        ),
    ],
)
def test_what_a_refusal_means(said, meaning):
    assert refusal(f"ERROR: (gcloud.compute.tpus.tpu-vm.create) {said}") is meaning


def test_a_quota_names_what_to_ask_for_and_where():
    said = quota_words("Quota limit 'A' has been exceeded. Limit: 4 in zone z.", "p")
    assert "A is 4" in said and "https://console.cloud.google.com/iam-admin/quotas?project=p" in said
