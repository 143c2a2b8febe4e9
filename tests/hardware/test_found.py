"""What devices are, whatever was asked for."""

import pytest

from tomat.hardware.chips import TPU_SLICES, FoundDevices, slice_named


def devices_of(name: str) -> FoundDevices:
    slice_ = slice_named(name)
    return FoundDevices(slice_.chip.device_kinds[0], slice_.n_devices, slice_.n_hosts)


@pytest.mark.parametrize("name", [*TPU_SLICES, "h100", "h100x8", "h200x16", "gb200x4"])
def test_devices_are_their_slice_and_no_other(name):
    found = devices_of(name)
    assert found.difference(slice_named(name)) is None
    assert found.as_slice(name) is not None and found.n_chips == slice_named(name).n_chips
    ran = found.as_slice(name)
    assert ran == slice_named(name) and FoundDevices.from_words(found.words, found.n_hosts) == found
    for other in ("v6e-16", "v6e-8", "v5p-16", "v4-16", "tpu7x-16", "h100x8"):
        same = (slice_named(other).chip, slice_named(other).n_chips) == (ran.chip, ran.n_chips)
        assert (found.difference(slice_named(other)) is None) == same


@pytest.mark.parametrize(
    "found, said",
    [
        (FoundDevices("TPU v6 lite", 8, 1), "found 8 x TPU v6 lite on 1 host"),
        (FoundDevices("TPU v6 lite", 16, 1), "found 16 x TPU v6 lite on 1 host"),
        (FoundDevices("TPU v5 lite", 16, 4), "found 16 x TPU v5 lite on 4 hosts"),
        (FoundDevices("cpu", 16, 4), "found 16 x cpu on 4 hosts"),
        (FoundDevices("TPU v9", 16, 4), "found 16 x TPU v9 on 4 hosts"),
        (FoundDevices("NVIDIA H200", 16, 4), "found 16 x NVIDIA H200 on 4 hosts"),
        (FoundDevices("TPU v5 lite, TPU v6 lite", 16, 4), "found 16 x TPU v5 lite, TPU v6 lite on 4 hosts"),
    ],
)
def test_other_devices_than_a_recipe_is_for_are_named(found, said):
    difference = found.difference(slice_named("v6e-16"))
    assert difference == f"expected 16 x TPU v6 lite on 4 hosts (v6e-16), {said}"


def test_what_the_table_does_not_have_is_no_slice():
    """A share of a peak that is not known is none."""
    for kind, count in (("cpu", 4), ("TPU v9", 4), ("TPU v6 lite", 12), ("NVIDIA H100 80GB HBM3", 12)):
        assert FoundDevices(kind, count, 1).as_slice("v6e-4") is None
    assert FoundDevices("TPU v5 lite", 8, 1).as_slice() == slice_named("v5e-8")
    assert FoundDevices("TPU v5 lite", 8, 1).as_slice("v5litepod-8") == slice_named("v5litepod-8")
    # One GPU a process, as Slurm starts them: the same chips.
    assert FoundDevices("NVIDIA H200", 8, 8).difference(slice_named("h200x8")) is None


@pytest.mark.parametrize("words", [None, 3, "", "cpu", "4 x ", "x 4", "0 x cpu", "-1 x cpu", "4.0 x cpu", "9" * 30])
def test_what_says_no_devices_is_not_known(words):
    assert FoundDevices.from_words(words, 1) is None
    assert FoundDevices.from_words("4 x cpu", words) == FoundDevices("cpu", 4, 3 if words == 3 else None)


@pytest.mark.parametrize("kind, platform", [("TPU v4", "tpu"), ("cpu", "cpu"), ("NVIDIA H200", "gpu")])
def test_a_platform_follows_from_the_kind(kind, platform):
    assert FoundDevices(kind, 1, 1).platform == platform
