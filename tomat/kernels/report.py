"""`tomat plan --calibrate --kernels FILE`: what the cycle models say of kernels that chips have timed.

The models stand alone here, without the factor that pods gave for whole steps (`planning/calibration.py`).
"""

from __future__ import annotations

import importlib.metadata
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import console, counted, progress, write_json
from tomat.hardware.chips import slice_named
from tomat.kernels.compile import SMALLEST_SLICES, CompiledKernel, compile_kernels
from tomat.kernels.timings import KernelTiming, RefusedRow, read_timings
from tomat.kernels.work import ASYNC, PALLAS, KernelWork, kept_work
from tomat.pages.document import empty_section, update_document
from tomat.pages.tables import UNKNOWN, markdown_table, percent
from tomat.planning.compile.compiler import default_cache_dir
from tomat.planning.compile.topology import compiler_version
from tomat.planning.plan_cache import RESULT_FILE

PAGE, RECORD = "kernels.md", "kernels.json"
TEMPLATE = f"""# Kernels that chips have timed, and what the planner says of them

Programs of openxla/tokamax's autotuning data, compiled here and costed by the models of a plan, without any factor.
`tomat plan --calibrate --kernels FILE` compiles what is new and rewrites what is between the markers.

{empty_section("summary")}

## By operation

{empty_section("operations")}

## By what bounds the kernel

{empty_section("bounds")}

## Rows without a program

{empty_section("refused")}
"""

MEMORY_TOLERANCE = 0.01
"""Peak memory within this of the compiler's on the day of the measurement counts as right."""


@dataclass(frozen=True)
class JudgedKernel:
    """A timed kernel beside its estimate."""

    timing: KernelTiming
    seconds: float
    """By the models."""
    bound: str
    """What takes most of the estimate: `HBM`, `matrix unit`, `bundles`, or `Pallas bundles`, `Pallas HBM`."""
    peak_memory_bytes: int
    compile_seconds: float
    unscheduled: tuple[str, ...] = ()
    """Pallas kernels whose schedule was not found: costed by their HBM traffic alone."""

    @property
    def error(self) -> float:
        """Estimate over measurement, minus one."""
        return self.seconds / self.timing.seconds - 1.0

    @property
    def memory_error(self) -> float | None:
        """The same of the peak memory; None where the file has none."""
        measured = self.timing.peak_memory_bytes
        return self.peak_memory_bytes / measured - 1.0 if measured else None


def judge(kernel: CompiledKernel) -> JudgedKernel:
    """The estimate of a kernel that was compiled.

    Raises:
        TomatError: What the cache kept of it is damaged.
    """
    assert kernel.folder is not None
    chip = slice_named(SMALLEST_SLICES[kernel.timing.chip])
    seconds, work = kept_work(kernel.folder, chip)
    try:
        result = json.loads((kernel.folder / RESULT_FILE).read_text(encoding="utf-8"))
        memory, compile_seconds = int(result["peak_memory_bytes"]), float(result["compile_seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TomatError(f"{kernel.folder} is damaged ({error}); delete it and calibrate again.") from None
    unscheduled = tuple(each.name for each in work if each.kind == PALLAS and not each.scheduled)
    return JudgedKernel(kernel.timing, seconds, bound_of(work), memory, compile_seconds, unscheduled)


def bound_of(work: Iterable[KernelWork]) -> str:
    """What takes the largest part of a program's time, kernel by kernel the slowest of its parts."""
    seconds: dict[str, float] = defaultdict(float)
    for kernel in work:
        if kernel.kind == ASYNC:
            continue
        parts = {"HBM": kernel.hbm_seconds, "bundles": kernel.bundle_seconds, "matrix unit": kernel.mxu_seconds}
        slowest = max(parts, key=lambda part: parts[part])
        # A product keeps its bundles busy too: the unit bounds it where it is at work in most of them.
        if slowest == "bundles" and kernel.mxu_seconds > 0.8 * kernel.bundle_seconds:
            slowest = "matrix unit"
        seconds[f"Pallas, {slowest}" if kernel.kind == PALLAS else slowest] += max(parts.values())
    return max(seconds, key=lambda part: seconds[part]) if seconds else "nothing"


def calibrate_kernels(
    file: Path,
    tracking_dir: Path,
    *,
    cache_dir: Path | None = None,
    chips: Sequence[str] = (),
    on_kernel: Callable[[CompiledKernel], None] = lambda kernel: None,
) -> dict[str, Any]:
    """Compile the kernels of a file of timings, and write the record and the page of their errors.

    Args:
        file: As `read_timings` takes it.
        tracking_dir: Gets `kernels.json` and `kernels.md`.
        cache_dir: Of the plan cache; default: `default_cache_dir()`.
        chips: Only rows of these; empty: of all.
        on_kernel: Told each kernel when it is compiled or found.

    Returns:
        The record.

    Raises:
        TomatError: As for `read_timings` and `compile_kernels`; or no row of `chips`.
    """
    timings, refused = read_timings(file)
    present = sorted({timing.chip for timing in timings})
    unknown = [chip for chip in chips if chip not in present]
    if unknown:
        raise TomatError(f"{file} has no row of the chip {unknown[0]}; it has {', '.join(present)}.")
    timings = [timing for timing in timings if not chips or timing.chip in chips]
    with progress(seconds="left") as bar:
        task = bar.add_task(f"Compiling {counted(len(timings), 'kernel')}", total=len(timings))

        def tell(kernel: CompiledKernel) -> None:
            bar.advance(task)
            on_kernel(kernel)

        compiled = compile_kernels(timings, cache_dir or default_cache_dir(), on_kernel=tell)
        judged = [
            judge(kernel) for kernel in bar.track(compiled, description="Costing them") if kernel.folder is not None
        ]
    refused += [RefusedRow(kernel.timing.line, kernel.reason) for kernel in compiled if kernel.folder is None]
    ops = {kernel.timing.line: f"{kernel.timing.chip} {kernel.timing.op}" for kernel in compiled}
    record = kernel_record(judged, sorted(refused, key=lambda row: row.line), ops)
    tracking_dir.mkdir(parents=True, exist_ok=True)
    write_json(tracking_dir / RECORD, record)
    update_document(tracking_dir / PAGE, sections(record), TEMPLATE)
    console.print(f"wrote {tracking_dir / PAGE}", highlight=False)
    return record


def kernel_record(
    judged: Sequence[JudgedKernel], refused: Sequence[RefusedRow], ops: Mapping[int, str]
) -> dict[str, Any]:
    """What is kept of a calibration on kernels.

    Args:
        judged: Kernels with estimates.
        refused: Rows without.
        ops: Line of the file -> chip and operation, of the rows that could be read.
    """
    by_chip: dict[str, list[JudgedKernel]] = defaultdict(list)
    for kernel in judged:
        by_chip[kernel.timing.chip].append(kernel)
    return {
        "compiler": compiler_version(),
        "tokamax": importlib.metadata.version("tokamax"),
        "chips": {
            chip: {
                "all": summary(kernels),
                "operations": _grouped(kernels, lambda kernel: kernel.timing.op),
                "bounds": _grouped(kernels, lambda kernel: kernel.bound),
            }
            for chip, kernels in sorted(by_chip.items())
        },
        "refused": [{"line": row.line, "row": ops.get(row.line, ""), "reason": row.reason} for row in refused],
    }


def _grouped(kernels: Sequence[JudgedKernel], of: Callable[[JudgedKernel], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[JudgedKernel]] = defaultdict(list)
    for kernel in kernels:
        groups[of(kernel)].append(kernel)
    return {name: summary(group) for name, group in sorted(groups.items())}


def summary(kernels: Sequence[JudgedKernel]) -> dict[str, Any]:
    """Errors of a group of kernels, as fractions."""
    errors = np.array([kernel.error for kernel in kernels])
    memory = [error for kernel in kernels if (error := kernel.memory_error) is not None]
    return {
        "kernels": len(kernels),
        "absolute_error_median": float(np.median(np.abs(errors))),
        "absolute_error_p90": float(np.quantile(np.abs(errors), 0.9)),
        "absolute_error_largest": float(np.max(np.abs(errors))),
        "error_mean": float(np.mean(errors)),
        "memory_right_share": float(np.mean(np.abs(memory) <= MEMORY_TOLERANCE)) if memory else None,
        "compile_seconds_median": float(np.median([kernel.compile_seconds for kernel in kernels])),
        "unscheduled_pallas_kernels": sum(len(kernel.unscheduled) for kernel in kernels),
    }


def sections(record: Mapping[str, Any]) -> dict[str, str]:
    """The generated parts of the page."""
    return {
        "summary": _summary_section(record),
        "operations": _table(record, "operations", "operation"),
        "bounds": _table(record, "bounds", "bound by"),
        "refused": _refused_section(record),
    }


HEADER = ("kernels", "median error", "p90", "largest", "mean, signed", "memory within 1 %")


def _row(values: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{values['kernels']:,}",
        percent(values["absolute_error_median"]),
        percent(values["absolute_error_p90"]),
        percent(values["absolute_error_largest"]),
        f"{100 * values['error_mean']:+.1f} %",
        UNKNOWN if values["memory_right_share"] is None else percent(values["memory_right_share"]),
    )


def _summary_section(record: Mapping[str, Any]) -> str:
    rows = [(chip, *_row(values["all"])) for chip, values in record["chips"].items()]
    parts = [markdown_table(("chip", *HEADER), rows, "l" + "r" * len(HEADER))]
    parts.append(f"Compiled by {record['compiler']}, programs of tokamax {record['tokamax']}.")
    missing = sum(values["all"]["unscheduled_pallas_kernels"] for values in record["chips"].values())
    if missing:
        parts.append(
            f"Of {counted(missing, 'Pallas kernel')} no schedule was found: their estimate is HBM traffic alone."
        )
    return "\n\n".join(parts)


def _table(record: Mapping[str, Any], group: str, title: str) -> str:
    rows = [
        (chip, name, *_row(values))
        for chip, chip_values in record["chips"].items()
        for name, values in chip_values[group].items()
    ]
    return markdown_table(("chip", title, *HEADER), rows, "ll" + "r" * len(HEADER))


def _refused_section(record: Mapping[str, Any]) -> str:
    if not record["refused"]:
        return "None."
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in record["refused"]:
        groups[row["row"], row["reason"]].append(row["line"])
    rows = [
        (str(len(lines)), name or f"line {lines[0]}", reason.replace("|", "\\|"))
        for (name, reason), lines in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    return markdown_table(("rows", "operation", "reason"), rows, "rll")
