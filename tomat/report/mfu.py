"""The report on MFU, planned or measured, for every place that shows it: every convention, the wall clock by part."""

from collections.abc import Mapping
from typing import Any

from tomat.base.report.formats import count, percent, seconds, share
from tomat.base.report.model import Cell, Column, Note, Part, Table, columns
from tomat.base.reporting import counted
from tomat.hardware.mfu import UTILISATIONS


def mfu_parts(report: Mapping[str, Any] | None) -> list[Part]:
    """MFU by every convention and the wall clock by part, from a report of `hardware/mfu.py`."""
    if not report:
        return ["No step time is on record for this run."]
    parts: list[Part] = []
    if report.get("slice") is None:
        where = f" of {report['devices_that_ran']}" if report.get("devices_that_ran") else ""
        parts.append(f"The chip's peak{where} is not known, so no utilisation is given.")
    parts += [Note(f"{note}.") for note in report.get("notes", ())]
    parts.append(_figures(report))
    if "untimed" in report:
        said = f"Share of the step on kernels without timings of this chip: {report['untimed']}."
        parts.append(f"{said} For these the range has other chips' errors, or an assumed one of half (`kernels.md`).")
    if by_part := report.get("wall_seconds_by_part"):
        wall, lost = report["wall_seconds"], report.get("wall_mfu_full_lost") or {}
        said = f"The wall clock of {report['n_steps']:,} steps, {seconds(wall)}, by part"
        if report.get("wall_mfu_full") is not None:
            whole, steps = percent(report["wall_mfu_full"]), percent(report["step_mfu_full"])
            said += f"; over all of it MFU (full) is {whole}, over the steps alone {steps}"
        rows = [(name.replace("_", " "), value, value / wall, lost.get(name)) for name, value in by_part.items()]
        heads = Column("part"), Column("time", seconds), Column("share", percent), Column("MFU lost", share)
        parts.append(Table(said, heads, rows))
    return parts


def _figures(report: Mapping[str, Any]) -> Table:
    names = [("step_seconds", "step time", seconds, "")]
    names += [
        (one.key, one.name, share, f"{one.counts} ({one.source})" if one.source else one.counts) for one in UTILISATIONS
    ]
    names += [("tokens_per_second_per_chip", "tokens/s/chip", count, ""), ("tokens_per_second", "tokens/s", count, "")]
    # Heading of a column -> pattern that makes the figure's key in this column from the figure's own key.
    heads, said = {"value": "{}"}, ""
    if "step_seconds_p10" in report:
        heads = {"median": "{}", "p10": "{}_p10", "p90": "{}_p90", "wall clock": "wall_{}"}
        said = f"{counted(report['n_steady_steps'], 'steady step')} of {report['n_steps']:,}"
    elif "ranges" in report:
        heads = {"planned": "{}", "from": "low", "to": "high"}
    rows: list[list[Cell]] = []
    for key, words, show, counts in names:
        if report.get(key) is None and key != "step_seconds":
            continue
        found = {**report, **(report.get("ranges", {}).get(key) or {})}
        values = (found.get(name.format(key)) for name in heads.values())
        rows.append([words, *(None if value is None else show(value) for value in values), counts])
    return Table(said, [Column("figure"), *columns(*heads, right=True), Column("what it counts")], rows)
