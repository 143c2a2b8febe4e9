"""The time of collectives on a slice's links, and how much of it the step waits for.

The model is a ring or torus. Along every axis that a collective spans, bytes move over the chip's links of that axis at
once, in both directions if the axis closes; the worst-placed chip decides. Permutes and all-to-alls are routed link by
link; the fullest link decides. Each hop adds its latency, and each collective a wait that nothing hides.

`ici_bytes_per_second` is the rate of all ports (4 in a plane, 6 in a cube) in both directions. Programs reach 0.9 of
it: https://jax-ml.github.io/scaling-book/tpus gives 45 GB/s each way for a port of v4 and v5e, and 90 for v5p and v6e;
the data sheets give 50 and 100.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from tomat.hardware.chips import Slice
from tomat.perf.cost.chip_model import ASSUMED_RATES, LinkRates
from tomat.perf.profile.hlo import FREE_OPCODES, HloProgram, Instruction
from tomat.perf.profile.hlo_costs import COLLECTIVES, base_opcode
from tomat.perf.profile.hlo_kernels import trip_count

Link = tuple[tuple[int, ...], int, int]
"""A directed link: the chip that it leaves, the axis, and +1 or -1."""


def coordinates(device_id: int, slice_: Slice) -> tuple[int, ...]:
    """Place of a device's chip. Ids count along the first axis first (`device.coords` of v6e:4x8 and v5p:2x2x2)."""
    chip_id = device_id // slice_.chip.jax_devices_per_chip
    return tuple(map(int, np.unravel_index(chip_id, slice_.topology, order="F")))


def route(source: Sequence[int], target: Sequence[int], slice_: Slice) -> list[Link]:
    """The links of the shortest way, one axis after another, around the ring if that is shorter."""
    links: list[Link] = []
    here = list(source)
    for axis, side in enumerate(slice_.topology):
        distance = target[axis] - here[axis]
        if slice_.wrap[axis] and abs(distance) > side // 2:
            distance -= side if distance > 0 else -side
        step = 1 if distance > 0 else -1
        for _ in range(abs(distance)):
            links.append((tuple(here), axis, step))
            here[axis] = (here[axis] + step) % side
    return links


def entrances_and_hops(group: Sequence[tuple[int, ...]], slice_: Slice) -> tuple[int, int]:
    """Links over which the worst-placed chip of a group can receive, and links between the two chips farthest apart.

    The chip receives over one link per axis, or two if the axis closes: a chip in the corner of an open mesh has one
    neighbour per axis. There is at least one link, because members of a group that skips chips still reach each other.
    """
    links = hops = 0
    for axis, places in enumerate(zip(*group, strict=True)):
        span = len(set(places))
        closed = slice_.wrap[axis] and span == slice_.topology[axis]
        hops += span // 2 if closed else span - 1
        if span > 1:
            links += 2 if closed and span > 2 else 1
    return max(1, links), hops


def participants(program: HloProgram, collective: Any) -> list[list[int]]:
    """The groups of partitions of a collective's `HloInstructionProto`, in any form that HLO has for them."""
    device_list = collective.collective_device_list.replica_groups or collective.replica_groups
    if any(group.replica_ids for group in device_list):
        return [list(group.replica_ids) for group in device_list]
    iota = collective.iota_collective_device_list
    if iota.num_replica_groups:
        ids = np.arange(prod(iota.iota_reshape_dims)).reshape(list(iota.iota_reshape_dims))
        if iota.iota_transpose_perm:
            ids = ids.transpose(list(iota.iota_transpose_perm))
        return ids.reshape(iota.num_replica_groups, iota.num_devices_per_group).tolist()
    mesh_axes = collective.mesh_axes_replica_group_list
    if mesh_axes.mesh.axes:
        return _mesh_groups(mesh_axes)
    assignment = program.module.device_assignment
    return [list(range(max(1, assignment.computation_count * max(1, assignment.replica_count))))]


def _mesh_groups(mesh_axes: Any) -> list[list[int]]:
    """Groups along named axes of a device mesh, or along parts of an axis (`pre_size`, `size`)."""
    mesh = mesh_axes.mesh
    sizes = [axis.size for axis in mesh.axes]
    ids = np.array(mesh.device_ids) if mesh.device_ids else np.arange(prod(sizes))
    if mesh.iota_transform.reshape_dims:
        ids = ids.reshape(list(mesh.iota_transform.reshape_dims)).transpose(list(mesh.iota_transform.transpose_perm))
    cuts: dict[int, set[int]] = defaultdict(set)
    wanted = []
    for reference in mesh_axes.axes:
        size = sizes[reference.mesh_axis_index]
        sub = reference.sub_axis_info
        first = max(1, sub.pre_size) if sub.size else 1
        last = first * sub.size if sub.size else size
        cuts[reference.mesh_axis_index] |= {first, last}
        wanted.append((reference.mesh_axis_index, first, last))
    shape: list[int] = []
    chosen: list[int] = []
    for axis, size in enumerate(sizes):
        bounds = sorted({1, size} | cuts[axis])
        for low, high in zip(bounds, bounds[1:], strict=False):
            if any(axis == a and first <= low and high <= last for a, first, last in wanted):
                chosen.append(len(shape))
            shape.append(high // low)
    rest = [place for place in range(len(shape)) if place not in chosen]
    members = prod(shape[place] for place in chosen)
    return ids.reshape(shape).transpose(rest + chosen).reshape(-1, members).tolist()


LINK_EFFICIENCY = 0.9
"""Share of a link's nominal bandwidth that a transfer between two chips reaches (see the module)."""
HOP_SECONDS = 1e-6
"""Latency of a hop (https://jax-ml.github.io/scaling-book/sharding: "about 1 us")."""


def link_bandwidth(slice_: Slice) -> float:
    """Nominal bytes/s of one link of a TPU, one way."""
    bandwidth = slice_.chip.ici_bytes_per_second
    assert bandwidth is not None  # true for every TPU
    return bandwidth / (2 * 2 * len(slice_.topology))


@dataclass(frozen=True)
class CollectiveTime:
    """One execution of a collective on one chip. The exposed and hidden times of an async pair sum to its seconds plus
    the start, unless it shares its links or its flight with another collective. A wait then includes the queue, and
    time beside only other transfers is neither exposed nor hidden."""

    opcode: str
    """Opcode of the collective itself (`all-gather`, ...), even if a fusion or an async pair wraps it."""
    n_participants: int
    """Chips of the largest group."""
    link_bytes: float
    """Bytes that one chip sends over its links."""
    seconds: float
    exposed_seconds: float
    """Time that the step waits. In an async pair, the done has it."""
    hidden_seconds: float
    """Time beside other kernels. In an async pair, the start has it."""
    links: frozenset[Link] | None = None
    """The links that a permute uses; None: all links."""


def collective_of(program: HloProgram, instruction: Instruction) -> Instruction | None:
    """The collective that a kernel is, starts or contains; None for other kernels and for the done of an async pair."""
    if instruction.opcode.endswith(("-done", "-update")):
        return None
    if base_opcode(instruction.opcode) in COLLECTIVES:
        return instruction
    return next((i for i in program.inner(instruction) if base_opcode(i.opcode) in COLLECTIVES), None)


def collective_seconds(
    program: HloProgram, instruction: Instruction, slice_: Slice, rates: LinkRates = ASSUMED_RATES
) -> CollectiveTime | None:
    """The time of a collective on TPUs, all of it exposed (`overlap` tells how much is hidden); None if `instruction`
    holds no collective."""
    collective = collective_of(program, instruction)
    if collective is None:
        return None
    nominal_rate = link_bandwidth(slice_)
    # Partitions are placed by the program's device assignment, or else in the order of the ids.
    assigned = [c.replica_device_ids[0] for c in program.module.device_assignment.computation_devices]
    if len(assigned) < slice_.n_devices or len(set(assigned)) < len(assigned):
        assigned = list(range(slice_.n_devices))
    where = [coordinates(device_id, slice_) for device_id in assigned]
    opcode = base_opcode(collective.opcode)
    operand_bytes = sum(o.shape.byte_count() for o in program.operands(collective))
    if opcode in ("collective-permute", "collective-broadcast", "all-to-all", "ragged-all-to-all"):
        if opcode == "collective-permute":
            pairs = [(p.source, p.target) for p in collective.proto.source_target_pairs if p.source != p.target]
            members = len({p for pair in pairs for p in pair})
            size = float(operand_bytes)
        else:
            groups = participants(program, collective.proto)
            members = max(len(group) for group in groups)
            pairs = [(a, b) for group in groups for a in group for b in group if a != b]
            size = operand_bytes / members
        routes = [route(where[a], where[b], slice_) for a, b in pairs]
        loads: dict[Link, float] = defaultdict(float)
        for link in chain.from_iterable(routes):  # all transfers run at once
            loads[link] += size
        hops = max(map(len, routes), default=0)
        seconds = max(loads.values(), default=0.0) / (nominal_rate * LINK_EFFICIENCY) + hops * HOP_SECONDS
        sent = size * len(pairs) / max(1, members)
        return CollectiveTime(opcode, members, sent, seconds, seconds, 0.0, frozenset(loads))
    groups = participants(program, collective.proto)
    members = max(len(group) for group in groups)
    whole = float(operand_bytes * members if opcode == "all-gather" else operand_bytes)
    # Shards of an all-reduce go round twice (scatter, then gather). If its result is only sliced, XLA:TPU has fused it
    # into a reduce-scatter, which goes round once.
    sliced = instruction.opcode == "fusion" and instruction.shape.byte_count() * members <= operand_bytes
    passes = 1 if opcode in ("all-gather", "reduce-scatter") or sliced else 2
    sent = passes * whole * (members - 1) / members
    seconds = 0.0
    places = [chips for group in groups if len(set(chips := [where[member] for member in group])) > 1]
    # Cores of one chip that belong to different groups share its links.
    at_once = Counter(chip for chips in places for chip in set(chips))
    for chips in places:
        entrances, hops = entrances_and_hops(chips, slice_)
        rate = entrances * nominal_rate * rates.ring_efficiency / max(at_once[chip] for chip in chips)
        seconds = max(seconds, sent / rate + passes * hops * HOP_SECONDS)
    return CollectiveTime(opcode, members, sent, seconds, seconds, 0.0)


SPREAD_START, SPREAD_DONE = "async-collective-start", "async-collective-done"
"""Prefixes in libtpu 0.0.46 of the names of the first and last kernel of an asynchronous collective fusion."""


def spread_collectives(program: HloProgram) -> dict[str, str]:
    """Name of each kernel over which an asynchronous collective fusion is spread -> name of the kernel that starts it.

    libtpu (0.0.46, on v5e) spreads a gather over many kernels, also in a loop. Each of them holds the whole collective,
    with one channel id, and does a part of it. Counted as one gather each, the gather of the head of an 800M on a
    v5e-64 was 107 gathers, 0.9 s of a step that took 1.1 s in all.
    """
    channels: dict[int, list[str]] = defaultdict(list)
    for instruction in program.by_name.values():
        if instruction.opcode == "fusion" and (inner := collective_of(program, instruction)) is not None:
            channels[inner.proto.channel_id].append(instruction.name)
    return {
        name: start
        for names in channels.values()
        if (start := next((name for name in names if name.startswith(SPREAD_START)), None)) is not None
        for name in names
    }


KernelSeconds = Callable[[Instruction], float | None]


def overlap(
    program: HloProgram, kernel_seconds: KernelSeconds, slice_: Slice, rates: LinkRates = ASSUMED_RATES
) -> dict[str, CollectiveTime]:
    """Exposed and hidden time of one execution of every collective kernel, by instruction name.

    An asynchronous collective runs between its start and its done, beside the kernels that the compiler scheduled
    there. Transfers that share a link queue. It has two entries: its start, with the hidden part and the bytes, and its
    done, with the wait. A collective in a fusion that also multiplies hides behind the fusion's own time.
    `kernel_seconds` is the time of one execution of a kernel without its collective; None counts as 0.
    """
    timeline = _Timeline(program, kernel_seconds, slice_, rates)
    timeline.run(program.entry_id)
    return timeline.times


@dataclass
class _Timeline:
    """Walks computations in the order of execution, with a clock and the time at which each link is free."""

    program: HloProgram
    kernel_seconds: KernelSeconds
    slice: Slice
    rates: LinkRates
    times: dict[str, CollectiveTime] = field(default_factory=dict)
    durations: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._spread = spread_collectives(self.program)

    def run(self, computation_id: int) -> float:
        """Seconds that a computation takes, waits included. A body that several loops share is walked once."""
        if computation_id in self.durations:
            return self.durations[computation_id]
        clock = 0.0
        free_at: dict[Link | None, float] = {}
        finish: dict[str, float] = {}
        worked = 0.0  # the clock without waits
        worked_at_start: dict[str, float] = {}
        for instruction in self.program.scheduled(computation_id):
            if instruction.opcode in FREE_OPCODES:
                continue
            started = self._started_by(instruction)
            if started is not None:
                if started in finish:
                    transfer = self.times[started]
                    wait = max(0.0, finish[started] - clock) + self.rates.start_seconds
                    hidden = min(transfer.seconds, worked - worked_at_start[started])
                    self.times[started] = replace(transfer, exposed_seconds=0.0, hidden_seconds=hidden)
                    self.times[instruction.name] = replace(
                        transfer, link_bytes=0.0, seconds=0.0, exposed_seconds=wait, hidden_seconds=0.0
                    )
                    clock += wait
                continue
            start = self._spread.get(instruction.name)
            transfer = collective_seconds(self.program, instruction, self.slice, self.rates)
            if transfer is None or start not in (None, instruction.name):
                seconds = self._compute(instruction)
                clock += seconds
                worked += seconds
            elif instruction.opcode.endswith("-start") or start is not None:
                used: list[Link | None] = [*transfer.links] if transfer.links is not None else [None]
                busy = [free_at.get(link, 0.0) for link in used] if transfer.links is not None else free_at.values()
                begin = max([clock, free_at.get(None, 0.0), *busy])
                finish[instruction.name] = begin + transfer.seconds
                for link in used:
                    free_at[link] = finish[instruction.name]
                worked_at_start[instruction.name] = worked
                self.times[instruction.name] = transfer
            else:
                inner = {i.opcode for i in self.program.inner(instruction)}
                beside = self._compute(instruction) if inner & {"dot", "convolution"} else 0.0
                hidden = min(beside, transfer.seconds)
                exposed = transfer.seconds - hidden + self.rates.start_seconds
                self.times[instruction.name] = replace(transfer, exposed_seconds=exposed, hidden_seconds=hidden)
                clock += beside + exposed
                worked += beside
        self.durations[computation_id] = clock
        return clock

    def _started_by(self, instruction: Instruction) -> str | None:
        """Name of the start that belongs to the done of a collective; None for other instructions."""
        if instruction.name.startswith(SPREAD_DONE):
            return self._spread.get(instruction.name)
        if not instruction.opcode.endswith("-done"):
            return None
        operands = self.program.operands(instruction)
        while operands and operands[0].opcode.endswith("-update"):
            operands = self.program.operands(operands[0])
        if not operands or collective_of(self.program, operands[0]) is None:
            return None
        return operands[0].name

    def _compute(self, instruction: Instruction) -> float:
        """Seconds of an instruction that is no collective: loops times their trips, the mean of branches."""
        called = instruction.called_ids
        if instruction.opcode == "while":
            trips = trip_count(self.program, instruction)
            return (1 if trips is None else trips) * (self.run(called[0]) + self.run(called[1]))
        if instruction.opcode == "conditional":
            return sum(self.run(branch) for branch in called) / max(1, len(called))
        if instruction.opcode == "call":
            return sum(self.run(branch) for branch in called)
        if instruction.opcode.endswith(("-start", "-done", "-update")):
            return 0.0  # asynchronous copies run beside the kernels
        return self.kernel_seconds(instruction) or 0.0
