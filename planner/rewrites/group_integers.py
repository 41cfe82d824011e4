"""Integers of groups: where they begin and end, and which rows and blocks are theirs."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.hlo import ArrayShape, Computation, Instruction
from shardwright.planner.rewrites.instruction_writer import InstructionWriter, reduction_region


class GroupIntegers:
    """Writes arrays of s32 with `writer`. regions: of reductions, shared by a module's products, by element type."""

    def __init__(self, writer: InstructionWriter, regions: dict[str, Computation]) -> None:
        self.writer, self._regions = writer, regions

    def sum_up_to(self, values: Instruction) -> Instruction:
        """Of each group and all before it. values: groups last."""
        shape = values.shape.leaves[0].dimensions
        dims, last = (*shape, shape[-1]), len(shape)
        before = self.compare(self.iota(dims, last), self.iota(dims, last - 1), "LE")
        zeros = self.writer.spread(self.writer.constant("s32", 0), dims, [])
        spread = self.writer.spread(values, dims, [*range(last - 1), last])
        return self.total(self.writer.array("select", "s32", dims, before, spread, zeros))

    def to_integers(self, sizes: Instruction) -> Instruction:
        leaf = sizes.shape.leaves[0]
        return sizes if leaf.element_type == "s32" else self.writer.array("convert", "s32", leaf.dimensions, sizes)

    def total(self, values: Instruction) -> Instruction:
        """The sum along the last dimension."""
        leaf = values.shape.leaves[0]
        region = self._regions.setdefault("s32", reduction_region("ragged_products.add", "add", "s32"))
        shape = ArrayShape("s32", leaf.dimensions[:-1])
        return self.writer.reduce(shape, region, [leaf.rank - 1], values, self.writer.constant("s32", 0))

    def binary(self, opcode: str, first: Instruction, second: Instruction) -> Instruction:
        return self.writer.elementwise(opcode, first, second)

    def filled(self, number: int, like: Instruction) -> Instruction:
        return self.writer.spread(self.writer.constant("s32", number), like.shape.leaves[0].dimensions, [])

    def plus(self, value: Instruction, number: int) -> Instruction:
        return self.binary("add", value, self.filled(number, value))

    def clamped(self, value: Instruction, largest: int) -> Instruction:
        """Between 0 and `largest`."""
        low = self.binary("maximum", value, self.filled(0, value))
        return self.binary("minimum", low, self.filled(largest, value))

    def iota(self, dims: Sequence[int], dim: int) -> Instruction:
        return self.writer.array("iota", "s32", tuple(dims), iota_dimension=str(dim))

    def compare(self, first: Instruction, second: Instruction, direction: str) -> Instruction:
        dims = first.shape.leaves[0].dimensions
        return self.writer.array("compare", "pred", dims, first, second, direction=direction)
