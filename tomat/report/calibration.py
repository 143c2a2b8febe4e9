"""The report on the calibration, for every place that shows it: plans of steps beside the same steps measured on
pods."""

from collections.abc import Mapping, Sequence

from tomat.base.report.formats import number, percent, seconds, share
from tomat.base.report.model import Column, Heading, Items, Part, Report, Section, Table, held_against
from tomat.perf.cost.chip_model import MODELS
from tomat.perf.plan.calibration import CalibrationRow

ModelTable = Mapping[str, Mapping[str, float]]
"""Seconds of each model (`MODELS`) by category."""
LEAST_SECONDS = 1e-3
"""Categories below this time have no row in the table of models."""


def calibration_report(
    rows: Sequence[CalibrationRow], notes: Sequence[str] | None = None, models: Mapping[str, ModelTable] | None = None
) -> Report:
    """Every measurement on record beside its plan. `notes` are people's remarks on the differences (None: not read).
    `models` are the cycle models of rows that have just been planned, by the row's name."""
    lead = "What `tomat plan` says of steps that pods have run, to which no estimate is fitted. "
    lead += "`tomat plan --calibrate` plans every row again; `tomat plan --record RUN` adds a run of yours."
    sources = Table("", [*map(Column, ("run", "slice", "source"))], [(row.name, row.slice, row.source) for row in rows])
    noted: list[Part] = [Items(notes)] if notes else ["Nothing is noted."]
    sections = [
        Section("", [lead]),
        Section("Step time", steps_parts(rows), "steps"),
        Section("Memory", memory_parts(rows), "memory"),
        Section("Shares of the step", shares_parts(rows), "shares"),
        *([Section("The cycle models", _models_parts(rows, models), "models")] if models else []),
        *([] if notes is None else [Section("What differs", noted, "notes")]),
        Section("Where each is from", [sources], "sources"),
    ]
    figures = {"rows": len(rows), "steps": sum(row.step_ratio is not None for row in rows)}
    return Report("Calibration: the plan beside the pod", sections, "calibration", figures)


def steps_parts(rows: Sequence[CalibrationRow]) -> list[Part]:
    body, points = [], []
    for row in rows:
        measured, planned = row.measured.get("step_seconds"), row.predicted.get("model_seconds")
        if measured is not None and planned is None:
            body.append((row.name, measured, None, None, None))
        elif measured is not None:
            error = row.predicted.get("error")
            body.append((row.name, measured, planned, planned / measured - 1, error))
            points.append((row.name, planned, measured, error or 0.0))
    heads = [Column("run"), *(Column(one, seconds) for one in ("measured", "planned")), Column("error", percent)]
    heads.append(Column("range of the plan", lambda error: f"± {percent(error, 0)}"))
    said = "No step of a pod is in the fit: the model is that of timed kernels (`kernels.md`). The start of a "
    said += "collective, 20 µs, is from the profiles of the first two."
    return [*_compared(points, "step", "s"), Table("", heads, body), said]


def memory_parts(rows: Sequence[CalibrationRow]) -> list[Part]:
    body, points = [], []
    for row in rows:
        needed, planned = (side.get("hbm_required_gib") for side in (row.measured, row.predicted))
        pod = "ran" if row.measured.get("fits") else "out of memory"
        plan = "fits" if row.predicted.get("fits") else "does not fit"
        body.append((row.name, pod, needed, plan, planned, planned / needed - 1 if needed and planned else None))
        if needed and planned:
            points.append((row.name, planned, needed, 0.0))
    needs = Column("needed, GiB", number(2))
    heads = [Column("run"), Column("the pod"), needs, Column("planned"), needs, Column("error", share)]
    return [*_compared(points, "HBM of a device", "GiB"), Table("", heads, body)]


def _compared(points: Sequence[tuple[str, float, float, float]], what: str, unit: str) -> list[Part]:
    """A chart of planned against measured. A point is (name, planned, measured, the plan's stated relative error)."""
    if not points:
        return []
    ratios = [b / a for _, a, b, _ in points]
    # The same range as a plan states for itself: `Interval.of`.
    ranges = [(a / (1 + error), a * (1 + error)) for _, a, _, error in points] if any(p[3] for p in points) else ()
    said = f"{len(points)} rows; measured over planned from {min(ratios):.3f} to {max(ratios):.3f}. "
    said += "Dotted: equality. Bars: the range expected."
    named = [point[:3] for point in points]
    return [held_against(f"Planned against measured: {what}", named, unit, what, said, x_ranges=ranges)]


def shares_parts(rows: Sequence[CalibrationRow]) -> list[Part]:
    body, doubts = [], []
    for row in rows:
        for key, measured in row.measured.items():
            if not key.endswith("_share"):
                continue
            name, planned, doubted = key.removesuffix("_share"), row.predicted.get(key), row.doubted.get(key)
            difference = None if planned is None else f"{100 * (planned - measured):+.1f}"
            if doubted is not None:
                difference = f"{difference or ''} (doubted)".strip()
                doubts.append(f"The profile's {name} of {row.name} cannot be right: {doubted}")
            body.append((row.name, name, measured, planned, difference))
    heads = [Column("run"), Column("share"), Column("profile", percent), Column("planned", percent)]
    heads.append(Column("difference, points", right=True))
    return [Table("", heads, body), *doubts] if body else ["No profile is on record."]


def _models_parts(rows: Sequence[CalibrationRow], models: Mapping[str, ModelTable]) -> list[Part]:
    """Each model's seconds by category. A model has no value for a category that it does not know."""
    parts: list[Part] = []
    heads = [Column("category"), *(Column(name, seconds) for name in MODELS)]
    for row in rows:
        if row.name in models:
            categories = sorted(models[row.name].items(), key=lambda item: -item[1]["estimate"])
            shown = [(name, values) for name, values in categories if max(values.values()) > LEAST_SECONDS]
            body = [(name, *(values[model] or None for model in MODELS)) for name, values in shown]
            total = [sum(values[model] for _, values in categories) for model in MODELS]
            measured = row.measured.get("step_seconds")
            said = f"{row.name}: measured {seconds(measured)}" if measured else row.name
            parts += [Heading(said), Table("", heads, body, ("sum", *total))]
    said = "`compiler` (XLA's own cycles) and `roofline` say nothing of Pallas kernels; "
    return [*parts, f"{said}`schedule` alone says nothing of waiting for memory."]
