"""The page of a plan or a profile: where the time of a step goes, by module and kind of operation, and its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tomat.base.records import typed
from tomat.base.report.formats import quantity, seconds
from tomat.hardware.mfu import UTILISATIONS
from tomat.perf.cost.memory import read_memory
from tomat.perf.cost.op_times import MODELS
from tomat.perf.cost.support import Support, untimed_text
from tomat.perf.profile.breakdown import Breakdown, GroupRow
from tomat.perf.profile.steady import WindowKind, what_else_ran
from tomat.report.html.charts import flame_chart, roofline, treemap
from tomat.report.html.document import Figure, Page, Section, paragraph
from tomat.report.html.memory import GIB, memory_section
from tomat.report.html.tables import Column, facts, number, percent, significant, table
from tomat.report.pages.figures import COLOURS


def breakdown_page(breakdown: Breakdown, kind: str, *, report: Mapping[str, Any] | None = None) -> Page:
    """The page of a breakdown.

    Args:
        breakdown: Of a trace, a compiled program or a plan.
        kind: `plan` or `profile`.
        report: `Plan.to_dict()` of a plan: its memory, models and utilisation.

    Raises:
        TomatError: The report's memory is damaged.
    """
    measured = "measured" if breakdown.source == "trace" else "predicted"
    lead = [paragraph(f"One step of one device, {measured}: {breakdown.title}.")]
    said = [*(f"not in the step: {text}" for text in what_else_ran(breakdown)), *breakdown.notes]
    lead += [paragraph(f"{note[:1].upper()}{note[1:]}.", "note") for note in said]
    shown: dict[str, object] = {
        "step": seconds(breakdown.step_seconds),
        "device": breakdown.roofs.device_kind or "not known",
        "devices": f"{breakdown.n_devices:,} on {breakdown.n_hosts:,} hosts"
        if breakdown.n_hosts > 1
        else f"{breakdown.n_devices:,}",
        "steps read": breakdown.n_steps if breakdown.source == "trace" else None,
        "operations": f"{len(breakdown.ops):,}",
        "compute": quantity(_total(op.flops for op in breakdown.ops), "FLOP") + " a step",
        "HBM traffic": quantity(_total(op.hbm_bytes for op in breakdown.ops), "B") + " a step",
    }
    sections = [Section("The step", (facts(shown), *(_plan_parts(report) if report else ())))]
    sections.append(
        Section("By kind of operation", (_shares(breakdown), _groups("Kinds of operations", breakdown.categories)))
    )
    sections.append(
        Section(
            "By module", (flame_chart(breakdown), treemap(breakdown), _groups("Parts of the model", breakdown.parts))
        )
    )
    if (against := roofline(breakdown)) is not None:
        sections.append(Section("Against the roofs of the chip", (against,)))
    sections.append(Section("Operations", (_operations(breakdown),)))
    memory = read_memory(report["memory"]) if report else None
    if memory is not None or breakdown.memory_bytes:
        sections.append(memory_section(memory, breakdown.memory_bytes))
    if len(breakdown.step_times_seconds) > 1 or len(breakdown.windows) > 1 or breakdown.gaps:
        sections.append(Section("Steps and waits", tuple(_steps(breakdown))))
    title = str(report["run_name"]) if report else breakdown.title
    figures = {"step_seconds": breakdown.step_seconds, "operations": len(breakdown.ops), "title": title}
    return Page(title, kind, tuple(lead), tuple(sections), figures)


def unfit_page(report: Mapping[str, Any]) -> Page:
    """The page of a plan that does not fit: what fills the memory, and what was tried instead.

    Raises:
        TomatError: The report's memory, or what was tried instead, is damaged.
    """
    memory = memory_section(read_memory(report.get("memory") or {}), {})
    facts_shown = facts({"slice": report.get("slice"), "compiler": report.get("compiler")})
    trials = typed(report.get("nearest_fits") or [], list[dict[str, Any]], "the plan's nearest_fits", "Plan again.")
    heads = (Column("change"), Column("needs, GiB", number(2, 1 / GIB)), Column("fits"), Column("error"))
    rows = [
        (str(trial.get("words", "")), trial.get("required_bytes"), "yes" if trial.get("fits") else "no",
         str(trial.get("error", "")))
        for trial in trials
    ]  # fmt: skip
    tried = table("Nearest changes, each compiled", heads, rows) if rows else paragraph("Nothing else was tried.")
    title = str(report.get("run_name", "a plan"))
    lead = (paragraph("This step does not fit into the memory of a device, so that it has no times."),)
    sections = (Section("The step", (facts_shown,)), memory, Section("What was tried instead", (tried,)))
    return Page(title, "plan", lead, sections, {"title": title, "fits": False, "trials": len(rows)})


def _plan_parts(report: Mapping[str, Any]) -> Iterable[str]:
    """What only a plan says: the slice, step and utilisation with their ranges, the models side by side."""
    found = {
        "slice": report.get("slice"),
        "compiler": report.get("compiler"),
        "configuration": report.get("config_hash"),
    }
    if parts := report.get("rests_on"):
        found["of the step, on kernels without timings"] = untimed_text(Support(**part) for part in parts)
    yield facts(found)
    rows: list[tuple[object, ...]] = []
    if span := report.get("step_seconds"):
        rows.append(("step", *(seconds(span[key]) for key in ("estimate", "low", "high"))))
    for one in UTILISATIONS:
        if share := report.get(one.key):
            rows.append((one.name, *(percent(share[key]) for key in ("estimate", "low", "high"))))
    heads = (Column(""), Column("estimate"), Column("from"), Column("to"))
    if rows:
        yield table("Step and utilisation of the slice's peak, with the range in which they are expected", heads, rows)
    if models := report.get("models_seconds"):
        # A model leaves out the operations that it does not know: 0 of a kind is no answer.
        body = [(kind, *(row.get(name) or None for name in MODELS)) for kind, row in models.items()]
        columns = (Column("kind"), *(Column(f"{name}, ms", number(3, 1e3)) for name in MODELS))
        yield table("The cycle models beside each other", columns, body)


def _shares(breakdown: Breakdown) -> Figure:
    rows = [row for row in breakdown.categories if row.share > 0]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": row.name,
            "x": [100 * row.share],
            "y": ["step"],
            "marker": {"color": COLOURS[row.name]},
            "hovertemplate": f"{row.name}: %{{x:.2f}} % of the step, {seconds(row.seconds)}<extra></extra>",
        }
        for row in rows
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "% of the step"}, "range": [0, 100]},
        "yaxis": {"visible": False},
        "legend": {"orientation": "h", "y": -0.6, "traceorder": "normal"},
    }
    largest = sorted(rows, key=lambda row: -row.seconds)[:4]
    said = "Largest: " + ", ".join(f"{row.name} {100 * row.share:.1f} %" for row in largest) + "."
    return Figure("Share of the step by kind of operation", traces, layout, said, 260)


def _groups(caption: str, rows: Sequence[GroupRow]) -> str:
    heads = (
        Column("name"),
        Column("runs", number(0)),
        Column("time, ms", number(4, 1e3)),
        Column("share", percent),
        Column("hidden, ms", number(4, 1e3)),
        Column("of peak FLOP/s", percent),
        Column("of HBM bandwidth", percent),
        Column("bound by"),
    )
    body = [
        (
            row.name,
            row.occurrences,
            row.seconds,
            row.share,
            row.hidden_seconds or None,
            row.flops_fraction,
            row.bandwidth_fraction,
            str(row.bound) or None,
        )
        for row in rows
    ]
    return table(caption, heads, body)


def _operations(breakdown: Breakdown) -> str:
    heads = (
        Column("operation"),
        Column("kind"),
        Column("part"),
        Column("direction"),
        Column("runs", number(0)),
        Column("time, ms", number(4, 1e3)),
        Column("share", percent),
        Column("of peak FLOP/s", percent),
        Column("of HBM bandwidth", percent),
        Column("bound by"),
        Column("HBM MB", significant(factor=1e-6)),
        Column("GFLOP", significant()),
        Column("source"),
        Column("scope"),
    )
    rows = []
    for op in breakdown.top(len(breakdown.ops)):
        one = breakdown.group(op.name, [op])
        rows.append(
            (
                op.name,
                str(op.category),
                str(op.part),
                str(op.direction),
                op.occurrences,
                op.seconds,
                one.share,
                one.flops_fraction,
                one.bandwidth_fraction,
                str(one.bound),
                op.hbm_bytes,
                op.flops / 1e9 if op.flops is not None else None,
                op.source,
                op.op_name,
            )
        )
    return table("Operations of a step, the longest first", heads, rows)


def _steps(breakdown: Breakdown) -> Iterable[str | Figure]:
    times = breakdown.step_times_seconds
    if len(breakdown.windows) > 1:
        kinds = {kind: [one for one in breakdown.windows if one.kind == kind] for kind in WindowKind}
        traces = [
            {
                "type": "scatter",
                "mode": "markers",
                "name": str(kind),
                "x": [1e3 * one.start_seconds for one in rows],
                "y": [1e3 * one.seconds / one.steps for one in rows],
                "text": [one.device for one in rows],
                "hovertemplate": f"%{{text}}: %{{y:.4f}} ms, {kind}<extra></extra>",
            }
            for kind, rows in kinds.items()
            if rows
        ]
        layout = {
            "xaxis": {"title": {"text": "begins at, ms"}},
            "yaxis": {"title": {"text": "step, ms"}, "rangemode": "tozero"},
        }
        said = ", ".join(f"{len(rows):,} {kind}" for kind, rows in kinds.items() if rows)
        yield Figure("All windows, from the beginning of a step to that of the next", traces, layout, f"{said}.", 260)
    elif len(times) > 1:  # a breakdown of before, which kept no windows
        traces = [{"type": "histogram", "x": [1e3 * one for one in times], "nbinsx": 40, "name": "steps"}]
        layout = {
            "xaxis": {"title": {"text": "step, ms"}},
            "yaxis": {"title": {"text": "steps x devices"}},
            "bargap": 0.05,
        }
        said = f"{len(times):,} steps from {seconds(min(times))} to {seconds(max(times))}."
        yield Figure("Times of the steps", traces, layout, said, 260)
    if breakdown.step_classes:
        heads = (
            Column("windows"),
            Column("number", number(0)),
            *(Column(f"{name}, ms", number(3, 1e3)) for name in ("mean", "10 %", "median", "90 %")),
        )
        rows = [
            (c.name, c.count, c.mean_seconds, c.p10_seconds, c.p50_seconds, c.p90_seconds)
            for c in breakdown.step_classes
        ]
        yield table("All windows by kind; the step is the mean of the steady ones", heads, rows)
    if breakdown.gaps:
        heads = (
            Column("after"),
            Column("before"),
            Column("times a step", number(2)),
            Column("wait, ms", number(4, 1e3)),
            Column("longest, ms", number(4, 1e3)),
            Column("host meanwhile"),
        )
        rows = [
            (gap.before, gap.after, gap.occurrences, gap.seconds, gap.longest_seconds, gap.host_activity)
            for gap in breakdown.gaps
        ]
        yield table("Waits of the device", heads, rows)


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
