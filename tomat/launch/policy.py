"""When a launch tries again, and when it stops trying: how attempts end, and what counts as health."""

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
    STORAGE_FAULT = "could not reach its storage"
    CHIP_HELD = "found its chips held by another process"
    FAILED = "failed"
    CAPPED = "reached the cap"


FAILURES = frozenset({Ending.FAILED, Ending.STORAGE_FAULT, Ending.CHIP_HELD, Ending.HOST_LOST})
WAITED_FOR = FAILURES - {Ending.HOST_LOST} | {Ending.NO_CAPACITY}


def judge(statuses: list[str]) -> tuple[Ending, str]:
    said = f"exit status {', '.join(statuses)}"
    # Before a refusal by another host, which may come of the same fault; if not, the next attempt shows it.
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
    """Attempts in a row, each with fewer than `healthy_steps`."""
    max_without_step: int = 2
    """Attempts in a row without a single step; machines that were taken away meanwhile count for none."""
    healthy_steps: int = 50
    backoff_seconds: float = 30.0
    """Wait after the first failure or refused request for machines; doubles with each further one."""
    max_backoff_seconds: float = 900.0
    quick_seconds: float = 600.0
    """A failure that came sooner after the start is a quick one: what it needs is mostly another machine."""
    quick_failures: int = 2
    """Quick failures in a row on one slice after which it is replaced, whatever the logs say."""
    poll_seconds: float = 30.0
    straggler_seconds: float = 120.0
    """How long other hosts may go on after one has ended; then they are stopped."""
    unreachable_polls: int = 10
    """Unanswered questions in a row after which an attempt counts as failed."""
    log_seconds: float = 600.0
    """Between two collections of the logs, which a preempted machine takes with it."""
    creation_seconds: float = 3600.0
    """A slice that is neither ready nor gone for so long is given back."""

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
    """What the attempts of a launch have come to: steps, not minutes, since a start that hangs for half an hour costs
    as much as one that trains."""

    policy: RestartPolicy
    short: int = 0
    without_step: int = 0
    failures: int = 0
    """In a row, as far as none was healthy: for the wait."""
    unlucky: int = 0
    """Requests for machines in a row that were refused."""

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
        elif ending is not Ending.MACHINE_LOST:
            self.without_step += 1

    def replaced(self) -> None:
        """After quick failures on one slice the next attempt, on another, decides whether the slice was at fault."""
        self.without_step = min(self.without_step, self.policy.max_without_step - 1)

    @property
    def verdict(self) -> str | None:
        """Why there is no further attempt; None: there is."""
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
