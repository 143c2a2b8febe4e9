"""The sections of a tracking page as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tomat.base.report.formats import (
    UNKNOWN,
    count,
    cycles,
    markdown_table,
    percent,
    quantity,
    seconds,
)
from tomat.hardware.mfu import UTILISATIONS
from tomat.perf.profile.breakdown import Breakdown, GroupRow
from tomat.perf.profile.steady import what_else_ran

TOP_OPERATIONS = 20
# By whether a trace, rather than a compiled program, lacks it.
NO_BUFFERS = {
    True: "How much HBM the step holds is not known: this trace records when operations ran, and came without XLA's "
    "buffer assignment (which array lies where, for how long). Two ways to get it: `tomat plan` compiles the same "
    "configuration and lists the memory with its largest buffers; or profile with `enable_hlo_proto`, which puts the "
    "assignment into `*.xplane.pb` where the backend gives it (a JSON trace never has it).",
    False: "How much HBM the step holds is not in this module, which came without XLA's buffer assignment (which array "
    "lies where, for how long). `tomat profile` of the `*after_optimizations.hlo.pb` that XLA writes under "
    "`--xla_dump_to=DIR --xla_dump_hlo_as_proto` has it.",
}


def setup_section(record: Mapping[str, Any], breakdown: Breakdown | None) -> str:
    """What ran, where."""
    rows = [
        ("kind", str(record["kind"])),
        ("commit", f"`{record['commit']}`" if record["commit"] else UNKNOWN),
        ("date", record["date"] or UNKNOWN),
        ("configuration", f"`{record['config_hash']}`" if record["config_hash"] else UNKNOWN),
        ("slice", str(record["slice"] or UNKNOWN)),
    ]
    if record.get("asked_slice") not in (None, record["slice"]):
        rows.append(("slice that was asked for", str(record["asked_slice"])))
    if record.get("devices_that_ran"):
        rows.append(("ran on", str(record["devices_that_ran"])))
    if record["batch_sequences"] and record["sequence_tokens"]:
        rows.append(("batch", f"{record['batch_sequences']} sequences of {record['sequence_tokens']} tokens"))
    if breakdown is not None:
        roofs = breakdown.roofs
        peaks = (
            f"{quantity(roofs.peak_flops_per_second, 'FLOP/s')} bf16, "
            f"{quantity(roofs.peak_hbm_bytes_per_second, 'B/s')} HBM, {quantity(roofs.clock_hz, 'Hz')}"
            f"{' (as the trace states them)' if roofs.stated_by_trace else ''}"
        )
        known = roofs.peak_flops_per_second or roofs.peak_hbm_bytes_per_second
        rows += [
            ("device", f"{roofs.device_kind or 'unknown'}, {breakdown.n_devices} on {breakdown.n_hosts} host(s)"),
            ("profile", f"`{breakdown.title}`, {breakdown.source}, mean of {breakdown.n_steps} step(s)"),
            ("peaks of a device", peaks if known else "not in the table of chips"),
        ]
    return markdown_table(("", ""), rows, "ll")


def differences_section(config: Mapping[str, Any], base: Mapping[str, Any] | None) -> str:
    """The configuration as a diff against the baseline's."""
    if base is None:
        return "No baseline was named."
    old, name = base["config"], base["run"]
    changed = sorted(k for k in {*old, *config} if old.get(k, UNKNOWN) != config.get(k, UNKNOWN))
    if not changed:
        return f"The same configuration as `{name}`."
    rows = [(f"`{k}`", f"`{old.get(k, UNKNOWN)}`", f"`{config.get(k, UNKNOWN)}`") for k in changed]
    return markdown_table(("setting", f"{name}", "this run"), rows, "lll")


def mfu_section(report: Mapping[str, Any] | None) -> str:
    """MFU by every convention, and where the wall clock went."""
    if not report:
        return "### MFU\n\nNo step time is on record for this run."
    lines = ["### MFU"]
    if report.get("slice") is None:
        where = f" of {report['devices_that_ran']}" if report.get("devices_that_ran") else ""
        lines.append(f"The chip's peak{where} is not known, so no utilisation is given.")
    lines += [f"Note: {note}." for note in report.get("notes", ())]
    header = ("figure", "value")
    if "step_seconds_p10" in report:
        header = ("figure", "median", "p10", "p90")
    elif "ranges" in report:
        header = ("figure", "planned", "from", "to")
    rows = [_figure(report, "step_seconds", "step time", seconds, header)]
    for one in UTILISATIONS:
        if report.get(one.key) is not None:
            cited = f"{one.name} ({one.source})" if one.source else one.name
            rows.append(_figure(report, one.key, cited, percent, header))
    for key, label in (("tokens_per_second_per_chip", "tokens/s/chip"), ("tokens_per_second", "tokens/s")):
        if report.get(key) is not None:
            rows.append(_figure(report, key, label, count, header))
    lines.append(markdown_table(header, rows))
    if "untimed" in report:
        lines.append(
            f"Of the step, on kernels without timings of this chip: {report['untimed']}. The range has for them what "
            "other chips' timings show, or an assumed error of half ([timed kernels](kernels.md))."
        )
    parts = report.get("wall_seconds_by_part")
    if parts:
        lost = report.get("wall_mfu_full_lost") or {}
        wall = report["wall_seconds"]
        table = [
            (name.replace("_", " "), seconds(value), percent(value / wall), percent(lost.get(name), 2))
            for name, value in parts.items()
        ]
        sentence = f"The wall clock of {report['n_steps']:,} steps, {seconds(wall)}, by part"
        if report.get("wall_mfu_full") is not None:
            sentence += (
                f"; over all of it MFU (full) is {percent(report['wall_mfu_full'])}, "
                f"over the steps alone {percent(report['step_mfu_full'])}"
            )
        lines.append(f"{sentence}:")
        lines.append(markdown_table(("part", "time", "share", "MFU lost"), table))
    return "\n\n".join(lines)


def _figure(report: Mapping[str, Any], key: str, label: str, show: Any, header: Sequence[str]) -> tuple[str, ...]:
    values = [report.get(key)]
    if "p10" in header:
        values += [report.get(f"{key}_p10"), report.get(f"{key}_p90")]
    elif "from" in header:
        span = report["ranges"].get(key)
        values += [None, None] if span is None else [span["low"], span["high"]]
    return (label, *(UNKNOWN if v is None else show(v) for v in values))


def memory_section(breakdown: Breakdown | None) -> str:
    """Bytes of the main program's buffers, from its buffer assignment."""
    if breakdown is None:
        return "### HBM\n\nNo profile was taken."
    if not breakdown.memory_bytes:
        return f"### HBM\n\n{NO_BUFFERS[breakdown.source == 'trace']}"
    capacity = breakdown.roofs.hbm_bytes
    total = sum(breakdown.memory_bytes.values())
    rows = [
        (name, f"{size / 2**30:.3f} GiB", percent(size / capacity) if capacity else UNKNOWN)
        for name, size in [*sorted(breakdown.memory_bytes.items()), ("sum", total)]
    ]
    return "### HBM\n\nBuffers of the main program on one device.\n\n" + markdown_table(
        ("buffers", "bytes", "of capacity"), rows
    )


def group_table(rows: Sequence[GroupRow], first: str) -> str:
    """Categories or parts: one row each, and their sum."""
    header = (first, "occurrences", "cycles", "time", "share", "hidden", "flops", "HBM bytes", "of peak flops",
              "of bandwidth", "bound")  # fmt: skip
    body = [
        (
            row.name,
            count(row.occurrences),
            cycles(row.cycles),
            seconds(row.seconds),
            percent(row.share),
            seconds(row.hidden_seconds) if row.hidden_seconds else "",
            quantity(row.flops),
            quantity(row.hbm_bytes, "B"),
            percent(row.flops_fraction),
            percent(row.bandwidth_fraction),
            str(row.bound),
        )
        for row in rows
    ]
    total = sum(row.seconds for row in rows)
    all_cycles = sum(row.cycles or 0.0 for row in rows) if any(row.cycles for row in rows) else None
    share = sum(row.share for row in rows)
    body.append(("**step**", "", cycles(all_cycles), seconds(total), percent(share), "", "", "", "", "", ""))
    return markdown_table(header, body, "l" + "r" * 9 + "l")


def breakdown_section(breakdown: Breakdown | None, figures: Sequence[tuple[str, str]]) -> str:
    """Where the cycles of a step went."""
    if breakdown is None:
        return "### Where the cycles went\n\nNo profile was taken."
    lines = [
        "### Where the cycles went",
        f"One step of one device, {seconds(breakdown.step_seconds)}. Time is exclusive, so the shares sum to the step; "
        "*hidden* is communication beside compute, in no sum.",
        group_table(breakdown.categories, "category"),
        *(f"![{caption}]({path})" for caption, path in figures),
        "By part of the model:",
        group_table(breakdown.parts, "part"),
    ]
    if breakdown.step_classes:
        rows = [
            (c.name, str(c.count), *(seconds(v) for v in (c.mean_seconds, c.p10_seconds, c.p50_seconds, c.p90_seconds)))
            for c in breakdown.step_classes
        ]
        lines += [
            "All windows (times devices), each from the beginning of a step to that of the next; the step is the mean "
            "of the steady ones:",
            markdown_table(("windows", "count", "mean", "p10", "p50", "p90"), rows),
        ]
    if breakdown.others:
        lines.append("\n".join(["Not in the step:", "", *(f"- {text}" for text in what_else_ran(breakdown))]))
    if breakdown.gaps:
        rows = [
            (f"`{g.before}`", f"`{g.after}`", count(g.occurrences), seconds(g.seconds), seconds(g.longest_seconds),
             f"`{g.host_activity}`" if g.host_activity else UNKNOWN)
            for g in breakdown.gaps
        ]  # fmt: skip
        lines += [
            "Waits of the device with the longest total, per step:",
            markdown_table(("after", "before", "occurrences", "time", "longest", "the host was in"), rows, "llrrrl"),
        ]
    if breakdown.notes:
        lines.append("\n".join(["Notes:", "", *(f"- {note}" for note in breakdown.notes)]))
    return "\n\n".join(lines)


def operations_section(breakdown: Breakdown | None) -> str:
    """The operations with the most time."""
    if breakdown is None:
        return "### Top operations\n\nNo profile was taken."
    header = ("operation", "category", "part", "direction", "occurrences", "time", "share", "of peak flops",
              "of bandwidth", "bound", "source")  # fmt: skip
    rows = []
    for op in breakdown.top(TOP_OPERATIONS):
        row = breakdown.group(op.name, [op])
        rows.append(
            (
                f"`{op.name}`",
                str(op.category),
                str(op.part),
                str(op.direction),
                count(op.occurrences),
                seconds(op.seconds),
                percent(row.share),
                percent(row.flops_fraction),
                percent(row.bandwidth_fraction),
                str(row.bound),
                f"`{op.source}`" if op.source else UNKNOWN,
            )
        )
    shown = sum(op.seconds for op in breakdown.top(TOP_OPERATIONS))
    return (
        f"### Top operations\n\nThe {len(rows)} of {len(breakdown.ops)} operations with the most time, "
        f"{percent(shown / breakdown.step_seconds if breakdown.step_seconds else None)} of the step.\n\n"
        + markdown_table(header, rows, "llllrrrrrll")
    )
