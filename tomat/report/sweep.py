"""The reports on a sweep, planned (`tomat plan --sweep`) or measured (`tomat lab run`). The same report serves the
tracking page and the browser; the terminal shows its ranking."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tomat.base.report.formats import UNKNOWN, number, percent, ranged, seconds, significant
from tomat.base.report.model import (
    VERDICT,
    Axis,
    Chart,
    Code,
    Column,
    Facts,
    Heading,
    Items,
    Note,
    Part,
    Report,
    Section,
    Series,
    Table,
    columns,
    held_against,
)
from tomat.base.reporting import counted
from tomat.hardware.mfu import TABLE_UTILISATIONS
from tomat.measure.lab.messages import OUT_OF_MEMORY
from tomat.measure.lab.record import LabRow, median
from tomat.measure.lab.speedup import SAME
from tomat.perf.tuning.changes import override_words
from tomat.perf.tuning.scaling import contests, crossings, exposed, lines_of, sequences_per_chip, tokens_per_second
from tomat.perf.tuning.sweep_record import SweepRecord, ranked
from tomat.perf.tuning.sweep_rows import FITS, OOM, RowRecord, base_of, interval_text, required_text, verdict
from tomat.report.step import COLOURS
from tomat.report.sweep_answers import answers_parts

MIB = 2**20
JOULES = "J a step"
WINDOW_KEY = "model.sliding_window"
BUSY_SHARE = 0.05
"""If other processes use at least this share of the processors, a page says that the machine was shared."""
SMALLEST_SHARE = 0.01
"""Categories below this share of every row's step have no column in the table of categories."""
LINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Readers with any colour vision can tell them apart (Okabe and Ito, 2008)."""
ASIDE = 1.035
"""Factor in chips by which the error bars of two lines are moved apart, so that they do not cover each other."""

PLANNED_LEGEND = (
    "Planned, not measured. HBM: of one chip, required and available. Intervals are those of a step's parts "
    "(`kernels.md`); the error is mostly common to the rows of one model, so their order is surer than their figures. "
    f"Without timings: the share of the step on kernels unlike any timed on such a chip ({UNKNOWN}: "
    "planned before that was kept)."
)
WINDOW_LEGEND = "A sliding window lowers the work that MFU counts, too: compare such rows by tokens/s."
MEASURED_LEGEND = (
    "tok/s and step: median of the windows, whose range is least and most. accum: microbatches of a step. ahead: steps "
    "dispatched before a loss is read. shuffle: rows of a window of the shuffle. compile: lowering and compiling, "
    "cached: the same on later starts. mem peak: {memory}. loss: after the warm-up, as long in every row. against "
    "base: tokens a second over the base's, mean of pairs of windows beside each other, with its 95 % interval, from "
    "the windows or from the differences between starts of a row, whichever is wider; within noise if that contains 1."
)
MEMORY_SOURCES = {
    "device": "of the fullest device",
    "process": "resident memory of the process, Python and JAX included (the devices report none)",
}
COMPARED = "Plans are for the slice named; on another device, above all a CPU, even their order may be wrong."
NOT_COMPARED = "No row is both planned (`tomat plan --sweep`) and measured (`tomat lab run`) in this tracking folder."


def planned_report(record: SweepRecord[RowRecord], measured: Mapping[str, LabRow]) -> Report:
    """The report on a sweep of plans. `measured` are the measured rows of the same sweep, by name, if there are any."""
    rows = record["rows"]
    left = record.get("n_rows", 0) - len(rows)
    facts = {
        "rows that fit": f"{sum(row.status == FITS for row in rows)} of {record.get('n_rows', len(rows))}",
        "not planned yet": f"{left}; run the sweep again to continue" if left > 0 else None,
        "compiled by": ", ".join(sorted({row.compiler for row in rows if row.compiler})),
    }
    notes = [f"{note[:1].upper()}{note[1:]}." for note in dict.fromkeys(note for row in rows for note in row.notes)]
    if any(WINDOW_KEY in row.overrides for row in rows):
        notes.insert(0, WINDOW_LEGEND)
    places = enumerate(ranked(rows), 1)
    crosses = {place: row for place, row in places if row.status == OOM and row.memory_space == "hbm"}
    pareto = pareto_parts(record["sweep"], rows, "MFU full, %", "the intervals of the plans", 100.0, crosses)
    compared = compared_parts({row.name: row for row in rows}, list(measured.values()))
    sections = [
        Section("", [record["introduction"], Facts(facts)], "introduction"),
        Section("Ranking", [planned_table(rows), PLANNED_LEGEND, *map(Note, notes)], "ranking"),
        Section("Scaling", scaling_parts(record["sweep"], rows), "scaling", owns_heading=True),
        Section("MFU against memory", pareto, "pareto"),
        Section("Where the time goes", categories_parts(rows), "shares"),
        Section("Answers", answers_parts(rows), "answers"),
        Section("Planned and measured", compared, "planned", owns_heading=True),
        VERDICT,
    ]
    figures = {"sweep": record["sweep"], "rows": len(rows), "fitting": sum(row.speed is not None for row in rows)}
    return Report(record["title"], sections, "sweep of plans", figures | {"front": [one.name for one in front(rows)]})


def measured_report(
    record: SweepRecord[LabRow], plans: Mapping[str, RowRecord], epoch_rows: int | None = None
) -> Report:
    """The report on a measured sweep, from `Lab.record`. `plans` are the planned rows of the same sweep, by name, if
    there are any. An epoch has `epoch_rows` sequences (None: as many as the data set that was trained on)."""
    rows = record["rows"]
    sources = sorted({row.setup["memory_source"] for row in rows if "memory_source" in row.setup})
    ranking: list[Part] = [measured_table(rows)]
    ranking.append(MEASURED_LEGEND.format(memory="; ".join(MEMORY_SOURCES[one] for one in sources) or "not known"))
    if told := sorted({source for row in rows if (source := row.setup.get("energy_source"))}):
        known = any(row.step_joules is not None for row in rows)
        ranking.append(f"{JOULES}: of {told[0]}." if known else f"Energy: {told[0]}.")
    ranking += [same_text(rows, names) for names in record.get("same_settings", [])]
    pareto = pareto_parts(record["sweep"], rows, "tokens a second", "the smallest and largest window")
    sections = [
        Section("", [record["introduction"], *_how(record)], "introduction"),
        Section("Ranking", ranking, "ranking"),
        Section("Tokens a second against memory", pareto, "pareto"),
        Section("Hours an epoch", epochs_parts(rows, epoch_rows), "epochs"),
        Section("Planned and measured", compared_parts(plans, rows) or [NOT_COMPARED], "planned"),
        VERDICT,
    ]
    answered = sum(row.speed is not None for row in rows)
    figures = {"sweep": record["sweep"], "rows": len(rows), "with_an_answer": answered}
    return Report(record["title"], sections, "measured sweep", figures | {"front": [one.name for one in front(rows)]})


def _how(record: SweepRecord[LabRow]) -> list[Part]:
    how, overhead, rows = record.get("measured_with", {}), record.get("overhead_seconds_per_start"), record["rows"]
    steps, rounds = how.get("steps"), how.get("rounds")
    fewer = sum(row.measured and row.rounds_done < (rounds or 0) for row in rows)
    facts = {
        "rows with an answer": f"{sum(row.measured for row in rows)} of {record.get('n_rows', len(rows))}",
        "measured on": record.get("devices"),
        "processors": record.get("n_processors"),
        "starts of a row, each a process of its own": f"{rounds}, so far fewer of {counted(fewer, 'row')}"
        if fewer
        else rounds,
        "windows of a start, each beside one of a base that was started for the row": how.get("repeats"),
        "a window": f"{steps} steps" if steps else f"about {how.get('window_seconds')} s, at least 2 steps",
        "steps before that do not count, besides the first": how.get("warmup_steps"),
        "the lab's own time for a start": None if overhead is None else f"{overhead:.2f} s",
    }
    busy = median(window.others_busy_share for row in rows for window in row.windows)
    noted = shared_note(busy, "windows", "Speeds are below those of a quiet machine, and intervals are wide.")
    once = ["With one start, intervals leave out what a process keeps for its life (some 3 % on a CPU)."]
    starts = max((len(row.start_ratios) for row in rows), default=0)
    return [Facts(facts), *noted, *(once if rounds == 1 or starts == 1 else ())]


def shared_note(busy: float | None, of: str, effect: str) -> list[Part]:
    """A warning that other processes used the machine, if their share is at least `BUSY_SHARE`."""
    if busy is None or busy < BUSY_SHARE:
        return []
    said = f"The machine was shared: other processes used {percent(busy, 0)} of its processors meanwhile"
    return [Note(f"{said} (median of the {of}). {effect}", warning=True)]


def settings_cell(overrides: Mapping[str, Any]) -> Code | None:
    """`model.num_heads 4 sharding zero1`, sorted by key."""
    words = override_words(dict(sorted(overrides.items())))
    return Code(" ".join(word.removeprefix("--") for word in words)) if overrides else None


def planned_table(rows: Sequence[RowRecord]) -> Table:
    heads = [
        Column("", number(0)),
        *columns("row", "slice"),
        *columns("batch", "tokens", show=number(0)),
        *columns("HBM MiB", "of MiB", show=number(0, 1 / MIB)),
        *columns("step ms", "from", "to", show=number(1, 1e3)),
        *columns(*(one.short for one in TABLE_UTILISATIONS), "MFU from", "MFU to", "without timings", show=percent),
        Column("tokens/s/chip", number(0)),
        *columns("largest category", "verdict", "settings", right=False),
    ]
    body = []
    for place, row in enumerate(ranked(rows), 1):
        largest = max(row.categories, key=lambda group: group["seconds"], default=None)
        step, mfu, rate = row.step_seconds or {}, row.mfu_full or {}, row.tokens_per_second_per_chip or {}
        category = f"{largest['name']} {percent(largest['share'], 0)}" if largest else None
        body.append((
            place, row.name, row.slice, row.batch_sequences, row.sequence_tokens,
            row.hbm_required_bytes or None, row.hbm_capacity_bytes or None,
            *(step.get(key) for key in ("estimate", "low", "high")),
            *((row.utilisation(one.key) or {}).get("estimate") for one in TABLE_UTILISATIONS),
            mfu.get("low"), mfu.get("high"), row.untimed_step_share, rate.get("estimate"),
            category, verdict(row, base_of(row, rows)).replace("`", ""), settings_cell(row.overrides),
        ))  # fmt: skip
    return Table("Rows of the sweep, the best MFU first", heads, body)


def planned_ranking(rows: Sequence[RowRecord]) -> Table:
    shares = (one.short for one in TABLE_UTILISATIONS)
    shown = "row", "HBM MiB", "of MiB", "step ms", *shares, "without timings", "largest category", "verdict"
    return planned_table(rows).chosen(*shown)


def measured_table(rows: Sequence[LabRow]) -> Table:
    """Every measured row, the most tokens a second first. It has columns for MFU only if a chip's peak is known, and
    for energy only if the devices report it."""
    shares = [one for one in TABLE_UTILISATIONS if any(row.mfu for row in rows)]
    energy = any(row.step_joules is not None for row in rows)
    setup = {
        "batch": ("batch_sequences", number(0)),
        "accum": ("accumulations", number(0)),
        "tokens": ("sequence_tokens", number(0)),
        "ahead": ("dispatch_ahead", number(0)),
        "shuffle": ("shuffle_rows", str),
        "optimizer": ("optimizer", str),
        "dtype": ("compute_dtype", str),
    }
    heads = [
        Column("", number(0)),
        Column("run"),
        *(Column(heading, show) for heading, (_, show) in setup.items()),
        *columns("tok/s", "least", "most", show=number(0)),
        Column("step ms", number(1, 1e3)),
        *columns("compile s", "cached s", show=number(1)),
        *columns("mem peak MiB", "limit MiB", show=number(0, 1 / MIB)),
        *columns(*(one.short for one in shares), show=percent),
        *(columns(JOULES, "tokens a J", show=number(1)) if energy else ()),
        Column("loss", number(4)),
        *columns("ok", "against base", "verdict", "settings", right=False),
    ]
    body = []
    for place, row in enumerate(ranked(rows), 1):
        known = row.setup | {"shuffle_rows": row.setup.get("shuffle_rows") or row.setup.get("shuffle")}
        speed = row.speed or {}
        ok = "True" if row.measured else "OOM" if row.status == OUT_OF_MEMORY else "False"
        body.append((
            place, row.name, *(known.get(key) for key, _ in setup.values()),
            *(speed.get(key) for key in ("estimate", "low", "high")), row.step_seconds,
            row.compile_cold_seconds, row.compile_cached_seconds, row.peak_memory_bytes, row.memory_limit_bytes,
            *(row.mfu.get(one.key) for one in shares),
            *((row.step_joules, row.tokens_per_joule) if energy else ()),
            known.get("warm_loss"), ok, ratio_text(row), measured_verdict(row).replace("`", ""),
            settings_cell(row.overrides),
        ))  # fmt: skip
    return Table("Rows of the sweep, the most tokens a second first; medians of the windows", heads, body)


def measured_ranking(rows: Sequence[LabRow], same: Sequence[Sequence[str]]) -> list[Part]:
    shown = ("run", "tok/s", "least", "most", "step ms", "mem peak MiB", "loss", "against base", "verdict")
    return [measured_table(rows).chosen(*shown), *(Note(same_text(rows, names).replace("`", "'")) for names in same)]


def ratio_text(row: LabRow) -> str:
    """`1.05 (1.02 to 1.08)`: the row's tokens a second divided by the base's."""
    ratio = row.ratio
    return UNKNOWN if ratio is None else ranged(ratio.mean, ratio.low, ratio.high, number(3))


def measured_verdict(row: LabRow) -> str:
    if not row.measured:
        return f"{row.status}: {row.reason}"
    if row.base is None:
        return "base"
    ratio = row.ratio
    return f"not compared with `{row.base}`" if ratio is None else f"{ratio.verdict} (`{row.base}`)"


def row_text(row: LabRow) -> str:
    if not row.measured or row.tokens_per_second is None:
        return measured_verdict(row)
    return f"{row.tokens_per_second:,.0f} tokens/s, against its base {ratio_text(row)}: {measured_verdict(row)}"


def same_text(rows: Sequence[LabRow], names: Sequence[str]) -> str:
    compared = [row.ratio for row in rows if row.name in names and row.base in names and row.ratio is not None]
    within = sum(ratio.verdict == SAME for ratio in compared)
    listed = " and ".join(f"`{name}`" for name in names)
    listed = listed if len(names) < 4 else f"`{names[0]}` and {len(names) - 1} more"
    said = f"{listed} are one setting and differ by noise: of {counted(len(compared), 'comparison')} of it with itself"
    return f"{said}, {within} {'has' if within == 1 else 'have'} 1 in the interval, which 19 of 20 should."


def front(rows: Sequence[RowRecord | LabRow]) -> list[RowRecord | LabRow]:
    """The Pareto front, sorted by memory: no other row is faster with less memory."""
    found: list[RowRecord | LabRow] = []
    for row in sorted(rows, key=lambda row: (row.memory_bytes, row.rank)):
        best = found[-1].speed if found else None
        if row.speed is not None and (best is None or row.speed["estimate"] > best["estimate"]):
            found.append(row)
    return found


def pareto_parts(
    name: str,
    rows: Sequence[RowRecord | LabRow],
    speed: str,
    bars: str,
    scale: float = 1.0,
    crosses: Mapping[int, RowRecord] = {},
) -> list[Part]:
    """Speed against memory: a chart, and the rows that no other row beats in both. `speed` names the axis, and `scale`
    converts a row's speed to its unit. `bars` says what the error bars show. `crosses` are the rows that do not fit, by
    their place in the ranking."""
    points = [(place, row, row.speed) for place, row in enumerate(ranked(rows), 1) if row.speed is not None]
    if not points:
        return ["No row has an answer."]
    show = significant(4, scale)
    memory = [row.memory_bytes / MIB for _, row, _ in points]
    said = [f"{row.name}: {interval_text(one, show)}, {row.memory_bytes / MIB:,.1f} MiB" for _, row, one in points]
    ranges = [(scale * one["low"], scale * one["high"]) for *_, one in points]
    estimates = [scale * one["estimate"] for *_, one in points]
    labels = [str(place) for place, *_ in points]
    series = [Series("rows", memory, estimates, "points", "#2b6cb0", y_ranges=ranges, labels=labels, texts=said)]
    best = front(rows)
    ends = [(row.memory_bytes / MIB, scale * row.speed["estimate"]) for row in best if row.speed is not None]
    series.append(Series("least memory for the speed", *zip(*ends, strict=True), mark="step", colour="#2f855a"))
    if crosses:
        sizes, names = [row.memory_bytes / MIB for row in crosses.values()], [str(place) for place in crosses]
        series.append(Series("rows that do not fit", sizes, [0] * len(sizes), "crosses", "#c53030", labels=names))
    # A limit far to the right would squeeze all rows into one corner, so such a limit is not drawn.
    limits = sorted({row.limit_bytes / MIB for _, row, _ in points if row.limit_bytes})
    near = [limit for limit in limits if limit < 2 * max(memory)]
    said = f"Numbers are places in the ranking, bars {bars}{', crosses rows that do not fit' if crosses else ''}. "
    said += f"Least memory for the speed: {', '.join(f'`{row.name}`' for row in best)}."
    x, y = Axis("memory of a device, MiB (dashed: limit)", from_zero=True), Axis(speed, from_zero=True)
    chart = Chart(f"{speed} against memory", series, x, y, said, f"{name}-pareto.svg", (7.0, 4.2), limits=near)
    return [chart, said]


def compared_parts(plans: Mapping[str, RowRecord], rows: Sequence[LabRow]) -> list[Part]:
    """A chart and a table of rows that were planned and measured with the same settings; empty if there are none."""
    body = []
    for row in ranked(rows):
        plan = plans.get(row.name)
        if plan is not None and plan.step_seconds and row.step_seconds and dict(plan.overrides) == dict(row.overrides):
            step, memory = plan.step_seconds["estimate"], (plan.hbm_required_bytes, row.peak_memory_bytes)
            body.append((row.name, str(plan.slice), step, row.step_seconds, row.step_seconds / step, *memory))
    if not body:
        return []
    heads = [
        *columns("run", "planned for"),
        *columns("planned step ms", "measured step ms", show=number(1, 1e3)),
        Column("measured / planned", number(2)),
        *columns("planned MiB", "measured MiB", show=number(0, 1 / MIB)),
    ]
    points = [(one[0], 1e3 * one[2], 1e3 * one[3]) for one in body]
    chart = held_against("Planned against measured", points, "ms", "step", COMPARED)
    return [chart, Table("Steps planned and measured", heads, body), COMPARED]


def categories_parts(rows: Sequence[RowRecord]) -> list[Part]:
    shown = [row for row in ranked(rows) if row.status == FITS and row.categories and row.step_seconds]
    if not shown:
        return ["No row fits."]
    mine = [{group["name"]: group for group in row.categories} for row in shown]
    names = dict.fromkeys(name for one in mine for name in one)
    most = {name: max(one[name]["share"] for one in mine if name in one) for name in names}
    kept = sorted((name for name in most if most[name] >= SMALLEST_SHARE), key=lambda name: (-most[name], name))
    labels = [row.name for row in shown]
    taken = {name: [1e3 * one[name]["seconds"] if name in one else 0.0 for one in mine] for name in names}
    series = [Series(name, times, labels, "bar", COLOURS.get(name, "#8a929b")) for name, times in taken.items()]
    said = "Milliseconds of a step by kind of operation, the rows in the order of the ranking; the table has them."
    shares = [Column("row"), Column("step", seconds), *columns(*kept, show=lambda share: percent(share, 0))]
    times = [Column("row"), *columns(*(f"{name}, ms" for name in names), show=number(2, 1e3))]
    body, lasted = [], []
    for row, one in zip(shown, mine, strict=True):
        share, time = ({name: group[key] for name, group in one.items()} for key in ("share", "seconds"))
        body.append((row.name, row.estimate("step_seconds"), *map(share.get, kept)))
        lasted.append((row.name, *map(time.get, names)))
    size = (7.0, (200 + 26 * len(shown)) / 80)
    return [
        Chart("The step by kind of operation", series, Axis("ms of a step"), Axis(""), said, size=size),
        Table("", shares, body),
        f"Shares of the step; categories below {percent(SMALLEST_SHARE, 0)} in every row are left out.",
        Table("Time of a step by kind of operation", times, lasted),
    ]


def epochs_parts(rows: Sequence[LabRow], epoch_rows: int | None) -> list[Part]:
    body, sizes = [], set()
    for row in ranked(rows):
        if row.measured and row.is_whole and row.tokens_per_second is not None:
            setup = cast(Mapping[str, Any], row.setup)  # a whole row has `SHOWN_SETUP`
            n_rows, length = epoch_rows or setup["train_rows"], setup["sequence_tokens"]
            sizes.add((n_rows, length))
            hours = n_rows * length / row.tokens_per_second / 3600
            cells = (setup[key] for key in ("batch_sequences", "accumulations"))
            body.append((row.name, *cells, row.tokens_per_second, row.peak_memory_bytes, hours))
    if not body:
        return ["No row has an answer yet."]
    heads = [Column("run"), *columns("batch", "accum", "tok/s", show=number(0))]
    heads += [Column("mem peak MiB", number(0, 1 / MIB)), Column("est hours / epoch", significant(3))]
    said = "; ".join(f"{n:,} sequences of {length:,} tokens ({n * length:,} an epoch)" for n, length in sorted(sizes))
    return [Table("", heads, body), f"For {said}, padding included; evaluation and checkpoints not."]


def scaling_parts(name: str, rows: Sequence[RowRecord]) -> list[Part]:
    """How the lines of a sweep scale over slices (`perf/tuning/scaling.py`); empty for a sweep without lines."""
    lines = lines_of(rows)
    if not lines:
        return []
    shown = {
        "chips": number(0), "sequences a chip": "{:g}".format, "step": seconds, "tokens/s": number(0), "MFU full": str,
        "exposed collectives": number(1, 1e3, " ms"), "of the step": percent, "HBM": str,
    }  # fmt: skip
    heads = [*columns("line", "slice"), *(Column(heading, show, right=True) for heading, show in shown.items())]
    body = []
    for line, row in ((line, row) for line, points in lines.items() for row in points):
        time = row.estimate("step_seconds") if row.step_seconds else row.status
        rate, said = (tokens_per_second(row) or {}).get("estimate"), interval_text(row.mfu_full, percent)
        cells = row.slice, row.n_chips, sequences_per_chip(row) or None, time, rate, said
        body.append((line, *cells, *(exposed(row) or (None, None)), required_text(row)))
    parts: list[Part] = [*scaling_charts(name, rows)] if any(row.speed for row in rows if row.lines) else []
    takes_over = Items([crossing.sentence for crossing in crossings(rows)])
    parts += [Table("", heads, body), Heading("Where communication takes over"), takes_over]
    if compared := contests(rows):
        parts += [Heading("The fastest line"), Items([contest.sentence for contest in compared])]
        parts.append("Within the interval: the difference is less than the wider of the two intervals of tokens/s.")
    return parts


def scaling_charts(name: str, rows: Sequence[RowRecord]) -> list[Chart]:
    lines = lines_of(rows)
    most = max(row.n_chips or 0 for row in rows if row.lines)
    rates, shares = [], []
    for place, (line, all_points) in enumerate(lines.items()):
        colour = LINE_COLOURS[place % len(LINE_COLOURS)]
        points = [(row.n_chips, row) for row in all_points if row.n_chips]
        reached = {chips: rate["estimate"] for chips, row in points if (rate := tokens_per_second(row))}
        chips = [one for one, _ in points]
        rates.append(Series(line, chips, [reached.get(one) for one in chips], "both", colour))  # None is a gap
        if reached:
            x, y = next(iter(reached.items()))
            rates.append(Series("", [x, most], [y, y * most / x], colour=colour, dotted=True, named=False))
        aside = ASIDE ** (place - (len(lines) - 1) / 2)
        timed = [(one * aside, row.mfu_full) for one, row in points if row.mfu_full]
        ranges = [(100 * mfu["low"], 100 * mfu["high"]) for _, mfu in timed]
        middle = [100 * mfu["estimate"] for _, mfu in timed]
        shares.append(Series(line, [x for x, _ in timed], middle, "both", colour, y_ranges=ranges))
        if missing := [one * aside for one, row in points if not row.mfu_full]:
            shares.append(Series("", missing, [0] * len(missing), "crosses", colour, named=False))
    x = Axis("chips", log=True, ticks=sorted({row.n_chips for row in rows if row.lines and row.n_chips}))
    rate, share = Axis("tokens/s", log=True), Axis("MFU full, %", from_zero=True)
    size = (5.0, 3.8)
    dotted = "Dotted: ideal scaling from a line's first point. Rows that do not fit or failed are left out."
    bars = "Bars: the intervals, drawn beside each other. Crosses on the axis: rows that do not fit or failed."
    return [
        Chart("Tokens/s over chips", rates, x, rate, dotted, f"{name}-scaling.svg", size),
        Chart("MFU over chips", shares, x, share, bars, f"{name}-scaling-mfu.svg", size),
    ]
