"""Writes instructions in place of one: each with a name derived from its name, and its source line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.hlo import ArrayShape, Computation, Instruction, Module, Shape, parse
from shardwright.planner.rewrites import edit

#: Makes the result of an instruction of others, which it returns; takes a module's names, and the regions that what it
#: writes shares, by what tells them apart.
Rewrite = Callable[[Instruction, edit.Names, dict[str, Computation]], list[Instruction]]


def rewrite_instructions(module: Module, is_rewritten: Callable[[Instruction], bool], rewrite: Rewrite) -> Module:
    """`module` with some instructions rewritten, without their private callees; `module` itself without any."""
    instructions = {instruction for instruction in module.instructions() if is_rewritten(instruction)}
    if not instructions:
        return module
    names = edit.Names(module)
    regions: dict[str, Computation] = {}
    rewritten = edit.insert_ahead_of(module, instructions, lambda _, instruction: rewrite(instruction, names, regions))
    called = {
        callee for instruction in rewritten.instructions() for group in instruction.called.values() for callee in group
    }
    computations = [
        computation for computation in rewritten.computations if computation.is_entry or computation in called
    ]
    return edit.module_of(rewritten, [*regions.values(), *computations])


class InstructionWriter:
    """Writes the replacement of `instead_of`; `written` holds it in order."""

    def __init__(self, instead_of: Instruction, names: edit.Names) -> None:
        self._instead_of, self._names = instead_of, names
        self.written: list[Instruction] = []

    def array(
        self, opcode: str, element_type: str, dims: tuple[int, ...], *operands: Instruction, **attributes: str
    ) -> Instruction:
        """An instruction that makes one array. attributes: their texts by name."""
        return self.instruction(opcode, ArrayShape(element_type, dims), *operands, **attributes)

    def instruction(self, opcode: str, shape: Shape, *operands: Instruction, **attributes: str) -> Instruction:
        """An instruction of any shape."""
        name = self._names.like(self._instead_of.name, opcode)
        new = Instruction(name, opcode, shape, operands, line=self._instead_of.line)
        new.attributes = {name: edit.attribute(name, text) for name, text in attributes.items()}
        if "metadata" in self._instead_of.attributes:
            new.attributes["metadata"] = self._instead_of.attributes["metadata"]
        self.written.append(new)
        return new

    def elementwise(self, opcode: str, *operands: Instruction) -> Instruction:
        """An instruction whose result has the shape of its first operand."""
        leaf = operands[0].shape.leaves[0]
        return self.array(opcode, leaf.element_type, leaf.dimensions, *operands)

    def reduce(self, shape: Shape, region: Computation, dims: Sequence[int], *operands: Instruction) -> Instruction:
        """A reduction of arrays, from initial values, over `dims`."""
        reduction = self.instruction("reduce", shape, *operands, dimensions=f"{{{','.join(map(str, dims))}}}")
        reduction.called = {"to_apply": (region,)}
        reduction.attributes |= edit.callee_attributes(reduction.called)
        return reduction

    def spread(self, value: Instruction, dims: tuple[int, ...], along: Sequence[int]) -> Instruction:
        """An array over all of `dims`: its own dimensions are those of `along`."""
        mapped = f"{{{','.join(map(str, along))}}}"
        return self.array("broadcast", value.shape.leaves[0].element_type, dims, value, dimensions=mapped)

    def constant(self, element_type: str, value: float) -> Instruction:
        """A scalar."""
        scalar = self.array("constant", element_type, ())
        scalar.payload = str(value)
        return scalar

    def element(self, of: Instruction, index: int) -> Instruction:
        """An array of a tuple."""
        leaf = of.shape.leaves[index]
        element_of_tuple = self.array("get-tuple-element", leaf.element_type, leaf.dimensions, of, index=str(index))
        element_of_tuple.index = index
        return element_of_tuple


def reduction_region(name: str, opcode: str, element_type: str) -> Computation:
    """A region of this name: `opcode` on two numbers."""
    region = parse(f"""HloModule region

ENTRY {name} {{
  {name}.a = {element_type}[] parameter(0)
  {name}.b = {element_type}[] parameter(1)
  ROOT {name}.both = {element_type}[] {opcode}({name}.a, {name}.b)
}}
""").entry
    region.is_entry = False
    return region
