"""What a run watches for while it trains, and what it does about it."""

from dataclasses import dataclass
from typing import Literal

from tomat.base.config_keys import key
from tomat.base.errors import TomatError

SPIKE_HISTORY = 128
"""Losses that a run's state keeps for judging the next one; the upper limit of `spike_window`. A constant, so that
every other setting may change when a run is resumed: the state has the same shape under all of them."""


@dataclass(frozen=True)
class GuardsConfig:
    """The guards of a run (`docs/guides/preemption.md`); all of it may differ when a run is resumed."""

    on_bad_loss: Literal["stop", "skip"] = key("stop", free="watching")
    """A loss or an update that is not finite, or a loss that is a spike. `stop`: end the run before the state after it
    is saved. `skip`: leave model and optimizer as they were before that batch, and go on with the next."""
    max_skips: int = key(10, free="watching")
    """Batches in a row that `skip` passes over before the run stops after all."""
    spike_factor: float = key(20.0, free="watching")
    """A loss is a spike if it is more than this many standard deviations above the median of the last `spike_window`
    good losses, the deviation estimated from the median absolute deviation; 0: no loss is. In the demo's 1,200 steps,
    whose batches of two sequences make its loss as noisy as any, the largest excess is 9.8."""
    spike_window: int = key(64, free="watching")
    """Good losses that the next one is held against; nothing is judged before there are as many."""
    allow_cross_region: bool = key(False, free="watching")
    """Read data and write checkpoints in another region than the machine's."""
    max_clock_skew_seconds: float = key(30.0, free="watching")
    """Difference between the clocks of hosts, or of a host and Cloud Storage, above which the run warns."""
    hang_seconds: float = key(1800.0, free="watching")
    """Without any progress for so long after the first step, the process writes the stacks of its threads next to the
    run and exits with status 124; 0: never. An evaluation and a save must each fit in it."""
    startup_hang_seconds: float = key(7200.0, free="watching")
    """The same until the first step is done, which loads the checkpoint and compiles; 0: never."""

    def __post_init__(self) -> None:
        if self.on_bad_loss not in ("stop", "skip"):
            raise TomatError(f"guards.on_bad_loss is '{self.on_bad_loss}'; expected stop or skip.")
        if self.max_skips < 0:
            raise TomatError(f"guards.max_skips is {self.max_skips}; expected 0 or more.")
        if not 8 <= self.spike_window <= SPIKE_HISTORY:
            raise TomatError(f"guards.spike_window is {self.spike_window}; expected 8 to {SPIKE_HISTORY}.")
        for name in ("spike_factor", "max_clock_skew_seconds", "hang_seconds", "startup_hang_seconds"):
            if not getattr(self, name) >= 0:
                raise TomatError(f"guards.{name} is {getattr(self, name)}; expected 0 or more.")
