"""Who reads what in a module: through tuples, barriers and what loops carry unchanged."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from functools import cached_property

from shardwright.hlo import ArrayShape, Computation, Instruction, Module
from shardwright.planner.attention.rebuild import live_instructions
from shardwright.planner.attention.tuning import MAX_ORIGIN_STEPS
from shardwright.planner.graph.manual_regions import find_inside

_SILENT = frozenset({"metadata", "sharding", "frontend_attributes", "to_apply"})


class Flow:
    """A module's values, as their readers see them."""

    def __init__(self, module: Module) -> None:
        self.in_regions = find_inside(module).regions  # attention in manual regions is theirs
        self._loops = {
            body: instruction
            for instruction in module.instructions()
            if instruction.opcode == "while"
            for body in instruction.called["body"]
        }
        self._computation_of = {
            parameter: computation for computation in module.computations for parameter in computation.parameters
        }
        self._numbers: dict[Instruction, int] = {}
        self._values: dict[object, int] = {}

    def source(self, value: Instruction) -> Instruction:
        """The instruction of the same computation that makes a value."""
        for _ in range(MAX_ORIGIN_STEPS):
            if value.opcode == "opt-barrier" and isinstance(value.shape, ArrayShape):
                value = value.operands[0]
            elif value.opcode != "get-tuple-element":
                return value
            else:
                whole = value.operands[0]
                while whole.opcode == "opt-barrier":
                    whole = whole.operands[0]
                if whole.opcode != "tuple":
                    return value
                value = whole.operands[value.index]
        return value

    def origin(self, value: Instruction) -> Instruction:
        """The instruction that makes a value, outside of loops that do not change it."""
        for _ in range(MAX_ORIGIN_STEPS):
            value = self.source(value)
            outer = self._entering(value)
            if outer is None:
                return value
            value = outer
        return value

    def number(self, value: Instruction) -> int:
        """A number that equal values share."""
        stack = [value]
        while stack:
            top = stack[-1]
            source = self.source(top)
            if top in self._numbers:
                stack.pop()
                continue
            inner = [source] if source is not top else list(top.operands)
            waiting = [operand for operand in inner if operand not in self._numbers]
            if waiting:
                stack += waiting
                continue
            stack.pop()
            if source is not top:
                self._numbers[top] = self._numbers[source]
            else:
                self._numbers[top] = self._values.setdefault(self._key(top), len(self._values))
        return self._numbers[value]

    def number_within(self, value: Instruction, inner: Collection[Instruction], start: Instruction) -> int:
        """The same for a value that is computed from `start` by values `inner`, whatever start is."""
        numbers = {start: self._values.setdefault(_shape_of(start), len(self._values))}
        stack = [value]
        while stack:
            top = stack[-1]
            sources = [self.source(operand) for operand in top.operands]
            waiting = [each for each in sources if each in inner and each not in numbers]
            if top in numbers or not waiting:
                stack.pop()
            else:
                stack += waiting
            if top not in numbers and not waiting:
                operands = tuple(numbers[each] if each in inner else self.number(each) for each in sources)
                numbers[top] = self._values.setdefault((text_of(top), operands), len(self._values))
        return numbers[value]

    def _key(self, value: Instruction) -> object:
        if value.opcode in ("parameter", "while", "conditional", "custom-call", "rng", "rng-bit-generator"):
            return value
        return text_of(value), tuple(self._numbers[operand] for operand in value.operands)

    def _entering(self, value: Instruction) -> Instruction | None:
        """The element of the loop's operand that an unchanged carried element is."""
        if value.opcode != "get-tuple-element" or value.operands[0].opcode != "parameter":
            return None
        parameter = value.operands[0]
        body = self._computation_of[parameter]
        loop = self._loops.get(body)
        if loop is None or body.root.opcode != "tuple":
            return None
        carried = self.source(body.root.operands[value.index])
        same = carried.opcode == "get-tuple-element" and carried.operands[0] is parameter
        if not same or carried.index != value.index:
            return None
        start = self.source(loop.operands[0])
        return start.operands[value.index] if start.opcode == "tuple" else None


def _shape_of(value: Instruction) -> Hashable:
    return tuple((leaf.element_type, leaf.dimensions) for leaf in value.shape.leaves)


def text_of(value: Instruction) -> Hashable:
    """An operation, without its operands."""
    texts = tuple((name, each.text) for name, each in value.attributes.items() if name not in _SILENT)
    regions = tuple(callee.root.opcode for callees in value.called.values() for callee in callees)
    return (value.opcode, _shape_of(value), value.payload, value.index, texts, regions)


class Readers:
    """The readers of each value of one computation, barriers and tuples looked through."""

    def __init__(self, computation: Computation, flow: Flow) -> None:
        self.computation, self.flow = computation, flow
        self.position = {instruction: place for place, instruction in enumerate(computation)}

    @cached_property
    def _readers(self) -> dict[Instruction, list[tuple[Instruction, int]]]:
        readers: dict[Instruction, list[tuple[Instruction, int]]] = {}
        live = live_instructions(self.computation.root, self.computation)
        for instruction in self.computation:
            if instruction in self._passing or instruction not in live:
                continue
            for place, operand in enumerate(instruction.operands):
                readers.setdefault(self.flow.source(operand), []).append((instruction, place))
        return readers

    @cached_property
    def _passing(self) -> frozenset[Instruction]:
        """Barriers, tuples whose only readers are barriers, and elements of either: each is only another name."""
        passing: set[Instruction] = set()
        users: dict[Instruction, list[Instruction]] = {}
        for instruction in self.computation:
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
        for instruction in self.computation:
            if self.flow.source(instruction) is not instruction:
                passing.add(instruction)
        for instruction in reversed(self.computation.instructions):
            is_whole = instruction.opcode == "tuple" or (
                instruction.opcode == "opt-barrier" and instruction.operands[0].opcode == "tuple"
            )
            if is_whole and not instruction.is_root and all(user in passing for user in users.get(instruction, ())):
                passing.add(instruction)
        return frozenset(passing)

    def of(self, value: Instruction) -> Sequence[tuple[Instruction, int]]:
        """Reading instructions, each with its operand's place."""
        return self._readers.get(value, ())

    def is_returned(self, value: Instruction) -> bool:
        """Whether it is the computation's result."""
        return self.flow.source(self.computation.root) is value
