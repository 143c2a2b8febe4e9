"""The schedule the TPU compiler gives an HLO op: VLIW bundles by region, loops, copies and what runs how often.

Asked to (`base/ports/libtpu.py`), libtpu writes for every op that it compiles the bundles in order with their control
flow, and the slots that each fills. A bundle issues in one cycle unless the core waits. What it waits for by itself is
not in the final bundles: a run of empty ones before the result of a unit is taken out at the end
(``packed-bundles-post-ra`` of the same dump still has it).

The format was read off dumps of libtpu 0.0.46 for v6e, and for v5p and TPU7x where they differ: ``sbr.rel (%p) target =
$regionN`` is a branch with four delay slots, taken where the predicate holds; a target at or before the branch makes a
loop, one after it a predicated region. In the 225 ops of the reference 200M step these nest without exception. A bundle
that starts a copy names its size and, in a comment of the compiler's pipeline emitter, the window that it moves:
``base_bounds`` of the array, ``window_bounds`` of the block, both in tiles, and ``element_size_in_bytes`` of a tile.
From these follows what XLA's HLO does not say: how often a block is fetched again.
"""

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from tomat.base.errors import TomatError
from tomat.base.ports.libtpu import FINAL_BUNDLES, UTILISATION, final_bundles_flags
from tomat.base.records import typed_text
from tomat.perf.cost.scalar_code import ScalarCode

BYTES_PER_GRANULE = 32
"""Unit of the sizes: a window of 64 tiles of 2,048 bytes is 4,096 granules (splash forward kernel)."""

_START = re.compile(
    r"= dma\.(?P<kind>hbm_to_vmem|vmem_to_hbm|general) (?:\[thread:\$\d+\]\s+)?"
    r"(?:\((?P<negated>!?)%(?P<predicate>p\d+)_p\d+\), )?"
    r"/\*(?:hbm|vmem|src)=\*/%(?P<source>s\d+)_\S+, /\*size_in_granules=\*/(?:(?P<granules>\d+)|%\S+), "
    r"/\*(?:hbm|vmem|dst)=\*/%(?P<target>s\d+)_"
)
_WINDOW = re.compile(r"(base_bounds|window_bounds): \(([\d, ]*)\)")
_ELEMENT_BYTES = re.compile(r"element_size_in_bytes: (\d+)")


@dataclass(frozen=True)
class Transfer:
    """A copy between HBM and the memory of the core."""

    written: bool
    """To HBM; else from it."""
    size_bytes: int
    share: float | None = 1.0
    """In which share of the executions of its region it is started: a block that is there already is not fetched. None
    where data decide it."""


class TransferReader:
    """Collects the copies of one op, line by line."""

    def __init__(self) -> None:
        self._found: list[tuple[int, re.Match[str], dict[str, tuple[int, ...]]]] = []
        self._open = False

    def line(self, bundle: int, line: str) -> None:
        """Takes note of a copy that a line starts, or of its window."""
        if "= dma." in line:
            self._open = False
            if match := _START.search(line):
                self._found.append((bundle, match, {}))
                self._open = True
        elif self._open and ":" in line:
            window = self._found[-1][2]
            for name, sizes in _WINDOW.findall(line):
                window.setdefault(name, tuple(int(size) for size in sizes.split(",") if size.strip()))
            if element := _ELEMENT_BYTES.search(line):
                window.setdefault("element", (int(element[1]),))
                self._open = False

    def transfers(
        self, code: ScalarCode, trips: Mapping[int, int | None], grid: tuple[int, ...]
    ) -> dict[int, list[Transfer]]:
        """Bundle -> the copies it starts between HBM and the core. Of the scalar code of an op, whole; `trips`: loop
        (first bundle) -> trip count."""
        found: dict[int, list[Transfer]] = {}
        for bundle, match, window in self._found:
            written = match["kind"] == "vmem_to_hbm"
            if match["kind"] == "general":
                written = code.in_core(match["source"])
                if written and code.in_core(match["target"]):  # neither end of it is in HBM
                    continue
            element = window.get("element", (0,))[0]
            base, bounds = window.get("base_bounds", ()), window.get("window_bounds", ())
            # A size that is no constant belongs to an array that its blocks do not divide: the last one is shorter.
            cut = math.prod(size / (math.ceil(size / part) * part) for size, part in zip(base, bounds, strict=True))
            granules, predicate = match["granules"], match["predicate"]
            size = int(granules) * BYTES_PER_GRANULE if granules else round(element * math.prod(bounds) * cut)
            share: float | None = 1.0
            if predicate:
                share, _ = code.share(predicate, bool(match["negated"]), trips, grid)
                if share is None:
                    share = code.changed_share(predicate, grid)
            if size:
                found.setdefault(bundle, []).append(Transfer(written, size, share))
        return found


BRANCH_DELAY_SLOTS = 4
"""Bundles after a branch that run whether it is taken or not (the four that follow each `sbr.rel` in the dumps of v5e,
v5p and v6e). A v4 has one and a TPU7x six, fewer where they are empty: there up to three bundles beside a branch are
counted in the wrong region."""

_ADDRESS = re.compile(r" *(0x[0-9a-f]+|0) +(?:[A-Z]{2})?:")
_REGION_START = re.compile(r"(?:Start/End empty|Start) region (\d+)")
_BRANCH = re.compile(r"sbr\.rel (?:\((!?)%(p\d+)_p\d+\) )?target = \$region(\d+)")
_GRID = re.compile(r"iteration_bounds: \(([\d, ]*)\)")


@dataclass(frozen=True)
class Region:
    """Bundles that run equally often."""

    kind: str
    """`body` (the op), `loop` or `branch` (predicated: entered where its predicate allows)."""
    first_bundle: int
    bundles: int
    """Bundles of the region itself; those of `regions` come on top."""
    slots: tuple[int, ...]
    """Slots filled in these bundles, by `OpSchedule.units`; empty where the dump has no utilisation."""
    executions: float | None
    """Of a loop: its trip count. Of a branch: in which share of the cases it is entered. None where that depends on
    data or could not be read."""
    operand: int | None = None
    """Of a branch: the prefetched operand of the kernel that decides whether it is entered."""
    entered_for: tuple[int, ...] | None = None
    """Of a branch that one element of `operand` alone decides: for which of its values 0 to 3 it is entered."""
    scalar_trips: tuple[int, int, int] | None = None
    """Of a loop whose bound is a scalar operand of the kernel: its number, the trips where it is 0, those that each
    unit of it adds."""
    mxu_cycles: int = 0
    """Cycles that the busiest matrix unit works on the products issued in these bundles."""
    transfers: tuple[Transfer, ...] = ()
    """Copies between HBM and the core that these bundles start."""
    regions: "tuple[Region, ...]" = ()

    def walk(self) -> "Iterator[Region]":
        yield self
        for region in self.regions:
            yield from region.walk()


Executions = Callable[[Region], float | None]
"""How often a region runs, where it is known better than by the region itself; else None."""


@dataclass(frozen=True)
class OpSchedule:
    body: Region
    units: tuple[str, ...] = ()
    """Names of the slots, such as MXU."""
    capacity: tuple[int, ...] = ()
    """Slots of each unit in a bundle."""
    grid: tuple[int, ...] = ()
    """Grid of a Pallas kernel (`iteration_bounds` of its transfers), empty for other ops."""

    def timed(self, executions: Executions = lambda region: None) -> Iterator[tuple[Region, float]]:
        """Each region, and how often it runs in one execution of the op. `executions` overrides a region's own; where
        both are None the region counts as entered, and a loop once."""

        def walk(region: Region, around: float) -> Iterator[tuple[Region, float]]:
            own = executions(region)
            if own is None:
                own = 1.0 if region.executions is None else region.executions
            yield region, around * own
            for inner in region.regions:
                yield from walk(inner, around * own)

        return walk(self.body, 1.0)

    def executed(self, quantity: Callable[[Region], float], executions: Executions = lambda region: None) -> float:
        """`quantity` summed over the regions times how often each runs."""
        return sum(times * quantity(region) for region, times in self.timed(executions))


def write_schedules(path: Path, schedules: Mapping[str, OpSchedule]) -> None:
    # Level 6 costs 0.1 s for a 200M step and leaves a fifth.
    content = json.dumps({name: asdict(schedule) for name, schedule in schedules.items()})
    path.write_bytes(gzip.compress(content.encode(), compresslevel=6, mtime=0))


def kept_schedules(path: Path, remedy: str) -> dict[str, OpSchedule]:
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise TomatError(f"{path} is damaged ({error}). {remedy}") from None
    return typed_text(content, dict[str, OpSchedule], path, remedy)


def slot_utilisation(schedule: OpSchedule) -> dict[str, float]:
    """Share of each unit's slots that executed bundles fill; empty where the dump has no utilisation."""
    executed = schedule.executed(lambda region: region.bundles)
    if not executed:
        return {}
    return {
        unit: schedule.executed(lambda region, n=number: region.slots[n]) / (executed * schedule.capacity[number])
        for number, unit in enumerate(schedule.units)
    }


def read_schedules(llo_dir: Path) -> dict[str, OpSchedule]:
    """The schedules in a dump, by name of the HLO instruction.

    An op that was compiled more than once has the last of its schedules. Files cut off mid-write are an error.
    """
    newest: dict[str, tuple[tuple[int, int], Path]] = {}
    utilisation: dict[str, Path] = {}
    for path in sorted(llo_dir.iterdir()) if llo_dir.is_dir() else ():
        if match := FINAL_BUNDLES.fullmatch(path.name):
            stamp = (int(match[1]), int(match[3]))
            if match[2] not in newest or stamp > newest[match[2]][0]:
                newest[match[2]] = (stamp, path)
        elif match := UTILISATION.fullmatch(path.name):
            utilisation[match[1]] = path
    if not newest:
        flags = " ".join(final_bundles_flags("DIR"))
        raise TomatError(f"{llo_dir}: no *-final_bundles.txt. Compile with LIBTPU_INIT_ARGS containing {flags}")
    return {
        name: read_schedule(path, utilisation.get(f"{stamp[0]}-{name}"))
        for name, (stamp, path) in newest.items()
        if not name.endswith("-schedule-analysis")
    }


def read_schedule(bundles: Path, utilisation: Path | None) -> OpSchedule:
    builder = _ScheduleBuilder()
    with bundles.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            builder.add(line)
    if not builder.n_bundles:
        raise TomatError(f"{bundles}: no VLIW bundles. Expected lines such as `0x1a   :  {{ ... }}`.")
    if utilisation is None:
        return builder.schedule()
    rows = utilisation.read_text(encoding="utf-8").splitlines()
    if len(rows) < 4 or "UTILIZATION" not in rows[3]:
        raise TomatError(f"{utilisation}: expected the slots' names, their capacities and one row a bundle.")
    units = tuple(name.strip() for name in rows[1].split(","))
    capacity = tuple(int(n) for n in rows[2].split())
    filled = [tuple(int(n) for n in row.split()) for row in rows[4:] if row.strip()]
    if filled and len(filled) != builder.n_bundles:
        found = f"{builder.n_bundles} bundles, but {len(filled)} rows in its utilisation file"
        raise TomatError(f"{bundles}: {found}. The dump is incomplete; compile again.")
    return builder.schedule(units, capacity, filled)


_PRODUCT = re.compile(r"vmatmul\.([\w.]+)(?:\[\d+\])?\.mxu([0-3])")
N_MXU = 4
"""Units of a core, at most."""


def product_cycles(forms: str) -> int:
    """Cycles a matrix unit needs for one `vmatmul`, by the forms that follow the name: 16 rows of bf16, 8 of f32, 32 of
    s8 (of v6e; on units of 128 x 128 they were not seen, and count as f32).

    Units of 256 x 256 (`mubr`) take two rows a cycle, those of 128 x 128 one; with `lmr` they take 8 rows of bf16. So
    all units of a chip together reach its peak. Source: the spacing that the compiler itself keeps between products on
    one unit. v6e: 8 bundles in 21,477 of 23,600 cases of bf16, 4 in 20,009 of 21,300 of f32 (the reference 200M step).
    TPU7x: 8 in 4,946 of 6,142, 4 in 6,606 of 10,238 (two losses). v5p: 16 in 3,131 of 5,816 (more in most others), 8 in
    7,822 of 9,520 of f32 and in 6,551 of 9,156 with `lmr` (15 attention kernels). s8 on a v6e: 8 in 1,306 of 1,408 (a
    product [32768, 1024] x [1024, 4096], which has half the bundles of the same in bf16).
    """
    kinds = forms.split(".")
    wide = ("bf16" in kinds and "lmr" not in kinds) or ("s8" in kinds and "mubr" in kinds)
    return (8 if wide else 4) if "mubr" in kinds else (16 if wide else 8)


class _Span(NamedTuple):
    """Bundles [first, end) that a branch jumps back over (a loop, repeated while) or passes over (entered where) the
    predicate holds, or does not if negated."""

    first: int
    end: int
    kind: str
    predicate: str
    negated: bool


class _ScheduleBuilder:
    def __init__(self) -> None:
        self.n_bundles = 0
        self._bundle = 0
        self._starts: dict[int, int] = {}
        """Region -> its first bundle."""
        self._grid: tuple[int, ...] = ()
        self._branches: list[tuple[int, bool, str, int]] = []
        """(the bundle that follows the delay slots, negated, predicate, region) of each."""
        self._code = ScalarCode()
        self._products: dict[int, list[int]] = {}
        self._transfers = TransferReader()

    def add(self, line: str) -> None:
        if match := _ADDRESS.match(line):
            self._bundle = int(match[1], 16)
            self.n_bundles = max(self.n_bundles, self._bundle + 1)
        self._code.add(self._bundle, line)
        self._transfers.line(self._bundle, line)
        if "vmatmul" in line:
            for forms, unit in _PRODUCT.findall(line):
                cycles = self._products.setdefault(self._bundle, [0] * N_MXU)
                cycles[int(unit)] += product_cycles(forms)
        if not self._grid and "iteration_bounds" in line and (bounds := _GRID.search(line)):
            self._grid = tuple(int(n) for n in bounds[1].split(",") if n.strip())
        if "region " in line:
            for number in _REGION_START.findall(line):
                self._starts.setdefault(int(number), self._bundle)
        if "sbr.rel" in line:
            for negated, predicate, target in _BRANCH.findall(line):
                after = self._bundle + 1 + BRANCH_DELAY_SLOTS
                self._branches.append((after, bool(negated), predicate, int(target)))

    def schedule(
        self, units: tuple[str, ...] = (), capacity: tuple[int, ...] = (), rows: Sequence[tuple[int, ...]] = ()
    ) -> OpSchedule:
        """The schedule of what was noted; `rows` are the slots of each of `units` that are filled, by bundle."""
        spans: list[_Span] = []
        for after, negated, predicate, target in self._branches:
            start = self._starts.get(target)
            if start is None:
                continue  # out of the op; seen once in 225 ops, behind its last region
            if start < after:
                spans.append(_Span(start, after, "loop", predicate, negated))
            elif after < start:  # entered where the branch around it is not taken
                spans.append(_Span(after, start, "branch", predicate, not negated))
        spans.sort(key=lambda span: (span.first, -span.end))
        self._code.loops = [(span.first, span.end) for span in spans if span.kind == "loop"]
        self._code.regions = [(span.first, span.end) for span in spans if span.kind == "branch"]
        trips = {s.first: self._code.trip_count(s.first, s.predicate, s.negated) for s in spans if s.kind == "loop"}
        transfers = self._transfers.transfers(self._code, trips, self._grid)

        def build(span: _Span, inside: list[_Span], given: tuple[tuple[str, bool], ...]) -> Region:
            executions: float | None = 1.0
            operand = entered_for = scalar_trips = None
            if span.kind == "loop":
                executions = trips[span.first]
                if executions is None:
                    scalar_trips = self._code.scalar_trips(span.first, span.predicate, span.negated)
            elif span.kind == "branch":
                entered_for = self._code.entered_for(span.predicate, span.negated)
                executions, operand = self._code.share(span.predicate, span.negated, trips, self._grid, given)
                if executions is None and operand is None:
                    executions = self._code.changed_share(span.predicate, self._grid)
                given = (*given, (span.predicate, span.negated))
            children: list[Region] = []
            own: list[int] = []
            cursor = span.first
            while inside:
                head = inside[0]._replace(end=min(inside[0].end, span.end))
                nested = [s for s in inside[1:] if s.first < head.end]
                inside = inside[1 + len(nested) :]
                own += range(cursor, head.first)
                cursor = head.end
                children.append(build(head, nested, given))
            own += range(cursor, span.end)
            busy = [self._products[b] for b in own if b in self._products]
            return Region(
                kind=span.kind,
                first_bundle=span.first,
                bundles=len(own),
                slots=tuple(sum(rows[b][n] for b in own) for n in range(len(rows[0]))) if rows else (),
                executions=executions,
                operand=operand,
                entered_for=entered_for,
                scalar_trips=scalar_trips,
                mxu_cycles=max((sum(cycles) for cycles in zip(*busy, strict=True)), default=0),
                transfers=tuple(transfer for b in own for transfer in transfers.get(b, ())),
                regions=tuple(children),
            )

        body = build(_Span(0, self.n_bundles, "body", "", False), spans, ())
        return OpSchedule(body, units, capacity, self._grid)
