"""How often a loop runs, where the program's text fixes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.hlo import Computation, Instruction

#: Trips that a loop is priced at where nothing bounds them: many, so that what it moves is worth moving out of it.
UNKNOWN_TRIPS = 10

_SWAPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_KNOWN = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')

#: What hands a value on as it is. A conversion of a counter keeps its value.
_SAME = frozenset({"copy", "bitcast", "convert", "optimization-barrier", "opt-barrier", "reshape"})

#: Constant expressions are followed no deeper than this.
_MAX_STEPS = 200

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
    """Executions of a loop's body. is_exact: false where the loop may end earlier."""

    count: int
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class _Element:
    """One leaf of a value that is known no further: a carried element, an argument, an instruction's result."""

    instruction: Instruction
    path: tuple[int, ...] = ()


class TripCounter:
    """Counts the trips of one module's loops.

    sites: per computation the instructions that run it; a bound that a loop or a call hands down is looked up there.
    """

    def __init__(self, sites: CallSites) -> None:
        self._sites = sites

    def trips(self, loop: Instruction) -> TripCount | None:
        """Of a `while`: first value, constant step and constant limit of the counter that its condition compares;
        None where there is none.

        Reads what `lax.scan`, `fori_loop` and comparisons in `while_loop` lower to, and XLA's own
        `known_trip_count`. Of conditions that must hold together the tightest limit counts.
        """
        config = loop.attributes.get("backend_config")
        if config is not None and (known := _KNOWN.search(_unescape(config.text))):
            return TripCount(int(known[1]))
        (condition,) = loop.called["condition"]
        return self._trips_of_test(loop, self._source(condition.root))

    def _trips_of_test(self, loop: Instruction, test: _Element | None) -> TripCount | None:
        if test is None:
            return None
        operands = [self._source(operand) for operand in test.instruction.operands]
        if test.instruction.opcode == "and":
            found = [trips for operand in operands if (trips := self._trips_of_test(loop, operand)) is not None]
            return TripCount(min(trips.count for trips in found), is_exact=False) if found else None
        if test.instruction.opcode != "compare":
            return None
        left, right = operands
        direction = test.instruction.get("direction", "")
        if not self._is_carried(left, loop):
            left, right, direction = right, left, _SWAPPED.get(direction, "")
        if left is None or right is None or not self._is_carried(left, loop):
            return None
        limit = self._constant(right, loop)
        first = self._value(self._source(loop.operands[0], left.path))
        step = self._step(loop, left.path)
        if first is None or limit is None or not step:
            return None
        count = _count(first, limit, step, direction)
        return None if count is None else TripCount(count)

    # ---- what a loop carries ---------------------------------------------------
    def _is_carried(self, element: _Element | None, loop: Instruction) -> bool:
        """Whether it is an element of what the condition or the body takes."""
        if element is None or element.instruction.opcode != "parameter":
            return False
        parameters = [called.parameters[0] for name in ("condition", "body") for called in loop.called[name]]
        return element.instruction in parameters

    def _constant(self, element: _Element, loop: Instruction) -> int | None:
        """The value of what the condition compares with: a constant, or an element that the body hands on."""
        if not self._is_carried(element, loop):
            return self._value(element)
        if not self._is_invariant(loop, element.path):
            return None
        return self._value(self._source(loop.operands[0], element.path))

    def _is_invariant(self, loop: Instruction, path: tuple[int, ...]) -> bool:
        (body,) = loop.called["body"]
        return self._source(body.root, path) == _Element(body.parameters[0], path)

    def _step(self, loop: Instruction, path: tuple[int, ...]) -> int | None:
        """The constant that the body adds to an element of what it carries."""
        (body,) = loop.called["body"]
        update = self._source(body.root, path)
        if update is None or update.instruction.opcode not in ("add", "subtract"):
            return None
        left, right = (self._source(operand) for operand in update.instruction.operands)
        counter = _Element(body.parameters[0], path)
        if update.instruction.opcode == "add" and right == counter:
            left, right = right, left
        step = self._value(right) if left == counter else None
        return step if step is None or update.instruction.opcode == "add" else -step

    # ---- where values come from ------------------------------------------------
    def _source(self, instruction: Instruction, path: tuple[int, ...] = ()) -> _Element | None:
        """What makes an element of a value, through tuples, copies, calls and what loops hand on unchanged."""
        for _ in range(_MAX_STEPS):
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
        """What the only call hands to a called computation's parameter."""
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
        if element is None or depth > _MAX_STEPS:
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
            left, right = (self._value(self._source(operand), depth + 1) for operand in instruction.operands)
            return None if left is None or right is None else _ARITHMETIC[instruction.opcode](left, right)
        return None

    def _value_of_parameter(self, element: _Element, depth: int) -> int | None:
        """The value of a parameter's element: the same at every call, unchanged by every loop that carries it."""
        found = set()
        for site in self._call_sites(element.instruction):
            if site.opcode == "while":
                operand = site.operands[0] if self._is_invariant(site, element.path) else None
            elif site.opcode == "call":
                operand = site.operands[element.instruction.index]
            else:
                operand = None
            found.add(None if operand is None else self._value(self._source(operand, element.path), depth + 1))
        return found.pop() if len(found) == 1 else None


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
    """The value of a scalar; None for fractions and for arrays."""
    try:
        return int(constant.payload.strip())
    except ValueError:
        return None


def _unescape(text: str) -> str:
    """A backend's configuration may be printed as JSON or as a string that holds JSON."""
    return json.loads(text) if text.startswith('"') and isinstance(json.loads(text), str) else text
