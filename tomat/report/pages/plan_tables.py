"""Plans, and the largest batches that a search found, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tomat.base.report.formats import percent, seconds
from tomat.base.reporting import console
from tomat.hardware.mfu import UTILISATIONS
from tomat.perf.cost.chip_model import MODELS, Support, untimed_share, untimed_text
from tomat.perf.cost.memory import MemoryReport, read_memory
from tomat.perf.profile.breakdown import Breakdown
from tomat.report.pages.profile_tables import print_breakdown

FITS = ("fits", "green")

if TYPE_CHECKING:
    from tomat.perf.tuning.search import LargestBatch


def gib(count: int | None) -> str:
    """Bytes in GiB, as XLA prints them."""
    return "-" if count is None else f"{count / 2**30:.2f} GiB"


def table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are figures."""
    made = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    return made


def print_plan(report: Mapping[str, Any], top: int) -> None:
    """Memory, cycles, the models side by side, MFU.

    Args:
        report: `Plan.to_dict()`, as made or as kept.
        top: Operations and buffers to print.
    """
    how = "from the cache" if report["cached"] else f"compiled in {report['compile_seconds']:.0f} s"
    slice_ = f"{report['slice']}: {report['n_chips']} chips, {report['n_hosts']} host(s)"
    console.print(Text.assemble((report["run_name"], "bold"), f" on {slice_}, {report['compiler']}, {how}"))
    print_memory(read_memory(report["memory"]), top)
    if report["breakdown"] is None:
        return
    print_breakdown(Breakdown.from_dict(report["breakdown"], "the plan"), top)
    models = table("the cycle models", "category", "XLA's cycles", "roofline", "schedule", "estimate")
    rows = sorted(report["models_seconds"].items(), key=lambda item: -item[1]["estimate"])
    whole = sum(row["estimate"] for _, row in rows)
    for name, row in rows:
        if row["estimate"] > 0.001 * whole:
            models.add_row(name, *(seconds(row[model]) if row[model] else "-" for model in MODELS))
    console.print(models)
    parts = [Support(**part) for part in report["rests_on"]]
    print_support(parts)
    if report["pallas_kernels"]:
        _print_kernels(report["pallas_kernels"])
    figures = table("utilisation of the slice's peak", "", "estimate", "from", "to")
    for one in UTILISATIONS:
        found = report[one.key]
        figures.add_row(one.name, percent(found["estimate"]), percent(found["low"]), percent(found["high"]))
    console.print(figures)
    span, work = report["step_seconds"], report["work"]
    tokens = work["batch_sequences"] * work["sequence_tokens"] / span["estimate"]
    useful = work["batch_sequences"] * work["useful_tokens_per_sequence"] / span["estimate"]
    interval = f"({seconds(span['low'])} to {seconds(span['high'])})"
    speed = f"{tokens:,.0f} tokens/s, {useful:,.0f} useful; of it on kernels without timings {untimed_text(parts)}"
    console.print(Text.assemble("step ", (seconds(span["estimate"]), "bold"), f" {interval}, {speed}"))


def print_support(parts: list[Support]) -> None:
    """Which parts of the step rest on kernels that were timed, and which do not."""
    shown = table("what the step rests on", "kernels bound by", "a step", "share", "error of nine in ten", "timed")
    for part in parts:
        if part.step_share > 0.001:
            shown.add_row(
                part.name, seconds(part.seconds_per_step), percent(part.step_share), percent(part.error), part.timed
            )
    console.print(shown)


def _print_kernels(kernels: Sequence[Mapping[str, Any]]) -> None:
    view = table(
        "Pallas kernels: share of the slots that executed bundles fill",
        "kernel", "runs", "a step", "MXU", "VALU", "EUP", "XLU", "load", "store", "bound",
    )  # fmt: skip
    for kernel in kernels:
        use = kernel["slot_utilisation"]
        view.add_row(
            kernel["name"],
            f"{kernel['executions']:.0f}",
            seconds(kernel["seconds_per_step"]),
            *(percent(use.get(unit), 0) for unit in ("MXU", "VALU", "EUP", "XLU", "VLOAD", "VSTORE")),
            kernel["bound"],
        )
    console.print(view)


def print_memory(memory: MemoryReport, top: int) -> None:
    """Does it fit, and what fills the memory."""
    verdict = FITS if memory.fits else ("does not fit", "bold red")
    beyond = f"{gib(memory.headroom_bytes)} left" if memory.fits else f"{gib(-memory.headroom_bytes)} too much"
    said = f": {gib(memory.required_bytes)} of {gib(memory.capacity_bytes)} a device, {beyond}"
    console.print(Text.assemble(verdict, said))
    parts = [
        ("arguments", memory.argument_bytes),
        ("temporaries", memory.temporary_bytes),
        ("outputs of their own", memory.output_bytes),
        ("program", memory.program_bytes),
        ("live at the peak", memory.peak_bytes),
    ]
    known = ", ".join(f"{name} {gib(count)}" for name, count in parts if count is not None)
    console.print(f"  {known}", highlight=False)
    if memory.largest and top > 0:
        view = table(f"largest buffers, {memory.largest_are}", "shape", "size", "operation", "source line")
        for buffer in memory.largest[:top]:
            view.add_row(buffer.shape, gib(buffer.hbm_bytes), buffer.instruction or buffer.opcode, buffer.source)
        console.print(view)


def print_trials(trials: Sequence[Mapping[str, Any]]) -> None:
    """What was tried to make a step fit, as `Trial.to_dict` gives it."""
    if not trials:
        console.print("no change of microbatch, checkpointing, sharding or batch is left to try.")
        return
    view = table("nearest changes, each compiled", "change", "needs", "verdict")
    for trial in trials:
        verdict = trial["error"] or (Text(*FITS) if trial["fits"] else "does not fit")
        view.add_row(trial["words"], gib(trial["required_bytes"]), verdict)
    console.print(view)


def print_largest(found: Sequence[LargestBatch]) -> None:
    """The largest batch for each checkpoint policy."""
    view = table("largest batch that fits", "checkpointing", "sequences", "needs", "next multiple", "needs", "")
    for one in found:
        fits, over = one.fits, one.next_up
        view.add_row(
            str(one.policy),
            str(one.batch_sequences or "none"),
            gib(fits.required_bytes) if fits else "-",
            str(over.overrides["trainer.train_batch_size"]) if over else "-",
            gib(over.required_bytes) if over else "-",
            one.stopped_by,
        )
    console.print(view)


def print_decoders(report: Mapping[str, Any], top: int) -> None:
    """What `compile_decoders` found: of each decoder memory and times, then both.

    Args:
        report: As made or as kept.
        top: Operations and buffers to print.
    """
    grid, patch = (" x ".join(map(str, report[key])) for key in ("grid", "patch_shape_voxels"))
    for plan in report["decoders"].values():
        how = "from the cache" if plan["cached"] else f"compiled in {plan['compile_seconds']:.0f} s"
        console.print(Text.assemble((f"{plan['decoder']} decoder", "bold"), f", {plan['compiler']}, {how}"))
        if plan["kv_cache_bytes"] is not None:
            kept = f"keys and values kept: {gib(plan['kv_cache_bytes'])}, kv_cache_dtype {plan['kv_cache_dtype']}"
            console.print(kept)
        print_memory(read_memory(plan["memory"]), 0 if plan["fits"] else top)
        if plan["fits"]:
            print_breakdown(Breakdown.from_dict(plan["breakdown"], "the plan"), top)
            print_support([Support(**part) for part in plan["rests_on"]])
    cell = f"a cell of {grid} voxels with {report['atoms']} atoms, {report['patches']:,} patches of {patch}"
    console.print(Text.assemble((report["run_name"], "bold"), f" on {report['slice']}: {cell}"))
    for note in report["notes"]:
        console.print(f"note: {note}")
    view = table(
        "a cell",
        "decoder", "rounds", "patches", "HBM", "a batch", "batches", "a cell", "from", "to", "without timings", "bound",
    )  # fmt: skip
    for plan in report["decoders"].values():
        row = [plan["decoder"], str(plan["rounds"]), str(plan["patches_at_a_time"]), gib(plan["hbm_required_bytes"])]
        if not plan["fits"]:
            view.add_row(*row, *["does not fit"], *["-"] * 6)
            continue
        cell, parts = plan["cell_seconds"], [Support(**part) for part in plan["rests_on"]]
        view.add_row(
            *row, seconds(plan["batch_seconds"]["estimate"]), str(plan["batches"]),
            *(seconds(cell[name]) for name in ("estimate", "low", "high")),
            percent(untimed_share(parts)), f"{parts[0].name} {percent(parts[0].step_share, 0)}",
        )  # fmt: skip
    console.print(view)
    if report["times_faster_in_parallel"] is not None:
        console.print(f"parallel is {report['times_faster_in_parallel']:.0f} times faster")
