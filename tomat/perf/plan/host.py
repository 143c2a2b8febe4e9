"""What the host adds to a step of the device, by the loop that dispatches it.

Levanter's loop (0.2.227, `Trainer.train_step`) looks its program up, dispatches it and reads its loss before anything
else: its Python comes on top of every step. tomat's dispatches ahead (`train/dispatch.py`): its Python is hidden while
the device takes longer. Both were measured on 2026-11-27 by `profiling/beside_levanter.py` with a decoder of 6 layers
16 wide, whose own work is a millisecond or two, on two cores that other work shared, medians of five windows of 60
steps: 29 ms (24 to 38) and 12 ms (8 to 19). What a TPU's host takes is not measured.
"""

from dataclasses import asdict, dataclass
from typing import Any

from tomat.perf.plan.plan import Interval


@dataclass(frozen=True)
class HostLoop:
    name: str
    step_seconds: Interval
    """Of Python in each step."""
    ahead: bool
    """Whether steps are dispatched before the loss of an earlier one is read."""

    def on_top(self, device: Interval) -> Interval:
        """What it adds to a step, seconds; of a loop that dispatches ahead what is longer than the device's step."""
        if not self.ahead:
            return self.step_seconds
        own = self.step_seconds
        # A long step of the device hides more of the host.
        least, most = max(0.0, own.low - device.high), max(0.0, own.high - device.low)
        return Interval(max(0.0, own.estimate - device.estimate), least, most)


LEVANTER = HostLoop("Levanter's loop", Interval(0.025, 0.012, 0.038), ahead=False)
TOMAT = HostLoop("tomat's loop", Interval(0.010, 0.004, 0.019), ahead=True)


def host_dict(dispatch_ahead: int, device: Interval) -> dict[str, Any]:
    """For the JSON report of a plan: what the loop's Python takes, and how much of it comes on top of the step."""
    loop = TOMAT if dispatch_ahead else LEVANTER
    return {
        "host_loop": loop.name,
        "host_seconds_per_step": asdict(loop.step_seconds),
        "host_on_top_seconds": asdict(loop.on_top(device)),
    }


COMPILE_SECONDS = Interval(20.0, 0.0, 60.0)
"""Of one program on a TPU's host. Of the published records whose steps are short enough to show it and whose shapes are
not kept aside: what is left of the total time beside the planned device's and the host's is 42 s a compile (130M on
v5p-32), 22, 15 and -1 s (300M, 75M and 150M on v4). Compiling them here takes 100 to 250 s, on two shared cores."""
COMPILES_ON_RECORD = 2
"""Programs whose compile is in the times of a record of Levanter's: the step, and the one that also computes the norms
of gradients and parameters, every tenth time (`Trainer.train_step`: "this results in two compiles")."""


FUSED_LOSS_MORE = Interval(0.26, 0.21, 0.33)
"""Of the planned loss, that Levanter's fused cross-entropy of April 2026 took more than that of 0.2.227, which is what
is planned (its code and table of blocks changed some dozen times between). Learnt from the three records of 130M (v5p-8
twice, v5p-32); those of 520M and 1.2B, which are kept aside, leave 0.22 to 0.29 of their loss."""


def step_on_record(device: Interval, loop: HostLoop, steps: int, fused_loss_seconds: float = 0.0) -> Interval:
    """A step of a run's record, seconds: its total time over its `steps`, compiles included. Of the device's seconds
    `fused_loss_seconds` are in Levanter's fused loss."""
    host = loop.on_top(device)
    compiled = COMPILES_ON_RECORD / steps

    def whole(bound: str) -> float:
        loss = fused_loss_seconds * getattr(FUSED_LOSS_MORE, bound)
        return getattr(device, bound) + loss + getattr(host, bound) + compiled * getattr(COMPILE_SECONDS, bound)

    return Interval(whole("estimate"), whole("low"), whole("high"))
