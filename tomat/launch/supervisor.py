"""Keep one launch alive: create the slice, start the training, watch, restart, collect logs, give the slice back."""

import contextlib
import enum
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tomat.base.errors import TomatError
from tomat.base.layout import REFUSED_STATUS, RETRY_STATUS, STOPPED_STATUS
from tomat.base.tpu_faults import TpuFault, known_tpu_fault
from tomat.launch.command import TIMEOUT_STATUS, Command, Result
from tomat.launch.gcloud import TpuLaunch
from tomat.launch.remote import parse_statuses

LOST_STATES = frozenset({"PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDING", "HIDDEN", "absent"})
"""States of a TPU VM that it does not come back from by itself; the others (READY apart) pass.
https://cloud.google.com/python/docs/reference/tpu/latest/google.cloud.tpu_v2.types.Node.State"""
PASSING_STATES = frozenset({"DELETING", "STOPPING", "SUSPENDING"})
"""Lost, but still being taken apart: nothing of that name can be created or deleted now."""
LOST_QUEUE_STATES = frozenset({"FAILED", "SUSPENDING", "SUSPENDED", "DELETING", "absent"})
"""States of a queued resource that it does not come back from (https://cloud.google.com/tpu/docs/queued-resources)."""
NO_CAPACITY = ("RESOURCE_EXHAUSTED", "no more capacity", "no available capacity", "stockout")
"""What gcloud says where a slice cannot be had now, as opposed to never."""


class Ending(enum.Enum):
    FINISHED = "finished"
    REFUSED = "refused its input"
    PREEMPTED = "was stopped in good order"
    MACHINE_LOST = "lost its machines"
    NO_CAPACITY = "got no machines"
    STORAGE_FAULT = "could not reach its storage"
    CHIP_HELD = "found its chips held by another process"
    FAILED = "failed"


_FAILURES = frozenset({Ending.FAILED, Ending.STORAGE_FAULT, Ending.CHIP_HELD})
"""Endings of which a row ends the launch."""


@dataclass(frozen=True)
class RestartPolicy:
    """When to try again, and when to stop trying."""

    max_restarts: int = 200
    max_failures: int = 5
    """Failures in a row, storage that did not answer among them; losing machines is none, and an attempt that lasted
    `healthy_seconds` breaks the row."""
    backoff_seconds: float = 30.0
    """Wait after the first failure or refused request for machines; doubles with each further one."""
    max_backoff_seconds: float = 900.0
    healthy_seconds: float = 1800.0
    """An attempt that lasted this long was no immediate failure."""
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

    def wait_seconds(self, in_a_row: int) -> float:
        """The wait after the `in_a_row`-th failure in a row, from 1."""
        return min(self.backoff_seconds * 2.0 ** min(in_a_row - 1, 60), self.max_backoff_seconds)

    @property
    def words(self) -> str:
        """How --execute restarts, as comments of the dry run."""
        most = f"at most {self.max_failures} failures in a row and {self.max_restarts} restarts"
        return (
            f"# With --execute, the state every {self.poll_seconds:.0f} s. PREEMPTED or gone: delete, create, install, "
            "start. Exit status 143\n# (stopped in good order): start at once. 2 (input refused): never again. Others: "
            f"start after {self.backoff_seconds:.0f} s,\n# doubling up to {self.max_backoff_seconds:.0f} s, {most};\n"
            f"# after {self.quick_failures} failures in a row within {self.quick_seconds / 60:.0f} min of their start, "
            "on a new slice.\n"
            f"# Every host's log is collected every {self.log_seconds / 60:.0f} min."
        )


@dataclass
class Supervisor:
    launch: TpuLaunch
    policy: RestartPolicy
    run: Callable[[Command], Result]
    say: Callable[[str], None]
    keep: bool = False
    """Do not give the slice back."""
    endings: list[str] = field(default_factory=list)
    """How each attempt ended, in order."""
    waited_seconds: float = 0.0
    _installed: bool = False
    _quick: int = 0
    """Quick failures in a row on this slice."""
    _held: bool = False
    """There may be a slice, which is paid for."""
    _logs_at: float = 0.0
    _unanswered: str = ""

    def supervise(self) -> "Supervisor":
        """Until the training is finished; itself, with what it came to."""
        try:
            self._until_it_ends()
            return self
        except TomatError:
            raise
        except Exception:
            if self._held:
                self._give_back()
            raise
        finally:
            with contextlib.suppress(OSError):
                self.launch.sent_environment.unlink(missing_ok=True)

    def _until_it_ends(self) -> None:
        failures = unlucky = 0
        while True:
            attempt = len(self.endings) + 1
            started = time.monotonic()
            ending, why = self._attempt(attempt)
            self.endings.append(ending.value)
            self._say(f"attempt {attempt} {ending.value}{f': {why}' if why else ''}")
            if ending is Ending.FINISHED:
                self._give_back()
                return
            if time.monotonic() - started >= self.policy.healthy_seconds:
                failures = 0
            failures += ending in _FAILURES
            unlucky = unlucky + 1 if ending is Ending.NO_CAPACITY else 0
            for stops, reason in (
                (ending is Ending.REFUSED, "the training refused its input; the same command would be refused again"),
                (failures >= self.policy.max_failures, f"the training failed {failures} times in a row"),
                (attempt > self.policy.max_restarts, f"{self.policy.max_restarts} restarts are used up"),
            ):
                if stops:
                    said = self._last_error()
                    self._give_back()
                    raise TomatError(f"{reason}{said}; the logs are in {self.launch.folder}.")
            if ending in _FAILURES or ending is Ending.NO_CAPACITY:
                wait = self.policy.wait_seconds(max(failures, unlucky))
                self._say(f"next attempt in {wait:.0f} s")
                self.waited_seconds += wait
                time.sleep(wait)

    def _give_back(self) -> None:
        if not self._held:
            return
        if self.keep:
            self._say(f"kept, at its price: {self.launch.tpu_name}. Give it back with: {self.launch.delete.line}")
            return
        # gcloud itself may not start any more.
        with contextlib.suppress(OSError):
            if self.run(self.launch.delete).ok:
                return
        self._say(f"NOT given back, and paid for until it is: {self.launch.delete.line}")

    def _say(self, text: str) -> None:
        """Show a line. Whoever reads may be gone, and the disk of a log full: neither may end what is paid for."""
        try:
            self.say(text)
        except Exception:
            with contextlib.suppress(Exception):
                print(text, file=sys.stderr)

    def _attempt(self, attempt: int) -> tuple[Ending, str]:
        """One start of the training, from whatever state the slice is in, to its end."""
        ready = self._machine()
        if ready is not None:
            return ready
        if "running" in self._statuses():
            self._say("the training is running already; watching it")
        else:
            steps = [] if self._installed else [*self.launch.pack, *self.launch.install]
            for command in (*steps, self.launch.start):
                if (result := self.run(command)).ok:
                    continue
                if command in self.launch.pack:
                    self._give_back()
                    raise TomatError(f"`{command.line}` ended with status {result.status}: {result.last_line}.")
                if (state := self._state(self.launch.machine_state)) in LOST_STATES:
                    return Ending.MACHINE_LOST, f"the slice is {state}"
                return self._after(attempt, Ending.FAILED, f"cannot {command.purpose}: {result.last_line}", 0.0)
            self._installed = True
        self._logs_at = started = time.monotonic()
        ending, why = self._watch(attempt)
        if ending is not Ending.MACHINE_LOST:
            self._collect(attempt)
        return self._after(attempt, ending, why, time.monotonic() - started)

    def _after(self, attempt: int, ending: Ending, why: str, seconds: float) -> tuple[Ending, str]:
        """Say what the logs of a failure tell of, and replace a slice that failed too often, or whose chips are held,
        since what holds them is no process of this training, whose lock is free."""
        self._quick = self._quick + 1 if ending in _FAILURES and seconds < self.policy.quick_seconds else 0
        faults = self._faults(attempt) if ending is Ending.FAILED else []
        for host, fault in faults:
            self._say(f"host {host}: {fault.line}")
        held = any(fault.held for _, fault in faults)
        if held or self._quick >= self.policy.quick_failures:
            reason = "a host's chips are held by another process" if held else f"{self._quick} quick failures in a row"
            self._say(f"{reason}: replacing {self.launch.tpu_name}")
            self._held = not self.run(self.launch.delete).ok
            self._installed, self._quick = False, 0
        return (Ending.CHIP_HELD if held else ending), why

    def _faults(self, attempt: int) -> list[tuple[int, TpuFault]]:
        """What the logs of the hosts tell of their chips, by host."""
        found = [(host, known_tpu_fault(log)) for host, log in enumerate(self._logs(attempt))]
        return [(host, fault) for host, fault in found if fault is not None]

    def _machine(self) -> tuple[Ending, str] | None:
        """Get the slice to READY, creating it where it is not there; an ending if it cannot be had now."""
        silent = 0
        while True:
            state = self._state(self.launch.machine_state)
            if state == "READY":
                self._held = True
                return None
            silent = silent + 1 if state == "unknown" else 0
            if silent >= self.policy.unreachable_polls:
                said = f"`{self.launch.machine_state.line}` failed {silent} times in a row: {self._unanswered}"
                raise TomatError(f"{said}. Check the network and `gcloud auth list`; a slice is left as it is.")
            queue = self._state(self.launch.queue_state) if self.launch.queued_resource else "absent"
            waiting = self.launch.queued_resource and queue not in LOST_QUEUE_STATES
            passing = state in PASSING_STATES or queue in PASSING_STATES
            if state in LOST_STATES and not passing and not (waiting and state == "absent"):
                self._installed = False
                if state != "absent" or (self.launch.queued_resource and queue != "absent"):
                    self._say(f"the slice is {state}, the queued resource {queue}: deleting what is left of it")
                    self.run(self.launch.delete)
                self._held = True
                result = self.run(self.launch.create)
                if not result.ok and result.status != TIMEOUT_STATUS:  # one that takes long may still come
                    self._held = False
                    said = result.output + result.errors
                    if any(words.lower() in said.lower() for words in NO_CAPACITY):
                        return Ending.NO_CAPACITY, result.last_line
                    ended = f"`{self.launch.create.line}` ended with status {result.status}: {result.last_line}"
                    raise TomatError(f"{ended}. Check zone, project, quota and name; nothing was started.")
                if result.ok:
                    continue
            time.sleep(self.policy.poll_seconds)

    def _state(self, command: Command) -> str:
        """What a `describe` says: a state, `absent`, or `unknown` where the question was not answered."""
        result = self.run(command)
        if result.ok:
            return result.output.strip() or "unknown"
        said = (result.output + result.errors).lower()
        if "not_found" in said or "not found" in said:
            return "absent"
        self._unanswered = result.last_line
        return "unknown"

    def _statuses(self) -> list[str]:
        """The state of the training on each host; empty where not every host answered."""
        result = self.run(self.launch.status)
        statuses = parse_statuses(result.output)
        return statuses if result.ok and len(statuses) == self.launch.slice.n_hosts else []

    def _watch(self, attempt: int) -> tuple[Ending, str]:
        """Until the training has ended on every host, or the slice is gone."""
        silent = 0
        first_end: float | None = None
        while True:
            time.sleep(self.policy.poll_seconds)
            state = self._state(self.launch.machine_state)
            if state in LOST_STATES:
                return Ending.MACHINE_LOST, f"the slice is {state}"
            statuses = self._statuses() if state == "READY" else []
            if not statuses:
                silent += 1
                if silent >= self.policy.unreachable_polls:
                    return Ending.FAILED, f"the slice is {state}, and no host answered {silent} times in a row"
                continue
            silent = 0
            if "running" not in statuses:
                return _judge(statuses)
            if set(statuses) != {"running"}:
                first_end = time.monotonic() if first_end is None else first_end
                if time.monotonic() - first_end >= self.policy.straggler_seconds:
                    self._say(f"the hosts are {', '.join(statuses)}: stopping what still runs")
                    self.run(self.launch.stop)
            if time.monotonic() - self._logs_at >= self.policy.log_seconds:
                self._collect(attempt)

    def _collect(self, attempt: int) -> None:
        self._logs_at = time.monotonic()
        for command in self.launch.logs(attempt):
            result = self.run(command)
            if not result.ok:
                self._say(f"{command.purpose}: {result.last_line}")

    def _logs(self, attempt: int) -> list[str]:
        paths = sorted(self.launch.folder.glob(f"attempt-{attempt}-host-*.log"))
        return [path.read_text(encoding="utf-8", errors="replace") for path in paths]

    def _last_error(self) -> str:
        """The training's own error message, of the first host that has one: the others' may only follow from it."""
        for text in self._logs(len(self.endings)):
            errors = [line for line in text.splitlines() if line.startswith("error: ") or "Error: " in line]
            if errors:
                return f" ({errors[-1]})"
        return ""


def _judge(statuses: list[str]) -> tuple[Ending, str]:
    said = f"exit status {', '.join(statuses)}"
    # Before a refusal by another host, which may come of the same fault; if not, the next attempt shows it.
    if str(RETRY_STATUS) in statuses:
        return Ending.STORAGE_FAULT, said
    if str(REFUSED_STATUS) in statuses:
        return Ending.REFUSED, said
    if set(statuses) == {"0"}:
        return Ending.FINISHED, ""
    if set(statuses) <= {"0", str(STOPPED_STATUS)}:
        return Ending.PREEMPTED, said
    return Ending.FAILED, said
