"""Reads the TPU compiler's schedule of an HLO op: VLIW bundles by region, loops, copies, and how often each runs.

With the flags of `base/ports/libtpu.py`, libtpu writes for every op that it compiles the bundles in order, with their
control flow, and the slots that each fills. A bundle issues in one cycle unless the core waits. The final bundles do
not show the core's own waits: runs of empty bundles before the result of a unit are removed at the end
(``packed-bundles-post-ra`` of the same dump still has them).

The format is derived from dumps of libtpu 0.0.46 for v6e, and for v5p and TPU7x where they differ. ``sbr.rel (%p)
target = $regionN`` is a branch with four delay slots, taken if the predicate holds. A target at or before the branch
makes a loop, a target after it a predicated region. In the 225 ops of the reference 200M step these nest without
exception. A bundle that starts a copy names its size and, in a comment of the compiler's pipeline emitter, the window
that it moves: ``base_bounds`` of the array, ``window_bounds`` of the block, both in tiles, and
``element_size_in_bytes`` of a tile. They give what XLA's HLO does not show: how often a block is fetched again.
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
    """A copy between HBM and the core's memory."""

    written: bool
    """Whether it writes to HBM, rather than reads from it."""
    size_bytes: int
    share: float | None = 1.0
    """Share of the executions of its region in which it is started: a block that is already present is not fetched.
    None if that depends on data."""


class TransferReader:
    """Collects the copies of one op, line by line."""

    def __init__(self) -> None:
        self._found: list[tuple[int, re.Match[str], dict[str, tuple[int, ...]]]] = []
        self._open = False

    def line(self, bundle: int, line: str) -> None:
        """Record a copy that a line starts, or the window of that copy."""
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
        """Bundle -> the copies between HBM and the core that it starts. `code` is the complete scalar code of an op;
        `trips` maps a loop (its first bundle) to its trip count."""
        found: dict[int, list[Transfer]] = {}
        for bundle, match, window in self._found:
            written = match["kind"] == "vmem_to_hbm"
            if match["kind"] == "general":
                written = code.in_core(match["source"])
                if written and code.in_core(match["target"]):  # neither end is in HBM
                    continue
            element = window.get("element", (0,))[0]
            base, bounds = window.get("base_bounds", ()), window.get("window_bounds", ())
            # If the size is not a constant, the blocks do not divide the array evenly, and the last block is shorter.
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
"""Bundles after a branch that run whether it is taken or not (the four after each `sbr.rel` in dumps of v5e, v5p and
v6e). A v4 has one and a TPU7x six, or fewer where they are empty, so on these up to three bundles per branch are
counted in the wrong region."""

_ADDRESS = re.compile(r" *(0x[0-9a-f]+|0) +(?:[A-Z]{2})?:")
_REGION_START = re.compile(r"(?:Start/End empty|Start) region (\d+)")
_BRANCH = re.compile(r"sbr\.rel (?:\((!?)%(p\d+)_p\d+\) )?target = \$region(\d+)")
_GRID = re.compile(r"iteration_bounds: \(([\d, ]*)\)")


@dataclass(frozen=True)
class Region:
    """Bundles that run equally often."""

    kind: str
    """`body` (the op), `loop` or `branch` (predicated: entered if its predicate holds)."""
    first_bundle: int
    bundles: int
    """Number of bundles of the region itself, without those of `regions`."""
    slots: tuple[int, ...]
    """Slots filled in these bundles, by `OpSchedule.units`; empty if the dump has no utilisation."""
    executions: float | None
    """For a loop: its trip count. For a branch: the share of cases in which it is entered. None if that depends on
    data or could not be derived."""
    operand: int | None = None
    """For a branch: the prefetched operand of the kernel that decides whether it is entered."""
    entered_for: tuple[int, ...] | None = None
    """For a branch that only one element of `operand` decides: the values, from 0 to 3, for which it is entered."""
    scalar_trips: tuple[int, int, int] | None = None
    """For a loop whose bound is a scalar operand of the kernel: the operand's number, the trips if it is 0, and the
    trips that each unit adds."""
    mxu_cycles: int = 0
    """Cycles in which the busiest matrix unit works on the products issued in these bundles."""
    transfers: tuple[Transfer, ...] = ()
    """Copies between HBM and the core that these bundles start."""
    regions: "tuple[Region, ...]" = ()

    def walk(self) -> "Iterator[Region]":
        yield self
        for region in self.regions:
            yield from region.walk()


Executions = Callable[[Region], float | None]
"""How often a region runs, if a better value than the region's own is known; else None."""


@dataclass(frozen=True)
class OpSchedule:
    body: Region
    units: tuple[str, ...] = ()
    """Names of the units that have slots, such as MXU."""
    capacity: tuple[int, ...] = ()
    """Slots of each unit in a bundle."""
    grid: tuple[int, ...] = ()
    """Grid of a Pallas kernel (`iteration_bounds` of its transfers); empty for other ops."""

    def timed(self, executions: Executions = lambda region: None) -> Iterator[tuple[Region, float]]:
        """Each region, and how often it runs in one execution of the op. `executions` overrides a region's own value.
        If both are None, a branch counts as entered, and a loop once."""

        def walk(region: Region, around: float) -> Iterator[tuple[Region, float]]:
            own = executions(region)
            if own is None:
                own = 1.0 if region.executions is None else region.executions
            yield region, around * own
            for inner in region.regions:
                yield from walk(inner, around * own)

        return walk(self.body, 1.0)

    def executed(self, quantity: Callable[[Region], float], executions: Executions = lambda region: None) -> float:
        """The sum over the regions of `quantity` times how often each runs."""
        return sum(times * quantity(region) for region, times in self.timed(executions))


def write_schedules(path: Path, schedules: Mapping[str, OpSchedule]) -> None:
    # Level 6 takes 0.1 s for a 200M step, and reduces it to a fifth.
    content = json.dumps({name: asdict(schedule) for name, schedule in schedules.items()})
    path.write_bytes(gzip.compress(content.encode(), compresslevel=6, mtime=0))


def kept_schedules(path: Path, remedy: str) -> dict[str, OpSchedule]:
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise TomatError(f"{path} is damaged ({error}). {remedy}") from None
    return typed_text(content, dict[str, OpSchedule], path, remedy)


def slot_utilisation(schedule: OpSchedule) -> dict[str, float]:
    """Share of each unit's slots that executed bundles fill; empty if the dump has no utilisation."""
    executed = schedule.executed(lambda region: region.bundles)
    if not executed:
        return {}
    return {
        unit: schedule.executed(lambda region, n=number: region.slots[n]) / (executed * schedule.capacity[number])
        for number, unit in enumerate(schedule.units)
    }


def read_schedules(llo_dir: Path) -> dict[str, OpSchedule]:
    """The schedules in a dump, by name of the HLO instruction.

    For an op that was compiled more than once, the last schedule counts. Files cut off mid-write are an error.
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
"""Most matrix units of a core."""


def product_cycles(forms: str) -> int:
    """Cycles that a matrix unit needs for one `vmatmul`, by the forms that follow the name: 16 rows of bf16, 8 of f32,
    32 of s8 (on v6e; on units of 128 x 128 no s8 was seen, and it counts as f32).

    Units of 256 x 256 (`mubr`) take two rows a cycle, those of 128 x 128 one; with `lmr`, a `vmatmul` has 8 rows of
    bf16. With these, a chip's units together reach its peak. Source: the spacing that the compiler keeps between
    products on one unit. v6e: 8 bundles in 21,477 of 23,600 cases of bf16, 4 in 20,009 of 21,300 of f32 (reference 200M
    step). TPU7x: 8 in 4,946 of 6,142, 4 in 6,606 of 10,238 (two losses). v5p: 16 in 3,131 of 5,816 (more in most
    others), 8 in 7,822 of 9,520 of f32 and in 6,551 of 9,156 with `lmr` (15 attention kernels). s8 on a v6e: 8 in 1,306
    of 1,408 (a product [32768, 1024] x [1024, 4096], which has half the bundles of the same in bf16).
    """
    kinds = forms.split(".")
    wide = ("bf16" in kinds and "lmr" not in kinds) or ("s8" in kinds and "mubr" in kinds)
    return (8 if wide else 4) if "mubr" in kinds else (16 if wide else 8)


class _Span(NamedTuple):
    """Bundles [first, end) of a loop, over which a branch jumps back, or of a region that a branch may skip. The loop
    repeats, or the region is entered, if the predicate holds (or does not hold, if negated)."""

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
        """(bundle after the delay slots, negated, predicate, region) of each branch."""
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
        """The schedule of the lines that were added. `rows` holds the filled slots of each of `units`, by bundle."""
        spans: list[_Span] = []
        for after, negated, predicate, target in self._branches:
            start = self._starts.get(target)
            if start is None:
                continue  # a branch out of the op, seen once in 225 ops, behind the last region
            if start < after:
                spans.append(_Span(start, after, "loop", predicate, negated))
            elif after < start:  # entered if the branch around it is not taken
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
