"""Supervises one launch: gets the slice, starts, watches and restarts the training, collects logs, gives it back."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tomat.base.errors import TomatError
from tomat.base.layout import LOST_STATUS
from tomat.base.reporting import counted
from tomat.base.tpu_faults import known_tpu_fault
from tomat.launch.answers import Refusal, refusal
from tomat.launch.command import Command, Result
from tomat.launch.gcloud import TpuLaunch
from tomat.launch.machine import LOST_STATES, Clock, Machine, Unreachable
from tomat.launch.policy import FAILURES, WAITED_FOR, Ending, Health, RestartPolicy, judge
from tomat.launch.prices import MARGIN_SECONDS
from tomat.launch.record import (
    RECORD_FILE,
    RENEW_SECONDS,
    WATCHED_SECONDS,
    LaunchRecord,
    Login,
    age_in_bucket,
    other_launcher,
    parse_record,
)
from tomat.launch.remote import parse_statuses, parse_steps


@dataclass
class Supervisor:
    launch: TpuLaunch
    policy: RestartPolicy
    run: Callable[[Command], Result]
    say: Callable[[str], None]
    login: Login
    keep: bool = False
    """Do not give the slice back at the end."""
    zones: Sequence[str] = ()
    max_hours: float | None = None
    new_pack: bool = False
    """Replace the pack of a launch that has not ended."""
    only_once: bool = False
    """Refuse a run whose launch has finished: there is nothing left to train, and a slice would be paid for."""
    at_end: Callable[["Supervisor"], None] = field(default=lambda supervisor: None)
    """Called once the training is finished, while the slice still exists."""
    clock: Clock = field(default_factory=Clock)
    endings: list[str] = field(default_factory=list)
    """How each attempt ended, in order. Attempts by earlier launchers of the same launch come first."""
    waited_seconds: float = 0.0
    _installed_on: int | None = None
    """Number of the slice (`Machine.created`) on which the pack is installed."""
    _replaces: bool = False
    """A training that runs on the slice belongs to the former pack."""
    _steps: int = 0
    _quick: int = 0
    """Quick failures in a row on this slice."""
    _replaced: bool = False
    """The slice of this attempt was given back, so the next attempt gets another slice."""
    _dead: int = 0
    """Number of hosts that did not answer the last question."""
    _trains: bool = False
    """The training ran on a host when one last answered. What runs is neither installed over nor given back, also if
    another host is slow to answer."""
    _collected: set[int] = field(default_factory=set)
    """Hosts whose log of this attempt was collected. Files of that name may also be of an earlier launch."""
    _logs_at: float = 0.0
    _renewed_at: float = 0.0
    _said_at: float = 0.0
    """When the record was last written to the bucket."""
    _ended: str | None = None
    _watching: bool = True

    def __post_init__(self) -> None:
        self.machine = Machine(
            self.launch, self.policy, self.run, self._say, self.clock, self.zones, self.max_hours,
            changed=self._renew, looked=self._is_still_its_own,
        )  # fmt: skip

    @property
    def held_hours(self) -> float:
        return self.machine.used_seconds / 3600

    def supervise(self) -> "Supervisor":
        try:
            self._claim()
            self._until_it_ends()
            return self
        except KeyboardInterrupt:
            # A training that runs goes on. A slice without one is given back.
            self._watching = False
            if self.machine.held:
                self._statuses()
                if not self._trains:
                    self._give_back()
            raise
        except BaseException as error:
            # A training that was at work when gcloud last answered may still be; the same command then goes on with it.
            if self.machine.held and not (isinstance(error, Unreachable) and self._trains):
                self._give_back()
            if not self.machine.held:  # else the same command goes on with the slice, its pack and its hours so far
                self._ended = self._ended or str(error) or type(error).__name__
            raise
        finally:
            self._watching = False
            if self._renewed_at:
                self._renew()
            with contextlib.suppress(OSError):
                self.launch.sent_environment.unlink(missing_ok=True)

    def _claim(self) -> None:
        record = self._recorded()
        if record is not None and record.ended is None:
            age = age_in_bucket([self._must(one, "Check the bucket").output for one in self.launch.date_record][-1])
            if (other := other_launcher(record, self.login, age)) is not None:
                name = self.launch.run_name
                raise TomatError(f"run '{name}' is launched by {other}; leave it to that one, or use another run_name.")
            self._go_on(record, age)
        elif record is not None and self.only_once and record.ended == Ending.FINISHED.value:
            said = f"run '{self.launch.run_name}' has finished, and would train nothing"
            remedy = f"Remove {self.launch.run_url}, or give another --run_name, to repeat it"
            raise TomatError(f"{said}. {remedy}; nothing was started.")
        else:
            self._must(self.launch.send_pack, "Check the bucket and your access to it")
        write = self.launch.write_record(self._record().text, only_new=record is None)
        self._must(write, "Another launcher may have begun just now")
        self._renewed_at = self._said_at = self.clock.now()

    def _recorded(self) -> LaunchRecord | None:
        result = self.run(self.launch.read_record)
        if result.ok:
            return parse_record(result.output, f"{self.launch.run_url}/{RECORD_FILE}")
        said = (result.output + result.errors).lower()
        if "matched no objects" in said or "not found" in said or "not_found" in said:
            return None
        raise self._refused(self.launch.read_record, result, "Check the bucket and your access to it")

    def _go_on(self, record: LaunchRecord, age: float) -> None:
        hours = record.unwatched_hours
        unwatched = 86_400.0 * 365 if hours is None else hours * 3600
        self.endings = list(record.endings)
        self.machine.held_seconds = record.held(age, unwatched)
        self.machine.asked = record.asked
        self.machine.absent_at = self.clock.now() - age if record.held_since is None else None
        if record.login == str(self.login):
            self.machine.launch = replace(self.machine.launch, zone=record.zone)
        if (record.asked or record.held_since is not None) and hours != self.launch.unwatched_hours:
            self.machine.launch = replace(self.machine.launch, unwatched_hours=hours)
            said = "the slice keeps to the --unwatched_hours or --keep that it was made with"
            self._say(f"{said}: {self.machine.launch.unwatched_words}")
        own = self.launch.pack
        if record.sha256 == own.sha256:
            self._say(f"going on with the launch of this run, {own.words}")
        elif self.new_pack:
            self._say(f"going on with this checkout, {own.words}, in place of pack {record.sha256[:12]}")
            self._must(self.launch.send_pack, "Check the bucket and your access to it")
            self._replaces = True
        else:
            pack = record.pack(own.path)
            said = f"going on with the launch of this run and its {pack.words}"
            self._say(f"{said}; --new_pack sends this checkout instead")
            self.launch = replace(self.launch, pack=pack)
            self.machine.launch = replace(self.machine.launch, pack=pack)

    def _must(self, command: Command, remedy: str) -> Result:
        """Run a command that must succeed before anything is paid for."""
        if not (result := self.run(command)).ok:
            raise self._refused(command, result, remedy)
        return result

    def _refused(self, command: Command, result: Result, remedy: str) -> TomatError:
        expired = refusal(result.output + result.errors) is Refusal.LOGIN
        remedy = "Run `gcloud auth login`" if expired else remedy
        ended = f"`{command.line}` ended with status {result.status}: {result.last_line}"
        return TomatError(f"{ended}. {remedy}; nothing was started.")

    def _record(self) -> LaunchRecord:
        launch = self.machine.launch
        return LaunchRecord(
            login=str(self.login),
            machine=self.login.machine,
            seen=self.clock.now(),
            watching=self._watching,
            sha256=launch.pack.sha256,
            commit=launch.pack.commit,
            dirty=launch.pack.dirty,
            config_path=launch.pack.config_path,
            overrides=list(launch.pack.overrides),
            tpu_name=launch.tpu_name,
            zone=launch.zone,
            held_seconds=self.machine.held_seconds,
            held_since=self.machine.held_since,
            asked=self.machine.asked,
            unwatched_hours=launch.unwatched_hours,
            endings=self.endings,
            ended=self._ended,
        )

    def _renew_when_due(self) -> None:
        if self.clock.now() - self._renewed_at >= RENEW_SECONDS:
            self._renew()

    def _is_still_its_own(self) -> None:
        """Called before a slice is asked for. If the record could not be written for so long that another launcher may
        have taken over, retry for a while, then leave the launch alone."""
        self._renew_when_due()
        began = self.clock.now()
        while (silent := self.clock.now() - self._said_at) >= WATCHED_SECONDS:
            if self.clock.now() - began >= self.policy.max_backoff_seconds:
                said = f"the bucket has not taken the record of this launch for {silent / 60:.0f} min, so another"
                launch = self.machine.launch
                left = f"{launch.unwatched_words}. If none has, give it back: {launch.delete.line}"
                self.machine.leave(f"{said} launcher may have gone on with it; {left}")
            self.clock.sleep(self.policy.poll_seconds)
            self._renew()

    def _renew(self) -> None:
        """Write the record. If that fails now, the launch goes on. If another launcher took over while this one was
        silent (for example on a sleeping laptop), the launch is left to that one."""
        if not self._renewed_at:
            return
        self._renewed_at = self.clock.now()
        try:
            record = self._recorded()
            if record is not None and not record.is_of(self.login):
                # Another login does not touch a slice that is held here, so in this case the launch goes on.
                if record.login == str(self.login) or not self.machine.held:
                    self._renewed_at = 0.0
                    other = f"{record.login} on {record.machine}"
                    said = f"the run is now launched by {other}, which went on with it while this launcher was silent"
                    self.machine.leave(f"{said}; it is left to that one, and nothing of it is given back here")
            result = self.run(self.launch.write_record(self._record().text))
            why = None if result.ok else result.last_line
            self._said_at = self.clock.now() if result.ok else self._said_at
        except (OSError, TomatError) as error:
            if not self._renewed_at:
                raise
            why = str(error)
        if why is not None:
            self._say(f"the record of the launch could not be renewed: {why}")

    def _until_it_ends(self) -> None:
        health = Health(self.policy)
        while True:
            attempt = len(self.endings) + 1
            self._steps, self._replaced, self._trains = 0, False, False
            self._collected.clear()
            ending, why = self._attempt(attempt)
            self.endings.append(ending.value)
            self._say(f"attempt {attempt} {ending.value}{f': {why}' if why else ''}")
            if ending is Ending.FINISHED:
                self._ended = ending.value
                self.at_end(self)
                self._give_back()
                return
            health.count(ending, self._steps)
            if self._replaced:
                health.replaced()
            reason = health.verdict
            if ending is Ending.REFUSED:
                reason = "the training refused its input; the same command would be refused again"
            elif ending is Ending.CAPPED:
                cap = f"the cap of {self.max_hours or 0:.2f} h with a slice is reached"
                reason = f"{cap}; the same command goes on, with a new cap"
            if reason is None and attempt > self.policy.max_restarts:
                reason = f"{self.policy.max_restarts} restarts are used up"
            if reason is not None:
                said = self._last_error()
                self._ended = reason
                self._give_back()
                raise TomatError(f"{reason}{said}; the logs are in {self.launch.folder}.")
            self._renew()
            if ending in WAITED_FOR:
                seconds = health.wait_seconds
                if self.machine.held and (left := self.machine.left_seconds) is not None:
                    seconds = max(0.0, min(seconds, left - MARGIN_SECONDS))  # the slice is paid for meanwhile
                self._say(f"next attempt in {seconds:.0f} s")
                self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        """Wait, and ask the hosts now and then: without a sign of life they would give the slice back."""
        self.waited_seconds += seconds
        while seconds > 0:
            self.clock.sleep(min(seconds, self.policy.log_seconds / 2))
            seconds -= self.policy.log_seconds / 2
            if seconds > 0 and self.machine.held:
                self._statuses()
            self._renew()

    def _give_back(self) -> None:
        if self.keep:
            said = self.machine.launch
            self._say(f"kept, at its price: {said.tpu_name}. Give it back with: {said.delete.line}")
            if said.unwatched_hours is not None:
                self._say(f"but it was made without --keep: {said.unwatched_words}")
            return
        if self.machine.held:
            self.machine.give_back()

    def _say(self, text: str) -> None:
        """Show a line. A closed terminal or a full disk for the log must not end a launch that is paid for."""
        try:
            self.say(text)
        except Exception:
            with contextlib.suppress(Exception):
                print(text, file=sys.stderr)

    def _attempt(self, attempt: int) -> tuple[Ending, str]:
        refused = self.machine.get()
        if refused is not None:
            return refused
        launch = self.machine.launch
        self._statuses()
        running = self._trains
        if running and self._replaces:
            self._say("stopping the training of the earlier pack, in good order")
            self.run(launch.stop)
            running = False
        self._replaces = False
        if running:
            self._say("the training is running already; watching it")
        else:
            steps = [] if self._installed_on == self.machine.created else launch.install
            for command in (*steps, launch.start):
                if (result := self.run(command)).ok:
                    continue
                if (state := self.machine.state()) in LOST_STATES:
                    return Ending.MACHINE_LOST, f"the slice is {state}"
                return self._after(attempt, Ending.FAILED, f"cannot {command.purpose}: {result.last_line}", 0.0)
            self._installed_on, self._trains = self.machine.created, True
            self._steps = 0  # forget the steps read from the previous log
        self._logs_at = started = self.clock.now()
        ending, why = self._watch(attempt)
        if ending is not Ending.MACHINE_LOST:
            self._collect(attempt)
        return self._after(attempt, ending, why, self.clock.now() - started)

    def _after(self, attempt: int, ending: Ending, why: str, seconds: float) -> tuple[Ending, str]:
        """Report known TPU faults in the logs of a failure. Replace a slice that failed too often, that has lost hosts,
        or whose chips are held: this training's lock is free, so a foreign process holds them."""
        self._quick = self._quick + 1 if ending in FAILURES and seconds < self.policy.quick_seconds else 0
        held = False
        for host, log in self._logs(attempt) if ending is Ending.FAILED else ():
            if (fault := known_tpu_fault(log)) is not None:
                self._say(f"host {host}: {fault.line}")
                held = held or fault.held
        dead = ending is Ending.HOST_LOST and self._dead > 0
        if held or dead or self._quick >= self.policy.quick_failures:
            reason = "a host's chips are held by another process" if held else f"{self._quick} quick failures in a row"
            reason = f"{counted(self._dead, 'host')} of the slice did not answer" if dead else reason
            self._say(f"{reason}: replacing {self.launch.tpu_name}")
            self.machine.give_back()
            self._quick, self._replaced = 0, True
        return (Ending.CHIP_HELD if held else ending), why

    def _statuses(self) -> list[str]:
        """The state of the training on each host; empty if not every host answered, unless one reports a lost host."""
        launch = self.machine.launch
        result = self.run(launch.status)
        statuses = parse_statuses(result.output)
        self._steps = max(self._steps, parse_steps(result.output))
        self._dead = launch.slice.n_hosts - len(statuses)
        if statuses:
            self._trains = "running" in statuses
        return statuses if (result.ok and not self._dead) or str(LOST_STATUS) in statuses else []

    def _watch(self, attempt: int) -> tuple[Ending, str]:
        silent = unanswered = 0
        first_end: float | None = None
        while True:
            self.clock.sleep(self.policy.poll_seconds)
            self._renew_when_due()
            if self.machine.is_capped:
                self._say("the cap is near: stopping the training in good order")
                self.run(self.machine.launch.stop)
                return Ending.CAPPED, ""
            state = self.machine.state()
            if state in LOST_STATES:
                return Ending.MACHINE_LOST, f"the slice is {state}"
            unanswered = unanswered + 1 if state == "unknown" else 0
            if unanswered >= self.policy.unreachable_polls:
                raise self.machine.unreachable(unanswered)
            statuses = self._statuses() if state == "READY" else []
            if not statuses:
                silent += state != "unknown"
                if silent >= self.policy.unreachable_polls:
                    return Ending.FAILED, f"the slice is {state}, and no host answered {silent} times in a row"
                continue
            silent = 0
            if "running" not in statuses:
                return judge(statuses)
            if set(statuses) != {"running"}:
                first_end = self.clock.now() if first_end is None else first_end
                if self.clock.now() - first_end >= self.policy.straggler_seconds:
                    self._say(f"the hosts are {', '.join(statuses)}: stopping what still runs")
                    self.run(self.machine.launch.stop)
            if self.clock.now() - self._logs_at >= self.policy.log_seconds:
                self._collect(attempt)

    def _collect(self, attempt: int) -> None:
        """Collect the logs of the hosts for at most the time between two collections: many hosts that do not answer
        would take long, while the slice is paid for."""
        self._logs_at = self.clock.now()
        seconds = self.policy.log_seconds
        if (left := self.machine.left_seconds) is not None:
            # Leave time before the cap: to stop the training and give the slice back, or later only to give it back.
            seconds = min(seconds, left - (MARGIN_SECONDS if left > MARGIN_SECONDS else MARGIN_SECONDS / 2))
        for host, command in enumerate(self.machine.launch.logs(attempt)):
            if (took := self.clock.now() - self._logs_at) >= seconds:
                self._say(f"after {took:.0f} s the other logs are left where they are: {command.purpose}, ...")
                return
            result = self.run(command)
            if result.ok:
                self._collected.add(host)
            else:
                self._say(f"{command.purpose}: {result.last_line}")

    def _logs(self, attempt: int) -> list[tuple[int, str]]:
        """The hosts whose logs of this attempt are here, with the logs."""
        paths = [(host, self.launch.folder / f"attempt-{attempt}-host-{host}.log") for host in sorted(self._collected)]
        return [(host, path.read_text(encoding="utf-8", errors="replace")) for host, path in paths if path.is_file()]

    def _last_error(self) -> str:
        """The training's own error message, from the first host that has one; errors of others may only follow."""
        for _, text in self._logs(len(self.endings)):
            errors = [line for line in text.splitlines() if line.startswith("error: ") or "Error: " in line]
            if errors:
                return f" ({errors[-1]})"
        return ""
