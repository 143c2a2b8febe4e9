"""`tomat lab max_batch`: finds the largest batch that runs, by running it.

A batch consists of microbatches of one size, one for each device and each accumulation. For each remat policy and
number of accumulations, the search is over this size. Every probe is a process that takes real steps; the way it ends
is its result. The record is rewritten after each probe, and a search that was stopped continues from there.
"""

import hashlib
import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.progress import Stages
from tomat.base.records import Amount, Count, Positive
from tomat.base.reporting import counted, dump_json, to_jsonable, write_json
from tomat.measure.lab.messages import FAILED, MEASURED, PROCESS, LabConfig, Request, RowError, Status
from tomat.measure.lab.process import RowProcess, described
from tomat.measure.lab.record import Rate, record_path
from tomat.measure.lab.run import alone_in
from tomat.perf.tuning.batch_search import RUNS, Tried, next_size
from tomat.perf.tuning.changes import override_words
from tomat.perf.tuning.sweep_record import RECORD_FORMAT, Seconds, read_record

POLICY_KEY = "model.gradient_checkpointing"


@dataclass(frozen=True)
class Probe:
    microbatch: Positive
    """Sequences that a device computes at a time."""
    batch_sequences: Positive
    status: Status
    reason: str = ""
    step_seconds: Seconds | None = None
    tokens_per_second: Rate | None = None
    peak_memory_bytes: Count | None = None
    loss: float | None = None
    """Loss of the first step. A larger batch begins with the rows of a smaller one."""
    others_busy_share: Amount | None = None

    def __post_init__(self) -> None:
        if self.runs and None in (self.step_seconds, self.tokens_per_second, self.peak_memory_bytes):
            raise ValueError("expected step_seconds, tokens_per_second and peak_memory_bytes of a batch that runs")

    @property
    def runs(self) -> bool:
        """Whether the probe took its steps within the limits."""
        return self.status == MEASURED


@dataclass
class Search:
    key: str
    """Hash of what was asked, including the limits."""
    policy: bool | str | None
    accumulations: Positive
    probes: list[Probe]
    stopped_by: str = ""
    """Why the search stopped early, so that the result may not be the largest; empty if it did not stop early."""

    @property
    def known(self) -> dict[int, Probe]:
        return {probe.microbatch: probe for probe in self.probes}

    @property
    def tried(self) -> dict[int, Tried]:
        """The probes for `next_size`, without the memory of those that failed: it is not what their batch needs."""
        return {size: Tried(one.runs, one.peak_memory_bytes if one.runs else None) for size, one in self.known.items()}

    @property
    def largest(self) -> Probe | None:
        return max((probe for probe in self.probes if probe.runs), key=lambda one: one.microbatch, default=None)

    @property
    def edge_is_known(self) -> bool:
        """Whether the next size above the largest that runs (or size 1, if none runs) is known to fail."""
        largest = self.largest
        beyond = self.known.get(largest.microbatch + 1 if largest else 1)
        return beyond is not None and not beyond.runs

    @property
    def name(self) -> str:
        return f"checkpointing {policy_word(self.policy)}, accum {self.accumulations}"

    def to_dict(self) -> dict[str, Any]:
        largest = self.largest
        return {
            **asdict(self),
            "largest_batch_sequences": largest.batch_sequences if largest else None,
            "edge_is_known": self.edge_is_known,
        }


def policy_word(policy: Any) -> str:
    """A policy as it is written on the command line."""
    return {True: "true", False: "false", None: "as the model has it"}.get(policy, str(policy))


@dataclass
class MaxBatch:
    name: str
    """Name of the page and the record."""
    config_path: Path
    words: Sequence[str]
    policies: Sequence[Any]
    """Values of `model.gradient_checkpointing`; None stands for the configured one."""
    accumulations: Sequence[int]
    tracking_dir: Path
    work_dir: Path
    config: LabConfig
    most: int = 2**16
    stages: Stages = field(default_factory=Stages)
    on_done: Callable[[str, Probe], None] = lambda probe, found: None
    start: Callable[[Request, Callable[[str], None]], RowProcess] = RowProcess
    describe: Callable[[Path, Sequence[str]], dict[str, Any]] = described
    searches: list[Search] = field(default_factory=list)
    setup: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        with alone_in(self.work_dir):
            self.stages.show(self.name, "importing JAX and reading the configuration")
            self.setup = self.describe(self.config_path, self.words)
            self.stages.done(self.name)
            if self.setup["memory_source"] == PROCESS and self.config.limits.memory_bytes is None:
                said = f"{self.setup['devices']} has no memory of its own, so the search would end only when this"
                raise TomatError(f"{said} machine's memory is full; give --memory_limit_gib.")
            path = record_path(self.tracking_dir, self.name)
            earlier = read_record(path, MaxBatchRecord) if path.exists() else MaxBatchRecord([])
            # Searches of other policies are kept if everything else is the same.
            self.searches = [one for one in earlier.searches if one.key == self._key(one.policy, one.accumulations)]
            if self.searches and earlier.steps not in (None, self.config.steps):
                raise TomatError(
                    f"the record of {self.name} has probes of {counted(earlier.steps, 'step')}, but "
                    f"{self.config.steps} are asked for; give --steps {earlier.steps}, or another --name."
                )
            known = {one.key: one for one in self.searches}
            wanted = []
            for policy, accumulations in itertools.product(dict.fromkeys(self.policies), self.accumulations):
                key = self._key(policy, accumulations)
                wanted.append(known.get(key) or Search(key, policy, accumulations, []))
            self.searches += [one for one in wanted if one.key not in known]
            try:
                for search in wanted:
                    self._search(search)
            finally:
                shutil.rmtree(self.work_dir / "scratch", ignore_errors=True)
        return self.record()

    def _key(self, policy: Any, accumulations: int) -> str:
        asked = {
            "config": self.config_path.read_text(encoding="utf-8"),
            "words": list(self.words),
            "limits": asdict(self.config.limits),
            "devices": self.setup["devices"],
            "policy": policy_word(policy),
            "accumulations": accumulations,
        }
        return hashlib.sha256(dump_json(asked).encode()).hexdigest()[:16]

    def _search(self, search: Search) -> None:
        unit = self.setup["data_axis_size"] * search.accumulations
        first, most = max(1, self.setup["batch_sequences"] // unit), self.most // unit
        if most < 1:
            raise TomatError(f"--largest is {self.most}; expected at least {unit}, one sequence per microbatch.")
        search.stopped_by = ""
        while (size := next_size(search.tried, first, most, self.config.limits.memory_bytes, RUNS)) is not None:
            probe = self._probe(search, size, size * unit)
            if probe.status == FAILED:
                # This says nothing about the size; another size would fail in the same way.
                search.stopped_by = f"batch {probe.batch_sequences} failed: {probe.reason}"
            else:
                search.probes.append(probe)
            self._write()
            self.on_done(f"{search.name}, batch {probe.batch_sequences}", probe)
            if search.stopped_by:
                return
        if most in search.known and search.known[most].runs:
            search.stopped_by = f"no larger batch than {most * unit} was to be tried"
        self._write()

    def _probe(self, search: Search, size: int, batch: int) -> Probe:
        overrides: dict[str, Any] = {
            "trainer.train_batch_size": batch,
            "trainer.per_device_parallelism": size if search.accumulations > 1 else -1,
        }
        if search.policy not in (None, self.setup["policy"]):
            overrides[POLICY_KEY] = search.policy
        words = [*self.words, *override_words(overrides)]
        label = f"{policy_word(search.policy)}-a{search.accumulations}-b{batch}".replace(" ", "-")
        request = Request(str(self.config_path), words, self.work_dir.absolute(), label, self.config, settle_steps=0)
        what = f"{search.name}, batch {batch}"
        try:
            with self.start(request, partial(self.stages.show, what)) as process:
                self.stages.show(what, "measuring")
                window = process.window()
        except RowError as error:
            return Probe(size, batch, error.status, error.reason)
        kept = ("step_seconds", "tokens_per_second", "peak_memory_bytes", "others_busy_share")
        loss = process.described["first_loss"]
        return Probe(size, batch, MEASURED, loss=loss, **{key: window[key] for key in kept})

    def _write(self) -> None:
        write_json(record_path(self.tracking_dir, self.name), self.record())

    def record(self) -> dict[str, Any]:
        return to_jsonable(
            {
                "record_format": RECORD_FORMAT,
                "name": self.name,
                "config_file": self.config_path.name,
                "words": list(self.words),
                "memory_limit_bytes": self.config.limits.memory_bytes,
                "row_seconds_limit": self.config.limits.seconds,
                "steps": self.config.steps,
                **self.setup,
                "searches": [search.to_dict() for search in self.searches if search.probes or search.stopped_by],
            }
        )


@dataclass(frozen=True)
class MaxBatchRecord:
    """The part of the record file that is read back."""

    searches: list[Search]
    steps: Positive | None = None


STATUS_WORDS: dict[Status, str] = {"measured": "OK", "out of memory": "OOM", "too long": "TIME", "failed": "FAILED"}
