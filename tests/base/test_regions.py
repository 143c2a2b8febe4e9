import pytest

from tomat.base.errors import TomatError
from tomat.base.regions import Place, bucket_region, check_regions, known_places, same_region


def test_same_region():
    for first, second in (("us-east5", "us-east5"), ("us", "us-central1"), ("nam4", "us-east1"), ("eu", "europe-west4"),
                          ("eur4", "europe-west4")):  # fmt: skip
        assert same_region(first, second) and same_region(second, first)
    for first, second in (("us-east5", "us-central1"), ("us", "europe-west4"), ("nam4", "us-east5"),
                          ("amazon s3", "us-east1")):  # fmt: skip
        assert not same_region(first, second) and not same_region(second, first)


def test_places_apart_need_consent():
    places = [Place("input", "gs://a", "us"), Place("output", "gs://b", "us-east5"), Place("worker", "vm", "us-west1")]
    assert check_regions(places[:2], False) is None and check_regions(places[::2], False) is None
    with pytest.raises(TomatError, match=r"worker \(vm\) in us-west1.*allow_cross_region"):
        check_regions(places, False)
    assert "us-west1" in (check_regions(places, True) or "")


def test_folders_are_where_the_worker_is(tmp_path):
    assert bucket_region(str(tmp_path)) is None and bucket_region(f"file://{tmp_path}") is None
    assert known_places({"input": str(tmp_path), "output": None}, "worker") == []
    assert bucket_region("s3://bucket/chgcars") == "amazon s3"
