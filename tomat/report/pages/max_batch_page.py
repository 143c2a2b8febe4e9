"""The page of a search for the largest batch: a table of its probes for each remat policy and accumulation."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tomat.base.records import typed
from tomat.base.report.formats import number
from tomat.base.report.markdown import update_page
from tomat.base.report.model import VERDICT, Cell, Code, Column, Facts, Heading, Items, Part, Report, Section, Table
from tomat.base.reporting import readable_bytes
from tomat.measure.lab.max_batch import STATUS_WORDS, Search, policy_word
from tomat.measure.lab.record import median
from tomat.report.sweep import MIB, shared_note

MEBIBYTES = number(0, 1 / MIB, "M")


def write_max_batch_page(record: Mapping[str, Any], tracking_dir: Path) -> Path:
    searches = typed(record["searches"], list[Search], "the record", "Search again.")
    limit = record["memory_limit_bytes"]
    of = "of a device" if record["memory_source"] == "device" else "of the process (resident, Python and JAX included)"
    facts: dict[str, Cell] = {
        "configuration": Code(record["config_file"]),
        "settings": Code(" ".join(record["words"])) if record["words"] else None,
        "devices": record["devices"],
        "tokens of a sequence": record["sequence_tokens"],
        "memory limit": f"{readable_bytes(limit)} {of}" if limit else "what a device has",
        "timed steps of a probe": record["steps"],
    }
    said = "Each probe is a process that compiles, takes one step and then the timed steps. Loss: of that one step."
    busy = median(
        one.others_busy_share for search in searches for one in search.probes if one.others_busy_share is not None
    )
    effect = "Step times are above those of a quiet machine; memory does not depend on it."
    body = []
    for search in searches:
        largest = search.largest
        best = max((one for one in search.probes if one.runs), key=lambda one: one.tokens_per_second or 0, default=None)
        edge = (largest.batch_sequences, largest.microbatch, largest.peak_memory_bytes) if largest else (None,) * 3
        speed = None if best is None else f"{best.tokens_per_second:,.0f} at {best.batch_sequences}"
        state = "edge found" if search.edge_is_known else "not finished; run it again to go on"
        body.append((policy_word(search.policy), search.accumulations, *edge, speed, search.stopped_by or state))
    heads = [*map(Column, ("checkpointing", "accum", "max batch", "microbatch")), Column("memory", MEBIBYTES)]
    table = Table("", [*heads, Column("best t/s", right=True), Column("search")], body)
    first = Section("", [Facts(facts), said, *shared_note(busy, "probes", effect)], "introduction")
    found, tried = Section("Largest", [table], "largest"), Section("Probes", probes_parts(searches), "probes")
    report = Report(f"The largest batch: {record['name']}", (first, found, tried, VERDICT))
    return update_page(tracking_dir / f"{record['name']}.md", report)


def probes_table(search: Search) -> Table:
    """The probes by batch. The largest that runs has the status `MAX` if the next larger one has been tried."""
    heads = [Column("Batch"), Column("Microbatch"), Column("Step(s)", number(3)), Column("Memory", MEBIBYTES)]
    heads += [Column("t/s", number(0)), Column("Loss", number(3)), Column("Status")]
    body = []
    for one in sorted(search.probes, key=lambda one: one.microbatch):
        status = "MAX" if one is search.largest and search.edge_is_known else STATUS_WORDS[one.status]
        figures = (one.step_seconds, one.peak_memory_bytes, one.tokens_per_second, one.loss)
        body.append((one.batch_sequences, one.microbatch, *figures, status))
    return Table(search.name, heads, body)


def probes_parts(searches: Sequence[Search]) -> list[Part]:
    parts: list[Part] = []
    for search in searches:
        failed = sorted((one for one in search.probes if not one.runs), key=lambda one: one.microbatch)
        table = replace(probes_table(search), caption="")
        parts += [Heading(f"{search.name[0].upper()}{search.name[1:]}"), table]
        parts += [Items([f"{one.batch_sequences}: {one.reason}." for one in failed])] if failed else []
    return parts or ["No batch has been tried yet."]
