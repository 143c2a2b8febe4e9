"""How the attempts of a launch end, which attempts are healthy, and when the launch tries again or stops."""

import enum
from dataclasses import dataclass

from tomat.base.layout import LOST_STATUS, REFUSED_STATUS, RETRY_STATUS, STOPPED_STATUS
from tomat.base.reporting import counted


class Ending(enum.Enum):
    FINISHED = "finished"
    REFUSED = "refused its input"
    PREEMPTED = "was stopped in good order"
    MACHINE_LOST = "lost its machines"
    HOST_LOST = "lost a host"
    NO_CAPACITY = "got no machines"
    NOT_MADE = "met an internal error at Google"
    STORAGE_FAULT = "could not reach its storage"
    CHIP_HELD = "found its chips held by another process"
    FAILED = "failed"
    CAPPED = "reached the cap"


FAILURES = frozenset({Ending.FAILED, Ending.STORAGE_FAULT, Ending.CHIP_HELD, Ending.HOST_LOST})
WAITED_FOR = FAILURES - {Ending.HOST_LOST} | {Ending.NO_CAPACITY, Ending.NOT_MADE}


def judge(statuses: list[str]) -> tuple[Ending, str]:
    said = f"exit status {', '.join(statuses)}"
    # A storage fault comes before another host's refusal, which may follow from it; if not, the next attempt shows it.
    causes = {RETRY_STATUS: Ending.STORAGE_FAULT, REFUSED_STATUS: Ending.REFUSED, LOST_STATUS: Ending.HOST_LOST}
    if found := [ending for status, ending in causes.items() if str(status) in statuses]:
        return found[0], said
    if set(statuses) == {"0"}:
        return Ending.FINISHED, ""
    if set(statuses) <= {"0", str(STOPPED_STATUS)}:
        return Ending.PREEMPTED, said
    return Ending.FAILED, said


@dataclass(frozen=True)
class RestartPolicy:
    max_restarts: int = 200
    max_failures: int = 5
    """The launch ends after this many attempts in a row with fewer than `healthy_steps` each."""
    max_without_step: int = 2
    """The launch ends after this many attempts in a row without a step; those without machines do not count."""
    healthy_steps: int = 50
    backoff_seconds: float = 30.0
    """Wait after the first failure or refused request for machines. Each further one doubles it."""
    max_backoff_seconds: float = 900.0
    quick_seconds: float = 600.0
    """A failure within this time after the start is a quick one. It mostly needs another machine."""
    quick_failures: int = 2
    """The slice is replaced after this many quick failures in a row, whatever the logs say."""
    poll_seconds: float = 30.0
    straggler_seconds: float = 120.0
    """How long the other hosts may go on after one host has ended. Then they are stopped."""
    unreachable_polls: int = 10
    """Unanswered questions in a row after which an attempt counts as failed."""
    log_seconds: float = 600.0
    """Time between two collections of the logs, since a preempted machine loses its logs."""
    creation_seconds: float = 3600.0
    """A slice that is neither ready nor gone after this time is given back."""

    @property
    def words(self) -> str:
        """How --execute restarts, as comments of the dry run."""
        most = f"{self.max_failures} with fewer than {self.healthy_steps}"
        quick = f"{self.quick_failures} failures in a row within {self.quick_seconds / 60:.0f} min of their start"
        return (
            f"# With --execute, the state every {self.poll_seconds:.0f} s. PREEMPTED or gone: delete, create, install, "
            "start. Exit status 143\n# (stopped in good order) or 76 (lost a host): start at once. 2 (refused): never "
            f"again. Others:\n# start after {self.backoff_seconds:.0f} s, doubling up to "
            f"{self.max_backoff_seconds:.0f} s. "
            f"{counted(self.max_without_step, 'attempt')} without a step, or {most}, in a row end it;\n"
            f"# {quick} replace the slice first.\n"
            f"# Every host's log is collected every {self.log_seconds / 60:.0f} min."
        )


@dataclass
class Health:
    """Counts the failed attempts of a launch. Progress is measured in steps and not in minutes, because a start that
    hangs for half an hour costs as much as one that trains."""

    policy: RestartPolicy
    short: int = 0
    without_step: int = 0
    failures: int = 0
    """Failures since the last healthy attempt; they set the wait."""
    unlucky: int = 0
    """Number of refused requests for machines in a row."""

    def count(self, ending: Ending, steps: int) -> None:
        if ending is Ending.NO_CAPACITY:
            self.unlucky += 1
            return
        self.unlucky = 0
        is_healthy = steps >= self.policy.healthy_steps
        self.failures = (0 if is_healthy else self.failures) + (ending in WAITED_FOR)
        if is_healthy:
            self.short = self.without_step = 0
            return
        self.short += 1
        if steps > 0:
            self.without_step = 0
        elif ending not in (Ending.MACHINE_LOST, Ending.NOT_MADE):
            self.without_step += 1

    def replaced(self) -> None:
        """Allow one more attempt after the slice was replaced: it shows whether the old slice was at fault."""
        self.without_step = min(self.without_step, self.policy.max_without_step - 1)

    @property
    def verdict(self) -> str | None:
        """Why there is no further attempt; None: there is one."""
        policy = self.policy
        if self.without_step >= policy.max_without_step:
            return f"{counted(self.without_step, 'attempt')} in a row without a step"
        if self.short >= policy.max_failures:
            return f"{counted(self.short, 'attempt')} in a row with fewer than {policy.healthy_steps} steps"
        return None

    @property
    def wait_seconds(self) -> float:
        doublings = min(max(self.failures, self.unlucky, 1) - 1, 60)
        return min(self.policy.backoff_seconds * 2.0**doublings, self.policy.max_backoff_seconds)
