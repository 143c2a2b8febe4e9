"""Derives how often a region of a TPU program runs, from the scalar instructions that decide it.

In the final VLIW bundles of an op, every value is defined once (``%s46_s6 = sadd.s32 1, %s20004_s17``: value ``s46`` in
register ``s6``), except values spilled to scalar memory, which have several stores. These definitions give the trip
count of a loop, and the share of iterations in which a predicated region runs, if they depend only on loop counters, on
indices of a kernel's grid or on prefetched operands.
"""

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

DEFINITION = re.compile(r"%([sp]\d+)_[sp]\d+ = ([a-z][\w.]*)\s*(.*?)(?=\s+;;|\s+\}(?:\s|$)|$)")
_STORE = re.compile(r"= sst \[smem:\[(#allocation\d+_spill)\]\] %([sp]\d+)_")
_SPILLED = re.compile(r"#allocation\d+_spill")
_GRID_INDEX = re.compile(r"iter bound = (\d+)")
_PREFETCH = re.compile(r"= dma\.\w+_to_smem .*?/\*(?:vmem|hbm)=\*/%(s\d+)_.*?/\*smem=\*/(%s\d+|\[#allocation\d+\])")
_PREFETCH_ONE = re.compile(r"= sst \[smem:(\[#allocation\d+\])\] %(s\d+)_")
"""The store of a prefetched operand of one element."""
_PREFETCHED = re.compile(r"#allocation(\d+)(?!\d|_spill)")
_SCALAR_OPERAND = re.compile(r"\[shape: s32\[\], index: (\d+), kind: input")
_ELEMENT = re.compile(r"#allocation\d+ \+ %s(\d+)_")
_COMMENT = re.compile(r"/\*.*?\*/")
_VALUE = re.compile(r"%([sp]\d+)_")

MAX_COMBINATIONS = 1 << 20
"""Most index combinations that are tried one by one to find a share."""

UNBOUNDED = (1 << 31) - 1
"""Stands for a dimension of a grid that is an operand of the kernel."""

_MASK = (1 << 32) - 1


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 32) if value >> 31 else value


_BINARY: dict[str, Callable[[int, int], int]] = {
    "sadd": lambda a, b: a + b,
    "ssub": lambda a, b: a - b,
    "smul": lambda a, b: a * b,
    "sshll": lambda a, b: a << (b & 31),
    "sshrl": lambda a, b: (a & _MASK) >> (b & 31),
    "sshra": lambda a, b: a >> (b & 31),
    "sand": lambda a, b: a & b,
    "sor": lambda a, b: a | b,
    "sxor": lambda a, b: a ^ b,
    "smin": min,
    "smax": max,
    "por": lambda a, b: int(bool(a or b)),
    "pand": lambda a, b: int(bool(a and b)),
    "pnand": lambda a, b: int(not (a and b)),
    "pnor": lambda a, b: int(not (a or b)),
    "pxor": lambda a, b: int(bool(a) != bool(b)),
    "scmp.eq": lambda a, b: int(a == b),
    "scmp.ne": lambda a, b: int(a != b),
    "scmp.lt": lambda a, b: int(a < b),
    "scmp.le": lambda a, b: int(a <= b),
    "scmp.gt": lambda a, b: int(a > b),
    "scmp.ge": lambda a, b: int(a >= b),
}


@dataclass(frozen=True)
class Symbol:
    """A quantity that the instructions leave open and a value depends on: `counter` of a loop, `grid` index, an element
    of a prefetched `operand`, a `scalar` operand, or `unknown`. `index` is the loop's first bundle, the dimension of
    the grid, or the number of the operand."""

    kind: str
    index: int = -1
    start: int = 0
    """First value of a counter, which advances by `step`. For an operand: the register that selects the element."""
    step: int = 1


UNKNOWN = Symbol("unknown")

Expression = Symbol | int | tuple
"""A symbol, a constant, or (operation, argument, ...)."""


class _Definition(NamedTuple):
    bundle: int
    operation: str
    text: str


class _Store(NamedTuple):
    bundle: int
    name: str
    """Name of the value."""
    loop: int = -1
    """First bundle of the loop that carries the value to its next iteration."""


@dataclass
class ScalarCode:
    """The scalar and predicate definitions of one op, and the loops around them."""

    loops: list[tuple[int, int]] = field(default_factory=list)
    """[first bundle, bundle after the last) of each loop."""
    regions: list[tuple[int, int]] = field(default_factory=list)
    """[first bundle, bundle after the last) of each predicated region."""
    _definitions: dict[str, _Definition] = field(default_factory=dict)
    _stores: dict[str, list[_Store]] = field(default_factory=dict)
    _prefetches: list[tuple[str, str]] = field(default_factory=list)
    _known: dict[str, Expression] = field(default_factory=dict)

    def add(self, bundle: int, text: str) -> None:
        for name, operation, arguments in DEFINITION.findall(text):
            self._definitions[name] = _Definition(bundle, operation, arguments)
        if "_spill" in text:
            for slot, name in _STORE.findall(text):
                self._stores.setdefault(slot, []).append(_Store(bundle, name))
        if "_to_smem" in text:
            self._prefetches += _PREFETCH.findall(text)
        if "= sst [smem:[#allocation" in text:
            self._prefetches += [(source, place) for place, source in _PREFETCH_ONE.findall(text)]

    @cached_property
    def prefetched(self) -> dict[int, int]:
        """Allocation in scalar memory -> number of the operand copied into it before the kernel starts."""
        found: dict[int, int] = {}
        for source, destination in self._prefetches:
            if destination.startswith("%"):
                definition = self._definitions.get(destination[1:])
                destination = definition.text if definition else ""
            allocation = _PREFETCHED.search(destination)
            for _ in range(8):  # follows the address arithmetic to the operand
                definition = self._definitions.get(source)
                if definition is None:
                    break
                index = re.search(r"index: (\d+), kind: input", definition.text)
                if definition.operation.startswith("inlined_call_operand") and index and allocation:
                    found[int(allocation[1])] = int(index[1])
                    break
                inner = re.search(r"%(s\d+)_", _COMMENT.sub("", definition.text))
                if inner is None:
                    break
                source = inner[1]
        return found

    def expression(self, name: str, depth: int = 0) -> Expression:
        """The value of `name` (such as ``p205``) in terms of constants and symbols."""
        if name not in self._known:
            if depth > 60:
                return UNKNOWN
            self._known[name] = UNKNOWN  # a value that depends on itself is unknown, unless it is a counter
            self._known[name] = self._expand(name, depth)
        return self._known[name]

    def _expand(self, name: str, depth: int) -> Expression:
        if name not in self._definitions:
            return UNKNOWN
        bundle, operation, text = self._definitions[name]
        bounds = set(_GRID_INDEX.findall(text))
        if len(bounds) == 1:
            return Symbol("grid", int(bounds.pop()))
        if operation == "sphi":
            inputs = _VALUE.findall(_COMMENT.sub("", text))
            return self._counter(bundle, inputs, name, depth) if len(inputs) == 2 else UNKNOWN
        if operation == "sld":
            return self._loaded(text, bundle, name, depth)
        if operation.startswith("inlined_call_operand"):
            scalar = _SCALAR_OPERAND.search(text)
            return UNKNOWN if scalar is None else Symbol("scalar", int(scalar[1]))
        if operation == "scalar_select":
            text = re.sub(r"/\*(?:predicate|on_true|on_false)=\*/", "", text)
        text = _COMMENT.sub("", text).strip().rstrip(",")
        arguments = [a.strip() for a in re.split(r",\s*(?![^(]*\))", text) if a.strip()]
        if arguments and re.fullmatch(r"\(!?%p\d+_p\d+\)", arguments[0]):
            arguments = arguments[1:]  # computed only if its region runs, and not used elsewhere
        elif arguments and "(" in arguments[0]:
            # `smov (%p, old), new`: `new` if the predicate holds, else `old`.
            match = re.fullmatch(r"\((!?)%(p\d+)_p\d+, (.+)\)", arguments[0])
            if match is None or len(arguments) != 2:
                return UNKNOWN
            predicate = self.expression(match[2], depth + 1)
            if match[1]:
                predicate = _folded(("pneg", predicate))
            return ("select", predicate, self._argument(arguments[1], depth), self._argument(match[3], depth))
        values = [self._argument(a, depth) for a in arguments]
        base = ".".join(operation.split(".")[:2]) if operation.startswith("scmp") else operation.split(".")[0]
        if operation == "scalar_select" and len(values) == 3:
            return ("select", *values)
        if len(values) == 2 and base in _BINARY:
            return _folded((base, *values))
        if len(values) == 1 and base in ("smov", "pmov"):
            return values[0]
        if len(values) == 1 and base == "pneg":
            return _folded((base, values[0]))
        return UNKNOWN

    def _argument(self, text: str, depth: int) -> Expression:
        match = re.fullmatch(r"%([sp]\d+)_[sp]\d+", text)
        if match:
            return self.expression(match[1], depth + 1)
        try:
            return _signed(int(text, 0))
        except ValueError:
            return UNKNOWN

    def _counter(self, bundle: int, inputs: list[str], name: str, depth: int) -> Expression:
        """A counter that starts as `inputs[0]`, if each iteration advances it by a constant to `inputs[1]`."""
        start = self.expression(inputs[0], depth + 1)
        if not isinstance(start, int):
            return UNKNOWN
        known = self._known
        itself = Symbol("itself", bundle, len(known))
        # `_known` is replaced meanwhile, because expressions found here contain `itself` and are not valid elsewhere.
        self._known = {k: v for k, v in known.items() if isinstance(v, Symbol) and v.kind == "itself"}
        self._known[name] = itself
        update = self.expression(inputs[1], depth + 1)
        self._known = known
        if isinstance(update, tuple) and update[0] == "sadd" and itself in update:
            step = update[1] if update[2] == itself else update[2]
            if isinstance(step, int) and step:
                return Symbol("counter", bundle, start, step)
        return UNKNOWN

    def _loaded(self, text: str, bundle: int, name: str, depth: int) -> Expression:
        spilled = _SPILLED.search(text)
        if spilled is None:
            allocation = _PREFETCHED.search(text)
            operand = self.prefetched.get(int(allocation[1])) if allocation else None
            element = _ELEMENT.search(text)
            return UNKNOWN if operand is None else Symbol("operand", operand, int(element[1]) if element else 0)
        stored = self._stored(spilled[0], bundle)
        if not stored:
            return UNKNOWN
        last = stored[0]
        if any(first <= last.bundle < end and not first <= bundle < end for first, end in self.regions):
            return UNKNOWN  # stored in a region that may have been skipped
        if len(stored) == 2:
            return self._counter(stored[1].loop, [last.name, stored[1].name], name, depth)
        return self.expression(last.name, depth + 1)

    def _stored(self, slot: str, bundle: int) -> list[_Store]:
        """The stores that a load from a slot may see: the last one before it, and if that is before a loop around the
        load, the last one of an iteration."""
        stores = self._stores.get(slot, [])
        before = [store for store in stores if store.bundle < bundle]
        if not before:
            return []
        last = max(before)
        for first, end in sorted(self.loops, key=lambda loop: loop[0] - loop[1]):
            if last.bundle < first <= bundle < end:
                later = [store for store in stores if bundle <= store.bundle < end]
                if later:
                    return [last, max(later)._replace(loop=first)]
        return [last]

    def in_core(self, name: str) -> bool:
        """Whether an address is in VMEM."""
        return name in self._definitions and self._definitions[name].operation.endswith(".vmem")

    def changed_share(self, predicate: str, grid: tuple[int, ...]) -> float | None:
        """The share of a grid's steps in which a block changes, if `predicate` tests for that. It changes with the grid
        indices on which it depends, and with those outside of them. None if it depends on anything else."""
        found, seen, open_ = set(), {predicate}, [predicate]
        while open_:
            definition = self._definitions.get(open_.pop())
            if definition is None or definition.operation.startswith("inlined_call_operand"):
                return None
            indices = set(_GRID_INDEX.findall(definition.text))
            if len(indices) == 1:
                found.add(int(indices.pop()))
                continue
            spilled = _SPILLED.search(definition.text)
            if definition.operation == "sld" and spilled is None:
                return None
            stored = self._stored(spilled[0], definition.bundle) if spilled is not None else []
            names = _VALUE.findall(_COMMENT.sub("", definition.text))
            for used in (*names, *(store.name for store in stored)):
                if used not in seen:
                    seen.add(used)
                    open_.append(used)
        if not grid or max(found, default=0) >= len(grid) or UNBOUNDED in grid:
            return None
        moving = [number for number in found if grid[number] > 1]
        return math.prod(grid[: max(moving) + 1] if moving else ()) / math.prod(grid)

    def _condition(self, predicate: str, negated: bool) -> Expression:
        condition = self.expression(predicate) if predicate else 1  # a branch without a predicate is always taken
        return _folded(("pneg", condition)) if negated else condition

    def trip_count(
        self, first_bundle: int, predicate: str, negated: bool, known: tuple[Symbol, int] | None = None
    ) -> int | None:
        """How often the loop at `first_bundle` runs. It jumps back while `predicate` holds (or does not hold, if
        `negated`). `known` is a symbol and its value."""
        condition = self._condition(predicate, negated)
        if known is not None:
            condition = _put(condition, *known)
        symbols = symbols_of(condition)
        if len(symbols) != 1 or symbols[0].kind != "counter" or symbols[0].index != first_bundle:
            return None
        (symbol,) = symbols

        def left(trips: int) -> bool:
            """Whether the loop ends after so many iterations. The test is at the end of an iteration."""
            return not evaluate(condition, {symbol: symbol.start + (trips - 1) * symbol.step})

        most = 1
        while not left(most):
            most *= 2
            if most > 1 << 32:
                return None
        return bisect_left(range(most), True, lo=most // 2 + 1, key=left) if most > 1 else 1

    def scalar_trips(self, first_bundle: int, predicate: str, negated: bool) -> tuple[int, int, int] | None:
        """How often a loop runs if its bound is a scalar operand of the kernel, as for some grids of Pallas kernels:
        the operand's number, the trips if it is 0, and the trips that each unit adds; None for other loops."""
        symbols = symbols_of(self._condition(predicate, negated))
        scalars = [symbol for symbol in symbols if symbol.kind == "scalar"]
        if len(scalars) != 1 or len(symbols) != 2:
            return None
        one, two, five = (self.trip_count(first_bundle, predicate, negated, (scalars[0], n)) for n in (1, 2, 5))
        if one is None or two is None or five is None:
            return None
        slope = two - one
        return (scalars[0].index, one - slope, slope) if five == one + 4 * slope else None

    def entered_for(self, predicate: str, negated: bool) -> tuple[int, ...] | None:
        """The values, from 0 to 3, of one element of a prefetched operand (a block of a mask) for which a predicate
        holds; None if it depends on anything else."""
        condition = self._condition(predicate, negated)
        symbols = symbols_of(condition)
        if len(symbols) != 1 or symbols[0].kind != "operand":
            return None
        return tuple(value for value in range(4) if evaluate(condition, {symbols[0]: value}))

    def share(
        self,
        predicate: str,
        negated: bool,
        trips: Mapping[int, int | None],
        grid: tuple[int, ...],
        given: tuple[tuple[str, bool], ...] = (),
    ) -> tuple[float | None, int | None]:
        """The share of cases in which a predicate (or its negation) holds, None if it depends on data or cannot be
        derived here; and the number of the prefetched operand on which it depends (the last of several), or None.

        `given` holds (predicate, negated) of the regions around. Only cases in which these hold are counted.
        """
        condition = self._condition(predicate, negated)
        symbols = symbols_of(condition)
        kinds = {symbol.kind for symbol in symbols}
        if not symbols:
            return float(bool(evaluate(condition, {}))), None
        if kinds - {"counter", "grid", "operand"}:
            return None, None
        if "operand" in kinds:
            return None, max(symbol.index for symbol in symbols if symbol.kind == "operand")
        conditions = [self._condition(*each) for each in given]
        around = [c for c in conditions if symbols_of(c) and set(symbols_of(c)) <= set(symbols)]
        values: list[range] = []
        for symbol in symbols:
            count = trips.get(symbol.index) if symbol.kind == "counter" else dict(enumerate(grid)).get(symbol.index)
            if not count:
                return None, None
            values.append(range(symbol.start, symbol.start + count * symbol.step, symbol.step))
        if math.prod(len(v) for v in values) > MAX_COMBINATIONS:
            return None, None
        cases = held = 0
        for combination in itertools.product(*values):
            case = dict(zip(symbols, combination, strict=True))
            if all(evaluate(c, case) for c in around):
                cases += 1
                held += bool(evaluate(condition, case))
        return (held / cases if cases else 0.0), None


def symbols_of(expression: Expression) -> tuple[Symbol, ...]:
    """The distinct symbols in an expression, in order of appearance."""
    found: dict[Symbol, None] = {}
    open_ = [expression]
    while open_:
        item = open_.pop()
        if isinstance(item, Symbol):
            found[item] = None
        elif isinstance(item, tuple):
            open_ += item[1:]
    return tuple(found)


def _put(expression: Expression, symbol: Symbol, value: int) -> Expression:
    if isinstance(expression, tuple):
        return (expression[0], *(_put(e, symbol, value) for e in expression[1:]))
    return value if expression == symbol else expression


def _folded(expression: tuple) -> Expression:
    return expression if symbols_of(expression) else evaluate(expression, {})


def evaluate(expression: Expression, values: Mapping[Symbol, int]) -> int:
    """The value of an expression, as a signed 32-bit integer, for given values of the symbols."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, Symbol):
        return values[expression]
    operation, *arguments = expression
    if operation == "select":
        chosen = arguments[1] if evaluate(arguments[0], values) else arguments[2]
        return evaluate(chosen, values)
    known = [evaluate(a, values) for a in arguments]
    return int(not known[0]) if operation == "pneg" else _signed(_BINARY[operation](*known))
