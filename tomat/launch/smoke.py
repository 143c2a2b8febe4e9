"""`tomat launch --smoke`: twenty steps of a recipe on its real slice, to test each promise of the guide. It sends one
SIGTERM to a host, resumes, profiles, finds everything in the bucket, and lets the hosts give the slice back."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from tomat.base.layout import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    HISTORY_FILE,
    METADATA_FILE,
    METRICS_FILE,
    PAGE_FILE,
    PROFILER_FOLDER,
)
from tomat.base.reporting import console, counted
from tomat.launch.command import Command, Result
from tomat.launch.gcloud import TpuLaunch
from tomat.launch.machine import Clock
from tomat.launch.policy import Ending
from tomat.launch.supervisor import Supervisor
from tomat.train.runs.history import Event, last_event, parse_events, parse_metrics

STEPS = 20
MAX_HOURS = 25 / 60
POLL_SECONDS = 10.0
GIVE_BACK_SECONDS = 300.0
"""Time that the hosts have to give the slice back; deleting a slice takes minutes."""
_PACK_LINE = re.compile(r"^tomat-pack \S+ (\S+)$", re.MULTILINE)


def smoke_words(run_name: str, words: Sequence[str]) -> list[str]:
    """The arguments after the configuration: the user's `words`, with the smoke run's settings in place of theirs."""
    own = {
        "--run_name": f"{run_name}-smoke",
        "--trainer.num_train_steps": str(STEPS),
        "--trainer.steps_per_eval": str(STEPS),
        "--trainer.max_eval_batches": "1",
        "--trainer.checkpointer.keep": "[{every: 10, until: null}]",
        "--trainer.profiler.enabled": "true",
        "--trainer.profiler.start_step": "12",
        "--trainer.profiler.num_steps": "3",
    }
    kept = [word for at, word in enumerate(words) if word not in own and (at == 0 or words[at - 1] not in own)]
    return [*kept, *(word for pair in own.items() for word in pair)]


@dataclass(frozen=True)
class Promise:
    name: str
    held: bool | None
    """None: it could not be tested."""
    said: str


@dataclass
class Smoke:
    """Collects what the smoke run shows: some of it while the slice exists, the rest afterwards from the bucket."""

    launch: TpuLaunch
    run: Callable[[Command], Result]
    clock: Clock
    packs: list[str] = field(default_factory=list)
    given_back: bool = False
    """Whether the hosts have given the slice back."""

    def at_end(self, supervisor: Supervisor) -> None:
        """While the slice still exists, ask its hosts for their packs and let them give the slice back themselves."""
        launch = supervisor.machine.launch
        self.packs = _PACK_LINE.findall(self.run(launch.packs_of_hosts).output)
        self.run(launch.give_back_by_host)
        end = self.clock.now() + GIVE_BACK_SECONDS
        while not self.given_back and self.clock.now() < end:
            self.clock.sleep(POLL_SECONDS)
            self.given_back = supervisor.machine.state() == "absent"

    def _read(self, name: str) -> str:
        words = ("gcloud", "storage", "cat", f"{self.launch.run_url}/{name}")
        result = self.run(Command(f"read {name}", words, 120, quiet=True))
        return result.output if result.ok else ""

    def _listed(self) -> list[str]:
        words = ("gcloud", "storage", "ls", "--recursive", f"{self.launch.run_url}/**")
        output = self.run(Command("what the run has left", words, 300, quiet=True)).output
        return [line.strip().removeprefix(f"{self.launch.run_url}/") for line in output.splitlines() if line.strip()]

    def promises(self, supervisor: Supervisor, cost: float | None, max_cost: float | None) -> list[Promise]:
        events, rows = parse_events(self._read(HISTORY_FILE))[0], parse_metrics(self._read(METRICS_FILE))[0]
        files, pack, hosts = self._listed(), self.launch.pack, self.launch.slice.n_hosts
        start, resume = last_event(events, "start") or {}, last_event(events, "resume") or {}
        steps, hashes = [row["step"] for row in rows], sorted({sha[:12] for sha in self.packs})
        said_steps = f"{counted(len(steps), 'line')} of {counted(len(set(steps)), 'step')}"
        on_hosts = f"{', '.join(hashes) or 'none'} on {counted(len(self.packs), 'host')}"
        minutes = supervisor.held_hours * 60
        alike = {start.get("pack"), *self.packs} == {pack.sha256} and len(self.packs) == hosts
        compared = None if hosts == 1 else start.get("hosts") == hosts
        at_start = f"begun on {counted(start.get('hosts') or 0, 'host')} of {hosts}"
        resumed = f"resumed at step {resume.get('step', 'none')}, {resume.get('steps_again', 'no')} steps again"
        whole = [name for name in files if re.fullmatch(rf"{CHECKPOINT_FOLDER}/step-\d+/{METADATA_FILE}", name)]
        profiles = [name for name in files if re.fullmatch(rf"{PROFILER_FOLDER}/.*\.xplane\.pb", name)]
        pages = sorted({CONFIG_FILE, PAGE_FILE} & set(files))
        back = "absent" if self.given_back else f"still there after {GIVE_BACK_SECONDS / 60:.0f} min"
        affordable = None if cost is None or max_cost is None else cost <= max_cost
        judged: list[tuple[str, bool | None, str]] = [
            ("every host has the pack that was sent", alike, f"{on_hosts}, sent {pack.sha256[:12]}"),
            ("the history has the commit", _commit(start) == pack.commit, f"{_commit(start)}, sent {pack.commit}"),
            ("hosts are compared before the first step", compared, at_start),
            _stopped(supervisor, events),
            ("the run resumes where it was, and no step is made again", resume.get("steps_again") == 0, resumed),
            (f"{STEPS} steps, each once", steps == list(range(STEPS)), said_steps),
            ("a save is whole", bool(whole), counted(len(whole), "checkpoint")),
            ("the profile is in the bucket", bool(profiles), counted(len(profiles), "trace")),
            ("configuration and page are in the bucket", len(pages) == 2, ", ".join(pages) or "neither"),
            ("the hosts give the slice back themselves", self.given_back, back),
            ("it ends in time", minutes <= 60 * MAX_HOURS, f"{minutes:.1f} min with a slice, of {MAX_HOURS * 60:.0f}"),
            ("it costs no more than was said", affordable, f"{_dollars(cost)} of {_dollars(max_cost)}"),
        ]
        return [Promise(*one) for one in judged]


def _dollars(amount: float | None) -> str:
    return "price not known" if amount is None else f"${amount:.2f}"


def _commit(start: Event) -> str:
    return str(start.get("commit", "none")).removesuffix("-dirty")


def _stopped(supervisor: Supervisor, events: Sequence[Event]) -> tuple[str, bool, str]:
    name = "SIGTERM to one host stops all in good order, with a checkpoint"
    if (stopped := last_event(events, "preempted")) is None:
        return name, False, "the run was over before the signal, or did not begin"
    held = Ending.PREEMPTED.value in supervisor.endings
    return name, held, f"after step {stopped['step'] - 1}; attempts: {', '.join(supervisor.endings)}"


def print_promise(promise: Promise) -> None:
    word, colour = {True: ("held", "green"), False: ("NOT HELD", "red"), None: ("not tried", "yellow")}[promise.held]
    console.print(Text.assemble((f"{word:9}", colour), f" {promise.name}: {promise.said}"), soft_wrap=True)


def figures(promises: Sequence[Promise]) -> dict[str, object]:
    return {"promises": [vars(one) for one in promises], "held": not any(one.held is False for one in promises)}
