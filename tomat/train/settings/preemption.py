"""What happens when the machine is taken away."""

from dataclasses import dataclass

from tomat.base.config_keys import key
from tomat.base.errors import TomatError


@dataclass(frozen=True)
class PreemptionConfig:
    """How a run reacts to losing its machine."""

    grace_seconds: float = key(25.0, free="speed")
    """From SIGTERM to the end of the process, at most: the step, the checkpoint with its commit, the trackers. A v6e
    that is taken away leaves 30 s."""
    maintenance_notice: bool = key(True, free="speed")
    """On a TPU VM, stop as on SIGTERM when its metadata server announces a preemption or a maintenance that ends it."""
    poll_seconds: float = key(2.0, free="speed")
    """How often the metadata server is asked."""

    def __post_init__(self) -> None:
        for name in ("grace_seconds", "poll_seconds"):
            if not getattr(self, name) > 0:
                raise TomatError(f"preemption.{name} is {getattr(self, name)}; expected a number of seconds above 0.")
