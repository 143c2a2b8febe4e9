"""The time that the host adds to a step of the device, for the loops that dispatch it.

Levanter's loop (0.2.227, `Trainer.train_step`) looks its program up, dispatches it and reads its loss before anything
else, so its Python adds to every step. tomat's loop dispatches ahead (`train/dispatch.py`), so its Python is hidden as
long as the device takes longer. Both were measured on 2026-11-27 by `profiling/beside_levanter.py`, with a decoder of 6
layers 16 wide, whose own work is a millisecond or two, on two cores shared with other work. Medians of five windows of
60 steps were 29 ms (24 to 38) and 12 ms (8 to 19). The time on a TPU's host is not measured.
"""

from dataclasses import asdict, dataclass
from typing import Any

from tomat.perf.plan.plan import Interval


@dataclass(frozen=True)
class HostLoop:
    name: str
    step_seconds: Interval
    """Time of Python in each step."""
    ahead: bool
    """Whether steps are dispatched before the loss of an earlier step is read."""

    def on_top(self, device: Interval) -> Interval:
        """Seconds that it adds to a step. A loop that dispatches ahead adds only what exceeds the device's step."""
        if not self.ahead:
            return self.step_seconds
        own = self.step_seconds
        # A long step of the device hides more of the host.
        least, most = max(0.0, own.low - device.high), max(0.0, own.high - device.low)
        return Interval(max(0.0, own.estimate - device.estimate), least, most)


LEVANTER = HostLoop("Levanter's loop", Interval(0.025, 0.012, 0.038), ahead=False)
TOMAT = HostLoop("tomat's loop", Interval(0.010, 0.004, 0.019), ahead=True)


def host_dict(dispatch_ahead: int, device: Interval) -> dict[str, Any]:
    """For the JSON report of a plan: the time of the loop's Python, and the part that adds to the step."""
    loop = TOMAT if dispatch_ahead else LEVANTER
    return {
        "host_loop": loop.name,
        "host_seconds_per_step": asdict(loop.step_seconds),
        "host_on_top_seconds": asdict(loop.on_top(device)),
    }


COMPILE_SECONDS = Interval(20.0, 0.0, 60.0)
"""Compile time of one program on a TPU's host. It is from published records whose steps are short enough to show it and
whose shapes are not kept aside: the total time minus the planned times of device and host leaves 42 s a compile (130M
on v5p-32), and 22, 15 and -1 s (300M, 75M and 150M on v4). A compile takes 100 to 250 s here, on two shared cores."""
COMPILES_ON_RECORD = 2
"""Programs whose compile is in the times of Levanter's records: the step, and one that also computes the norms of
gradients and parameters, every tenth step (`Trainer.train_step`: "this results in two compiles")."""


FUSED_LOSS_MORE = Interval(0.26, 0.21, 0.33)
"""Share of the planned loss by which Levanter's fused cross-entropy of April 2026 took longer than that of 0.2.227,
which is planned (its code and table of blocks changed some dozen times between). It is fitted to the three records of
130M (v5p-8 twice, v5p-32). The records of 520M and 1.2B, which are kept aside, give 0.22 to 0.29 of their loss."""


def step_on_record(device: Interval, loop: HostLoop, steps: int, fused_loss_seconds: float = 0.0) -> Interval:
    """Seconds of a step in a run's record: its total time divided by its `steps`, compiles included. Levanter's fused
    loss takes `fused_loss_seconds` of the device's seconds."""
    host = loop.on_top(device)
    compiled = COMPILES_ON_RECORD / steps

    def whole(bound: str) -> float:
        loss = fused_loss_seconds * getattr(FUSED_LOSS_MORE, bound)
        return getattr(device, bound) + loss + getattr(host, bound) + compiled * getattr(COMPILE_SECONDS, bound)

    return Interval(whole("estimate"), whole("low"), whole("high"))
