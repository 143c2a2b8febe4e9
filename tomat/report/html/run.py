"""The page of a run: its results, its curves, a density that it predicts, its state, settings and history."""

import shlex
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from markupsafe import Markup

from tomat.base.documents import flatten, mapping
from tomat.base.layout import CONFIG_FILE, EVALUATION_FILE, METRICS_FILE, PROFILER_FOLDER
from tomat.base.overrides import read_yaml
from tomat.base.records import typed
from tomat.base.report.formats import number, share, significant
from tomat.base.report.model import Axis, Chart, Code, Column, Facts, Note, Report, Section, Series, Table
from tomat.base.shipped import shipped_configurations
from tomat.base.storage import explaining_storage, files_at
from tomat.predict.evaluation.free_running import FreeRunningMaterial, FreeRunningResult
from tomat.predict.evaluation.result import LABEL, TeacherForcedResult
from tomat.report.html.density import kept_density_section
from tomat.report.html.document import details, rendered
from tomat.report.html.metrics import BUCKETS, Curve, Metrics, kept_points, read_curves, smoothed
from tomat.report.run import history_table
from tomat.train.runs.checkpoints import survey
from tomat.train.runs.devices import devices_sentence, last_devices, ran_steps
from tomat.train.runs.history import read_events
from tomat.train.runs.record import RunRecord, read_config
from tomat.train.runs.summary import LAST_STEPS, read_evaluation, run_state

TRAINING_LOSS, VALIDATION_LOSS = "train/loss", "eval/validation/loss"
UNITS = {
    "seconds": "s",
    "tokens_per_second": "tokens/s",
    "nats": "nats",
    "e_per_A3": "e/Å³",
    "share": "of the mean density",
}
"""Ending of a metric's name -> unit on the axis."""


def run_page(run_url: str, checkpoints_url: str | None = None) -> Report:
    """The page of the run in a folder or at a URL. A run that ends writes its page from local copies of its small
    files, while its checkpoints may be in a bucket at `checkpoints_url` (None: in the run's own place)."""
    config, events, metrics = read_config(f"{run_url}/{CONFIG_FILE}"), read_events(run_url), read_curves(run_url)
    record = RunRecord(run_url, config, [], (), events, metrics.written_utc)
    whole, partial = survey(checkpoints_url or run_url, record.temporary_url)
    state, detail = run_state(record, metrics.steps_done, whole, time.time())
    evaluation = read_evaluation(run_url)
    free = _free_running(evaluation)
    lead: list[Any] = [_achieved(metrics, record, free), str(config.get("purpose") or "")]
    if partial:
        lead.append(Note(f"{len(partial)} of its newest checkpoints are not whole.", warning=True))
    total = record.total_steps
    files, root = files_at(run_url)
    with explaining_storage(f"{run_url} cannot be read"):
        profiled = files.exists(f"{root}/{PROFILER_FOLDER}")
    xprof = f"uv run --extra xprof xprof server --logdir {shlex.quote(f'{run_url}/{PROFILER_FOLDER}')}"
    shown = {
        "state": f"{state}: {detail}" if detail else state,
        "steps": f"{metrics.steps_done:,}" + (f" of {total:,}" if total is not None else ""),
        "newest whole checkpoint": None if whole is None else f"step {whole.step:,}",
        "place": checkpoints_url or run_url,
        "ran on": devices_sentence(last_devices(events), record.asked_slice),
        "configuration": ", ".join(dict.fromkeys(str(e["configuration"]) for e in events if "configuration" in e)),
        "traces, in xprof": xprof if profiled else None,  # docs/guides/trackers.md
    }
    density = kept_density_section(run_url)
    sections = [
        Section("", lead),
        *([density] if len(density.parts) > 1 else []),
        Section("Curves", _curves(metrics)),
        *_evaluation_sections(evaluation, free),
        Section("State", [details(f"{state}, {shown['steps']} steps", Facts(shown | _speeds(metrics, record)))]),
        *([] if len(density.parts) > 1 else [density]),
        Section("Configuration", _configuration(config)),
        Section("History", [details(f"{len(events):,} events", history_table(events))] if events else ()),
    ]
    figures = {"run": record.name, "state": state, "steps_done": metrics.steps_done, "metrics": len(metrics.curves)}
    figures |= {"log_lines": metrics.lines, "unreadable_log_lines": metrics.unreadable}
    return Report(record.name, sections, "run", figures)


def _free_running(evaluation: Mapping[str, Any]) -> FreeRunningResult | None:
    if (found := evaluation.get("free_running")) is None:
        return None
    settings, materials = (mapping(found).get(key) for key in ("settings", "materials"))
    remedy = "Evaluate again with `tomat eval`."
    read = typed(materials or [], tuple[FreeRunningMaterial, ...], EVALUATION_FILE, remedy)
    return FreeRunningResult(mapping(settings), read)


def _achieved(metrics: Metrics, record: RunRecord, free: FreeRunningResult | None) -> Markup:
    """The headline: the error beside that of the sum of atoms (where cells were predicted), the losses, and the MFU."""
    found: list[tuple[str, str]] = []
    if free is not None and free.materials:
        ours, atoms = free.spread("free_running_nmae"), free.spread("promolecule_nmae")
        worst = max(free.figure("free_running_nmae").values())
        better = sum(each.free_running_nmae < each.promolecule_nmae for each in free.materials)
        words = f"NMAE, median of {ours.materials} held-out cells predicted from their structures"
        found.append((share(ours.median), f"{words}; mean {share(ours.mean)}, worst {share(worst)}"))
        found.append((share(atoms.median), f"the same of the sum of atoms; mean {share(atoms.mean)}"))
        found.append((f"{better} of {ours.materials}", "cells on which the model is better"))
    curves = metrics.curves
    for name, words, steps in ((TRAINING_LOSS, "training loss", LAST_STEPS), (VALIDATION_LOSS, "validation loss", 1)):
        if name in curves:
            values = curves[name].values
            said = f"{words}, mean of the last {steps} steps" if steps > 1 else words
            figures = f"at first {values[0]:.4g}, least {values.min():.4g}"
            found.append((f"{values[-steps:].mean():.4g}", f"{said}; {figures}"))
    if "mfu_full" in curves:
        values, _ = _as_it_ran("mfu_full", metrics, record)
        if len(values):
            found.append((share(float(np.median(values))), "MFU, full attention, median of the steps"))
    return rendered("headline.html", figures=found or [("–", "no step is on record yet")])


def _as_it_ran(name: str, metrics: Metrics, record: RunRecord) -> tuple[np.ndarray, int]:
    """The values of a speed metric since the run has had its last devices, and the first step of that time."""
    curve = metrics.curves[name]
    timed = metrics.curves.get("step_seconds", curve)
    steps = [{"step": int(step)} for step in timed.steps]
    ran = ran_steps(steps, record.events, record.asked_slice).rows
    since = ran[0]["step"] if ran else 0
    return curve.values[curve.steps >= since], since


def _speeds(metrics: Metrics, record: RunRecord) -> dict[str, str]:
    found: dict[str, str] = {}
    curves = metrics.curves
    for name, words, unit in (("step_seconds", "step", " s"), ("tokens_per_second", "tokens a second", "")):
        values, since = _as_it_ran(name, metrics, record) if name in curves else ((), 0)
        if len(values):
            # A median, unlike a mean, does not depend on the few steps that compile.
            said = "" if len(values) == len(curves[name].values) else f" from step {since:,} on, as it ran last"
            found[words] = f"{np.median(values):,.4g}{unit} (median{said})"
    if bad := metrics.unreadable:
        found["lines of the log that cannot be read"] = f"{bad:,} of {metrics.lines + bad:,}"
    return found


def _curves(metrics: Metrics) -> list[Any]:
    curves = metrics.curves
    if not curves:
        return [f"{METRICS_FILE} holds no line yet."]
    parts: list[Any] = []
    if any(len(kept_points(curve.values)) < len(curve.values) for curve in curves.values()):
        said = f"Curves of many points are drawn by the smallest and largest value of each of {BUCKETS} stretches"
        parts.append(Note(f"{said}; figures in the table are of all points."))
    losses = {name: curves[name] for name in (TRAINING_LOSS, VALIDATION_LOSS) if name in curves}
    if losses:
        parts.append(_chart("Loss", losses, 4.25))
    rows, others = [], []
    for name, curve in curves.items():
        v = curve.values
        if name not in losses and len(v) > 1 and np.ptp(v) > 0:
            others.append(_chart(name, {name: curve}, 3.0))
        rows.append((name, len(v), *map(float, (v[0], v[-1], v.min(), np.median(v), v.max()))))
    heads = [Column("metric"), Column("points", number(0))]
    heads += [Column(heading, significant(5)) for heading in ("first", "last", "least", "median", "largest")]
    opened = Markup("<details><summary>Every metric that changes ({:,})</summary>").format(len(others))
    opened += Markup('<div class="grid">')
    table = details(f"Metrics as a table ({len(rows):,})", Table("Metrics of the run, of all points", heads, rows))
    return [*parts, *([opened, *others, Markup("</div></details>")] if others else []), table]


def _chart(title: str, curves: Mapping[str, Curve], height: float) -> Chart:
    series, said = [], []
    for name, curve in curves.items():
        kept, values = kept_points(curve.values), curve.values
        mark = "both" if len(kept) <= 60 else "line"
        over = smoothed(curve)
        series.append(Series(name, curve.steps[kept], values[kept], mark, faint=over is not None))
        if over is not None:
            width, middle, means = over
            series.append(Series(f"{name}, means of {width}", middle, means, "line"))
        first, last = (f"{values[end]:.4g} at step {curve.steps[end]:,}" for end in (0, -1))
        said.append(f"{name}: {first} to {last}, least {values.min():.4g}, largest {values.max():.4g}")
    unit = next((words for end, words in UNITS.items() if title.endswith(end)), "")
    positive = all((curve.values > 0).all() for curve in curves.values())
    summary = "; ".join(said) + "."
    return Chart(title, series, Axis("step"), Axis(unit), summary, size=(6.0, height), scales=positive)


def _evaluation_sections(found: Mapping[str, Any], free: FreeRunningResult | None) -> list[Section]:
    sections = []
    if free is not None:
        words = str(free.settings.get("materials_from", ""))
        sections.append(Section("Predicted from their structures", [words, *_nmae(free)]))
    if "materials" in found:
        words = f"A {LABEL}: the model was given the true values of all earlier voxels."
        parts = _nmae(TeacherForcedResult.from_dict(found, EVALUATION_FILE))
        sections.append(Section("Teacher-forced evaluation", [words, *parts]))
    return sections


def _nmae(result: FreeRunningResult | TeacherForcedResult) -> list[Any]:
    if not result.materials:
        return ["No material was evaluated."]
    step = result.settings.get("step")  # a run that went on shows what its earlier weights gave
    whose = f"NMAE, weights of step {step:,}" if isinstance(step, int) else "NMAE"
    return [f"{whose}: {result.headline()}.", details(f"Every material ({len(result.materials):,})", result.table())]


def _configuration(config: Mapping[str, Any]) -> list[Any]:
    settings = flatten(config)
    parts: list[Any] = []
    if recipes := recipes_beside(settings):
        name, n, differing = recipes[0]
        parts.append(
            f"The nearest shipped configuration is {name}: of the {n} settings that it makes, "
            f"{len(differing)} differ here."
        )
        if differing:
            rows = [(Code(key), str(mine), str(theirs)) for key, (theirs, mine) in sorted(differing.items())]
            heads = Column("setting"), Column("this run"), Column(name)
            parts.append(details("Settings that differ", Table(f"Settings that differ from {name}", heads, rows)))
    every = [(key, str(value)) for key, value in sorted(settings.items())]
    table = Table(f"{CONFIG_FILE}, every setting", (Column("setting"), Column("value")), every)
    return [*parts, details(f"Every setting ({len(every):,})", table)]


def recipes_beside(settings: Mapping[str, Any]) -> list[tuple[str, int, dict[str, tuple[Any, Any]]]]:
    """Every shipped configuration: its name, its number of settings, and those that differ in the run, as dotted key ->
    (of the recipe, of the run). A run does not record the recipe it started from, so the smallest share of differences
    comes first; of several, the one with most settings, since a run of a recipe also agrees with what it extends."""
    recipes = []
    for name, path in shipped_configurations("train").items():
        its = flatten(read_yaml(path))
        beside = {key: (value, settings.get(key)) for key, value in its.items() if key not in ("run_name", "purpose")}
        recipes.append((name, len(its), {key: both for key, both in beside.items() if not _same(*both)}))
    return sorted(recipes, key=lambda recipe: (len(recipe[2]) / recipe[1], -recipe[1], recipe[0]))


def _same(one: Any, other: Any) -> bool:
    """Whether two values mean the same setting, such as 1 and 1.0, or a number and its text (`1e-3`)."""
    try:
        return one == other or float(one) == float(other)
    except (TypeError, ValueError):
        return str(one) == str(other)
