"""The report on runs that others published, beside the plans of their steps: errors by group, every row, the rest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from tomat.base.report.formats import change, number, percent, seconds
from tomat.base.report.model import VERDICT, Axis, Chart, Column, Items, Part, Report, Section, Series, Table, columns
from tomat.hardware.chips import slice_named
from tomat.perf.plan.calibration import CalibrationRow
from tomat.perf.plan.host import COMPILE_SECONDS, FUSED_LOSS_MORE, LEVANTER, step_on_record
from tomat.perf.plan.plan import Interval
from tomat.perf.profile.breakdown import Category
from tomat.perf.tuning.published_runs import NAME, PublishedRun
from tomat.perf.tuning.sweep_rows import FITS, RowRecord

SLOW_SECONDS = 0.4
"""The host's share is small in steps longer than this."""
COLOURS = {"v5p": "#0072b2", "v5e": "#d55e00", "v4": "#009e73", "v6e": "#cc79a7", "tpu7x": "#e69f00"}
"""Chip -> colour; readers with any colour vision can tell them apart (Okabe and Ito, 2008)."""


@dataclass(frozen=True)
class Beside:
    run: PublishedRun
    row: RowRecord
    device: Interval
    planned: Interval
    """The device's step with the host's time and the compiles that are in the record."""

    @property
    def error(self) -> float:
        return self.planned.estimate / self.run.step_seconds - 1

    @property
    def inside(self) -> bool:
        return self.planned.low <= self.run.step_seconds <= self.planned.high

    @property
    def chip(self) -> str:
        return slice_named(self.run.slice).chip.name

    @property
    def most(self) -> str:
        return str(max(self.row.categories, key=lambda one: one["seconds"])["name"]) if self.row.categories else ""


def beside(runs: Sequence[PublishedRun], rows: Mapping[str, RowRecord]) -> list[Beside]:
    found = []
    for run in runs:
        row = rows.get(run.id)
        if row is None or row.status != FITS or row.step_seconds is None:
            continue
        device = Interval(**row.step_seconds)
        fused = run.overrides.get("loss.kernel") == "levanter"
        loss = sum(one["seconds"] for one in row.categories if one["name"] == Category.LOSS) if fused else 0.0
        found.append(Beside(run, row, device, step_on_record(device, LEVANTER, run.steps, loss)))
    return found


def errors_of(found: Sequence[Beside]) -> dict[str, Any]:
    """Errors of a group as fractions, and the share of measured steps that lie in the stated range."""
    absolute = sorted(abs(one.error) for one in found)
    p90 = quantiles(absolute, n=10, method="inclusive")[-1] if len(absolute) > 1 else absolute[0]
    return {
        "rows": len(found),
        "absolute_error_median": median(absolute),
        "absolute_error_p90": p90,
        "absolute_error_largest": absolute[-1],
        "error_median": median(one.error for one in found),
        "inside_range_share": sum(one.inside for one in found) / len(found),
    }


def _size(one: Beside) -> str:
    width = one.row.overrides["model.hidden_dim"]
    return "up to 640 wide" if width <= 640 else "768 to 1,024 wide" if width <= 1024 else "1,408 wide and more"


GROUPS: Mapping[str, Callable[[Beside], str]] = {
    "learnt from": lambda one: "kept aside" if one.run.kept_aside else "shapes that may choose",
    "chip": lambda one: one.chip,
    "family": lambda one: one.run.family,
    "size": _size,
    "date": lambda one: "2025" if one.run.date < "2026" else "2026",
    "most of the step": lambda one: one.most,
}


def published_report(
    runs: Sequence[PublishedRun],
    rows: Mapping[str, RowRecord],
    pods: Sequence[CalibrationRow] = (),
    kernels: Mapping[str, Any] | None = None,
) -> Report:
    """The report on published runs, planned or not; `rows` are the plans on record, by the run's id. `pods` are one's
    own runs, planned and measured (`tomat plan --record`); `kernels` are those of `kernels.json`, by chip."""
    found = beside(runs, rows)
    lead = (
        "Steps of runs that others made with Levanter and published (marin-community/marin's speedruns, Apache-2.0; "
        "the file of each stands in the table), planned by `tomat plan --runs FILE` without a TPU. No figure of a "
        "device's step is fitted to them."
    )
    planned = sum(not run.refused for run in runs)
    left = f" {planned - len(found)} more can be planned but are not yet." if planned > len(found) else ""
    lead = f"{lead} {len(found)} of {len(runs)} rows are planned; {len(runs) - planned} cannot be.{left}"
    sections = [Section("", [lead], "introduction")]
    figures: dict[str, Any] = {"rows": len(runs), "planned": len(found)}
    if found:
        slow = [one for one in found if one.run.step_seconds > SLOW_SECONDS and one.chip == "v5p"]
        groups: list[tuple[str, str, Sequence[Beside]]] = [("all", "", found)]
        groups += [("v5p", f"steps above {SLOW_SECONDS} s", slow)] if slow else []
        for name, of in GROUPS.items():
            kinds = sorted({of(one) for one in found})
            groups += [(name, kind, [one for one in found if of(one) == kind]) for kind in kinds]
        figures["errors"] = {f"{name}: {kind}" if kind else name: errors_of(its) for name, kind, its in groups}
        sections += [
            Section("Errors", [_chart(found, pods), _errors_table(groups), *_said()], "errors"),
            Section("Row by row", [_rows_table(found)], "rows"),
        ]
    sections += [
        Section("Repeats", _repeats(runs), "repeats"),
        Section("Pods and kernels", _pods_and_kernels(pods, kernels or {}), "beside"),
        Section("Not planned", [_refused_table(runs, rows)], "refused"),
        VERDICT,
    ]
    return Report("Planned beside real runs", sections, "published runs", figures)


def _said() -> list[Part]:
    host, compile_, loss = LEVANTER.step_seconds, COMPILE_SECONDS, FUSED_LOSS_MORE
    return [
        Items([
            f"planned: the device's step, {1e3 * host.estimate:.0f} ms of the host ({1e3 * host.low:.0f} to "
            f"{1e3 * host.high:.0f}), since Levanter reads each loss before it dispatches the next step, and two "
            f"compiles of {compile_.estimate:.0f} s ({compile_.low:.0f} to {compile_.high:.0f}) in the record's time",
            f"a fused loss is charged {percent(loss.estimate)} more than is planned for today's Levanter "
            f"({percent(loss.low)} to {percent(loss.high)}), whose code has changed since April 2026; learnt from the "
            "three such rows that are not kept aside",
            "in range: the share of the measured steps that lie in the stated range",
            "kept aside: every third shape, by a hash of its dimensions; choices about a plan are made on the others",
        ])
    ]  # fmt: skip


def _chart(found: Sequence[Beside], pods: Sequence[CalibrationRow]) -> Chart:
    own = [row for row in pods if row.step_ratio is not None]
    measured = [one.run.step_seconds for one in found] + [row.measured["step_seconds"] for row in own]
    ends = [0.8 * min(measured), 1.25 * max(measured)]
    series = [Series("equal", ends, ends, colour="#8a929b", dotted=True)]
    for chip in sorted({one.chip for one in found}):
        its = [one for one in found if one.chip == chip]
        texts = [
            f"{one.run.id}: planned {one.planned.estimate:.3f} s, measured {one.run.step_seconds:.3f} s" for one in its
        ]
        series.append(
            Series(
                chip,
                [one.planned.estimate for one in its],
                [one.run.step_seconds for one in its],
                "points",
                COLOURS.get(chip, "#000000"),
                texts=texts,
                x_ranges=[(one.planned.low, one.planned.high) for one in its],
            )
        )
    if own:
        at = [row.predicted["model_seconds"] for row in own], [row.measured["step_seconds"] for row in own]
        series.append(Series("pods on record", *at, "crosses", "#000000", texts=[row.name for row in own]))
    numbers = errors_of(found)
    said = (
        f"{len(found)} published steps against their plans, made without a TPU: median error "
        f"{percent(numbers['absolute_error_median'])}. Dotted: equality. Bars: the stated range."
    )
    x, y = Axis("planned step, s", log=True), Axis("measured step, s", log=True)
    return Chart("Planned beside measured", series, x, y, said, f"{NAME}.svg", size=(6.0, 5.0))


def _errors_table(groups: Sequence[tuple[str, str, Sequence[Beside]]]) -> Table:
    heads = [*columns("by", ""), Column("rows"), *columns("median error", "nine of ten", "largest", show=percent)]
    heads += [Column("signed median", change), Column("in range", percent)]
    return Table("", heads, [(name, kind, *errors_of(its).values()) for name, kind, its in groups])


def _rows_table(found: Sequence[Beside]) -> Table:
    def span(value: Interval) -> str:
        return f"{seconds(value.estimate)} ({seconds(value.low)} to {seconds(value.high)})"

    by_error = sorted(found, key=lambda one: -abs(one.error))
    return Table.of(
        "",
        by_error,
        [
            (Column("run"), lambda one: one.run.id),
            (Column("date"), lambda one: one.run.date),
            (Column("slice"), lambda one: one.run.slice),
            (Column("optimizer"), lambda one: one.run.optimizer),
            (Column("measured", seconds), lambda one: one.run.step_seconds),
            (Column("planned, device", seconds), lambda one: one.device.estimate),
            (Column("planned", right=True), lambda one: span(one.planned)),
            (Column("error", change), lambda one: one.error),
            (Column("in range"), lambda one: "yes" if one.inside else "no"),
            (Column("needed, GiB", number(2)), lambda one: one.row.hbm_required_bytes / 2**30),
            (Column("most of it"), lambda one: one.most),
            (Column("not in the table, taken as"), lambda one: one.run.assumed),
            (Column("kept aside"), lambda one: "yes" if one.run.kept_aside else ""),
            (Column("source"), lambda one: one.run.source),
        ],
    )


def _repeats(runs: Sequence[PublishedRun]) -> list[Part]:
    """How much the measured times of runs with the same step differ. No plan can be closer to all of them than that."""
    same: dict[str, list[PublishedRun]] = {}
    for run in runs:
        same.setdefault(run.step, []).append(run)
    repeated = [group for step, group in same.items() if step and len(group) > 1]
    if not repeated:
        return ["No two rows have the same step."]

    def took(group: Sequence[PublishedRun]) -> list[float]:
        return sorted(run.step_seconds for run in group)

    def apart(group: Sequence[PublishedRun]) -> float:
        return took(group)[-1] / took(group)[0] - 1

    return [
        "Runs whose steps do the same, each with the Levanter and the compiler of its day.",
        Table.of(
            "",
            sorted(repeated, key=apart),
            [
                (Column("step"), lambda group: group[0].step),
                (Column("runs"), lambda group: ", ".join(run.id for run in group)),
                (Column("first"), lambda group: min(run.date for run in group)),
                (Column("last"), lambda group: max(run.date for run in group)),
                (Column("least", seconds), lambda group: took(group)[0]),
                (Column("most", seconds), lambda group: took(group)[-1]),
                (Column("apart", percent), apart),
            ],
        ),
    ]


def _pods_and_kernels(pods: Sequence[CalibrationRow], chips: Mapping[str, Any]) -> list[Part]:
    of_pods = [
        (row.name, row.slice, row.measured["step_seconds"], row.predicted["model_seconds"], 1 / ratio - 1)
        for row in pods
        if (ratio := row.step_ratio) is not None
    ]
    heads = [*columns("run on record", "slice"), *columns("measured", "planned", show=seconds), Column("error", change)]
    timed = [
        (chip, its["all"]["kernels"], its["all"]["absolute_error_median"], its["all"]["absolute_error_p90"])
        for chip, its in chips.items()
    ]
    of_chips = [Column("kernels timed on"), Column("kernels"), *columns("median error", "nine of ten", show=percent)]
    return [table for table in (Table("", heads, of_pods), Table("", of_chips, timed)) if table.rows]


def _refused_table(runs: Sequence[PublishedRun], rows: Mapping[str, RowRecord]) -> Part:
    def why(run: PublishedRun) -> str:
        row = rows.get(run.id)
        if run.refused or row is None:
            return run.refused or "not yet"
        return row.error if row.status != FITS and row.error else f"the plan {row.status}"

    left = [run for run in runs if run.refused or rows.get(run.id) is None or rows[run.id].status != FITS]
    heads = [*columns("run", "slice"), Column("measured", seconds), Column("why not")]
    return Table("", heads, [(run.id, run.slice, run.step_seconds, why(run)) for run in left]) if left else "None."
