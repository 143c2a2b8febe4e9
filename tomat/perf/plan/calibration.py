"""Compares plans with measurements on pods. The measurements judge the estimates; no estimate is fitted to them.

`<tracking_dir>/calibration.yaml` holds measurements kept by hand. `<tracking_dir>/calibration.json` holds those and the
runs that `tomat plan --record` added, each beside its prediction. Plans read the JSON file.

Figures must be finite, and plausible in their unit: 2,080 instead of 2.080 s would say that plans are a thousand times
too short.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE, METRICS_FILE
from tomat.base.overrides import read_yaml
from tomat.base.records import read_typed, typed
from tomat.base.reporting import counted, write_json
from tomat.hardware.chips import FoundDevices, Slice, slice_named
from tomat.perf.profile.breakdown import Category

if TYPE_CHECKING:
    from tomat.train.settings.config import TrainConfig

MEASUREMENTS_FILE = "calibration.yaml"
RECORD_FILE = "calibration.json"
PACKAGED_FILE = Path(__file__).with_name("calibration.json")
"""The release's record in an installed tomat (`pyproject.toml` puts it there). A checkout has it in `docs`."""
CHECKOUT_FILE = Path(__file__).parents[3] / "docs" / "tracking" / RECORD_FILE

SHARES = {
    "attention_share": (Category.ATTENTION_FORWARD, Category.ATTENTION_BACKWARD),
    "collectives_share": (Category.COLLECTIVES_EXPOSED,),
    "matmul_share": (Category.MATMUL,),
}
"""Shares of a step that a measurement may have, and the categories of the plan that each covers."""

BOUNDS: dict[str, tuple[float, float, str]] = {
    "step_seconds": (1e-4, 600.0, "seconds"),
    "model_seconds": (1e-6, 600.0, "seconds"),
    "error": (0.0, 10.0, "a fraction of the step"),
    "hbm_required_gib": (1e-3, 10_000.0, "GiB of one device"),
    **dict.fromkeys(SHARES, (0.0, 1.0, "a fraction of the step")),
}
"""Figures of a row: the least, the most, the unit. The slowest step on record takes 5.76 s, the fastest planned one
some milliseconds. A figure 100 times beyond either is no such step, but in another unit. The largest need on record is
71.87 GiB; 100 times that is in MiB."""

RATIO = 10.0
"""Factor by which a measurement may differ from its plan, either way. The pods on record took 1.2 times as long as the
models say, and needed 1 % more memory than planned. A mistaken unit is a factor of 60, 1,000 or 1,024."""

COMPARED = (("step_seconds", "model_seconds"), ("hbm_required_gib", "hbm_required_gib"))
"""Keys of figures that are compared: (measured, predicted)."""


@dataclass(frozen=True, kw_only=True)
class CalibrationRow:
    """One measurement, and the plan of the same configuration."""

    name: str
    slice: str = ""
    """Empty until a measurement kept by hand is planned."""
    source: str
    measured: Mapping[str, Any]
    """`fits`, and those of `step_seconds`, `hbm_required_gib` and `SHARES` that are known."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """The same keys, but `model_seconds` for the planned step, and `error` for its range; empty if it is not planned
    yet."""
    config_path: str | None = None
    """The configuration, with `overrides`; None: `config` holds it whole."""
    overrides: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    compiler: str = ""
    doubted: Mapping[str, str] = field(default_factory=dict)
    """Measured shares that cannot be right, each with the reason, which the page shows. Other figures decide what is
    said about plans, so a row with a wrong one is taken out instead."""

    @property
    def step_ratio(self) -> float | None:
        measured, predicted = self.measured.get("step_seconds"), self.predicted.get("model_seconds")
        return measured / predicted if measured and predicted else None

    @property
    def chip(self) -> str:
        return slice_named(self.slice).chip.name

    def training_config(self) -> "TrainConfig":
        from tomat.train.settings.config import config_from_dict, load_config

        if self.config is not None:
            return config_from_dict(self.config, source=f"the recorded run {self.name}")
        # the place of the tokens does not matter for the step
        return load_config(self.config_path, list(self.overrides))

    def checked(self, where: str) -> "CalibrationRow":
        """This row, if its figures are plausible. `where` is its file, for the error."""
        row = f"{where}: {self.name!r}"
        given = {f"{row}, measured": self.measured}
        if self.predicted:  # otherwise it is not planned yet
            given[f"{row}, predicted"] = self.predicted
        for place, figures in given.items():
            fits = figures.get("fits")
            if not isinstance(fits, bool):
                raise TomatError(f"{place}: fits is {fits!r}; expected true or false, whether the step fits.")
            for key, value in figures.items():
                if key == "fits":
                    continue
                if key not in BOUNDS:
                    expected = f"some of fits, {', '.join(BOUNDS)}"
                    raise TomatError(f"{place} has the unknown figure {key!r}; expected {expected}.")
                least, most, unit = BOUNDS[key]
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if not number or not least <= value <= most:
                    expected = f"a number from {least:g} to {most:g}, {unit}"
                    raise TomatError(f"{place}: {key} is {value!r}; expected {expected}. Correct it, or drop the row.")
        for found, planned in COMPARED:
            if self.measured.get(found) and self.predicted.get(planned):
                ratio = self.measured[found] / self.predicted[planned]
                if not 1 / RATIO <= ratio <= RATIO:
                    unit = BOUNDS[found][2].split()[0]
                    times = f"{ratio:.3g} times the {self.predicted[planned]:.4g} {unit} that were planned"
                    raise TomatError(
                        f"{row}: measured {found} is {self.measured[found]:g}, {times}: a slip of units. "
                        f"Correct the figure (it is in {unit}), or take the row out."
                    )
        if unmeasured := sorted(set(self.doubted) - (set(SHARES) & set(self.measured))):
            raise TomatError(
                f"{row}: doubted has {unmeasured[0]}, which is no measured share; expected measured ones of "
                f"{', '.join(SHARES)}. Take the row out if its other figures are in doubt."
            )
        if self.slice:
            try:
                slice_named(self.slice)
            except TomatError as error:
                raise TomatError(f"{row}: {error}") from None
        return self


@dataclass(frozen=True)
class Calibration:
    rows: tuple[CalibrationRow, ...]

    @staticmethod
    def load(tracking_dir: Path) -> "Calibration":
        """The record of `tracking_dir`, or else the one that came with tomat."""
        places = (tracking_dir / RECORD_FILE, PACKAGED_FILE, CHECKOUT_FILE)
        path = next((path for path in places if path.is_file()), None)
        if path is None:
            return Calibration(())
        how = "Restore it, or delete it and write it again with tomat plan --calibrate."
        rows = read_typed(path, Calibration, how, extra_keys=False).rows
        return Calibration(tuple(row.checked(str(path)) for row in rows))

    def save(self, tracking_dir: Path) -> None:
        write_json(tracking_dir / RECORD_FILE, {"rows": [asdict(row) for row in self.rows]})

    def step_ratios(self, chip: str) -> list[float]:
        """Measured step time divided by the planned one, for the runs on `chip`."""
        return [row.step_ratio for row in self.rows if row.chip == chip and row.step_ratio is not None]

    def notes(self, chip: str) -> tuple[str, ...]:
        ratios = self.step_ratios(chip)
        if ratios:
            took = f"took {min(ratios):.2f} to {max(ratios):.2f} of what was planned"
            known = f"with them {counted(len(ratios), 'pod')} on record {took}"
        else:
            known = f"no pod of {chip} is on record to say how much"
        unseen = "the host's gap between steps, waiting of chips for each other and a clock below nominal come on top"
        return (f"times are estimates; {unseen}: {known}",)


@dataclass(frozen=True)
class _Measurements:
    measurements: tuple[CalibrationRow, ...]
    notes: tuple[str, ...] = ()


def read_measurements(tracking_dir: Path) -> tuple[list[CalibrationRow], list[str]]:
    """The measurements kept by hand, and the notes below them."""
    path = tracking_dir / MEASUREMENTS_FILE
    if not path.is_file():
        raise TomatError(f"{path} does not exist. Run from a checkout, or give --tracking_dir.")
    data = typed(read_yaml(path), _Measurements, path, "Correct it.")
    rows = []
    for one in data.measurements:
        doubted = {key: " ".join(why.split()) for key, why in one.doubted.items()}
        rows.append(replace(one, source=" ".join(one.source.split()), doubted=doubted).checked(str(path)))
    return rows, [" ".join(note.split()) for note in data.notes]


def tpu_slice(found: FoundDevices, asked: str | None) -> Slice:
    """The slice that was measured. If several names fit the same chips, the name `asked` is kept."""
    slice_ = found.as_slice(asked)
    if slice_ is None or slice_.libtpu_topology is None:
        meant = "" if asked is None else f", but {asked} was asked for"
        raise TomatError(f"it ran on {found}{meant}: no TPU slice, and plans are for TPU slices only")
    return slice_


def row_of_run(run_dir: Path) -> CalibrationRow:
    """A measurement from a run's own folder: the median of its steady steps, on the slice that it ran on."""
    from tomat.hardware.mfu import RunTimes
    from tomat.train.runs.devices import NOT_ON_RECORD, ran_steps
    from tomat.train.runs.history import read_events, read_metrics
    from tomat.train.settings.config import recorded_config

    for name in (CONFIG_FILE, METRICS_FILE):
        if not (run_dir / name).is_file():
            raise TomatError(f"{run_dir / name} does not exist; expected the folder of a run that `tomat train` made.")
    config = recorded_config(run_dir / CONFIG_FILE)
    ran = ran_steps(read_metrics(run_dir / METRICS_FILE), read_events(run_dir), config.slice)
    if ran.devices is None:
        raise TomatError(
            f"{run_dir}: {NOT_ON_RECORD} (a `start` in history.jsonl says it), so it is no measurement of "
            f"{config.slice or 'a slice'}; put the run's history back, or keep its figures in {MEASUREMENTS_FILE}."
        )
    slice_ = tpu_slice(ran.devices, config.slice)
    times = RunTimes.from_rows(ran.rows, run_dir / METRICS_FILE)
    steps = counted(len(times.steady_step_seconds), "steady step")
    return CalibrationRow(
        name=config.run_name,
        slice=slice_.name,
        source="; ".join((f"run {config.run_name}, median of {steps}", *ran.notes)),
        measured={"fits": True, "step_seconds": times.step_percentiles["p50"]},
        config=config.to_dict(),
    ).checked(str(run_dir))
