"""Trip counts of loops, when the program's text fixes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.hlo import Computation, Instruction
from shardwright.planner.tuning import MAX_ORIGIN_STEPS

_SWAPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_KNOWN = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')

#: Opcodes that forward a value. A conversion of a counter keeps its value.
_SAME = frozenset({"copy", "bitcast", "convert", "optimization-barrier", "opt-barrier", "reshape"})

_ARITHMETIC: Mapping[str, Callable[[int, int], int | None]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "minimum": min,
    "maximum": max,
    # towards zero, as HLO divides integers
    "divide": lambda a, b: (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1) if b else None,
}

#: Which instructions run a computation.
CallSites = Mapping[Computation, Sequence[Instruction]]


@dataclass(frozen=True, slots=True)
class TripCount:
    """Executions of a loop's body. is_exact: false when the loop may end earlier."""

    count: int
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class _Element:
    """One leaf of a value resolved no further: a carried element, an argument, an instruction's result."""

    instruction: Instruction
    path: tuple[int, ...] = ()


class TripCounter:
    """Counts the trips of one module's loops.

    sites: per computation its call sites; bounds passed down by a loop or a call are looked up there.
    """

    def __init__(self, sites: CallSites) -> None:
        self._sites = sites

    def trips(self, loop: Instruction) -> TripCount | None:
        """Trips of a `while` from the counter in its condition: first value, constant step, constant limit; None
        without one.

        Recognizes the lowerings of `lax.scan`, `fori_loop` and comparisons in `while_loop`, and XLA's own
        `known_trip_count`. Among conjoined conditions the tightest limit counts.
        """
        config = loop.attributes.get("backend_config")
        if config is not None and (match := _KNOWN.search(_unescape(config.text))):
            return TripCount(int(match[1]))
        (condition,) = loop.called["condition"]
        return self._trips_of_test(loop, self._source(condition.root))

    def _trips_of_test(self, loop: Instruction, test: _Element | None) -> TripCount | None:
        if test is None:
            return None
        operands = [self._source(operand) for operand in test.instruction.operands]
        if test.instruction.opcode == "and":
            bounds = [trips for operand in operands if (trips := self._trips_of_test(loop, operand)) is not None]
            return TripCount(min(trips.count for trips in bounds), is_exact=False) if bounds else None
        if test.instruction.opcode != "compare":
            return None
        lhs, rhs = operands
        direction = test.instruction.get("direction", "")
        if not self._is_carried(lhs, loop):
            lhs, rhs, direction = rhs, lhs, _SWAPPED.get(direction, "")
        if lhs is None or rhs is None or not self._is_carried(lhs, loop):
            return None
        limit = self._constant(rhs, loop)
        first = self._value(self._source(loop.operands[0], lhs.path))
        step = self._step(loop, lhs.path)
        if first is None or limit is None or not step:
            return None
        count = _count(first, limit, step, direction)
        return None if count is None else TripCount(count)

    # ---- carried elements ---------------------------------------------------
    def _is_carried(self, element: _Element | None, loop: Instruction) -> bool:
        """Whether it is an element of the condition's or the body's parameter."""
        if element is None or element.instruction.opcode != "parameter":
            return False
        parameters = [called.parameters[0] for name in ("condition", "body") for called in loop.called[name]]
        return element.instruction in parameters

    def _constant(self, element: _Element, loop: Instruction) -> int | None:
        """The limit's value: a constant, or a loop-invariant element."""
        if not self._is_carried(element, loop):
            return self._value(element)
        if not self._is_invariant(loop, element.path):
            return None
        return self._value(self._source(loop.operands[0], element.path))

    def _is_invariant(self, loop: Instruction, path: tuple[int, ...]) -> bool:
        (body,) = loop.called["body"]
        return self._source(body.root, path) == _Element(body.parameters[0], path)

    def _step(self, loop: Instruction, path: tuple[int, ...]) -> int | None:
        """The constant added by the body to a carried element."""
        (body,) = loop.called["body"]
        update = self._source(body.root, path)
        if update is None or update.instruction.opcode not in ("add", "subtract"):
            return None
        lhs, rhs = (self._source(operand) for operand in update.instruction.operands)
        counter = _Element(body.parameters[0], path)
        if update.instruction.opcode == "add" and rhs == counter:
            lhs, rhs = rhs, lhs
        step = self._value(rhs) if lhs == counter else None
        return step if step is None or update.instruction.opcode == "add" else -step

    # ---- origins of values ------------------------------------------------
    def _source(self, instruction: Instruction, path: tuple[int, ...] = ()) -> _Element | None:
        """The origin of an element of a value, through tuples, copies and calls."""
        for _ in range(MAX_ORIGIN_STEPS):
            opcode = instruction.opcode
            if opcode == "get-tuple-element":
                instruction, path = instruction.operands[0], (instruction.index, *path)
            elif opcode == "tuple" and path:
                instruction, path = instruction.operands[path[0]], path[1:]
            elif opcode in _SAME:
                instruction = instruction.operands[0]
            elif opcode == "call":
                instruction = instruction.called["to_apply"][0].root
            elif opcode == "parameter" and (argument := self._argument(instruction)) is not None:
                instruction = argument
            else:
                return _Element(instruction, path)
        return None

    def _argument(self, parameter: Instruction) -> Instruction | None:
        """The argument of a called computation's parameter, given a single call site."""
        sites = self._call_sites(parameter)
        if len(sites) == 1 and sites[0].opcode == "call":
            return sites[0].operands[parameter.index]
        return None

    def _call_sites(self, parameter: Instruction) -> Sequence[Instruction]:
        for computation, sites in self._sites.items():
            if parameter in computation.parameters:
                return sites
        return ()

    def _value(self, element: _Element | None, depth: int = 0) -> int | None:
        """The integer that an element always is, or None."""
        if element is None or depth > MAX_ORIGIN_STEPS:
            return None
        instruction = element.instruction
        if instruction.opcode == "constant":
            return _integer(instruction)
        if instruction.opcode == "parameter":
            return self._value_of_parameter(element, depth)
        if instruction.opcode == "while":
            if not self._is_invariant(instruction, element.path):
                return None
            return self._value(self._source(instruction.operands[0], element.path), depth + 1)
        if instruction.opcode in _ARITHMETIC:
            lhs, rhs = (self._value(self._source(operand), depth + 1) for operand in instruction.operands)
            return None if lhs is None or rhs is None else _ARITHMETIC[instruction.opcode](lhs, rhs)
        return None

    def _value_of_parameter(self, element: _Element, depth: int) -> int | None:
        """The value of a parameter's element: the same at every call, invariant in every loop carrying it."""
        values = set()
        for site in self._call_sites(element.instruction):
            if site.opcode == "while":
                operand = site.operands[0] if self._is_invariant(site, element.path) else None
            elif site.opcode == "call":
                operand = site.operands[element.instruction.index]
            else:
                operand = None
            values.add(None if operand is None else self._value(self._source(operand, element.path), depth + 1))
        return values.pop() if len(values) == 1 else None


def _count(first: int, limit: int, step: int, direction: str) -> int | None:
    distance = limit - first
    if direction == "NE":
        return distance // step if distance % step == 0 and distance // step >= 0 else None
    if direction in ("LE", "GE"):
        distance += 1 if direction == "LE" else -1
    if (direction in ("LT", "LE")) != (step > 0) or direction not in ("LT", "LE", "GT", "GE"):
        return None
    return max(0, -(-distance // step))


def _integer(constant: Instruction) -> int | None:
    """The value of a scalar; None on fractions and arrays."""
    try:
        return int(constant.payload.strip())
    except ValueError:
        return None


def _unescape(text: str) -> str:
    """A backend's configuration, printed in JSON or in a string with JSON inside."""
    return json.loads(text) if text.startswith('"') and isinstance(json.loads(text), str) else text
