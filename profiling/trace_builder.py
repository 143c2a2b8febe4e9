"""Writes a program's execution as the ``*.xplane.pb`` a TPU would have written, with durations given by the caller.

So the parser can be timed (`parse_speed.py`) and checked against xprof on a TPU trace without a TPU. Planes, lines
and stats follow xprof's schema (``xplane_schema.cc``): device planes ``/device:TPU:N``; lines ``Steps``,
``XLA Modules``, ``XLA Ops``, ``Async XLA Ops``; per operation ``hlo_category``, ``flops``, ``bytes_accessed``,
``tf_op``, ``source``, ``program_id``, ``symbol_id``; per event ``device_offset_ps`` and ``device_duration_ps``; per
execution ``run_id``. It is built, not recorded: the file says so in its hostname.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tomat.perf.profile.hlo import CONTROL_OPCODES, FREE_OPCODES, HloProgram, Instruction
from tomat.perf.profile.hlo_costs import COLLECTIVES, base_opcode, kernel_flops
from tomat.perf.profile.hlo_kernels import trip_count
from tomat.perf.profile.protos import new_message

PS_PER_SECOND = 1e12
BUILT_HOST = "built-not-recorded"
SECONDS_BETWEEN_STEPS = 50e-6
START_UNIX_NS = 1_700_000_000_000_000_000
STEPS, MODULES, OPS, ASYNC = 1, 2, 3, 4  # line ids; xprof finds lines by name


def hlo_category(program: HloProgram, instruction: Instruction) -> str:
    """The category that XLA:TPU's profiler writes, as far as the opcode and the fusion tell it."""
    opcode = instruction.opcode
    if opcode != "fusion":
        return opcode
    inner = {i.opcode for i in program.inner(instruction)}
    if base := sorted({base_opcode(o) for o in inner} & COLLECTIVES):
        return f"{base[0]} fusion"
    if "convolution" in inner or "dot" in inner:
        return "convolution fusion"
    kind = instruction.proto.fusion_kind
    return {"kLoop": "loop fusion", "kInput": "input fusion", "kOutput": "output fusion"}.get(kind, "custom fusion")


class _Stats:
    """Interns stat and event names of one plane."""

    def __init__(self, plane: Any) -> None:
        self.plane = plane
        self.ids: dict[str, int] = {}

    def add(self, target: Any, **values: int | str | bytes) -> None:
        for name, value in values.items():
            if name not in self.ids:
                self.ids[name] = len(self.ids) + 1
                metadata = self.plane.stat_metadata[self.ids[name]]
                metadata.id, metadata.name = self.ids[name], name
            kind = {bytes: "bytes_value", str: "str_value", int: "uint64_value"}[type(value)]
            setattr(target.add(metadata_id=self.ids[name]), kind, value)


def serialise_program(program: HloProgram) -> bytes:
    """The program as a serialised `HloProto`, including fields that tomat does not read."""
    message = new_message("HloProto")
    message.hlo_module.CopyFrom(program.module)
    return message.SerializeToString(deterministic=True)


def build_xspace(
    program: HloProgram,
    device_kind: str,
    op_seconds: Callable[[Instruction], float],
    n_steps: int,
    hlo_proto: bytes | None = None,
) -> bytes:
    """A serialised XSpace of `n_steps` executions of `program` on one device.

    Args:
        program: the program that runs.
        device_kind: JAX's name of the chip.
        op_seconds: gives the duration of one execution of a kernel.
        n_steps: number of executions.
        hlo_proto: serialised HloProto to embed; None leaves the HLO out.
    """
    space = new_message("XSpace")
    space.hostnames.append(BUILT_HOST)
    modules = space.planes.add(name="/host:metadata", id=1)
    if hlo_proto is not None:
        metadata = modules.event_metadata[program.program_id]
        metadata.id, metadata.name = program.program_id, f"{program.name}({program.program_id})"
        _Stats(modules).add(metadata.stats, hlo_proto=hlo_proto)
    end_ps = _DevicePlane(space, program, device_kind, op_seconds).write(n_steps)
    environment = space.planes.add(name="Task Environment", id=2)
    stop_ns = START_UNIX_NS + end_ps // 1000
    _Stats(environment).add(environment.stats, profile_start_time=START_UNIX_NS, profile_stop_time=stop_ns)
    return space.SerializeToString()


class _DevicePlane:
    """One TPU's plane."""

    def __init__(
        self, space: Any, program: HloProgram, device_kind: str, op_seconds: Callable[[Instruction], float]
    ) -> None:
        self.program, self.op_seconds = program, op_seconds
        self.plane = space.planes.add(name="/device:TPU:0", id=100)
        self.stats = _Stats(self.plane)
        self.stats.add(self.plane.stats, device_type_string=device_kind)
        names = {STEPS: "Steps", MODULES: "XLA Modules", OPS: "XLA Ops", ASYNC: "Async XLA Ops"}
        self.lines = {key: self.plane.lines.add(id=key, name=name, timestamp_ns=0) for key, name in names.items()}
        self.metadata_ids: dict[str, int] = {}
        """Name of an event -> id of its metadata."""
        self.in_flight: dict[str, int] = {}
        self.durations: dict[str, int] = {}

    def write(self, n_steps: int) -> int:
        now = 1_000_000
        for step in range(n_steps):
            begin = now
            now = self._run(self.program.entry_id, now)
            module = self._metadata(f"{self.program.name}({self.program.program_id})")
            self._event(MODULES, module.id, begin, now, {"run_id": 7000 + step})
            self._event(STEPS, self._metadata(str(step)).id, begin, now, {"group_id": step})
            now += int(SECONDS_BETWEEN_STEPS * PS_PER_SECOND)
        return now

    def _run(self, computation_id: int, now: int) -> int:
        """Write a computation's kernels one after another. Returns the time of its end, in picoseconds."""
        for instruction in self.program.computations[computation_id]:
            if instruction.opcode in FREE_OPCODES:
                continue
            begin = now
            if instruction.opcode == "while":
                body, condition = instruction.called_ids[:2]
                for _ in range(round(trip_count(self.program, instruction) or 1)):
                    now = self._run(condition, now)
                    now = self._run(body, now)
                now = self._run(condition, now)
            elif instruction.opcode in CONTROL_OPCODES:
                now = self._run(instruction.called_ids[0], now)
            else:
                now += self._duration(instruction)
            if instruction.opcode.endswith("-start"):
                self.in_flight[instruction.name] = begin
            if instruction.opcode.endswith("-done"):
                started = self.in_flight.pop(self.program.operands(instruction)[0].name, begin)
                self._event(ASYNC, self._op_metadata(self.program.operands(instruction)[0]), started, now, {})
            offsets = {"device_offset_ps": begin, "device_duration_ps": now - begin}
            self._event(OPS, self._op_metadata(instruction), begin, now, offsets)
        return now

    def _duration(self, instruction: Instruction) -> int:
        if instruction.name not in self.durations:
            self.durations[instruction.name] = int(self.op_seconds(instruction) * PS_PER_SECOND)
        return self.durations[instruction.name]

    def _event(self, line: int, metadata_id: int, begin: int, end: int, stats: dict[str, int]) -> None:
        event = self.lines[line].events.add(metadata_id=metadata_id, offset_ps=begin, duration_ps=end - begin)
        self.stats.add(event.stats, **stats)

    def _metadata(self, name: str) -> Any:
        identity = self.metadata_ids.setdefault(name, len(self.metadata_ids) + 1)
        metadata = self.plane.event_metadata[identity]
        metadata.id, metadata.name = identity, name
        return metadata

    def _op_metadata(self, instruction: Instruction) -> int:
        metadata = self._metadata(f"%{instruction.name} = {instruction.opcode}()")
        if metadata.display_name:
            return metadata.id
        metadata.display_name = instruction.name

        self.stats.add(
            metadata.stats,
            hlo_category=hlo_category(self.program, instruction),
            flops=int(kernel_flops(self.program, instruction) or 0),
            bytes_accessed=self._bytes_accessed(instruction),
            program_id=self.program.program_id,
            symbol_id=int(instruction.proto.id),
        )
        if instruction.op_name:
            self.stats.add(metadata.stats, tf_op=f"{instruction.op_name}:")
        if source := self.program.source(instruction):
            self.stats.add(metadata.stats, source=source)
        return metadata.id

    def _bytes_accessed(self, instruction: Instruction) -> int:
        """Bytes of operands and results in any memory: the profiler's stat does not distinguish HBM from VMEM."""
        operands = {o.proto.id: o for o in self.program.operands(instruction)}.values()
        if instruction.opcode in CONTROL_OPCODES:
            return 0
        return sum(o.shape.byte_count() for o in operands) + instruction.shape.byte_count()
