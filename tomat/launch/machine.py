"""The slice of a launch: takes it in the first zone that has one, recognizes it by its label, and gives it back."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tomat.base.errors import TomatError
from tomat.launch.answers import Refusal, quota_words, refusal
from tomat.launch.command import TIMEOUT_STATUS, Command, Result
from tomat.launch.gcloud import TpuLaunch
from tomat.launch.policy import Ending, RestartPolicy
from tomat.launch.prices import MARGIN_SECONDS

LOST_STATES = frozenset({"PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDING", "HIDDEN", "absent"})
"""States that a TPU VM does not leave by itself for READY. The other states, except READY, are temporary.
https://cloud.google.com/python/docs/reference/tpu/latest/google.cloud.tpu_v2.types.Node.State"""
PASSING_STATES = frozenset({"DELETING", "STOPPING", "SUSPENDING"})
"""States of a lost slice that is still being removed: nothing of that name can be created or deleted now."""
LOST_QUEUE_STATES = frozenset({"FAILED", "SUSPENDING", "SUSPENDED", "DELETING", "absent"})
"""States that a queued resource does not leave by itself (https://cloud.google.com/tpu/docs/queued-resources)."""
NOT_YET_STATES = frozenset({"CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "FAILED"})
"""States of a queued resource that has not given a slice so far."""


class Unreachable(TomatError):
    """gcloud has not answered for long. What the hosts do is not known."""


class NoQuota(TomatError):
    """The project has no quota for a slice in a zone."""


class Clock:
    """The clock of this machine. Tests replace it."""

    def now(self) -> float:
        """Unix time."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass
class Machine:
    """The slice that is held at Google for one launch."""

    launch: TpuLaunch
    policy: RestartPolicy
    run: Callable[[Command], Result]
    say: Callable[[str], None]
    clock: Clock
    zones: Sequence[str] = ()
    """Zones to ask in turn; empty: only the zone of `launch`."""
    max_hours: float | None = None
    """Cap on the hours with a slice; None: no cap."""
    held_seconds: float = 0.0
    """Seconds with a slice before `held_since`."""
    held_since: float | None = None
    """Unix time since when there may be a slice, which is paid for; None: there is none."""
    created: int = 0
    """Number of slices asked for by this launcher. A new slice has nothing installed."""
    unanswered: str = ""
    """The last error that gcloud gave instead of an answer."""
    changed: Callable[[], None] = field(default=lambda: None)
    """Called when a slice is asked for, or is gone."""
    looked: Callable[[], None] = field(default=lambda: None)
    """Called repeatedly while waiting for a slice."""

    absent_at: float | None = None
    """Unix time of the last look that found no slice. A slice from Google's queue may exist since then."""
    asked: bool = False
    """A slice or a queued resource was asked for, so there may be something to give back."""

    def __post_init__(self) -> None:
        # For the next slice. A slice that is there keeps to what its hosts were told, which is in `launch`.
        self._unwatched_hours = self.launch.unwatched_hours

    @property
    def held(self) -> bool:
        return self.asked or self.held_since is not None

    @property
    def used_seconds(self) -> float:
        return self.held_seconds + (0.0 if self.held_since is None else self.clock.now() - self.held_since)

    @property
    def left_seconds(self) -> float | None:
        """Seconds until the cap; None without a cap."""
        return None if self.max_hours is None else self.max_hours * 3600 - self.used_seconds

    @property
    def is_capped(self) -> bool:
        return self.left_seconds is not None and self.left_seconds <= MARGIN_SECONDS

    def _hold(self) -> None:
        if self.held_since is None:
            now, hours = self.clock.now(), self.launch.unwatched_hours
            longest = now if hours is None else 3600 * hours  # unwatched for longer, its hosts have given it back
            self.held_since = now if self.absent_at is None else max(self.absent_at, now - longest)
            self.changed()

    def _released(self) -> None:
        self.asked, self.absent_at = False, self.clock.now()
        if self.held_since is not None:
            self.held_seconds, self.held_since = self.used_seconds, None
            self.changed()

    def leave(self, why: str) -> None:
        """Raise an error and never touch the slice again."""
        self.asked, self.held_since = False, None
        raise TomatError(why)

    def state(self) -> str:
        """The state of the slice: Google's word, `absent`, or `unknown` if there was no answer. A slice that does not
        belong to this launch is an error and is left alone."""
        said, label = self._ask(self.launch.machine_state)
        if said not in {"absent", "unknown", *PASSING_STATES} and label != self.launch.label:
            self._released()
            raise TomatError(
                f"the slice {self.launch.tpu_name} in {self.launch.zone} was not made by this launch and login (its "
                f"label is {label or 'none'}, not {self.launch.label}): it may train for somebody else, and is left as "
                f"it is. Give another --tpu_name, or, if it is yours, give it back: {self.launch.delete.line}"
            )
        if said not in ("absent", "unknown"):
            self._hold()
        elif said == "absent" and not self.launch.queued_resource:
            self._released()
        return said

    def _ask(self, command: Command) -> tuple[str, str]:
        result = self.run(command)
        if result.ok:
            state, _, label = result.output.strip().partition("\t")
            return state or "unknown", label.strip()
        said = (result.output + result.errors).lower()
        if "not_found" in said or "not found" in said:
            return "absent", ""
        self.unanswered = result.last_line
        return "unknown", ""

    def get(self) -> tuple[Ending, str] | None:
        """Wait until the slice is READY, creating it if needed. Returns an ending if no slice can be had now."""
        silent = stuck = 0
        began = self.clock.now()
        refused: list[str] = []
        without_quota: list[str] = []
        while True:
            self.looked()
            if self.is_capped:
                return Ending.CAPPED, ""
            state = self.state()
            if state == "READY":
                return None
            silent = silent + 1 if state == "unknown" else 0
            if silent >= self.policy.unreachable_polls:
                raise self.unreachable(silent)
            queue, why = self._ask(self.launch.queue_state) if self.launch.queued_resource else ("absent", "")
            waiting = self.launch.queued_resource and queue not in LOST_QUEUE_STATES and state == "absent"
            if state == "absent" and queue in NOT_YET_STATES:  # wait for as long as it takes
                began = self.absent_at = self.clock.now()
            elif queue not in ("absent", "unknown"):
                self._hold()  # also if the slice was taken away again: it was held until then
            elif queue == state == "absent" and self.asked:  # the hosts have given the slice back
                self._hold()
                self._released()
            passing = state in PASSING_STATES or queue in PASSING_STATES
            if state in LOST_STATES and not passing and not waiting:
                if state != "absent" or queue != "absent":
                    self.say(f"the slice is {state}, the queued resource {queue}: deleting what is left of it")
                    if not self.give_back():
                        stuck += 1
                        if stuck >= self.policy.unreachable_polls:
                            return Ending.FAILED, f"the slice is {state}, and was not deleted in {stuck} attempts"
                        self.clock.sleep(self.policy.poll_seconds)
                        continue
                try:
                    ending = self._failed(why) if queue == "FAILED" else self._create()
                except NoQuota as error:  # a quota may be of one zone, so the others are asked all the same
                    ending = Ending.NO_CAPACITY, str(error)
                    without_quota.append(str(error))
                    if len(without_quota) >= max(1, len(self.zones)):
                        raise NoQuota(f"{'; '.join(dict.fromkeys(without_quota))}; nothing was started.") from None
                if ending is not None:
                    refused.append(f"{self.launch.zone}: {ending[1]}")
                    self._next_zone()
                    if len(refused) < len(self.zones):
                        continue
                    return ending[0], "; ".join(refused)
                began = self.clock.now()
                continue
            if (state not in LOST_STATES or waiting) and self.clock.now() - began > self.policy.creation_seconds:
                self.give_back()
                return Ending.FAILED, f"the slice was {state} for {self.policy.creation_seconds / 60:.0f} min"
            self.clock.sleep(self.policy.poll_seconds)

    def _next_zone(self) -> None:
        if len(self.zones) > 1:
            at = self.zones.index(self.launch.zone)
            self.launch = replace(self.launch, zone=self.zones[(at + 1) % len(self.zones)])

    def _create(self) -> tuple[Ending, str] | None:
        """Ask for a slice. Returns an ending if there is none now. After a timeout the slice may still come."""
        left = self.left_seconds
        self.launch = replace(self.launch, unwatched_hours=self._unwatched_hours)
        self.launch.write_watchdog(None if left is None else left - MARGIN_SECONDS / 3)
        self.asked, self.absent_at = True, self.clock.now()
        self.created += 1
        if self.launch.queued_resource:  # it may wait for days, at no cost
            self.changed()
        else:
            self._hold()
        result = self.run(self.launch.create)
        if result.ok or result.status == TIMEOUT_STATUS:
            return None
        said = result.output + result.errors
        meaning = refusal(said)
        if meaning is Refusal.EXISTS:
            return None
        # A failed request may have left something, or only its answer was lost. If nothing is there, it costs nothing.
        may_be_there = meaning is not Refusal.LOGIN and (self.launch.queued_resource or self.state() != "absent")
        if may_be_there and not self.give_back():
            return None
        self._released()
        if meaning in (Refusal.NO_CAPACITY, Refusal.UNREACHABLE):
            return Ending.NO_CAPACITY, result.last_line
        if meaning is Refusal.FAULT:
            return Ending.NOT_MADE, result.last_line
        self._refuse_final(said)
        ended = f"`{self.launch.create.line}` ended with status {result.status}: {result.last_line}"
        raise TomatError(f"{ended}. Check zone, project, quota and name; nothing was started.")

    def _failed(self, why: str) -> tuple[Ending, str]:
        """The ending for a queued resource that failed and was given back. An immediate retry would fail again."""
        self._refuse_final(why)
        if refusal(why) is Refusal.FAULT:
            return Ending.NOT_MADE, f"the queued resource failed: {why}"
        if why and refusal(why) is not Refusal.NO_CAPACITY:
            raise TomatError(f"the queued resource failed: {why}. Correct that; nothing was started.")
        return Ending.NO_CAPACITY, f"the queued resource failed: {why or 'Google does not say why'}"

    def _refuse_final(self, said: str) -> None:
        if refusal(said) is Refusal.QUOTA:
            raise NoQuota(quota_words(said, self.launch.project))

    def unreachable(self, silent: int) -> Unreachable:
        """The error for a gcloud that does not answer any more. The hosts then act on their own."""
        said = f"`{self.launch.machine_state.line}` failed {silent} times in a row: {self.unanswered}"
        left = self.launch.unwatched_words if self.held else "no slice is known to be held"
        return Unreachable(f"{said}. Check the network and `gcloud auth list`; {left}, and the same command goes on.")

    def give_back(self) -> bool:
        """Delete the slice. Returns whether it is gone, and tells the user what to do if it is not."""
        # OSError: gcloud itself may not start any more.
        with contextlib.suppress(OSError):
            result = self.run(self.launch.delete)
            said = (result.output + result.errors).lower()
            if result.ok or "not_found" in said or "not found" in said:
                self._released()
                return True
        self.say(f"the slice was NOT given back, and costs money until you do: {self.launch.delete.line}")
        self.say(f"if you do not, {self.launch.unwatched_words}")
        return False
