"""A loop's body written anew: other carried elements, the rest as it was."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.hlo import ArrayShape, Computation, Instruction, Shape, TupleShape
from shardwright.planner.rewrites import edit


def is_carried(instruction: Instruction, body: Computation) -> bool:
    """Whether it is an element of what a loop's body or condition is given."""
    return instruction.opcode == "get-tuple-element" and instruction.operands[0] is body.parameters[0]


class LoopBody:
    """A loop's body as it is written anew: elements `gone` are carried no longer, others come behind.

    shapes: of all elements that it carries then.
    """

    def __init__(self, source: Instruction, names: edit.Names, gone: Sequence[int], shapes: Sequence[Shape]) -> None:
        self.source = source
        self.names = names
        self.gone = gone
        self.shape = TupleShape(tuple(shapes))
        (self.computation,) = source.called["body"]
        (parameter,) = self.computation.parameters
        self.parameter = edit.copy_of(parameter, (), shape=self.shape)
        self.made: dict[Instruction, Instruction] = {parameter: self.parameter}
        self.out = [self.parameter]
        self._elements: dict[int, Instruction] = {}
        for each in self.computation:
            if is_carried(each, self.computation) and each.index not in gone:
                index = each.index - sum(other < each.index for other in gone)
                self.made[each] = self._elements[index] = self._read(each.name, index, each)
                self.out.append(self.made[each])

    def _read(self, name: str, index: int, like: Instruction | None) -> Instruction:
        if like is not None:
            made = edit.copy_of(like, (self.parameter,), index=index)
        else:
            made = Instruction(name, "get-tuple-element", self.shape.elements[index], (self.parameter,), index=index)
        made.attributes["index"] = edit.attribute("index", str(index))
        return made

    def element(self, index: int, shape: Shape, name: str) -> Instruction:
        """A carried element, by its new number."""
        if index not in self._elements:
            self._elements[index] = self._read(self.names.like(name, "carried"), index, None)
            self.out.append(self._elements[index])
        return self._elements[index]

    def add(self, *instructions: Instruction) -> tuple[Instruction, ...]:
        """Instructions that are new."""
        self.out += instructions
        return instructions

    def copy(self, old: Instruction) -> Instruction:
        """An instruction of the body as it was."""
        if old not in self.made:
            self.made[old] = edit.copy_of(old, [self.made[operand] for operand in old.operands])
            self.out.append(self.made[old])
        return self.made[old]

    def with_operands(self, old: Instruction) -> Instruction:
        """The same, ahead of its turn, with what it is made of: a row, or the number of one."""
        for operand in old.operands:
            self.with_operands(operand)
        return self.copy(old)

    def row_of(self, taker: Instruction, stack: Shape) -> list[Instruction]:
        """Where the row that `taker` reads or writes of one stack begins in another."""
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
        """The loop over this body, appended to `out` with the tuple that it begins with."""
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
        made: dict[Instruction, Instruction] = {}
        for old in _read([*(each for each in source if each is not source.root), source.root]):
            if old is parameter:
                made[old] = edit.copy_of(old, (), shape=self.shape)
            elif is_carried(old, source):
                index = old.index - sum(other < old.index for other in self.gone)
                made[old] = edit.copy_of(old, (made[parameter],), index=index)
                made[old].attributes["index"] = edit.attribute("index", str(index))
            else:
                made[old] = edit.copy_of(old, [made[operand] for operand in old.operands])
        return edit.computation_of(source, list(made.values()), made[source.root])


def _read(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Those that the last one is made of, and parameters."""
    read = {instructions[-1]}
    for instruction in reversed(instructions):
        if instruction in read:
            read.update(instruction.operands)
    return [each for each in instructions if each in read or each.opcode == "parameter"]
