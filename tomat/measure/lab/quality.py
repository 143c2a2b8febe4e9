"""Trains the rows of a sweep over seeds, to find which are faster or worse (`tomat lab quality`) and which are the same
except for rounding (`profiling/numerics.py`).

Each row is trained once with each seed, in its own process (`quality_runs.py`). For each seed the rows run in another
order, so that a drift of the machine affects all rows. A seed decides the initial weights and the order of the data: a
row and its base with the same seed start alike and are compared as a pair. If rows are marked as exact or not exact,
their whole loss curves are compared too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.progress import Stages
from tomat.base.reporting import first_line, to_jsonable, write_json
from tomat.measure.bench.processes import compile_cache
from tomat.measure.lab.curves import CurveComparison, compare_curves, window_means
from tomat.measure.lab.quality_runs import (
    TRAINING_COMPOUNDS,
    PlannedRun,
    RunFailed,
    check_judged,
    read_finished,
    share_data,
    train_run,
    tuning_overrides,
)
from tomat.measure.lab.run import alone_in
from tomat.measure.lab.speedup import SAME, Difference, Ratio, difference_of, ratio_of
from tomat.perf.tuning.changes import override_words
from tomat.perf.tuning.sweep_config import SweepConfig, SweepRow

RECORD_FORMAT = 1
SPEED = "tokens_per_second_median"
LOSS = "validation_loss"
QUALITIES = {
    LOSS: "loss",
    "held_out_nmae_median": "teacher-forced NMAE",
    "free_running_nmae": "NMAE",
    "held_out_nemd": "teacher-forced NEMD",
}
"""Figures of a run's quality (`train/runs/summary.py`) -> their names in words. Lower is better."""
DECIDES = ("free_running_nmae", "held_out_nmae_median", LOSS)
"""The first of these figures that both a row and its base have decides whether the row is better or worse."""


@dataclass
class QualityRow:
    name: str
    base: str | None
    overrides: Mapping[str, Any]
    question: str
    loss_settings: Mapping[str, Any]
    """Rows with different loss settings have incomparable losses; only `block_positions` may differ (order of sums)."""
    exact: bool | None = None
    figures: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Seed -> result of `run_figures`."""
    failed: dict[int, str] = field(default_factory=dict)
    materials: tuple[str, ...] = ()
    """The materials that the row was evaluated on."""
    parameters: int = 0
    devices: str = ""
    """Devices of the last run, such as `1 x cpu`."""
    losses: dict[int, np.ndarray] = field(default_factory=dict)
    """Seed -> loss of every step, [steps]; not on record."""

    def values(self, key: str) -> dict[int, float]:
        """Seed -> value of one figure, for the seeds where it is known."""
        return {seed: one[key] for seed, one in self.figures.items() if key in one}


@dataclass(frozen=True)
class Against:
    seeds: tuple[int, ...]
    """Seeds for which both rows have a speed."""
    speed: Ratio | None
    """Tokens a second over the base's."""
    differences: Mapping[str, Difference]
    """Key of `QUALITIES` -> the row's value minus the base's."""
    curves: CurveComparison | None = None
    """Comparison of the loss curves, if the row has the base's loss and is marked as exact or not exact."""

    @property
    def quality(self) -> str:
        """`BETTER`, `WORSE` or `SAME` by the first figure of `DECIDES` that is known; empty if none is."""
        return next((self.differences[key].verdict for key in DECIDES if key in self.differences), "")

    @property
    def verdict(self) -> str:
        """Speed and quality in words, and the figures whose verdict differs from that of the deciding figure."""
        speed, quality = "" if self.speed is None else self.speed.verdict, self.quality
        words = [speed, quality]
        if speed == SAME == quality:
            words = [SAME]
        elif SAME in words:
            words = [f"speed {SAME}" if speed == SAME else speed, f"quality {SAME}" if quality == SAME else quality]
        verdict = ", ".join(word for word in words if word)
        others = [f"{QUALITIES[key]} {found.verdict}" for key, found in self.differences.items()
                  if found.verdict not in (SAME, quality)]  # fmt: skip
        return f"{verdict}; {', '.join(others)}" if others else verdict


def has_loss_of(row: QualityRow, base: QualityRow) -> bool:
    """Whether both rows minimise the same loss, so that their losses can be compared."""
    mine, theirs = ({**one.loss_settings, "block_positions": None} for one in (row, base))
    return mine == theirs


def against_base(
    row: QualityRow, base: QualityRow, window_steps: int = 20, first_step_tolerance: float = 1e-5
) -> Against:
    """Compare a row with its base. `window_steps` and `first_step_tolerance` are those of `SweepConfig`."""
    same_loss = has_loss_of(row, base)
    pairs = {}
    for key in (*QUALITIES, SPEED):
        mine, theirs = row.values(key), base.values(key)
        pairs[key] = {seed: (mine[seed], theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())}
    differences = {}
    for key in QUALITIES:
        found = difference_of([mine - theirs for mine, theirs in pairs[key].values()])
        if found is not None and (key != LOSS or same_loss):
            differences[key] = found
    speed = ratio_of([mine / theirs for mine, theirs in pairs[SPEED].values()])
    curves = None
    both = sorted(row.losses.keys() & base.losses.keys())
    if row.exact is not None and same_loss and both:
        of_base, of_row = (np.stack([one.losses[seed] for seed in both]) for one in (base, row))
        curves = compare_curves(of_base, of_row, window_steps, first_step_tolerance)
    return Against(tuple(pairs[SPEED]), speed, differences, curves)


def seeds_of(text: str) -> list[int]:
    """The seeds of a command line, such as `0,1,2`."""
    words = text.split(",")
    seeds = [int(word) for word in words if word.strip().isdecimal()]
    if len(seeds) != len(words) or len(set(seeds)) != len(seeds) or len(seeds) < 2:
        raise TomatError(f"--seeds is {text!r}; expected two or more different ones from 0: the noise is their spread.")
    return seeds


@dataclass
class Quality:
    """Trains one sweep over at least two seeds. `work_dir` holds the runs."""

    sweep: SweepConfig
    seeds: Sequence[int]
    work_dir: Path
    record_file: Path
    steps: int | None = None
    """Steps of each run; None: the configuration's."""
    share: float | None = 0.15
    """Share of the embedded training densities that is set aside to evaluate on; None: the held-out ones are used."""
    split_seed: int = 0
    rows: dict[str, QualityRow] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of the first row for the record: steps, batch, tokens of a sequence, loss and its unit, data."""
    devices: str = ""
    _runs: dict[str, list[PlannedRun]] = field(default_factory=dict)

    def run(self, only: Sequence[str] = ()) -> dict[str, Any]:
        """Train the runs that are missing (of the rows `only`, if given) and show the progress. Returns the record,
        which is written to disk after each run."""
        with Stages() as stages:
            stages.show(self.sweep.name, "importing JAX and reading the configurations")
            runs = self.plan()
            with alone_in(self.work_dir) as lock:
                self.read()
                stages.done(self.sweep.name)
                first: PlannedRun | None = None
                for number, seed in enumerate(self.seeds):
                    names = [name for name in self.rows if not only or name in only]
                    for name in (*names[number % len(names) :], *names[: number % len(names)]):
                        run = next(one for one in runs[name] if one.seed == seed)
                        first = first or run
                        if seed in self.rows[name].figures:
                            continue
                        share_data(Path(first.config.run_dir), Path(run.config.run_dir), first.config, run.config)
                        stages.show(run.name, "training")
                        said = "done"
                        try:
                            train_run(run, self.work_dir, lock)
                            self._read(name, run)
                        except RunFailed as error:
                            # For example a loss that is NaN. The row stays in the record.
                            self.rows[name].failed[seed] = first_line(error)
                            said = f"failed: {first_line(error)}"
                        stages.done(run.name)
                        stages.say(f"{run.name}: {said}")
                        write_json(self.record_file, self.record())
                # Written even if all runs had ended: the seeds, rows or tracking folder may differ from last time.
                write_json(self.record_file, record := self.record())
        return record

    def plan(self) -> dict[str, list[PlannedRun]]:
        from tomat.model.decoder import parameter_count
        from tomat.model.devices import ignore_absent_tpu
        from tomat.train.settings.meanings import changed_keys

        if self._runs:
            return self._runs
        ignore_absent_tpu()
        if len(self.sweep.rows) < 2:
            raise TomatError(f"sweep {self.sweep.name} has one row; expected at least two, a base and one to compare.")
        runs = {}
        rows: dict[str, QualityRow] = {}
        slugs: set[str] = set()
        for row in self.sweep.rows:
            slug = re.sub(r"[^A-Za-z0-9._-]+", "-", row.name).strip("-") or "row"
            while slug in slugs:
                slug += "-2"
            slugs.add(slug)
            runs[row.name] = [self._planned(row, slug, seed) for seed in self.seeds]
            config = runs[row.name][0].config
            rows[row.name] = QualityRow(
                row.name, row.base, to_jsonable(row.overrides), row.question, to_jsonable(asdict(config.loss)),
                exact=row.exact, parameters=parameter_count(config.model_config(), config.data.model_vocabulary),
            )  # fmt: skip
        for row in self.sweep.rows:
            if row.exact and row.base:
                its, other = (runs[name][0].config.to_dict() for name in (row.base, row.name))
                if changed := changed_keys(its, other):
                    said = f"row {row.name} is called exact, but changes what is learnt: {', '.join(changed)}"
                    raise TomatError(f"{said}. Set exact: false.")
        base = next(iter(runs.values()))[0].config
        inputs = {run.config.data.input for group in runs.values() for run in group}
        set_aside = str(self.work_dir / TRAINING_COMPOUNDS) in inputs
        self.config = {
            "steps": base.trainer.num_train_steps,
            "batch_sequences": base.batch_size,
            "sequence_tokens": base.seq_len,
            "loss": base.loss.kind,
            "loss_unit": base.loss.unit,
            "data": "the embedded training compounds" if set_aside else str(base.data.input or "as embedded"),
            "validation_share": base.data.validation_share,
            "split_seed": base.data.split_seed,
        }
        # Only now: a study that is refused has no rows, and no record of them is made.
        self.rows, self._runs = rows, runs
        return runs

    def _planned(self, row: SweepRow, slug: str, seed: int) -> PlannedRun:
        from tomat.train.settings.config import load_config

        words = override_words(row.overrides)
        config = load_config(row.config_path, words, row.words_of)
        check_judged(config, ("embedded",) if self.share is None else ("embedded", "folder"))
        tuned = {} if self.share is None else tuning_overrides(config, self.work_dir, self.share, self.split_seed)
        own: dict[str, Any] = {
            **tuned,
            "run_name": f"{slug}-seed-{seed}",
            "purpose": f"{self.sweep.title or self.sweep.name}: {row.name}",
            "output_dir": str(self.work_dir),
            "tracking_dir": str(self.work_dir / "tracking"),
            "trainer.seed": seed,
            "trainer.jax_config": compile_cache(self.work_dir / "compiled"),
        }
        if self.steps is not None:
            own["trainer.num_train_steps"] = self.steps
        words += override_words(own)
        config = load_config(row.config_path, words, row.words_of)
        return PlannedRun(seed, ("--config_path", str(row.config_path), *words), config)

    def read(self) -> None:
        """Read the runs that have ended. A folder with other settings is found here, before hours of work."""
        for name, group in self.plan().items():
            for run in group:
                self._read(name, run)

    def _read(self, name: str, run: PlannedRun) -> None:
        found = read_finished(run)
        if found is None:
            return
        row = self.rows[name]
        row.figures[run.seed], row.losses[run.seed] = dict(found.figures), found.losses
        row.materials, row.devices = found.materials, found.devices
        row.failed.pop(run.seed, None)
        self.devices = found.devices

    def record(self) -> dict[str, Any]:
        windows, tolerance = self.sweep.window_steps, self.sweep.first_step_tolerance
        with_curves = any(row.exact is not None for row in self.rows.values())
        rows = []
        for row in self.rows.values():
            values: dict[str, Any] = {**asdict(row), "against_base": None}
            if row.base is not None:
                held = against_base(row, self.rows[row.base], windows, tolerance)
                values["against_base"] = {**asdict(held), "quality": held.quality, "verdict": held.verdict}
            losses = values.pop("losses")
            if with_curves:
                values["loss_window_means"] = {seed: window_means(one, windows) for seed, one in losses.items()}
            rows.append(values)
        sweep = self.sweep
        record = {"record_format": RECORD_FORMAT, "sweep": sweep.name, "title": sweep.title}
        record |= {"introduction": sweep.introduction, "devices": self.devices, "seeds": list(self.seeds)}
        record |= {**self.config, "rows": rows}
        if with_curves:
            steps = self.config["steps"]
            ends = [*range(windows, steps - windows + 1, windows), steps]
            record |= {"window_steps": windows, "first_step_tolerance": tolerance, "window_end_steps": ends}
        return to_jsonable(record)
