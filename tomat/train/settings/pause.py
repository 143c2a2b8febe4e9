"""A pause between steps, for devices that others use too."""

from dataclasses import dataclass

from tomat.base.config_keys import key
from tomat.base.errors import TomatError

LONGEST_SECONDS = 60.0
"""Of a pause. A request to stop is seen after it, and the watchdog of a run that hangs is not to take it for one."""


@dataclass(frozen=True)
class PauseConfig:
    """When a run leaves its devices to others."""

    seconds: float = key(0.0, free="speed")
    """How long after a step nothing is dispatched; 0: there is no pause."""
    every: int = key(1, free="speed")
    """Steps from one pause to the next."""

    def __post_init__(self) -> None:
        if not 0 <= self.seconds <= LONGEST_SECONDS or self.every < 1:
            raise TomatError(
                f"pause.seconds is {self.seconds} and pause.every {self.every}; expected 0 to {LONGEST_SECONDS:g} "
                "seconds, every 1 step or more."
            )

    def is_after(self, done: int) -> bool:
        """Whether there is a pause once so many steps are done."""
        return self.seconds > 0 and done % self.every == 0
