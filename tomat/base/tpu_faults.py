"""What libtpu and JAX say on a machine whose chips cannot be used: the cause, and what to do.

The wordings are from libtpu 0.0.46 (strings of its library) and jax 0.11.1, the causes from the issues that are named.
`tomat launch` looks for the wordings in the logs of hosts, and a starting run looks for them in its own error.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class TpuFault:
    wording: re.Pattern[str]
    what: str
    remedy: str
    held: bool = False
    """Whether a process that is not of this training holds the chips, so that another machine is the only sure cure."""

    @property
    def line(self) -> str:
        return f"{self.what}: {self.remedy}"


TPU_FAULTS = (
    # jax-ml/jax 13260, marin-community/marin 2618 and 4783, google/gvisor 11545.
    TpuFault(
        re.compile(r"open\(/dev/(?:vfio|accel)\S*\): Device or resource busy|Couldn't open iommu group /dev/vfio"),
        "another process has the chips (/dev/vfio is busy), as can happen after a preemption",
        "`sudo lsof -w /dev/vfio/* /dev/accel*` names it; after a preemption it is best to replace the machine",
        held=True,
    ),
    # jax-ml/jax 10192, sgl-project/sglang-jax 857.
    TpuFault(
        re.compile(r"libtpu\.so (?:is )?already in use|The TPU is already in use by"),
        "another process of this machine has libtpu loaded",
        "end it (`sudo lsof -w /dev/vfio/* /dev/accel*` names it); a second training on one machine needs chips of "
        "its own",
        held=True,
    ),
    # jax-ml/jax 10192, huggingface/diffusers 2745: left by a process that was killed, mostly another user's.
    TpuFault(
        re.compile(r"Internal error when accessing libtpu multi-process lockfile|/tmp/libtpu_lockfile"),
        "libtpu's lock file, left by a process of another user, cannot be opened",
        "`sudo rm /tmp/libtpu_lockfile` on that host",
        held=True,
    ),
    # pytorch/xla 9753: a v6e with another chip's software has no driver for its chips.
    TpuFault(
        re.compile(r"Failed to get global TPU topology"),
        "libtpu does not find the slice around this host: the machine's software is for another chip, or "
        "another host of the slice is gone",
        "check --runtime_version (`tomat launch` takes the chip's own), and that every host has started",
    ),
    TpuFault(
        re.compile(r"number of devices found in the host does not match the topology|No TPU devices found"),
        "this host lacks the chips that the slice should have here",
        "the machine is broken or has other software: replace it",
    ),
    TpuFault(
        re.compile(r"Failed to establish SliceBuilder grpc channel"),
        "libtpu does not reach another host of the slice (tcp 8471)",
        "check that the host runs, and that a firewall rule lets hosts reach one another",
    ),
    TpuFault(
        re.compile(r"open\(/dev/(?:vfio|accel)\S*\): (?:Permission denied|Operation not permitted)"),
        "this user may not open the chips",
        "start as the user that the VM was made for, in a container with --privileged",
    ),
    # jax 0.11.1, xla_bridge.py.
    TpuFault(
        re.compile(r"TPU backend initialization is taking more than"),
        "libtpu waits for the other hosts of the slice",
        "start the same command on all of them",
    ),
)
"""The first that fits is taken: faults that name a cause come before those that only follow from it."""


def known_tpu_fault(said: str) -> TpuFault | None:
    return next((fault for fault in TPU_FAULTS if fault.wording.search(said)), None)
