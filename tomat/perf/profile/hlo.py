"""An optimised HLO module as the profiler and the planner need it: its instructions, and their source lines.

It is read from HLO text, or from a serialised ``HloModuleProto`` or ``HloProto``, also inside a trace. XLA's own parser
(``jaxlib``) converts text, so all three arrive as the same protocol buffer and nothing is parsed here.
"""

import contextlib
import graphlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tomat.base.errors import TomatError

# `PrimitiveType` (xla/xla_data.proto): number -> (name in HLO text, bits of an element). Sub-byte types are packed.
PRIMITIVE_TYPES: dict[int, tuple[str, int]] = {
    1: ("pred", 8), 2: ("s8", 8), 3: ("s16", 16), 4: ("s32", 32), 5: ("s64", 64), 6: ("u8", 8), 7: ("u16", 16),
    8: ("u32", 32), 9: ("u64", 64), 10: ("f16", 16), 11: ("f32", 32), 12: ("f64", 64), 13: ("tuple", 0),
    14: ("opaque", 0), 15: ("c64", 64), 16: ("bf16", 16), 17: ("token", 0), 18: ("c128", 128), 19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8), 21: ("s4", 4), 22: ("u4", 4), 23: ("f8e4m3b11fnuz", 8), 24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8), 26: ("s2", 2), 27: ("u2", 2), 28: ("f8e4m3", 8), 29: ("f8e3m4", 8), 30: ("s1", 1),
    31: ("u1", 1), 32: ("f4e2m1fn", 4), 33: ("f8e8m0fnu", 8), 35: ("f6e2m3fn", 6), 36: ("f6e3m2fn", 6),
}  # fmt: skip
UNKNOWN_TYPE = ("?", 0)
HBM_MEMORY_SPACE = 0
"""Layout memory space of ordinary device memory; on a TPU `S(1)` is VMEM, `S(2)` sync flags, `S(5)` the host."""

FREE_OPCODES = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "domain",
     "opt-barrier", "optimization-barrier", "partition-id", "replica-id"}
)  # fmt: skip
"""Opcodes for which XLA emits no kernel: they name or alias a buffer."""

CONTROL_OPCODES = frozenset({"while", "conditional", "call"})

CALLS = {"while": 2, "conditional": 1, "call": 1, "fusion": 1}
"""The least number of computations that an instruction of the opcode calls."""
MAX_SIZE = 2**48
"""Limit of a dimension: no memory holds 256 T elements."""
MAX_WINDOW = 2**24

LIBRARY_FILES = re.compile(r"(^|/)(jax|jaxlib|haliax|equinox|contextlib\.py)(/|$)")
"""Files whose lines are of no use in a report: wrappers between the model's line and the primitive."""


@dataclass(frozen=True)
class Frame:
    file: str
    function: str
    line: int


@dataclass(frozen=True)
class Shape:
    """The shape of an array or tuple, with the bits of an element and the memory space of the layout."""

    dims: tuple[int, ...]
    bits: int
    memory_space: int
    parts: "tuple[Shape, ...]" = ()

    @property
    def elements(self) -> int:
        """Elements of the array, or of all arrays of the tuple."""
        if self.parts:
            return sum(p.elements for p in self.parts)
        return math.prod(self.dims)

    def byte_count(self, memory_space: int | None = None) -> int:
        """Bytes, without padding, of the arrays in `memory_space` (None: anywhere)."""
        if self.parts:
            return sum(p.byte_count(memory_space) for p in self.parts)
        if memory_space is not None and memory_space != self.memory_space:
            return 0
        return (self.elements * self.bits + 7) // 8 if self.bits else 0


class Instruction:
    """One HLO instruction. `proto`, a decoded `HloInstructionProto`, has the rest of its fields."""

    def __init__(self, proto: Any, computation_id: int) -> None:
        self.proto, self.computation_id = proto, computation_id
        self.name: str = proto.name
        self.opcode: str = proto.opcode
        self.shape = _shape(proto.shape)
        self.op_name: str = proto.metadata.op_name
        """The path of JAX scopes, e.g. `jit(step)/transpose(jvp(Model))/while/body/Attention/dot_general`."""
        self.frame_id: int = proto.metadata.stack_frame_id
        self.operand_ids: tuple[int, ...] = tuple(proto.operand_ids)
        self.called_ids: tuple[int, ...] = tuple(proto.called_computation_ids)
        self.custom_call_target: str = proto.custom_call_target

    @cached_property
    def backend_config(self) -> dict[str, Any]:
        """The backend's JSON; empty if there is none, or if it is not JSON (some GPU custom calls)."""
        if not self.proto.backend_config:
            return {}
        try:
            config = json.loads(self.proto.backend_config)
        except (ValueError, RecursionError):
            return {}
        return config if isinstance(config, dict) else {}

    @property
    def estimated_cycles(self) -> float | None:
        """XLA's own estimate for one execution (TPU fusions only); None if the compiler gave none."""
        cycles = self.backend_config.get("window_config", {}).get("estimated_cycles")
        return float(cycles) if cycles is not None and 0 < float(cycles) < math.inf else None


class HloProgram:
    """A module: computations, instructions by id and name, stack frames, allocations."""

    def __init__(self, module: Any, program_id: int = 0, buffer_assignment: Any = None, origin: str = "") -> None:
        """From a decoded `HloModuleProto` (and `BufferAssignmentProto`). `program_id` overrides the module's id;
        `origin` names the file in errors."""
        self.module, self.origin = module, origin
        self.name: str = module.name
        self.program_id: int = program_id or module.id
        self.entry_id: int = module.entry_computation_id
        self.computations = {c.id: [Instruction(i, c.id) for i in c.instructions] for c in module.computations}
        self.computation_names: dict[int, str] = {c.id: c.name for c in module.computations}
        self.roots: dict[int, int] = {c.id: c.root_id for c in module.computations}
        self.memory_bytes: dict[str, int] = {}
        """Bytes allocated by kind (`parameter`, `constant`, `temporary`); empty without a buffer assignment."""
        for allocation in buffer_assignment.buffer_allocations if buffer_assignment is not None else ():
            if allocation.is_thread_local or allocation.color != HBM_MEMORY_SPACE:
                continue
            kind = "constant" if allocation.is_constant else "temporary"
            if allocation.is_entry_computation_parameter:
                kind = "parameter"
            self.memory_bytes[kind] = self.memory_bytes.get(kind, 0) + allocation.size
        self._frames: dict[int, tuple[Frame, ...]] = {}

    @cached_property
    def by_id(self) -> dict[int, Instruction]:
        return {i.proto.id: i for instructions in self.computations.values() for i in instructions}

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for instructions in self.computations.values() for i in instructions}

    @cached_property
    def by_kernel_name(self) -> dict[str, str]:
        """Name of a GPU's kernel -> name of its instruction. In a kernel's name XLA writes `_` for characters that no
        function name may have. A kernel name that two instructions share is left out."""
        names: dict[str, str | None] = {}
        for name in self.by_name:
            kernel = re.sub(r"\W", "_", name, flags=re.ASCII)
            names[kernel] = None if kernel in names else name
        return {kernel: name for kernel, name in names.items() if name is not None}

    def frames(self, instruction: Instruction) -> tuple[Frame, ...]:
        """The Python stack of an instruction, innermost first; empty if the module has none."""
        frame_id = instruction.frame_id
        if not frame_id:
            metadata = instruction.proto.metadata
            return (Frame(metadata.source_file, "", metadata.source_line),) if metadata.source_file else ()
        if frame_id not in self._frames:
            index, stack, current = self.module.stack_frame_index, [], frame_id
            # The length is limited, because the parents in a damaged module may form a circle.
            while 0 < current <= len(index.stack_frames) and len(stack) < len(index.stack_frames):
                frame = index.stack_frames[current - 1]
                where = index.file_locations[frame.file_location_id - 1]
                function = index.function_names[where.function_name_id - 1]
                stack.append(Frame(index.file_names[where.file_name_id - 1], function, where.line))
                current = frame.parent_frame_id
            self._frames[frame_id] = tuple(stack)
        return self._frames[frame_id]

    def root(self, computation_id: int) -> Instruction:
        return self.by_id[self.roots[computation_id]]

    def scheduled(self, computation_id: int) -> list[Instruction]:
        """The instructions of a computation, in the order of the schedule if there is one: 87 of the 135 scheduled
        computations of the 200M step are stored in another order."""
        sequences = self.module.schedule.sequences
        ids = sequences[computation_id].instruction_ids if computation_id in sequences else ()
        return [self.by_id[i] for i in ids if i in self.by_id] or self.computations[computation_id]

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.by_id[i] for i in instruction.operand_ids]

    def inner(self, instruction: Instruction) -> list[Instruction]:
        """The instructions inside a kernel: those of its fused or wrapped computations, without the scalar reducers
        that `reduce`, `scatter` and the collectives apply; for other kernels, the instruction itself."""
        if instruction.opcode not in ("fusion", "async-start", "async-update", "async-done", "call"):
            return [instruction]
        found: list[Instruction] = []
        for called in instruction.called_ids:
            for inner in self.computations[called]:
                found += self.inner(inner) if inner.opcode in ("fusion", "call") else [inner]
        return found or [instruction]

    @cached_property
    def callers(self) -> dict[int, list[Instruction]]:
        """The loops, calls, fusions and conditionals that run each computation, by its id."""
        found: dict[int, list[Instruction]] = {}
        for instruction in self.by_id.values():
            if instruction.opcode in (*CONTROL_OPCODES, "fusion"):
                for called in set(instruction.called_ids):
                    found.setdefault(called, []).append(instruction)
        return found

    def source(self, instruction: Instruction) -> str:
        """`file:line` of the innermost frame that is model code; "" if the module has no metadata."""
        frames = self.frames(instruction)
        for frame in (*(f for f in frames if not LIBRARY_FILES.search(f.file)), *frames[:1]):
            # The path from its package on: the part after `site-packages/`, or else the last three components.
            path = "/".join(frame.file.split("/")[-3:]).lstrip("/")
            if "site-packages/" in frame.file:
                path = frame.file.split("site-packages/", 1)[1]
            return f"{path}:{frame.line}"
        return ""


@contextlib.contextmanager
def sound_parts(program: HloProgram) -> Iterator[None]:
    """Turns errors from a damaged module into a TomatError. `check_structure` has checked its structure, but not each
    instruction: an operand or a dimension may be missing, for example."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, StopIteration) as error:
        raise TomatError(
            f"{program.origin}: the HLO of {program.name or 'a program'} is damaged: its parts do not fit together "
            f"({type(error).__name__}: {error}). Dump the module or take the profile again."
        ) from error


def check_structure(module: Any) -> None:
    """Raise ValueError, with the reason, for a decoded `HloModuleProto` with circles or with references that lead
    nowhere."""
    called: dict[int, set[int]] = {c.id: set() for c in module.computations}
    seen: set[int] = set()
    if len(called) != len(module.computations):
        raise ValueError("two computations have one id")
    for computation in module.computations:
        before: set[int] = set()
        for i in computation.instructions:
            windows = [size for window in i.window.dimensions for size in (window.size, window.base_dilation)]
            n_called, sizes = len(i.called_computation_ids), list(i.shape.dimensions)
            for wrong, how in (
                (i.id in seen, f"has the id {i.id}, as another one has"),
                (not before.issuperset(i.operand_ids), "has an operand that does not stand before it"),
                (not called.keys() >= set(i.called_computation_ids), "calls a computation that is not there"),
                (n_called < CALLS.get(i.opcode, 0), f"calls {n_called} computations"),
                (any(not 0 <= size < MAX_SIZE for size in sizes), f"has the shape {sizes}"),
                (any(not 0 <= size < MAX_WINDOW for size in windows), "has a window larger than arrays are"),
            ):
                if wrong:
                    raise ValueError(f"{i.name or i.id} {how}")
            seen.add(i.id)
            before.add(i.id)
            called[computation.id].update(i.called_computation_ids)
        if computation.root_id not in before:
            raise ValueError(f"{computation.name or computation.id} has a result that is not among its instructions")
    try:
        graphlib.TopologicalSorter(called).prepare()
    except graphlib.CycleError:
        raise ValueError("a computation calls itself") from None


def _shape(proto: Any) -> Shape:
    if proto.tuple_shapes:
        return Shape((), 0, HBM_MEMORY_SPACE, tuple(_shape(p) for p in proto.tuple_shapes))
    _, bits = PRIMITIVE_TYPES.get(proto.element_type, UNKNOWN_TYPE)
    return Shape(tuple(proto.dimensions), bits, proto.layout.memory_space)
