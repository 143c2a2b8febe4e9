"""The pages of `tomat plan --calibrate`: plans beside measured pods, and with `--kernels` beside timed kernels."""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
from msgspec import Meta

from tomat.base.documents import mapping, read_json
from tomat.base.errors import TomatError
from tomat.base.progress import progress
from tomat.base.records import Amount, Count, typed
from tomat.base.report.formats import change, number, percent
from tomat.base.report.markdown import update_page
from tomat.base.report.model import Column, Part, Report, Section, Table, columns
from tomat.base.reporting import console, counted, to_jsonable, write_json
from tomat.hardware.chips import CHIPS
from tomat.perf.cost import chip_model
from tomat.perf.plan.calibration import SHARES, Calibration, CalibrationRow, read_measurements
from tomat.perf.plan.compile.topology import planned_slice
from tomat.perf.plan.plan import make_plan
from tomat.perf.plan.plan_cache import default_cache_dir
from tomat.perf.timed_kernels.fit import TimedPrograms, fit, measured_rates
from tomat.perf.timed_kernels.programs import CompilerOf, TimedProgram, installed_compiler, timed_programs
from tomat.perf.timed_kernels.timings import KernelTiming, RefusedRow, read_timings
from tomat.report.calibration import calibration_report

MEMORY_TOLERANCE = 0.01
"""Planned peak memory counts as right within this fraction of the compiler's value on the day of the measurement."""
FEWEST_TO_FIT = 30
"""A chip with fewer kernels gets no fit of its parameters: three kernels for each parameter. (A choice.)"""


def calibrate(
    tracking_dir: Path,
    *,
    added: Sequence[CalibrationRow] = (),
    only_new: bool = False,
    on_stage: Callable[[str, str], None] = lambda what, stage: None,
    **how: Any,
) -> dict[str, Any]:
    """Plan every measurement (`only_new`: only new and changed ones) and write the record and the page into the folder
    of `calibration.yaml`. After an error, the rows planned before it are on record. Returns the rows for JSON.

    `added` are measurements to add; they replace those with the same names. `on_stage` is called with the name of the
    row and the stage of the compile. `how` is passed to `make_plan`.
    """
    kept, notes = read_measurements(tracking_dir)
    recorded = {row.name: row for row in Calibration.load(tracking_dir).rows}
    rows = {row.name: row for row in (*kept, *(row for row in recorded.values() if row.config is not None))}
    for row in added:
        rows.pop(row.name, None)  # it goes to the end
        rows[row.name] = row
    tables: dict[str, dict[str, dict[str, float]]] = {}
    done: dict[str, CalibrationRow] = {}
    for name, row in rows.items():
        config = replace(row.training_config(), tracking_dir=str(tracking_dir))
        slice_ = planned_slice(config, row.slice or None)
        old = recorded.get(name)
        if only_new and old is not None and old.predicted and _asks_the_same(old, row):
            done[name] = replace(old, source=row.source, doubted=row.doubted)
            continue
        plan = make_plan(config, slice_, on_stage=partial(on_stage, name), **how)
        memory = plan.compiled.memory
        predicted: dict[str, Any] = {"fits": plan.compiled.fits, "hbm_required_gib": memory.required_bytes / 2**30}
        if plan.step is not None:
            predicted |= {"model_seconds": plan.step.breakdown.step_seconds, "error": plan.step.error}
            shares = {group.name: group.share for group in plan.step.breakdown.categories}
            for key, categories in SHARES.items():
                predicted[key] = sum(shares.get(str(category), 0.0) for category in categories)
            tables[name] = plan.step.model_table()
        planned = replace(row, predicted=predicted, compiler=plan.compiled.compiler, slice=plan.slice_.name)
        done[name] = planned.checked("the plan beside the measurement")
        # Saved after every row, so that a calibration that is stopped keeps what it has planned.
        left = {other: recorded[other] for other in rows if other in recorded and other not in done}
        Calibration((*done.values(), *left.values())).save(tracking_dir)
    record = Calibration(tuple(done.values()))
    record.save(tracking_dir)
    page = update_page(tracking_dir / "calibration.md", calibration_report(record.rows, notes, tables))
    console.print(f"wrote {page}", highlight=False)
    return {"rows": [asdict(row) for row in record.rows]}


def _asks_the_same(old: CalibrationRow, row: CalibrationRow) -> bool:
    """Whether a row on record was measured and planned as `row` now says."""
    of_both = (to_jsonable([one.measured, one.config_path, one.overrides, one.config]) for one in (old, row))
    return next(of_both) == next(of_both) and row.slice in ("", old.slice)


def calibrate_kernels(
    file: Path,
    tracking_dir: Path,
    *,
    cache_dir: Path | None = None,
    chips: Sequence[str] = (),
    read: Callable[[Path], tuple[list[KernelTiming], list[RefusedRow]]] = read_timings,
    compiler_of: CompilerOf = installed_compiler,
    **how: Any,
) -> dict[str, Any]:
    """Compile the kernels of a file of timings (of `chips`, or of all chips), write the record and the page of their
    errors into `tracking_dir`, and return the record. The collectives that `tomat bench chip` measured may lie beside
    the file. `compiler_of` and `how` are passed to `timed_programs`."""
    timings, refused = read(file)
    collectives = measured_rates(file)
    present = sorted({timing.chip for timing in timings})
    if unknown := [chip for chip in chips if chip not in present]:
        raise TomatError(f"{file} has no row of the chip {unknown[0]}; it has {', '.join(present)}.")
    timings = [timing for timing in timings if not chips or timing.chip in chips]
    by_chip: dict[str, list[TimedProgram]] = defaultdict(list)
    without: list[RefusedRow] = []
    with progress() as bar:
        compiled = timed_programs(timings, cache_dir or default_cache_dir(), compiler_of=compiler_of, **how)
        said = f"Compiling {counted(len(timings), 'kernel')}"
        for program in bar.track(compiled, total=len(timings), description=said):
            if isinstance(program, RefusedRow):
                without.append(program)
            else:
                by_chip[program.timing.chip].append(program)
        if not by_chip:
            raise TomatError(f"{file} has no row that can be compiled; line {without[0].line}: {without[0].reason}")
        records = {
            chip: chip_record(chip, kernels, tracking_dir)
            for chip, kernels in bar.track(sorted(by_chip.items()), description="Fitting the chips")
        }
    ops = {timing.line: f"{timing.chip} {timing.op}" for timing in timings}
    kept, all_refused = _kept(tracking_dir, other_than={timing.chip for timing in timings})
    for chip, values in records.items():
        values["compilers"] = {op: compiler_of(op).name for op in values["operations"]}
        its = collectives[1] if collectives is not None and collectives[0] == chip else None
        values["collectives"] = its or kept.get(chip, {}).get("collectives")
    for row in (*refused, *without):
        all_refused.append({"line": row.line, "row": ops.get(row.line, ""), "reason": row.reason})
    record = {"chips": {**kept, **records}, "refused": sorted(all_refused, key=lambda row: row["line"])}
    write_json(tracking_dir / chip_model.RECORD_FILE, record)
    console.print(f"wrote {update_page(tracking_dir / 'kernels.md', kernels_report(record))}", highlight=False)
    return record


class Summary(chip_model.ErrorsOnRecord):
    absolute_error_largest: Amount
    error_mean: float
    memory_right_share: Amount | None
    unscheduled_pallas_kernels: Count


@dataclass(frozen=True)
class _Chip(chip_model.ChipOnRecord):
    all: Summary
    bounds: dict[str, Summary]
    operations: dict[str, Summary] = field(kw_only=True)
    compilers: Annotated[dict[str, str], Meta(min_length=1)] = field(kw_only=True)


class _Refused(TypedDict):
    line: Count
    row: str
    reason: str


class _Record(TypedDict):
    chips: dict[str, _Chip]
    refused: list[_Refused]


def _kept(tracking_dir: Path, other_than: Container[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The chips on record from an earlier calibration, and the rows that it refused, except those of `other_than`."""
    path = tracking_dir / chip_model.RECORD_FILE
    if not path.is_file():
        return {}, []
    how = "Restore it, or delete it and calibrate again."
    record = read_json(path, how)
    for chip in mapping(mapping(record).get("chips")).values():
        if isinstance(chip, dict) and "compilers" not in chip:
            # Records before 2026-11-25 name one compiler for each chip; still older ones name one for all chips.
            one = chip.pop("compiler", None) or record.get("compiler")
            chip["compilers"] = dict.fromkeys(mapping(chip.get("operations")), one)
    typed(record, _Record, path, how)
    others = [row for row in record["refused"] if (chip := row["row"].partition(" ")[0]) and chip not in other_than]
    return record["chips"], others


def chip_record(chip_name: str, programs: Sequence[TimedProgram], tracking_dir: Path) -> dict[str, Any]:
    """A chip's parameters and the errors of its kernels: fitted with each kernel left out, or as on record if few."""
    chip = CHIPS[chip_name]
    table = TimedPrograms([(program.timing, program.work) for program in programs], chip_model.core_bandwidth(chip))
    fitted = fit(table) if len(programs) >= FEWEST_TO_FIT else None
    if fitted is not None:
        at, errors = fitted.parameters, fitted.held_out_errors
    else:
        at = chip_model.ChipModel.load(tracking_dir, chip).parameters
        errors = table.errors(at)
    deviations = fitted.deviations if fitted is not None else {}
    parameters = {name: {"value": getattr(at, name), "deviation": deviations.get(name)} for name in chip_model.NAMES}
    record: dict[str, Any] = {"fitted": fitted is not None, "parameters": parameters, "all": summary(programs, errors)}
    for group, of in (("operations", [program.timing.op for program in programs]), ("bounds", table.bounds(at))):
        record[group] = {}
        for name in sorted(set(of)):
            places = [place for place, its in enumerate(of) if its == name]
            record[group][name] = summary([programs[place] for place in places], errors[places])
    return record


def summary(programs: Sequence[TimedProgram], errors: np.ndarray) -> dict[str, Any]:
    """Errors of a group of kernels, as fractions."""
    absolute = np.abs(errors)
    memory = [program.memory_error for program in programs if program.memory_error is not None]
    return {
        "kernels": len(programs),
        "absolute_error_median": float(np.median(absolute)),
        "absolute_error_p90": float(np.quantile(absolute, 0.9)),
        "absolute_error_largest": float(absolute.max()),
        "error_mean": float(errors.mean()),
        "memory_right_share": float(np.mean(np.abs(memory) < MEMORY_TOLERANCE)) if memory else None,
        "unscheduled_pallas_kernels": sum(len(program.work.unscheduled_pallas) for program in programs),
        "compile_seconds_median": float(np.median([program.compile_seconds for program in programs])),
    }


ERRORS = {
    "kernels": Column("kernels", number(0)),
    "absolute_error_median": Column("median error", percent),
    "absolute_error_p90": Column("p90", percent),
    "absolute_error_largest": Column("largest", percent),
    "error_mean": Column("mean, signed", change),
    "memory_right_share": Column("memory within 1 %", percent),
}
"""The figures of a `Summary` that the page shows, with their columns."""


def kernels_report(record: Mapping[str, Any]) -> Report:
    lead = (
        "Programs that chips have run, compiled by `tomat plan --calibrate --kernels FILE`, costed by a plan's model "
        "(`tomat/perf/cost/chip_model.py`). Errors are of kernels left out of the fit with all others of their shape."
    )
    chips = record["chips"]
    rows = [(chip, *(of["all"][key] for key in ERRORS), _compiled_by(of["compilers"])) for chip, of in chips.items()]
    parts: list[Part] = [Table("", [Column("chip"), *ERRORS.values(), Column("compiled by")], rows)]
    if few := [chip for chip, values in chips.items() if not values["fitted"]]:
        parts.append(f"Too few kernels to fit: {', '.join(few)}, judged by the parameters that were on record.")
    if missing := sum(values["all"]["unscheduled_pallas_kernels"] for values in chips.values()):
        said = f"No schedule was found for {counted(missing, 'Pallas kernel')}: the estimate is HBM traffic alone."
        parts.append(said)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in record["refused"]:
        groups[row["row"], row["reason"]].append(row["line"])
    most_first = sorted(groups.items(), key=lambda item: -len(item[1]))
    refused = [(len(lines), name or f"line {lines[0]}", reason) for (name, reason), lines in most_first]
    without = Table("", columns("rows", "operation", "reason"), refused) if refused else "None."
    sections = (
        Section("", [lead]),
        Section("", parts, "summary"),
        Section("The parameters of each chip", [_parameters_table(chips)], "parameters"),
        Section("By operation", [_groups_table(chips, "operations", "operation")], "operations"),
        Section("By what bounds the kernel", [_groups_table(chips, "bounds", "bound by")], "bounds"),
        Section("Rows without a program", [without], "refused"),
    )
    return Report("Kernels that chips have timed, and what the planner says of them", sections)


def _compiled_by(compilers: Mapping[str, str]) -> str:
    """`libtpu 0.0.44; normalization: libtpu 0.0.37`: the compiler of most operations, then operations with another."""
    most, _ = Counter(compilers.values()).most_common(1)[0]
    return "; ".join([most, *(f"{op}: {other}" for op, other in compilers.items() if other != most)])


def _parameters_table(chips: Mapping[str, Any]) -> Table:
    """The parameters of each chip as `0.93 ± 0.01`, in the unit in the parameter's name, and its collective rates."""
    rows: list[tuple[Any, ...]] = []
    for name in chip_model.NAMES:
        found = [values["parameters"][name] for values in chips.values()]
        # A record may lack the deviation, which plans do not need.
        known = [(one["value"], one.get("deviation")) for one in found]
        cells = (f"{value:.3g}" + ("" if off is None else f" ± {off:.1g}") for value, off in known)
        rows.append((name.replace("_", " "), *cells))
    rates = [values.get("collectives") for values in chips.values()]
    if any(rates):
        for name in chip_model.LinkRates.__dataclass_fields__:
            cells = (f"{its[name]:.3g}" if its else None for its in rates)
            rows.append((f"collectives, {name.replace('_', ' ')}", *cells))
    return Table("", [Column("parameter"), *columns(*chips, right=True)], rows)


def _groups_table(chips: Mapping[str, Any], group: str, title: str) -> Table:
    rows = [
        (chip, chip_model.BOUNDS.get(name) or name, *(values[key] for key in ERRORS))
        for chip, of in chips.items()
        for name, values in of[group].items()
    ]
    return Table("", [*columns("chip", title), *ERRORS.values()], rows)
