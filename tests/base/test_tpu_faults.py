"""Messages of libtpu as issues quote them, each known by its cause and not by what follows from it."""

import pytest

from tomat.base.tpu_faults import TPU_FAULTS, known_tpu_fault

BUSY = (
    "RuntimeError: Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed: open(/dev/vfio/1): "
    "Device or resource busy: Device or resource busy; Couldn't open iommu group /dev/vfio/1 (set JAX_PLATFORMS='')"
)
LOADED = "ABORTED: The TPU is already in use by process with pid 2718466. Not attempting to load libtpu.so in this one"
LOCK = 'INTERNAL: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".'
TOPOLOGY = "RuntimeError: Unable to initialize backend 'tpu': INTERNAL: Failed to get global TPU topology."
DENIED = "PERMISSION_DENIED: open(/dev/accel0): Operation not permitted: Operation not permitted; Couldn't open device"
SLOW = "UserWarning: TPU backend initialization is taking more than 60.0 seconds. Did you run your code on all hosts?"


@pytest.mark.parametrize(
    ("said", "what", "held"),
    [
        (BUSY, "/dev/vfio is busy", True),
        (LOADED, "has libtpu loaded", True),
        (LOCK, "a process of another user, cannot be opened", True),
        (TOPOLOGY, "does not find the slice", False),
        (f"{SLOW}\n{TOPOLOGY}", "does not find the slice", False),
        (DENIED, "may not open the chips", False),
        (SLOW, "waits for the other hosts", False),
    ],
)
def test_a_message_is_known_by_its_cause(said, what, held):
    fault = known_tpu_fault(f"a line before\n{said}\nand one after")
    assert fault is not None and what in fault.what and fault.held is held
    assert "\n" not in fault.line


def test_what_other_errors_say_is_not_taken_for_a_chips():
    for said in ("error: data.train does not exist.", "OSError: [Errno 16] Device or resource busy: '/mnt/data'", ""):
        assert known_tpu_fault(said) is None
    assert all(fault.remedy for fault in TPU_FAULTS)
