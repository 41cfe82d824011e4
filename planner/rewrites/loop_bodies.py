"""Rewrites a loop's body with other carried elements."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.hlo import ArrayShape, Computation, Instruction, Shape, TupleShape
from shardwright.planner.rewrites import edit


def is_carried(instruction: Instruction, body: Computation) -> bool:
    """Whether a value is an element of the parameter of a loop's body or condition."""
    return instruction.opcode == "get-tuple-element" and instruction.operands[0] is body.parameters[0]


class LoopBody:
    """A loop's rewritten body: without the carried elements `dropped`, with others appended.

    shapes: of all carried elements afterwards.
    """

    def __init__(self, source: Instruction, names: edit.Names, dropped: Sequence[int], shapes: Sequence[Shape]) -> None:
        self.source = source
        self.names = names
        self.gone = dropped
        self.shape = TupleShape(tuple(shapes))
        (self.computation,) = source.called["body"]
        (parameter,) = self.computation.parameters
        self.parameter = edit.copy_of(parameter, (), shape=self.shape)
        self.made: dict[Instruction, Instruction] = {parameter: self.parameter}
        self.out = [self.parameter]
        self._elements: dict[int, Instruction] = {}
        for element in self.computation:
            if is_carried(element, self.computation) and element.index not in dropped:
                index = element.index - sum(other < element.index for other in dropped)
                self.made[element] = self._elements[index] = self._read(element.name, index, element)
                self.out.append(self.made[element])

    def _read(self, name: str, index: int, like: Instruction | None) -> Instruction:
        if like is not None:
            element = edit.copy_of(like, (self.parameter,), index=index)
        else:
            element = Instruction(name, "get-tuple-element", self.shape.elements[index], (self.parameter,), index=index)
        element.attributes["index"] = edit.attribute("index", str(index))
        return element

    def element(self, index: int, shape: Shape, name: str) -> Instruction:
        """A carried element, by its new number."""
        if index not in self._elements:
            self._elements[index] = self._read(self.names.like(name, "carried"), index, None)
            self.out.append(self._elements[index])
        return self._elements[index]

    def add(self, *instructions: Instruction) -> tuple[Instruction, ...]:
        """Append new instructions."""
        self.out += instructions
        return instructions

    def copy(self, old: Instruction) -> Instruction:
        """Copy an instruction of the original body."""
        if old not in self.made:
            self.made[old] = edit.copy_of(old, [self.made[operand] for operand in old.operands])
            self.out.append(self.made[old])
        return self.made[old]

    def with_operands(self, old: Instruction) -> Instruction:
        """Copy an instruction early, with its inputs: a row, or its number."""
        for operand in old.operands:
            self.with_operands(operand)
        return self.copy(old)

    def row_of(self, taker: Instruction, stack: Shape) -> list[Instruction]:
        """The start indices, in another stack, of the row `taker` reads or writes."""
        assert isinstance(stack, ArrayShape)
        first = taker.operands[1 if taker.opcode == "dynamic-slice" else 2]
        self.with_operands(first)
        if len(stack.dimensions) == 1:
            return [self.made[first]]
        zero = Instruction(self.names.like(first.name, "zero"), "constant", first.shape, payload="0")
        self.add(zero)
        return [self.made[first], *[zero] * (len(stack.dimensions) - 1)]

    def loop(
        self, carried: Sequence[Instruction], handed_on: Sequence[Instruction], out: list[Instruction]
    ) -> Instruction:
        """The loop over this body, appended to `out` with the tuple of its initial values."""
        root = edit.copy_of(self.computation.root, handed_on, shape=self.shape)
        body = edit.computation_of(self.computation, _read([*self.out, root]), root)
        start = edit.copy_of(self.source.operands[0], carried, shape=self.shape)
        loop = edit.copy_of(self.source, (start,), shape=self.shape)
        loop.called = {**self.source.called, "body": (body,), "condition": (self._condition(),)}
        loop.attributes |= edit.callee_attributes({name: loop.called[name] for name in ("body", "condition")})
        out += [start, loop]
        return loop

    def _condition(self) -> Computation:
        (source,) = self.source.called["condition"]
        (parameter,) = source.parameters
        copies: dict[Instruction, Instruction] = {}
        for old in _read([*(instruction for instruction in source if instruction is not source.root), source.root]):
            if old is parameter:
                copies[old] = edit.copy_of(old, (), shape=self.shape)
            elif is_carried(old, source):
                index = old.index - sum(other < old.index for other in self.gone)
                copies[old] = edit.copy_of(old, (copies[parameter],), index=index)
                copies[old].attributes["index"] = edit.attribute("index", str(index))
            else:
                copies[old] = edit.copy_of(old, [copies[operand] for operand in old.operands])
        return edit.computation_of(source, list(copies.values()), copies[source.root])


def _read(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The inputs of the last instruction, and parameters."""
    live = {instructions[-1]}
    for instruction in reversed(instructions):
        if instruction in live:
            live.update(instruction.operands)
    return [other for other in instructions if other in live or other.opcode == "parameter"]
