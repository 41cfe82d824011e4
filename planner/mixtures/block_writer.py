"""Writes instructions over blocks: integers, gathers of rows by block, sums along the last dimension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwright.hlo import ArrayShape, Computation, Instruction, TupleShape, parse
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.instruction_writer import InstructionWriter, reduction_region

Dims = tuple[int, ...]


def dims_of(value: Instruction) -> Dims:
    return value.shape.leaves[0].dimensions


def type_of(value: Instruction) -> str:
    return value.shape.leaves[0].element_type


class BlockWriter(InstructionWriter):
    """Writes into one computation, each instruction in the name of the one that it serves.

    regions: of reductions and sorts, by what they do; new ones are added.
    """

    def __init__(self, instead_of: Instruction, names: edit.Names, regions: dict[str, Computation]) -> None:
        super().__init__(instead_of, names)
        self._regions = regions

    def serve(self, instead_of: Instruction) -> None:
        """Write in the name of this instruction from now on."""
        self._instead_of = instead_of

    @contextmanager
    def serving(self, instead_of: Instruction) -> Iterator[None]:
        """Write in the name of this instruction for a while."""
        before, self._instead_of = self._instead_of, instead_of
        yield
        self._instead_of = before

    # ---- shapes ------------------------------------------------------------------
    def reshape(self, value: Instruction, dims: Dims) -> Instruction:
        return value if dims_of(value) == dims else self.array("reshape", type_of(value), dims, value)

    def transpose(self, value: Instruction, order: Sequence[int]) -> Instruction:
        dims = tuple(dims_of(value)[dim] for dim in order)
        return self.array("transpose", type_of(value), dims, value, dimensions=f"{{{','.join(map(str, order))}}}")

    def convert(self, value: Instruction, element_type: str) -> Instruction:
        return value if type_of(value) == element_type else self.array("convert", element_type, dims_of(value), value)

    def filled(self, number: float, dims: Dims, element_type: str = "s32") -> Instruction:
        return self.spread(self.constant(element_type, number), dims, [])

    # ---- integers ----------------------------------------------------------------
    def iota(self, dims: Dims, dim: int) -> Instruction:
        return self.array("iota", "s32", dims, iota_dimension=str(dim))

    def compare(self, first: Instruction, second: Instruction, direction: str) -> Instruction:
        return self.array("compare", "pred", dims_of(first), first, second, direction=direction)

    def with_number(self, opcode: str, value: Instruction, number: int) -> Instruction:
        return self.elementwise(opcode, value, self.filled(number, dims_of(value)))

    def clamp(self, value: Instruction, largest: int) -> Instruction:
        """Between 0 and `largest`."""
        return self.with_number("minimum", self.with_number("maximum", value, 0), largest)

    def select(self, where: Instruction, value: Instruction, otherwise: float = 0) -> Instruction:
        """The value where `where`, of its leading dimensions, holds."""
        dims = dims_of(value)
        if dims_of(where) != dims:
            where = self.spread(where, dims, range(len(dims_of(where))))
        return self.array("select", type_of(value), dims, where, value, self.filled(otherwise, dims, type_of(value)))

    def total(self, value: Instruction, dims: Sequence[int] = (), element_type: str = "s32") -> Instruction:
        """The sum along some dimensions, by default the last."""
        gone = list(dims) or [len(dims_of(value)) - 1]
        shape = ArrayShape(element_type, tuple(size for dim, size in enumerate(dims_of(value)) if dim not in gone))
        return self.reduce(shape, self._sum(element_type), gone, value, self.constant(element_type, 0))

    def sum_before(self, values: Instruction, dim: int) -> Instruction:
        """Along one dimension, the sum of all before each."""
        dims = dims_of(values)
        size = dims[dim]
        pairs = (*dims[: dim + 1], size, *dims[dim + 1 :])  # `dim` of the result, then of what is summed
        other = [d for d in range(len(pairs)) if d != dim]
        earlier = self.compare(self.iota(pairs, dim + 1), self.iota(pairs, dim), "LT")
        return self.total(self.select(earlier, self.spread(values, pairs, other)), [dim + 1])

    def sort_with_places(self, keys: Instruction) -> Instruction:
        """The places, along the last dimension, of rising keys."""
        dims = dims_of(keys)
        last = len(dims) - 1
        shape = ArrayShape("s32", dims)
        both = self.instruction(
            "sort", _pair(shape), keys, self.iota(dims, last), dimensions=f"{{{last}}}", is_stable="true"
        )
        both.called = {"to_apply": (self._less(),)}
        both.attributes |= edit.callee_attributes(both.called)
        return self.element(both, 1)

    def shifted(self, place: Instruction, begins: Instruction, ends: Instruction, shift: Instruction) -> Instruction:
        """Each place, shifted as the part that it lies in. place: [R, E, a, b], others: [R, E, a, parts]."""
        dims = (*dims_of(place), dims_of(begins)[-1])
        each = self.spread(place, dims, [0, 1, 2, 3])
        begins, ends, shift = (self.spread(value, dims, [0, 1, 2, 4]) for value in (begins, ends, shift))
        inside = self.elementwise("and", self.compare(begins, each, "LE"), self.compare(each, ends, "LT"))
        return self.elementwise("add", place, self.total(self.select(inside, shift)))

    # ---- gathers -----------------------------------------------------------------
    def take(self, operand: Instruction, places: Instruction, batch: int) -> Instruction:
        """Rows along dimension `batch` of an array, at places of the same block; blocks are the dimensions before it.

        operand: [*blocks, rows, *rest], places: [*blocks, *some] -> [*blocks, *some, *rest].
        """
        dims, some = dims_of(operand), dims_of(places)
        rest = dims[batch + 1 :]
        indices = self.reshape(places, (*some, 1))
        blocks = ",".join(map(str, range(batch)))
        offsets = ",".join(str(len(some) + number) for number in range(len(rest)))
        sizes = ",".join(map(str, ((1,) * (batch + 1)) + rest))
        return self.array(
            "gather", type_of(operand), (*some, *rest), operand, indices,
            offset_dims=f"{{{offsets}}}", collapsed_slice_dims=f"{{{batch}}}", start_index_map=f"{{{batch}}}",
            operand_batching_dims=f"{{{blocks}}}", start_indices_batching_dims=f"{{{blocks}}}",
            index_vector_dim=str(len(some)), slice_sizes=f"{{{sizes}}}",
        )  # fmt: skip

    def take_across(self, operand: Instruction, places: Instruction) -> Instruction:
        """Rows that blocks have of others, at places (other · C + slot) of each: nothing is transposed for them.

        operand: [R, others, own, C, *rest], places: [R, own, *some] -> [R, own, *some, *rest].
        """
        dims, some = dims_of(operand), dims_of(places)
        rest, index = dims[4:], (*some, 1)
        parts = [self.reshape(self.with_number(way, places, dims[3]), index) for way in ("divide", "remainder")]
        indices = self.array("concatenate", "s32", (*some, 2), *parts, dimensions=f"{{{len(some)}}}")
        offsets = ",".join(str(len(some) + number) for number in range(len(rest)))
        sizes = ",".join(map(str, (1, 1, 1, 1, *rest)))
        return self.array(
            "gather", type_of(operand), (*some, *rest), operand, indices,
            offset_dims=f"{{{offsets}}}", collapsed_slice_dims="{1,3}", start_index_map="{1,3}",
            operand_batching_dims="{0,2}", start_indices_batching_dims="{0,1}",
            index_vector_dim=str(len(some)), slice_sizes=f"{{{sizes}}}",
        )  # fmt: skip

    # ---- regions -----------------------------------------------------------------
    def _sum(self, element_type: str) -> Computation:
        name = f"mixtures.add.{element_type}"
        if name not in self._regions:
            self._regions[name] = reduction_region(name, "add", element_type)
        return self._regions[name]

    def _less(self) -> Computation:
        return self._regions.setdefault("mixtures.less", _less_region())


def _pair(shape: ArrayShape) -> TupleShape:
    return TupleShape((shape, shape))


def _less_region() -> Computation:
    region = parse("""HloModule region

ENTRY mixtures.less {
  mixtures.less.a = s32[] parameter(0)
  mixtures.less.b = s32[] parameter(1)
  mixtures.less.c = s32[] parameter(2)
  mixtures.less.d = s32[] parameter(3)
  ROOT mixtures.less.is = pred[] compare(mixtures.less.a, mixtures.less.b), direction=LT
}
""").entry
    region.is_entry = False
    return region
