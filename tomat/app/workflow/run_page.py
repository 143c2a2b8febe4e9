"""The page of a run, `README.md` in the run's folder: its setup, losses, speeds, evaluations, history and settings."""

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
from tomat.base.report.markdown import markdown
from tomat.base.report.model import Axis, Chart, Code, Facts, Image, Lines, Link, Note, Part, Series
from tomat.base.report.svg import chart_svg
from tomat.base.report.text import plain
from tomat.base.reporting import write_text
from tomat.hardware.mfu import TABLE_UTILISATIONS
from tomat.report.run import history_table, results_table
from tomat.train.runs.devices import devices_sentence, last_devices, ran_steps
from tomat.train.runs.history import read_events, read_metrics
from tomat.train.runs.summary import VALIDATION, run_figures, steady
from tomat.train.settings.config import config_hash

if TYPE_CHECKING:
    from tomat.predict.evaluation.free_running import FreeRunningResult
    from tomat.predict.evaluation.result import TeacherForcedResult
    from tomat.train.loop import TrainResult
    from tomat.train.settings.config import TrainConfig


def write_training_page(
    config: "TrainConfig",
    result: "TrainResult",
    evaluation: "TeacherForcedResult | None",
    free_running: "FreeRunningResult | None" = None,
) -> Path:
    folder = result.run_dir
    rows = read_metrics(folder / METRICS_FILE)
    events = read_events(folder)
    browser = {"the same with figures to point at": Link(HTML_FILE, HTML_FILE)}
    setup = {
        "configuration": Code(config_hash(config)),
        "parameters": f"{result.parameters:,}",
        "sequence": f"{config.seq_len} tokens, layout {config.data.layout}",
        "batch": f"{config.batch_size} sequences",
        "steps": f"{result.steps} of {config.trainer.num_train_steps}",
        "loss": f"{config.loss.kind} ({config.loss.unit})",
        "sharding": config.sharding,
        "ran on": devices_sentence(last_devices(events), config.slice),
    }
    sections: list[tuple[str, list[Part]]] = [("", [*_origin(events), Facts(setup)])]
    if not result.preempted:
        sections[0][1].append(Facts(browser))
    if any(is_figure(row.get("train/loss")) for row in rows):
        chart = losses_chart(rows)
        write_text(folder / LOSS_FIGURE, chart_svg(chart))
        ran = ran_steps(rows, events, config.slice)
        notes = [Note(f"of the speeds: {note}.") for note in ran.notes]
        sections.append(("Training", [*_training(rows, ran.rows), *notes, chart]))
    if free_running is not None:
        words = f"{free_running.settings['materials_from']}."
        said = [free_running.summary(), f"{words[:1].upper()}{words[1:]}", free_running.table()]
        heading = "Held-out compounds, predicted from their structures"
        sections.append((heading, [*said, *_picture(folder, PREDICTION_FIGURE)]))
    if evaluation is not None:
        heading = "Held-out compounds, teacher-forced"
        sections.append((heading, [evaluation.summary(), evaluation.table(), *_picture(folder, DENSITY_FIGURE)]))
    if events:
        sections.append(("History", [history_summary(events), history_table(events)]))
    told = f"`{CONFIG_FILE}` beside this page, in full; what was set for this run:"
    values, keep = config.to_dict(), ("run_name", "preset", "slice", "sharding", "data", "loss", "optimizer")
    headline = {key: values[key] for key in keep if values.get(key) is not None}
    settings = yaml.safe_dump(headline, sort_keys=False).strip()
    sections.append(("Configuration", [told, Lines(settings, "yaml")]))
    text = [f"# {plain(config.run_name)}", *([plain(config.purpose)] if config.purpose else [])]
    for heading, parts in sections:
        text += [f"## {heading}"] if heading else []
        text.append(markdown(parts))
    path = folder / PAGE_FILE
    write_text(path, "\n\n".join(text) + "\n")
    return path


def losses_chart(rows: list[dict[str, Any]]) -> Chart:
    """Training loss by step, and validation loss where it was measured; one that is not finite is no point."""

    def drawn(key: str) -> tuple[list[int], list[float]]:
        found = [row for row in rows if is_figure(row.get(key))]
        return [row["step"] for row in found], [row[key] for row in found]

    series = [Series("training", *drawn("train/loss"))]
    if any(is_figure(row.get(VALIDATION)) for row in rows):
        series.append(Series("held-out compounds", *drawn(VALIDATION), mark="both"))
    return Chart("loss by step", series, Axis("step"), Axis("loss"), "", LOSS_FIGURE, (7.0, 3.5))


def _picture(folder: Path, name: str) -> list[Part]:
    return [Image("reference, prediction, difference", name)] if (folder / name).exists() else []


def _origin(events: list[dict[str, Any]]) -> list[Part]:
    """Says where the first weights come from, if the run is a fork or a warm start."""
    lines: list[Part] = []
    for event in events:
        if event["event"] == "fork":
            lines.append(
                f"Fork of run `{event.get('parent')}` after {event.get('step')} steps, with its model, optimizer "
                "state and step."
            )
        elif event["event"] == "warm_start":
            warmup = event.get("warmup")
            lines.append(
                f"Warm start: the weights of `{event.get('checkpoint')}`, a fresh optimizer, step 0, and a warm-up "
                f"of its own ({f'{warmup:g}' if is_figure(warmup) else warmup})."
            )
    return lines


def history_summary(events: list[dict[str, Any]]) -> str:
    """One sentence with the numbers of resumes and their reasons, repeated steps and changed settings."""
    resumes = [event for event in events if event["event"] == "resume"]
    orderly = sum(event.get("after") == "preempted" for event in resumes)
    killed = sum(event.get("after") == "killed" for event in resumes)
    again = sum(event["steps_again"] for event in resumes if is_figure(event.get("steps_again")))
    changes = sum(event["event"] == "allow_change" for event in events)
    return (
        f"{len(resumes)} resumes ({orderly} after an interruption with a checkpoint in time, {killed} after a kill), "
        f"{again} steps done again, {changes} settings changed with --allow_change."
    )


def _training(rows: list[dict[str, Any]], ran: list[dict[str, Any]]) -> list[Part]:
    """Losses over all rows; speeds over the rows that `ran_steps` keeps (`ran`)."""
    more: list[tuple[str, str | None]] = []
    for one in TABLE_UTILISATIONS:
        values = [row[one.key] for row in steady(ran) if is_figure(row.get(one.key))]
        if one.key in ("mfu_causal", "mfu_useful") and values:
            more.append((f"{one.name}, median", f"{100 * statistics.median(values):.1f} %"))
    if not any(is_figure(row.get("mfu_full")) for row in ran):
        more.append(("MFU, median", "- (unknown chip)"))
    found = results_table(run_figures(rows, {}, ran), more)
    return [found] if found is not None else []
