"""The page of a run, `README.md` in the run's folder: what ran, what it learnt, how fast."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tomat.base.documents import is_figure
from tomat.base.layout import (
    CONFIG_FILE,
    DENSITY_FIGURE,
    HTML_FILE,
    LOSS_FIGURE,
    METRICS_FILE,
    PAGE_FILE,
    PREDICTION_FIGURE,
)
from tomat.base.report.formats import markdown_table
from tomat.base.report.text import fenced, plain, without_html
from tomat.base.reporting import replacing, write_text
from tomat.hardware.mfu import TABLE_UTILISATIONS
from tomat.train.runs.devices import devices_sentence, last_devices, ran_steps
from tomat.train.runs.history import read_events
from tomat.train.runs.log_lines import read_metrics
from tomat.train.settings.config import config_hash

if TYPE_CHECKING:
    from tomat.predict.evaluation.free_running import FreeRunningResult
    from tomat.predict.evaluation.result import TeacherForcedResult
    from tomat.train.loop import TrainResult
    from tomat.train.settings.config import TrainConfig

BROWSER_PAGE = (
    f"The same with figures to point at, tables that sort and the density to turn: [{HTML_FILE}]({HTML_FILE})."
)


def write_training_page(
    config: "TrainConfig",
    result: "TrainResult",
    evaluation: "TeacherForcedResult | None",
    free_running: "FreeRunningResult | None" = None,
) -> Path:
    """Write the page and its loss curve from what the run's folder holds.

    Returns:
        The page.
    """
    folder = result.run_dir
    rows = [row for row in read_metrics(folder / METRICS_FILE) if is_figure(row.get("train/loss"))]
    events = read_events(folder)
    parts = [
        f"# {plain(config.run_name)}",
        plain(config.purpose),
        "" if result.preempted else BROWSER_PAGE,
        _origin(events),
        _setup(config, result, events),
    ]
    if rows:
        draw_losses(rows, folder / LOSS_FIGURE)
        ran = ran_steps(rows, events, config.slice)
        notes = (f"Of the speeds: {note}." for note in ran.notes)
        parts += ["## Training", _training(rows, ran.rows), *notes, f"![loss by step]({LOSS_FIGURE})"]
    if free_running is not None:
        parts += ["## Held-out compounds, predicted from their structures", free_running.summary()]
        words = free_running.settings["materials_from"]
        parts += [f"{words[:1].upper()}{words[1:]}.", _predictions(free_running)]
        if (folder / PREDICTION_FIGURE).exists():
            parts.append(f"![reference, prediction, difference]({PREDICTION_FIGURE})")
    if evaluation is not None:
        parts += ["## Held-out compounds, teacher-forced", evaluation.summary(), _evaluation(evaluation)]
        if (folder / DENSITY_FIGURE).exists():
            parts.append(f"![reference, prediction, difference]({DENSITY_FIGURE})")
    if events:
        parts += ["## History", history_summary(events), _history(events)]
    parts += [
        "## Configuration",
        f"`{CONFIG_FILE}` beside this page, in full; what was set for this run:",
        fenced(yaml.safe_dump(_headline(config), sort_keys=False).strip(), "yaml"),
    ]
    path = folder / PAGE_FILE
    write_text(path, without_html("\n\n".join(part for part in parts if part)) + "\n")
    return path


def draw_losses(rows: list[dict[str, Any]], path: Path) -> None:
    """Training loss by step, and validation loss where it was measured, as SVG; the same bytes for the same rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context({"svg.hashsalt": "tomat"}):
        figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
        axes.plot([row["step"] for row in rows], [row["train/loss"] for row in rows], lw=1, label="training")
        measured = [row for row in rows if is_figure(row.get("eval/validation/loss"))]
        if measured:
            steps, values = zip(*((row["step"], row["eval/validation/loss"]) for row in measured), strict=True)
            axes.plot(steps, values, "o-", ms=4, label="held-out compounds")
        axes.set(xlabel="step", ylabel="loss")
        axes.legend(frameon=False)
        with replacing(path) as temporary:
            figure.savefig(temporary, metadata={"Date": None})
        plt.close(figure)


def _setup(config: "TrainConfig", result: "TrainResult", events: list[dict[str, Any]]) -> str:
    return markdown_table(
        ("", ""),
        [
            ("configuration", f"`{config_hash(config)}`"),
            ("parameters", f"{result.parameters:,}"),
            ("sequence", f"{config.seq_len} tokens, layout {config.data.layout}"),
            ("batch", f"{config.batch_size} sequences"),
            ("steps", f"{result.steps} of {config.trainer.num_train_steps}"),
            ("loss", f"{config.loss.kind} ({config.loss.unit})"),
            ("sharding", config.sharding),
            ("ran on", devices_sentence(last_devices(events), config.slice)),
        ],
        "ll",
    )


def _origin(events: list[dict[str, Any]]) -> str:
    """Says that the weights are not the run's own from the first step on."""
    lines = []
    for event in events:
        if event["event"] == "fork":
            lines.append(
                f"**Fork** of run `{event.get('parent')}` after {event.get('step')} steps, with its model, optimizer "
                "state and step."
            )
        elif event["event"] == "warm_start":
            warmup = event.get("warmup")
            lines.append(
                f"**Warm start**: the weights of `{event.get('checkpoint')}`, a fresh optimizer, step 0, and a warm-up "
                f"of its own ({f'{warmup:g}' if is_figure(warmup) else warmup})."
            )
    return "\n\n".join(lines)


def history_summary(events: list[dict[str, Any]]) -> str:
    """One sentence: interruptions survived, steps done again, changes."""
    resumes = [event for event in events if event["event"] == "resume"]
    orderly = sum(event.get("after") == "preempted" for event in resumes)
    killed = sum(event.get("after") == "killed" for event in resumes)
    again = sum(event["steps_again"] for event in resumes if is_figure(event.get("steps_again")))
    changes = sum(event["event"] == "allow_change" for event in events)
    return (
        f"{len(resumes)} interruptions survived ({orderly} with a checkpoint in time, {killed} killed), {again} steps "
        f"done again, {changes} settings changed with --allow_change."
    )


def _history(events: list[dict[str, Any]]) -> str:
    rows = []
    for event in events:
        details = {key: value for key, value in event.items() if key not in ("time", "event", "step")}
        text = ", ".join(f"{key}: {value}" for key, value in details.items() if value not in (None, {}, ""))
        # A cell of a table has no bars.
        text = plain(text).replace("|", "/")
        rows.append((str(event.get("time", ""))[:19], event["event"], str(event.get("step", "")), text))
    return markdown_table(("time (UTC)", "event", "step", "details"), rows, "llrl")


def _training(rows: list[dict[str, Any]], ran: list[dict[str, Any]]) -> str:
    """Losses of all rows, speeds of those that `ran_steps` keeps."""
    # The first steps compile and warm caches.
    steady = [row for row in ran[3:] if not row.get("compile_seconds")] or ran
    last = rows[-10:]
    figures = [
        ("first loss", f"{rows[0]['train/loss']:.4f}"),
        ("last loss (mean of 10 steps)", f"{statistics.mean(row['train/loss'] for row in last):.4f}"),
        ("step, median", _median(steady, "step_seconds", "{:.3f} s")),
        ("tokens/s, median", _median(steady, "tokens_per_second", "{:,.0f}")),
        ("wall-clock of all steps", f"{sum(_figures(rows, 'wall_seconds')):.0f} s"),
    ]
    for one in (one for one in TABLE_UTILISATIONS if one.key != "hfu"):
        values = _figures(steady, one.key)
        figures.append(
            (f"{one.name}, median", f"{100 * statistics.median(values):.1f} %" if values else "- (unknown chip)")
        )
    return markdown_table(("figure", "value"), figures)


def _figures(rows: list[dict[str, Any]], key: str) -> list[float]:
    """The rows' figures of one name; one that was not finite is null in the log."""
    return [row[key] for row in rows if is_figure(row.get(key))]


def _median(rows: list[dict[str, Any]], key: str, form: str) -> str:
    values = _figures(rows, key)
    return form.format(statistics.median(values)) if values else "-"


def _evaluation(evaluation: "TeacherForcedResult") -> str:
    from tomat.predict.evaluation.result import COLUMNS

    header = ("material", *(f"{heading} %" for heading, _ in COLUMNS))
    body = [
        (material.material_id, *(f"{100 * getattr(material, name):.2f}" for _, name in COLUMNS))
        for material in evaluation.materials
    ]
    spreads = [evaluation.spread(name) for _, name in COLUMNS]
    for row in ("median", "mean"):
        body.append((f"**{row} over materials**", *(f"{100 * getattr(item, row):.2f}" for item in spreads)))
    return markdown_table(header, body)


def _predictions(free_running: "FreeRunningResult") -> str:
    columns = free_running.columns
    header = ("material", *(f"{heading} %" for heading, _ in columns), "seconds")
    body = [free_running.row(material) for material in free_running.materials]
    spreads = [free_running.spread(name) for _, name in columns]
    for row in ("median", "mean"):
        body.append((f"**{row} over materials**", *(f"{100 * getattr(item, row):.2f}" for item in spreads), ""))
    return markdown_table(header, body)


def _headline(config: "TrainConfig") -> dict[str, Any]:
    values = config.to_dict()
    keep = ("run_name", "preset", "slice", "sharding", "data", "loss", "optimizer")
    return {key: values[key] for key in keep if values.get(key) is not None}
