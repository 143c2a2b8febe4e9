"""The page of a search for the largest batch: a table of probes to the edge for each policy and accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from tomat.base.records import typed
from tomat.base.report.document import find_sections
from tomat.base.report.formats import UNKNOWN, percent
from tomat.base.report.markdown import markdown_table
from tomat.base.reporting import console, readable_bytes
from tomat.measure.lab.max_batch import STATUS_WORDS, Search, policy_word
from tomat.measure.lab.record import median
from tomat.report.pages.lab_page import BUSY_SHARE
from tomat.report.pages.sweep_tables import MIB, write_sections

HEADINGS = {"introduction": "", "largest": "Largest", "probes": "Probes"}
HEADER = ("Batch", "Microbatch", "Step(s)", "Memory", "t/s", "Loss", "Status")


def write_max_batch_page(record: Mapping[str, Any], tracking_dir: Path) -> Path:
    """Write (or bring up to date) the page of a search.

    Raises:
        TomatError: The page's markers are broken. Nothing is written then.
    """
    page = tracking_dir / f"{record['name']}.md"
    if page.is_file():
        find_sections(page.read_text(encoding="utf-8"), str(page))
    searches = typed(record["searches"], list[Search], "the record", "Search again.")
    contents = {
        "introduction": introduction_section(record, searches),
        "largest": largest_section(searches),
        "probes": probes_section(searches),
    }
    return write_sections(page, f"The largest batch: {record['name']}", contents, HEADINGS)


def introduction_section(record: Mapping[str, Any], searches: list[Search]) -> str:
    """What was searched, on what, under which limit."""
    limit = record["memory_limit_bytes"]
    of = "of a device" if record["memory_source"] == "device" else "of the process (resident, Python and JAX included)"
    words = f", with `{' '.join(record['words'])}`" if record["words"] else ""
    said = (
        f"`{record['config_file']}`{words} on {record['devices']}, {record['sequence_tokens']} tokens a sequence. "
        + (f"The limit is {readable_bytes(limit)} {of}. " if limit else "The limit is what a device has. ")
        + f"Each probe is a process that compiles, takes one step and then {record['steps']} that are timed. Loss: of "
        "the first step."
    )
    busy = median(one.others_busy_share for search in searches for one in search.probes if one.others_busy_share)
    if busy is not None and busy >= BUSY_SHARE:
        said += (
            f" **The machine was shared:** other processes used {percent(busy, 0)} of its processors meanwhile (median "
            "of the probes), so that step times are above those of a quiet machine. Memory does not depend on it."
        )
    return said


def largest_section(searches: list[Search]) -> str:
    """The answer of each search."""
    body = []
    for search in searches:
        largest = search.largest
        best = max((one for one in search.probes if one.runs), key=lambda one: one.tokens_per_second or 0, default=None)
        body.append(
            (
                policy_word(search.policy),
                str(search.accumulations),
                UNKNOWN if largest is None else str(largest.batch_sequences),
                UNKNOWN if largest is None else str(largest.microbatch),
                UNKNOWN if largest is None else f"{(largest.peak_memory_bytes or 0) / MIB:,.0f}M",
                UNKNOWN if best is None else f"{best.tokens_per_second:,.0f} at {best.batch_sequences}",
                search.stopped_by or ("edge found" if search.edge_is_known else "not finished; run it again to go on"),
            )
        )
    columns = ("checkpointing", "accum", "max batch", "microbatch", "memory", "best t/s", "search")
    return markdown_table(columns, body, "lrrrrrl")


def rows_of(search: Search) -> list[tuple[str, ...]]:
    """The probes by batch; the largest that runs is `MAX` where the next one up has been tried."""
    rows = []
    largest = search.largest
    for probe in sorted(search.probes, key=lambda one: one.microbatch):
        status = STATUS_WORDS[probe.status]
        if probe is largest and search.edge_is_known:
            status = "MAX"
        cells = (
            str(probe.batch_sequences),
            str(probe.microbatch),
            UNKNOWN if probe.step_seconds is None else f"{probe.step_seconds:.3f}",
            UNKNOWN if probe.peak_memory_bytes is None else f"{probe.peak_memory_bytes / MIB:,.0f}M",
            UNKNOWN if probe.tokens_per_second is None else f"{probe.tokens_per_second:,.0f}",
            UNKNOWN if probe.loss is None else f"{probe.loss:.3f}",
            status,
        )
        rows.append(tuple(f"**{cell}**" for cell in cells) if status == "MAX" else cells)
    return rows


def probes_section(searches: list[Search]) -> str:
    """A table for each search, and what ended the probes that did not run."""
    parts = []
    for search in searches:
        reasons = [
            f"{one.batch_sequences}: {one.reason}."
            for one in sorted(search.probes, key=lambda one: one.microbatch)
            if not one.runs
        ]
        table = markdown_table(HEADER, rows_of(search), "rrrrrrl")
        parts.append(f"### {search.name[0].upper()}{search.name[1:]}\n\n{table}")
        if reasons:
            parts.append("\n".join(f"- {reason}" for reason in reasons))
    return "\n\n".join(parts) or "No batch has been tried yet."


def print_searches(record: Mapping[str, Any]) -> None:
    """The tables on the console."""
    for search in typed(record["searches"], list[Search], "the record", "Search again."):
        table = Table(title=search.name)
        for heading in HEADER:
            table.add_column(heading, justify="left" if heading == "Status" else "right")
        for row in rows_of(search):
            table.add_row(*(cell.strip("*") for cell in row))
        console.print(table)
        if search.stopped_by:
            console.print(f"note: {search.stopped_by}", highlight=False)
