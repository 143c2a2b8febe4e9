"""Plans on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tomat.performance.profile_tables import print_breakdown
from tomat.performance.tables import percent, seconds
from tomat.planning.estimate import MODELS
from tomat.reporting import console

if TYPE_CHECKING:
    from tomat.planning.memory import MemoryReport
    from tomat.planning.plan import Plan
    from tomat.planning.search import LargestBatch, Trial

CONVENTIONS = (
    ("mfu_full", "MFU, full attention"),
    ("mfu_causal", "MFU, causal attention"),
    ("mfu_useful", "MFU, useful"),
    ("mfu_levanter", "MFU, as Levanter logs it"),
    ("hfu", "HFU"),
)


def gib(count: int | None) -> str:
    """Bytes in GiB, as XLA prints them."""
    return "-" if count is None else f"{count / 2**30:.2f} GiB"


def table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are figures."""
    made = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    return made


def print_plan(plan: Plan, top: int) -> None:
    """Memory, cycles, the models side by side, MFU."""
    compiled, memory = plan.compiled, plan.compiled.memory
    how = "from the cache" if compiled.cached else f"compiled in {compiled.result['compile_seconds']:.0f} s"
    console.print(
        f"[bold]{plan.config.run_name}[/bold] on {plan.slice_.name}: {plan.slice_.n_chips} chips, "
        f"{plan.slice_.n_hosts} host(s), {compiled.compiler}, {how}"
    )
    print_memory(memory, top)
    if plan.step is None or plan.breakdown is None or plan.step_seconds is None:
        return
    print_breakdown(plan.breakdown, top)
    models = table(
        "the cycle models, before calibration", "category", "XLA's cycles", "roofline", "schedule", "estimate"
    )
    rows = sorted(plan.step.model_table().items(), key=lambda item: -item[1]["estimate"])
    for name, row in rows:
        if row["estimate"] > 0.001 * plan.step.model_seconds:
            models.add_row(name, *(seconds(row[model]) if row[model] else "-" for model in MODELS))
    console.print(models)
    kernels = plan.pallas_kernels()
    if kernels:
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
    span = plan.step_seconds
    figures = table("utilisation of the slice's peak", "", "estimate", "from", "to")
    for key, label in CONVENTIONS:
        found = plan.utilisation[key]
        figures.add_row(label, percent(found.estimate), percent(found.low), percent(found.high))
    console.print(figures)
    console.print(
        f"step [bold]{span.estimate:.3f} s[/bold] ({span.low:.3f} to {span.high:.3f}), "
        f"{plan.work.tokens / span.estimate:,.0f} tokens/s, {plan.work.useful_tokens / span.estimate:,.0f} useful"
    )


def print_memory(memory: MemoryReport, top: int) -> None:
    """Does it fit, and what fills the memory."""
    verdict = "[green]fits[/green]" if memory.fits else "[bold red]does not fit[/bold red]"
    beyond = f"{gib(memory.headroom_bytes)} left" if memory.fits else f"{gib(-memory.headroom_bytes)} too much"
    console.print(f"{verdict}: {gib(memory.required_bytes)} of {gib(memory.capacity_bytes)} a device, {beyond}")
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
    for note in memory.notes:
        console.print(f"note: {note}", markup=False)


def print_trials(trials: Sequence[Trial]) -> None:
    """What was tried to make a step fit."""
    if not trials:
        console.print("no change of microbatch, checkpointing, sharding or batch is left to try.")
        return
    view = table("nearest changes, each compiled", "change", "needs", "verdict")
    for trial in trials:
        verdict = trial.error if trial.fits is None else "[green]fits[/green]" if trial.fits else "does not fit"
        view.add_row(trial.words, gib(trial.required_bytes), verdict)
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
