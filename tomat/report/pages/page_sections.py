"""What a tracking page says of a run or a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tomat.base.report.formats import UNKNOWN, count, percent, quantity, seconds, share
from tomat.base.report.model import Cell, Code, Column, Facts, Items, Note, Part, Table
from tomat.hardware.mfu import UTILISATIONS
from tomat.perf.profile.breakdown import Breakdown
from tomat.report.step import (
    groups_table,
    memory_table,
    operations_table,
    step_charts,
    step_notes,
    waits_table,
    windows_table,
)
from tomat.train.runs.former_keys import former_key

TOP_OPERATIONS = 20
NO_PROFILE = "No profile was taken."
# By whether a trace, rather than a compiled program, lacks it.
NO_BUFFERS = {
    True: "How much HBM the step holds is not known: this trace came without XLA's buffer assignment. `tomat plan` of "
    "the same configuration lists the memory; `enable_hlo_proto` puts the assignment into `*.xplane.pb` where the "
    "backend gives it.",
    False: "How much HBM the step holds is not in this module, which came without XLA's buffer assignment. `tomat "
    "profile` of the `*after_optimizations.hlo.pb` that XLA writes under `--xla_dump_to=DIR --xla_dump_hlo_as_proto` "
    "has it.",
}


def setup_facts(record: Mapping[str, Any], breakdown: Breakdown | None) -> Facts:
    asked, batch = record.get("asked_slice"), record["batch_sequences"]
    rows: dict[str, Cell] = {
        "kind": str(record["kind"]),
        "commit": Code(record["commit"]) if record["commit"] else UNKNOWN,
        "date": record["date"] or UNKNOWN,
        "configuration": Code(record["config_hash"]) if record["config_hash"] else UNKNOWN,
        "slice": str(record["slice"] or UNKNOWN),
        "slice that was asked for": None if asked == record["slice"] else asked,
        "ran on": record.get("devices_that_ran"),
    }
    if batch and record["sequence_tokens"]:
        rows["batch"] = f"{batch} sequences of {record['sequence_tokens']} tokens"
    if breakdown is not None:
        roofs = breakdown.roofs
        peaks = (
            f"{quantity(roofs.peak_flops_per_second, 'FLOP/s')} bf16, "
            f"{quantity(roofs.peak_hbm_bytes_per_second, 'B/s')} HBM, {quantity(roofs.clock_hz, 'Hz')}"
            f"{' (as the trace states them)' if roofs.stated_by_trace else ''}"
        )
        known = roofs.peak_flops_per_second or roofs.peak_hbm_bytes_per_second
        rows["device"] = f"{roofs.device_kind or 'unknown'}, {breakdown.n_devices} on {breakdown.n_hosts} host(s)"
        rows["profile"] = f"{breakdown.title}, {breakdown.source}, mean of {breakdown.n_steps} step(s)"
        rows["peaks of a device"] = peaks if known else "not in the table of chips"
    return Facts(rows)


def differences(config: Mapping[str, Any], base: Mapping[str, Any] | None) -> Part:
    """The configuration as a diff against the baseline's."""
    if base is None:
        return "No baseline was named."
    old, name = base["config"], base["run"]
    changed = sorted(k for k in {*old, *config} if old.get(k, UNKNOWN) != config.get(k, UNKNOWN) and not former_key(k))
    if not changed:
        return f"The same configuration as `{name}`."
    rows = [(Code(key), *(Code(str(one.get(key, UNKNOWN))) for one in (old, config))) for key in changed]
    return Table("", [Column(heading) for heading in ("setting", name, "this run")], rows)


def mfu_parts(report: Mapping[str, Any] | None) -> list[Part]:
    """MFU by every convention, and where the wall clock went."""
    if not report:
        return ["No step time is on record for this run."]
    parts: list[Part] = []
    if report.get("slice") is None:
        where = f" of {report['devices_that_ran']}" if report.get("devices_that_ran") else ""
        parts.append(f"The chip's peak{where} is not known, so no utilisation is given.")
    parts += [Note(f"{note}.") for note in report.get("notes", ())]
    parts.append(_figures(report))
    if "untimed" in report:
        parts.append(
            f"Of the step, on kernels without timings of this chip: {report['untimed']}. The range has for them what "
            "other chips' timings show, or an assumed error of half (`kernels.md`)."
        )
    return parts + _wall_clock(report)


def _figures(report: Mapping[str, Any]) -> Table:
    names = [(one.key, f"{one.name} ({one.source})" if one.source else one.name, percent) for one in UTILISATIONS]
    names = [("step_seconds", "step time", seconds), *names]
    names += [(key, words, count) for key, words in (("tokens_per_second_per_chip", "tokens/s/chip"),
                                                     ("tokens_per_second", "tokens/s"))]  # fmt: skip
    spread: tuple[str, ...] = ()
    if "step_seconds_p10" in report:
        spread = "median", "p10", "p90"
    elif "ranges" in report:
        spread = "planned", "from", "to"
    rows = []
    for key, words, show in names:
        if report.get(key) is None and key != "step_seconds":
            continue
        values = [report.get(key)]
        if "p10" in spread:
            values += [report.get(f"{key}_p10"), report.get(f"{key}_p90")]
        elif spread:
            span = report["ranges"].get(key) or {}
            values += [span.get("low"), span.get("high")]
        rows.append((words, *(None if value is None else show(value) for value in values)))
    return Table("", [Column("figure"), *(Column(name, right=True) for name in spread or ("value",))], rows)


def _wall_clock(report: Mapping[str, Any]) -> list[Part]:
    """Where the time of all steps went, and what that cost in MFU."""
    parts = report.get("wall_seconds_by_part")
    if not parts:
        return []
    wall, lost = report["wall_seconds"], report.get("wall_mfu_full_lost") or {}
    said = f"The wall clock of {report['n_steps']:,} steps, {seconds(wall)}, by part"
    if report.get("wall_mfu_full") is not None:
        said += (
            f"; over all of it MFU (full) is {percent(report['wall_mfu_full'])}, "
            f"over the steps alone {percent(report['step_mfu_full'])}"
        )
    rows = [(name.replace("_", " "), value, value / wall, lost.get(name)) for name, value in parts.items()]
    figures = (Column("time", seconds), Column("share", percent), Column("MFU lost", share))
    return [Table(said, (Column("part"), *figures), rows)]


def memory_part(breakdown: Breakdown | None) -> Part:
    """Bytes of the main program's buffers, from its buffer assignment."""
    if breakdown is None:
        return NO_PROFILE
    return memory_table(breakdown) if breakdown.memory_bytes else NO_BUFFERS[breakdown.source == "trace"]


def breakdown_parts(breakdown: Breakdown | None, stem: str) -> list[Part]:
    """Where the cycles of a step went; `stem` is that of the charts' files."""
    if breakdown is None:
        return [NO_PROFILE]
    parts: list[Part] = [
        f"One step of one device, {seconds(breakdown.step_seconds)}. Time is exclusive, so the shares sum to the step; "
        "hidden is communication beside compute, in no sum.",
        groups_table(breakdown.categories, "category"),
        *step_charts(breakdown, stem),
        "By part of the model:",
        groups_table(breakdown.parts, "part"),
    ]
    parts += [windows_table(breakdown)] if breakdown.step_classes else []
    parts += [waits_table(breakdown)] if breakdown.gaps else []
    notes = step_notes(breakdown)
    return [*parts, "Notes:", Items(notes)] if notes else parts


def operations_parts(breakdown: Breakdown | None) -> list[Part]:
    if breakdown is None:
        return [NO_PROFILE]
    found = operations_table(breakdown, TOP_OPERATIONS)
    columns = [column.heading for column in found.columns if column.heading not in ("HBM bytes", "flops", "scope")]
    return [f"{found.caption}.", found.chosen(*columns)]
