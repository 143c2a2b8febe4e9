"""The report on a plan, for every place that shows it: its memory, the parts of its estimate, the changes tried."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tomat.base.report.formats import number, percent, seconds
from tomat.base.report.model import Axis, Cell, Chart, Column, Facts, Part, Series, State, Table, Verdict, columns
from tomat.base.reporting import readable_bytes
from tomat.hardware.mfu import UTILISATIONS
from tomat.perf.cost.chip_model import MODELS, Support, untimed_share, untimed_text
from tomat.perf.cost.memory import MemoryReport

if TYPE_CHECKING:
    from tomat.perf.tuning.search import LargestBatch

GIB, MIB = 2**30, 2**20
FITS, UNFIT = Verdict("fits", State.GOOD), "does not fit"
LEAST_SHARE = 0.001
"""Kernels below this share of the step have no row in `support_table`."""
SPAN = ("estimate", "low", "high")
UNITS = ("MXU", "VALU", "EUP", "XLU", "VLOAD", "VSTORE")


def _gib(heading: str) -> Column:
    return Column(heading, number(2, 1 / GIB, " GiB"))


def memory_parts(memory: MemoryReport) -> list[Part]:
    """Whether a plan fits, the parts of its memory, and the memory in use over the schedule of the step."""
    beyond = readable_bytes(abs(memory.headroom_bytes))
    required, capacity = readable_bytes(memory.required_bytes), readable_bytes(memory.capacity_bytes)
    facts: dict[str, Cell] = {
        "memory": FITS if memory.fits else Verdict(f"does not fit: {beyond} too much", State.BAD),
        "required": f"{required} of {capacity} of {memory.memory_space.upper()}",
        "left": beyond if memory.fits else None,
    }
    kinds = {
        "arguments": memory.argument_bytes,
        "temporaries": memory.temporary_bytes,
        "outputs of their own": memory.output_bytes,
        "program": memory.program_bytes,
        "live at the peak": memory.peak_bytes,
        "holes in the heap": memory.fragmentation_bytes,
    }
    parts: list[Part] = [Facts(facts | {name: readable_bytes(n) for name, n in kinds.items() if n is not None})]
    if memory.timeline:
        places, values = [100 * place for place, _ in memory.timeline], [size / GIB for _, size in memory.timeline]
        peak, at = max(zip(values, places, strict=True), key=lambda point: point[0])
        series = [Series("in use", places, values, "step"),
                  Series("peak", [at], [peak], "points", "#c94f4f", texts=[f"peak: {peak:.3f} GiB"])]  # fmt: skip
        said = (
            f"Memory of a device along the step's schedule: {values[0]:.3f} GiB at its start, at most {peak:.3f} GiB "
            f"at {at:.0f} % of it. Of each stretch the largest value is drawn; the buffers that are live there follow."
        )
        x, y = Axis("% of the allocations and frees of the schedule", from_zero=True), Axis("GiB", from_zero=True)
        parts.append(Chart("Memory over the schedule", series, x, y, said, size=(6.0, 3.75)))
    elif memory.fits:
        parts.append("The plan has no memory over the schedule, as an earlier tomat made it. Plan again.")
    return parts


def buffers_table(memory: MemoryReport, top: int | None = None) -> Table:
    heads = [Column("buffer"), *columns("MiB", "MiB without padding", show=number(2, 1 / MIB))]
    heads += columns("shape", "operation", "source")
    rows = [
        (f"{i}. {b.instruction or b.opcode}", b.hbm_bytes, b.logical_bytes, b.shape, b.op_name, b.source)
        for i, b in enumerate(memory.largest[:top], 1)
    ]
    return Table(f"Largest buffers, {memory.largest_are}", heads, rows)


def plan_parts(report: Mapping[str, Any]) -> list[Part]:
    """What a plan has beyond a profile: step time and utilisation with their ranges, tokens a second, the cycle models
    side by side, and the timings behind the estimate. `report` is a `Plan.to_dict()`, also of an earlier version."""
    facts = {key: report.get(key) for key in ("slice", "compiler")} | {"configuration": report.get("config_hash")}
    support = [Support(**part) for part in report.get("rests_on") or ()]
    if support:
        facts["of the step, on kernels without timings"] = untimed_text(support)
    work, step = report.get("work"), report.get("step_seconds")
    if work and step:
        batch, length = work["batch_sequences"], work["sequence_tokens"]
        facts["tokens/s"] = f"{batch * length / step['estimate']:,.0f}"
        facts["useful tokens/s"] = f"{batch * work['useful_tokens_per_sequence'] / step['estimate']:,.0f}"
    if on_top := report.get("host_on_top_seconds"):
        own = [seconds(report["host_seconds_per_step"][key]) for key in SPAN]
        said = f"{report['host_loop']}: {own[0]} of Python a step ({own[1]} to {own[2]})"
        hidden = "hidden behind the device's step"
        facts["host"] = f"{said}, {hidden if on_top['high'] <= 0 else f'{seconds(on_top["estimate"])} on top of it'}"
    parts: list[Part] = [Facts(facts)]
    rows = [("step", *(seconds(step[key]) for key in SPAN))] if step else []
    known = (one for one in UTILISATIONS if report.get(one.key))
    rows += [(one.name, *(percent(report[one.key][key]) for key in SPAN)) for one in known]
    if rows:
        said = "Step and utilisation of the slice's peak, with the range in which they are expected"
        parts.append(Table(said, [Column(""), *columns("estimate", "from", "to", right=True)], rows))
    if models := report.get("models_seconds"):
        # A model leaves out the operations that it does not know, so 0 for a kind means that it has no answer.
        body = [
            (kind, *(row.get(name) or None for name in MODELS))
            for kind, row in sorted(models.items(), key=lambda item: -item[1].get("estimate", 0.0))
        ]
        heads = [Column("kind"), *columns(*MODELS, show=seconds)]
        parts.append(Table("The cycle models beside each other", heads, body))
    parts += [support_table(support)] if support else []
    if kernels := report.get("pallas_kernels"):
        heads = [Column("kernel"), Column("runs", number(0)), Column("a step", seconds)]
        heads += [*columns(*UNITS, show=number(0, 100.0, " %")), Column("bound")]
        first = "name", "executions", "seconds_per_step"
        body = [(*map(one.get, first), *map(one["slot_utilisation"].get, UNITS), one["bound"]) for one in kernels]
        parts.append(Table("Pallas kernels: share of the slots that executed bundles fill", heads, body))
    return parts


def support_table(support: Sequence[Support]) -> Table:
    heads = [Column("kernels bound by"), Column("a step", seconds)]
    heads += columns("share", "error of nine in ten", show=percent)
    shown = (part for part in support if part.step_share > LEAST_SHARE)
    rows = [(part.name, part.seconds_per_step, part.step_share, part.error, part.timed) for part in shown]
    return Table("What the step rests on", [*heads, Column("timed", right=True)], rows)


def trials_part(trials: Sequence[Mapping[str, Any]]) -> Part:
    """The changes that were tried to make a step fit, as `Trial.to_dict` gives them."""
    if not trials:
        return "No change of microbatch, checkpointing, sharding or batch is left to try."
    rows = [
        (str(one.get("words", "")), one.get("required_bytes"), one.get("error") or (FITS if one.get("fits") else UNFIT))
        for one in trials
    ]
    return Table("Nearest changes, each compiled", [Column("change"), _gib("needs"), Column("verdict")], rows)


def largest_table(found: "Sequence[LargestBatch]") -> Table:
    rows = []
    for one in found:
        more = one.next_up
        beyond = (more.overrides["trainer.train_batch_size"], more.required_bytes) if more else (None, None)
        needed = one.fits.required_bytes if one.fits else None
        rows.append((str(one.policy), one.batch_sequences, needed, *beyond, one.stopped_by))
    heads = [Column("checkpointing"), Column("sequences", number(0)), _gib("needs")]
    heads += [Column("next multiple", number(0)), _gib("needs"), Column("")]
    return Table("Largest batch that fits", heads, rows)


def decoders_table(plans: Sequence[Mapping[str, Any]]) -> Table:
    heads = [Column("decoder"), *columns("rounds", "patches", show=number(0)), _gib("HBM"), Column("a batch", seconds)]
    heads += [Column("batches", number(0)), *columns("a cell", "from", "to", show=seconds)]
    heads += [Column("without timings", percent), Column("bound", right=False)]
    rows: list[list[Cell]] = []
    for plan in plans:
        rows.append([plan[key] for key in ("decoder", "rounds", "patches_at_a_time", "hbm_required_bytes")])
        if not plan["fits"]:
            rows[-1] += [None] * 6 + [UNFIT]
            continue
        support = [Support(**part) for part in plan["rests_on"]]
        rows[-1] += [plan["batch_seconds"]["estimate"], plan["batches"], *(plan["cell_seconds"][key] for key in SPAN)]
        rows[-1] += [untimed_share(support), f"{support[0].name} {percent(support[0].step_share, 0)}"]
    return Table("A cell", heads, rows)
