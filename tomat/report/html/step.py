"""The page of a plan or a profile: where the time of a step goes, by module and kind of operation, and its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tomat.base.records import typed
from tomat.base.report.formats import number, percent, seconds
from tomat.base.report.model import Column, Facts, Note, Part, Report, Section, Table
from tomat.hardware.mfu import UTILISATIONS
from tomat.perf.cost.chip_model import MODELS, Support, untimed_text
from tomat.perf.cost.memory import read_memory
from tomat.perf.profile.breakdown import Breakdown
from tomat.report.html.charts import flame_chart, treemap
from tomat.report.html.memory import GIB, memory_parts
from tomat.report.step import (
    groups_table,
    memory_table,
    operations_table,
    roofline_chart,
    shares_chart,
    step_facts,
    step_notes,
    times_chart,
    waits_table,
    windows_chart,
    windows_table,
)


def breakdown_page(breakdown: Breakdown, kind: str, *, report: Mapping[str, Any] | None = None) -> Report:
    """The page of a breakdown.

    Args:
        breakdown: Of a trace, a compiled program or a plan.
        kind: `plan` or `profile`.
        report: `Plan.to_dict()` of a plan: its memory, models and utilisation.

    Raises:
        TomatError: The report's memory is damaged.
    """
    measured = "measured" if breakdown.source == "trace" else "predicted"
    notes = [Note(f"{note[:1].upper()}{note[1:]}.") for note in step_notes(breakdown)]
    sections = [
        Section("", (f"One step of one device, {measured}: {breakdown.title}.", *notes)),
        Section("The step", (step_facts(breakdown), *(_plan_parts(report) if report else ()))),
        Section("By kind of operation", (shares_chart(breakdown), groups_table(breakdown.categories, "kind"))),
        Section("By module", (flame_chart(breakdown), treemap(breakdown), groups_table(breakdown.parts, "part"))),
    ]
    if (against := roofline_chart(breakdown)) is not None:
        sections.append(Section("Against the roofs of the chip", (against,)))
    sections.append(Section("Operations", (operations_table(breakdown, len(breakdown.ops)),)))
    if report:
        sections.append(Section("Memory", memory_parts(read_memory(report["memory"]))))
    elif breakdown.memory_bytes:
        sections.append(Section("Memory", (memory_table(breakdown),)))
    # A breakdown of before kept no windows.
    chart = windows_chart(breakdown) or times_chart(breakdown)
    steps: list[Part] = [] if chart is None else [chart]
    steps += [windows_table(breakdown)] if breakdown.step_classes else []
    steps += [waits_table(breakdown)] if breakdown.gaps else []
    if steps:
        sections.append(Section("Steps and waits", steps))
    title = str(report["run_name"]) if report else breakdown.title
    figures = {"step_seconds": breakdown.step_seconds, "operations": len(breakdown.ops), "title": title}
    return Report(title, sections, kind, figures)


def unfit_page(report: Mapping[str, Any]) -> Report:
    """The page of a plan that does not fit: what fills the memory, and what was tried instead.

    Raises:
        TomatError: The report's memory, or what was tried instead, is damaged.
    """
    memory = Section("Memory", memory_parts(read_memory(report.get("memory") or {})))
    facts = Facts({"slice": report.get("slice"), "compiler": report.get("compiler")})
    trials = typed(report.get("nearest_fits") or [], list[dict[str, Any]], "the plan's nearest_fits", "Plan again.")
    heads = (Column("change"), Column("needs, GiB", number(2, 1 / GIB)), Column("fits"), Column("error"))
    rows = [
        (str(trial.get("words", "")), trial.get("required_bytes"), "yes" if trial.get("fits") else "no",
         str(trial.get("error", "")))
        for trial in trials
    ]  # fmt: skip
    tried = Table("Nearest changes, each compiled", heads, rows) if rows else "Nothing else was tried."
    title = str(report.get("run_name", "a plan"))
    lead = Section("", ("This step does not fit into the memory of a device, so that it has no times.",))
    sections = (lead, Section("The step", (facts,)), memory, Section("What was tried instead", (tried,)))
    return Report(title, sections, "plan", {"title": title, "fits": False, "trials": len(rows)})


def _plan_parts(report: Mapping[str, Any]) -> Iterable[Part]:
    """What only a plan says: the slice, step and utilisation with their ranges, the models side by side."""
    found = {
        "slice": report.get("slice"),
        "compiler": report.get("compiler"),
        "configuration": report.get("config_hash"),
    }
    if parts := report.get("rests_on"):
        found["of the step, on kernels without timings"] = untimed_text(Support(**part) for part in parts)
    yield Facts(found)
    rows: list[tuple[str, ...]] = []
    if span := report.get("step_seconds"):
        rows.append(("step", *(seconds(span[key]) for key in ("estimate", "low", "high"))))
    for one in UTILISATIONS:
        if share := report.get(one.key):
            rows.append((one.name, *(percent(share[key]) for key in ("estimate", "low", "high"))))
    heads = (Column(""), Column("estimate"), Column("from"), Column("to"))
    if rows:
        yield Table("Step and utilisation of the slice's peak, with the range in which they are expected", heads, rows)
    if models := report.get("models_seconds"):
        # A model leaves out the operations that it does not know: 0 of a kind is no answer.
        body = [(kind, *(row.get(name) or None for name in MODELS)) for kind, row in models.items()]
        columns = (Column("kind"), *(Column(f"{name}, ms", number(3, 1e3)) for name in MODELS))
        yield Table("The cycle models beside each other", columns, body)
