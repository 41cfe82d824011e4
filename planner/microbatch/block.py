"""Instructions written one after the other into a computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.hlo import ArrayShape, Attribute, Computation, Instruction, Module, TupleShape
from shardwright.hlo.names import NameUniquer
from shardwright.hlo.shapes import Shape
from shardwright.planner.microbatch.kinds import Along
from shardwright.planner.rewrites import edit

INDEX_SHAPE = ArrayShape("s32", ())


class Names:
    """Names of a new module's instructions: the first instance keeps its own."""

    def __init__(self, module: Module) -> None:
        self._names = edit.Names(module)
        self._kept: set[str] = set()
        self._computations = NameUniquer()

    def of(self, instruction: Instruction) -> str:
        """The instruction's own name; a similar one for further instances."""
        if instruction.name in self._kept:
            return self._names.like(instruction.name, "again")
        self._kept.add(instruction.name)
        return instruction.name

    def like(self, base: str, suffix: str) -> str:
        return self._names.like(base, suffix)

    def computation(self, name: str) -> str:
        return self._computations.register(name)


@dataclass(slots=True)
class Block:
    """Instructions being written into one computation."""

    names: Names
    out: list[Instruction] = field(default_factory=list)
    _constants: dict[tuple[str, str], Instruction] = field(default_factory=dict)

    def add(self, instruction: Instruction) -> Instruction:
        self.out.append(instruction)
        return instruction

    def make(
        self,
        opcode: str,
        shape: Shape,
        operands: Sequence[Instruction],
        like: Instruction | str,
        suffix: str = "local",
        **attributes: Attribute,
    ) -> Instruction:
        """A new instruction, with the metadata of `like`."""
        name = like if isinstance(like, str) else like.name
        instruction = Instruction(self.names.like(name, suffix), opcode, shape, tuple(operands), dict(attributes))
        if isinstance(like, Instruction) and "metadata" in like.attributes:
            instruction.attributes["metadata"] = like.attributes["metadata"]
        return self.add(edit.check_consistency(instruction))

    def element(self, value: Instruction, leaf: int, like: Instruction | str) -> Instruction:
        assert isinstance(value.shape, TupleShape)
        shape = value.shape.elements[leaf]
        element = self.make("get-tuple-element", shape, [value], like, "part", index=edit.attribute("index", str(leaf)))
        element.index = leaf
        return element

    def tuple(self, values: Sequence[Instruction], like: Instruction | str) -> Instruction:
        return self.make("tuple", TupleShape(tuple(value.shape for value in values)), values, like, "parts")

    def constant(self, element_type: str, literal: str) -> Instruction:
        """A scalar, once in each computation."""
        key = (element_type, literal)
        constant = self._constants.get(key)
        if constant is None:
            constant = Instruction(
                self.names.like("constant", "micro"), "constant", ArrayShape(element_type, ()), payload=literal
            )
            self._constants[key] = self.add(constant)
        return constant

    def zeros(self, shape: ArrayShape, like: Instruction | str) -> Instruction:
        return self.spread(self.constant(shape.element_type, zero_literal(shape.element_type)), shape, like)

    def spread(self, scalar: Instruction, shape: ArrayShape, like: Instruction | str) -> Instruction:
        if not shape.rank:
            return scalar
        return self.make("broadcast", shape, [scalar], like, dimensions=edit.int_list("dimensions", ()))

    def reshape(self, value: Instruction, dimensions: Sequence[int], like: Instruction | str) -> Instruction:
        shape = value.shape
        assert isinstance(shape, ArrayShape)
        if shape.dimensions == tuple(dimensions):
            return value
        return self.make("reshape", ArrayShape(shape.element_type, tuple(dimensions)), [value], like)


def zero_literal(element_type: str) -> str:
    if element_type == "pred":
        return "false"
    return "(0, 0)" if element_type.startswith("c") else "0"


def offset(block: Block, index: Instruction, size: int, like: Instruction) -> Instruction:
    """Elements of one dimension in earlier micro-batches, `size` in each."""
    return block.make("multiply", INDEX_SHAPE, [index, block.constant("s32", str(size))], like)


def is_first(block: Block, index: Instruction) -> Instruction:
    """Whether this is the first micro-batch."""
    direction = edit.attribute("direction", "EQ")
    zero = block.constant("s32", "0")
    return block.make("compare", ArrayShape("pred", ()), [index, zero], "first", direction=direction)


def slice_micro_batch(
    block: Block, whole: Instruction, kind: Along, parts: int, index: Instruction, like: Instruction
) -> Instruction:
    """One micro-batch's part of a whole value."""
    shape = whole.shape
    assert isinstance(shape, ArrayShape)
    before, length, after = shape.dimensions[: kind.dim], shape.dimensions[kind.dim], shape.dimensions[kind.dim + 1 :]
    size = length // kind.outer // parts
    outer = (kind.outer,) if kind.outer > 1 else ()
    value = block.reshape(whole, (*before, *outer, length // kind.outer, *after), like)
    first = offset(block, index, size, like)
    zero = block.constant("s32", "0")
    starts = [zero] * len(before + outer) + [first] + [zero] * len(after)
    slice_sizes = (*before, *outer, size, *after)
    sizes = edit.int_list("dynamic_slice_sizes", slice_sizes)
    local = ArrayShape(shape.element_type, slice_sizes)
    value = block.make("dynamic-slice", local, [value, *starts], like, dynamic_slice_sizes=sizes)
    return block.reshape(value, (*before, length // parts, *after), like)


class Region:
    """A computation of one flat tuple, written ahead of the tuple's final shape.

    index_at: the element with the number of the micro-batch.
    """

    def __init__(self, names: Names, name: str, *, index_at: int) -> None:
        self.block = Block(names)
        self.name = names.computation(name)
        self.needs_index = False
        self._index_at = index_at
        self._elements: dict[int, Instruction] = {}
        self._parameter = Instruction(names.like(name, "carried"), "parameter", TupleShape(()), index=0)
        self.block.add(self._parameter)

    def element(self, leaf: int, shape: Shape, like: Instruction | str) -> Instruction:
        """An element of the tuple."""
        element = self._elements.get(leaf)
        if element is None:
            name = like if isinstance(like, str) else self.block.names.of(like)
            element = Instruction(name, "get-tuple-element", shape, (self._parameter,), index=leaf)
            element.attributes["index"] = edit.attribute("index", str(leaf))
            if isinstance(like, Instruction) and "metadata" in like.attributes:
                element.attributes["metadata"] = like.attributes["metadata"]
            self._elements[leaf] = self.block.add(element)
        return element

    def index(self) -> Instruction:
        """The number of the micro-batch."""
        self.needs_index = True
        return self.element(self._index_at, INDEX_SHAPE, self.block.names.like(self.name, "index"))

    def finish(self, shape: TupleShape, root: Instruction) -> Computation:
        """The computation of a tuple of this shape."""
        self._parameter.shape = shape
        root.is_root = True
        return Computation(self.name, self.block.out, root, (self._parameter,))
