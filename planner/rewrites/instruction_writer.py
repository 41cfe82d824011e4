"""Writing instructions in place of one: each with a name made of its name, and its source line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.hlo import ArrayShape, Computation, Instruction, Module, Shape, parse
from shardwright.planner.rewrites import edit

#: Makes the result of an instruction of others, which it returns; takes a module's names, and the regions that what it
#: writes shares, by what tells them apart.
Rewrite = Callable[[Instruction, edit.Names, dict[str, Computation]], list[Instruction]]


def rewrite_instructions(module: Module, is_rewritten: Callable[[Instruction], bool], rewrite: Rewrite) -> Module:
    """`module` with some instructions rewritten, without what only these called; the same one where there are none."""
    found = {instruction for instruction in module.instructions() if is_rewritten(instruction)}
    if not found:
        return module
    names = edit.Names(module)
    regions: dict[str, Computation] = {}
    made = edit.insert_ahead_of(module, found, lambda _, instruction: rewrite(instruction, names, regions))
    called = {each for instruction in made.instructions() for group in instruction.called.values() for each in group}
    kept = [each for each in made.computations if each.is_entry or each in called]
    return edit.module_of(made, [*regions.values(), *kept])


class InstructionWriter:
    """Writes what stands in place of `instead_of`; `written` holds it in order."""

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
        made = Instruction(name, opcode, shape, operands, line=self._instead_of.line)
        made.attributes = {name: edit.attribute(name, text) for name, text in attributes.items()}
        if "metadata" in self._instead_of.attributes:
            made.attributes["metadata"] = self._instead_of.attributes["metadata"]
        self.written.append(made)
        return made

    def elementwise(self, opcode: str, *operands: Instruction) -> Instruction:
        """An instruction whose result has the shape of its first operand."""
        leaf = operands[0].shape.leaves[0]
        return self.array(opcode, leaf.element_type, leaf.dimensions, *operands)

    def reduce(self, shape: Shape, region: Computation, dims: Sequence[int], *operands: Instruction) -> Instruction:
        """A reduction of arrays, from initial values, over `dims`."""
        made = self.instruction("reduce", shape, *operands, dimensions=f"{{{','.join(map(str, dims))}}}")
        made.called = {"to_apply": (region,)}
        made.attributes |= edit.callee_attributes(made.called)
        return made

    def spread(self, value: Instruction, dims: tuple[int, ...], along: Sequence[int]) -> Instruction:
        """An array over all of `dims`: its own dimensions are those of `along`."""
        mapped = f"{{{','.join(map(str, along))}}}"
        return self.array("broadcast", value.shape.leaves[0].element_type, dims, value, dimensions=mapped)

    def constant(self, element_type: str, value: float) -> Instruction:
        """A scalar."""
        made = self.array("constant", element_type, ())
        made.payload = str(value)
        return made

    def element(self, of: Instruction, index: int) -> Instruction:
        """An array of a tuple."""
        leaf = of.shape.leaves[index]
        made = self.array("get-tuple-element", leaf.element_type, leaf.dimensions, of, index=str(index))
        made.index = index
        return made


def reduction_region(name: str, opcode: str, element_type: str) -> Computation:
    """A region of this name that takes two numbers to one by `opcode`."""
    region = parse(f"""HloModule region

ENTRY {name} {{
  {name}.a = {element_type}[] parameter(0)
  {name}.b = {element_type}[] parameter(1)
  ROOT {name}.both = {element_type}[] {opcode}({name}.a, {name}.b)
}}
""").entry
    region.is_entry = False
    return region
