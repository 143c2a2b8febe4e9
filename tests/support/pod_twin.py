"""A pod without a cloud and without waiting: Google, hosts and training as a launcher sees them, in simulated time.

It answers the very commands of `tomat.launch`, reads the start-up script that the hosts would run, and keeps account of
what must never happen: two trainers of one run, a slice that nobody gives back, time beyond the cap, a saved step that
is trained again.
"""

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tomat.launch.command import Command, Result
from tomat.launch.machine import Clock

NOT_FOUND = Result(
    1,
    "",
    "ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource 'projects/p/locations/us-east5-b/nodes/x' was "
    "not found. This command is authenticated as me@example.org which is the active account specified by the "
    "[core/account] property",
)
NO_OBJECT = Result(
    1, "", "ERROR: (gcloud.storage.cat) The following URLs matched no objects or files:\ngs://b/launch.json"
)
NO_CAPACITY = (
    'ERROR: (gcloud.compute.tpus.tpu-vm.create) {\n  "code": 8,\n  "message": "There is no more capacity in the zone '
    '\\"us-east5-b\\"; you can try in another zone where Cloud TPU Nodes are offered (see '
    'https://cloud.google.com/tpu/docs/regions) [EID: 0xba393c906974e61]"\n}'
)
QUOTA = (
    "ERROR: (gcloud.compute.tpus.tpu-vm.create) RESOURCE_EXHAUSTED: Quota limit "
    "'TPUV6EPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone us-east5-b."
)
LOGIN = (
    "ERROR: (gcloud.compute.tpus.tpu-vm.describe) There was a problem refreshing your current auth tokens: "
    "Reauthentication failed. cannot prompt during non-interactive execution.\nPlease run:\n\n  $ gcloud auth login\n\n"
    "to obtain new credentials.\n\nIf you have already logged in with a different account, run:\n\n"
    "  $ gcloud config set account ACCOUNT\n\nto select an already authenticated account to use."
)
DENIED = (
    "ERROR: (gcloud.storage.cat) HTTPError 403: me@example.org does not have storage.objects.list access to the Google "
    "Cloud Storage bucket. Permission 'storage.objects.list' denied on resource (or it may not exist). This command is "
    "authenticated as me@example.org which is the active account specified by the [core/account] property."
)
NO_BUCKET = Result(1, "", "ERROR: (gcloud.storage.cp) gs://b not found: 404.")
NO_QUEUE = Result(
    1, "", "ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: Resource 'projects/p/t-qr' was not found"
)
QUEUE_QUOTA = (  # marin-community/marin 87
    "Quota 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' exhausted. Limit 0 in region us-east5"
)
TICK = 30.0
HANG_SECONDS = 1800.0
"""After which the guard on the hosts ends a training that makes no progress (`guards.hang_seconds`)."""
N_HOSTS = 4
SLEEP_SECONDS = 1500.0
"""For which a laptop sleeps."""
SECONDS = {"create": 180.0, "delete": 60.0, "ssh": 5.0, "scp": 3.0, "describe": 2.0}


class Gone(BaseException):
    """The launcher's machine is switched off."""


@dataclass
class Training:
    began: float
    pack: str
    first: int
    """Step it goes on with."""
    reached: int
    moved: float
    """Of its last sign of progress."""
    status: int | None = None


@dataclass
class Slice:
    label: str
    born: float
    cap_seconds: float | None
    unwatched_seconds: float | None
    seen: float
    state: str = "READY"
    pack: str | None = None
    training: Training | None = None
    mute: bool = False
    """Its hosts do not answer."""
    dead: bool = False
    """One of its hosts is gone."""


@dataclass
class Queued:
    """A queued resource: CREATING, ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING (its node is CREATING), ACTIVE, and
    SUSPENDING and SUSPENDED once its node was taken away, or FAILED
    (cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources)."""

    flags: dict[str, str]
    since: float
    state: str = "CREATING"
    error: str = ""


@dataclass
class Twin(Clock):
    """Time, Google, a bucket and the hosts. `events` are (Unix time, name), what happens when."""

    events: list[tuple[float, str]] = field(default_factory=list)
    steps: int = 4000
    start_seconds: float = 300.0
    save_seconds: float = 600.0
    time: float = 0.0
    slices: dict[str, Slice] = field(default_factory=dict)
    """By zone."""
    queues: dict[str, Queued] = field(default_factory=dict)
    """By zone."""
    bucket: dict[str, str] = field(default_factory=dict)
    written: dict[str, float] = field(default_factory=dict)
    """When, by object."""
    flags: set[str] = field(default_factory=set)
    """What holds now: `no capacity`, `quota`, `login`, `denied`, `closed`, `broken start`, `refused`, ..."""
    saved: int = 0
    lost: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of steps that were trained and not saved."""
    paid_seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    packs_run: list[str] = field(default_factory=list)
    changed: Callable[[str], None] = lambda name: None
    """Called with events of the laptop: `full disk` and its end, and `taken over` while it sleeps."""

    skew: float = 0.0
    """By which the clock of the launcher's machine is wrong."""

    def now(self) -> float:
        return self.time + self.skew

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        if "closed" in self.flags:
            raise Gone
        for name in sorted({"sleeps", "taken over"} & self.flags):
            self.flags.discard(name)
            self.advance(SLEEP_SECONDS)
            self.changed(name)
        if "Ctrl-C" in self.flags:
            self.flags.discard("Ctrl-C")
            raise KeyboardInterrupt

    def advance(self, seconds: float) -> None:
        end = self.time + seconds
        while self.time < end:
            step = min(TICK, end - self.time)
            self.time += step
            # "Charges for Cloud TPU accrue while your TPU node is in a READY state" (cloud.google.com/tpu/pricing).
            self.paid_seconds += step * sum(one.state == "READY" for one in self.slices.values())
            while self.events and self.events[0][0] <= self.time:
                self._happens(self.events.pop(0)[1])
            for zone in list(self.queues):
                self._queue(zone)
            for zone in list(self.slices):
                self._train(self.slices[zone])
                self._watch(zone)
        running = [one for one in self.slices.values() if one.training and one.training.status is None]
        if len(running) > 1:
            self.faults.append(f"two trainers at {self.time:.0f}")

    def _happens(self, name: str) -> None:
        opposite = name.removeprefix("no more ")
        if opposite == "full disk":
            self.changed(name)
            return
        if name.startswith("no more "):
            self.flags.discard(opposite)
            for one in self.slices.values():
                one.mute = "mute" in self.flags
            return
        for one in self.slices.values():
            if name == "preempted" and one.state == "READY":
                self._lose(one)
                one.state, one.training = "PREEMPTED", None
            elif name == "mute":
                one.mute = True
            elif name == "dead host":
                one.dead = True
                if one.training is not None and one.training.status is None:
                    self._end(one, 76)
            elif name.isdigit() and one.training is not None and one.training.status is None:
                self._end(one, int(name))
        if not name.isdigit() and name not in ("preempted", "dead host"):
            self.flags.add(name)

    def _train(self, one: Slice) -> None:
        training = one.training
        if training is None or training.status is not None or one.state != "READY":
            return
        if "hangs" in self.flags:
            if self.time - training.moved >= HANG_SECONDS:
                self._end(one, 124)
            return
        training.moved = self.time
        if "broken start" in self.flags:
            self._end(one, 1)
            return
        done = self.time - training.began - self.start_seconds
        training.reached = max(training.reached, min(self.steps, training.first + int(max(0.0, done))))
        if done > 0:
            at_save = training.first + int(done // self.save_seconds * self.save_seconds)
            if "bucket gone" in self.flags and (at_save > self.saved or training.reached >= self.steps):
                training.reached = max(self.saved, min(training.reached, at_save))  # it waits for the save
                self._end(one, 75)
                return
            self._save(max(self.saved, min(at_save, training.reached)))
        if training.reached >= self.steps:
            self._save(self.steps)
            training.status = 0

    def _save(self, step: int) -> None:
        if step < self.saved:
            self.faults.append(f"step {step} is behind {self.saved}, which was saved")
        self.saved = step

    def _end(self, one: Slice, status: int) -> None:
        """A training ends with this status: with 143 in good order."""
        assert one.training is not None
        if status in (0, 143):
            self._save(max(self.saved, one.training.reached))
        self._lose(one)
        one.training.status = status

    def _lose(self, one: Slice) -> None:
        training = one.training
        if training is not None and training.status is None and training.reached > self.saved:
            self.lost.append((self.saved, training.reached))

    def _watch(self, zone: str) -> None:
        """What the start-up script does on the hosts."""
        one = self.slices[zone]
        silent, trains = self.time - one.seen, one.training is not None and one.training.status is None
        capped = one.cap_seconds is not None and self.time - one.born >= one.cap_seconds
        if one.state != "READY" or "powerless" in self.flags:
            return
        unwatched = one.unwatched_seconds is not None and (
            silent >= one.unwatched_seconds or (one.training is not None and not trains and silent >= 900)
        )
        if capped or unwatched:
            if trains:
                self._end(one, 143)
            del self.slices[zone]
            self.queues.pop(zone, None)

    def run(self, command: Command) -> Result:
        if "closed" in self.flags:
            raise Gone
        words = list(command.argv)
        self.calls.append(command.purpose)
        if words[:2] == ["gcloud", "storage"]:
            return self._storage(words[2], [word for word in words[3:] if not word.startswith("--")], command)
        if words[0] != "gcloud":
            return Result(0, "")
        verb, queued = words[4], words[3] == "queued-resources"
        self.advance(SECONDS.get(verb, 2.0))
        if "closed" in self.flags:
            raise Gone
        if "login" in self.flags:
            return Result(1, "", LOGIN)
        zone = next(word.partition("=")[2] for word in words if word.startswith("--zone="))
        if verb == "create":
            flags = dict(word[2:].split("=", 1) for word in words if "=" in word)
            try:
                flags["script"] = Path(flags["metadata-from-file"].removeprefix("startup-script=")).read_text()
            except OSError as error:
                return Result(1, "", f"ERROR: (gcloud.compute.tpus.{words[3]}.create) Unable to read file: {error}")
            return (self._enqueue if queued else self._create)(zone, flags)
        return (self._queued if queued else self._tpu)(verb, zone, words)

    def _storage(self, verb: str, places: list[str], command: Command) -> Result:
        self.advance(2.0)
        if "login" in self.flags:
            return Result(1, "", LOGIN)
        if "denied" in self.flags:
            return Result(1, "", DENIED)
        if "bucket gone" in self.flags:
            return NO_BUCKET
        if verb == "cat":
            return Result(0, self.bucket[places[0]]) if places[0] in self.bucket else NO_OBJECT
        if verb == "ls":
            began = datetime.datetime(2026, 11, 27, tzinfo=datetime.UTC)
            times = [began + datetime.timedelta(seconds=self.written[place]) for place in places]
            lines = [f"     1024  {at:%Y-%m-%dT%H:%M:%SZ}  {place}" for at, place in zip(times, places, strict=True)]
            return Result(0, "\n".join([*lines, f"TOTAL: {len(places)} objects, 2048 bytes (2KiB)\n"]))
        source, target = Path(places[0]), places[1]
        if "--if-generation-match=0" in command.argv and target in self.bucket:
            return Result(1, "", "HTTPError 412: At least one of the pre-conditions you specified did not hold.")
        self.bucket[target] = command.stdin if places[0] == "-" else source.read_text(errors="replace")
        self.written[target] = self.time
        return Result(0, "")

    def _tpu(self, verb: str, zone: str, words: list[str]) -> Result:
        one = self.slices.get(zone)
        if one is None:
            return NOT_FOUND
        if verb == "describe":
            return Result(0, f"{one.state}\t{one.label}\n")
        if verb == "delete":
            if one.training is not None and one.training.status is None:
                self._lose(one)
            self.slices.pop(zone, None)
            return Result(0, "")
        if verb == "scp" or one.state != "READY" or one.mute:
            return Result(0 if verb == "scp" else 255, "", "" if verb == "scp" else "ssh: connect to host: timed out")
        return self._ssh(one, next(word for word in words if word.startswith("--command=")))

    def _queue(self, zone: str) -> None:
        """What becomes of a queued resource by itself, a state in half a minute."""
        one, node = self.queues[zone], self.slices.get(zone)
        if self.time - one.since < TICK:
            return
        after = {"CREATING": "ACCEPTED", "SUSPENDING": "SUSPENDED"}.get(one.state, one.state)
        if one.state in ("ACCEPTED", "WAITING_FOR_RESOURCES"):
            full = {"no capacity", f"no capacity {zone}"} & self.flags
            after = "WAITING_FOR_RESOURCES" if full else "PROVISIONING"
            for flag, error in (("quota", QUEUE_QUOTA), ("bad request", "Network 'x' is not found")):
                if flag in self.flags:
                    after, one.error = "FAILED", error
        elif one.state == "PROVISIONING" and node is None:
            self._boot(zone, one.flags, "CREATING")
        elif one.state == "PROVISIONING" and node is not None and self.time - node.born >= SECONDS["create"]:
            node.state, node.born, after = "READY", self.time, "ACTIVE"
        elif one.state == "ACTIVE" and (node is None or node.state == "PREEMPTED"):
            after = "SUSPENDING"
            self.slices.pop(zone, None)
        if after != one.state:
            one.state, one.since = after, self.time

    def _enqueue(self, zone: str, flags: dict[str, str]) -> Result:
        if zone in self.queues:
            return Result(1, "", "ERROR: ALREADY_EXISTS: Resource already exists")
        self.queues[zone] = Queued(flags, self.time)
        return Result(0, "")

    def _queued(self, verb: str, zone: str, words: list[str]) -> Result:
        if zone not in self.queues:
            return NO_QUEUE
        if verb == "describe":
            return Result(0, f"{self.queues[zone].state}\t{self.queues[zone].error}\n")
        del self.queues[zone]
        return self._tpu(verb, zone, words) if zone in self.slices else Result(0, "")

    def _create(self, zone: str, flags: dict[str, str]) -> Result:
        if zone in self.slices:
            return Result(1, "", "ERROR: ALREADY_EXISTS: Resource already exists")
        for flag, said in ((f"no capacity {zone}", NO_CAPACITY), ("no capacity", NO_CAPACITY), ("quota", QUOTA),
                           (f"quota {zone}", QUOTA)):  # fmt: skip
            if flag in self.flags:
                return Result(1, "", said)
        self._boot(zone, flags, "READY")
        if "failed create" in self.flags:  # what is left of it is there, and costs
            return Result(1, "", "ERROR: INTERNAL: an internal error has occurred")
        return Result(0, "")

    def _boot(self, zone: str, flags: dict[str, str], state: str) -> None:
        script = flags["script"]
        cap = re.search(r'\[ (\d+) -gt 0 \] && .* why="the cap', script)
        unwatched = re.search(r"\[ (\d) = 1 \] && \[ \$silent -ge (\d+) \]; then why=\"no launcher", script)
        assert cap is not None and unwatched is not None
        label = dict(one.split("=") for one in flags["labels"].split(","))["tomat_launch"]
        self.slices[zone] = Slice(
            label,
            self.time,
            float(cap.group(1)) or None,
            float(unwatched.group(2)) if unwatched.group(1) == "1" else None,
            self.time,
            state,
            mute="mute" in self.flags,
        )

    def _ssh(self, one: Slice, script: str) -> Result:
        if "tomat-status" in script:
            one.seen = self.time
            state, steps = "absent", ""
            if (training := one.training) is not None:
                state = "running" if training.status is None else str(training.status)
                if training.reached > training.first:
                    steps = f" {training.first + 1} {training.reached}"
            # The first host, which has the lines of steps, is the one that dies.
            lines = [f"tomat-status t{n} {state}{'' if n else steps}\n" for n in range(one.dead, N_HOSTS)]
            return Result(255 if one.dead else 0, "".join(lines))
        if one.dead:
            return Result(255, "", "ssh: connect to host: timed out")
        if "mkdir -p" in script:
            one.seen = self.time
        elif "sha256sum" in script:
            self.advance(240.0)
            found = re.search(r"packs/(\w+)\.tar\.gz", script)
            assert found is not None
            one.pack = found.group(1)
        elif "setsid nohup" in script:
            if one.training is None or one.training.status is not None:
                assert one.pack is not None
                one.training = Training(self.time, one.pack, self.saved, self.saved, self.time)
                self.packs_run.append(one.pack)
                if "refused" in self.flags:
                    one.training.status = 2
        elif "kill -TERM" in script and one.training is not None and one.training.status is None:
            self._end(one, 143)
        return Result(0, "")
