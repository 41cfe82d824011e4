"""A top-k of few elements becomes that many searches for the largest: a form XLA can split.

A `topk` searches one dimension whole; XLA gathers even its batch, outside manual computations
(`xla/manual_computation.py`). A reduce of the largest element and its position keeps the other dimensions; along the
searched one its partial results are gathered (`rules/reduction.py`). k such reduces, each blind to its predecessors'
results, equal the top-k.

Results are equal to the bit. XLA orders floats by the total order of IEEE 754 (−NaN < −∞ < … < −0 < 0 < … < ∞ < NaN)
and takes the first of equal ones. Integers of the floats' bits have the same order, with negative floats' bits
reversed; positions break ties.
"""

from __future__ import annotations

from math import prod

from shardwright.hlo import ArrayShape, Computation, Instruction, Module, TupleShape, parse
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.instruction_writer import InstructionWriter, rewrite_instructions
from shardwright.planner.tuning import MAX_TOP_K_ROUNDS

_FLOATS = frozenset({"bf16", "f16", "f32", "f64"})
_INTEGERS = frozenset({"s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64"})

#: Attributes that nothing else has.
_OF_TOP_K = frozenset({"k", "largest", "is_stable"})

#: The place of elements found in earlier rounds: behind all others, never found twice.
_FOUND = 2**31 - 1


def expand_top_k(module: Module) -> Module:
    """`module` with every top-k of few elements in rounds; `module` itself without any.

    Unchanged: searches of one row, with only the searched dimension to split, and element types of unknown order. The
    tuple of a top-k's results has its name.
    """
    return rewrite_instructions(module, _can_expand, lambda *arguments: _Rounds(*arguments).write())


def _can_expand(instruction: Instruction) -> bool:
    if instruction.opcode != "topk" or not 1 <= instruction.get("k") <= MAX_TOP_K_ROUNDS:
        return False
    searched = instruction.operands[0].shape.leaves[0]
    return searched.element_type in _FLOATS | _INTEGERS and prod(searched.dimensions[:-1]) > 1


class _Rounds:
    """Writes one top-k, and makes a tuple of it. regions: shared by the module's top-ks, by key type."""

    def __init__(self, top_k: Instruction, names: edit.Names, regions: dict[str, Computation]) -> None:
        self._top_k, self._names, self._regions = top_k, names, regions
        self._writer = InstructionWriter(top_k, names)
        self._add = self._writer.array
        searched = top_k.operands[0].shape.leaves[0]
        self._type, self._dims = searched.element_type, searched.dimensions
        bits = ELEMENT_BITS[self._type]
        self._key_type = f"s{bits}" if self._type in _FLOATS else self._type
        self._lowest = 0 if self._key_type.startswith("u") else -(2 ** (bits - 1))
        self._all_but_sign = 2 ** (bits - 1) - 1

    def write(self) -> list[Instruction]:
        """The new instructions behind the tuple, in order."""
        (array,) = self._top_k.operands
        keys, places = self._keys(array), self._add("iota", "s32", self._dims, iota_dimension=str(len(self._dims) - 1))
        lowest, found_place = self._writer.constant(self._key_type, self._lowest), self._writer.constant("s32", _FOUND)
        largest: list[Instruction] = []
        where: list[Instruction] = []
        for number in range(self._top_k.get("k")):
            if number:
                is_found = self._add("compare", "pred", self._dims, places, self._spread(where[-1]), direction="EQ")
                keys = self._add("select", self._key_type, self._dims, is_found, self._spread(lowest), keys)
                places = self._add("select", "s32", self._dims, is_found, self._spread(found_place), places)
            best = self._search(keys, places, lowest, found_place)
            largest.append(self._writer.element(best, 0))
            where.append(self._writer.element(best, 1))
        self._top_k.operands = (self._values(self._side_by_side(largest)), self._side_by_side(where))
        self._top_k.opcode = "tuple"
        attributes = self._top_k.attributes.items()
        self._top_k.attributes = {name: value for name, value in attributes if name not in _OF_TOP_K}
        return [edit.check_consistency(instruction) for instruction in self._writer.written]

    def _search(
        self, keys: Instruction, places: Instruction, lowest: Instruction, first_place: Instruction
    ) -> Instruction:
        """(the largest key, its first position) of each row."""
        if self._key_type not in self._regions:
            self._regions[self._key_type] = _larger(self._names.like("larger", self._key_type), self._key_type)
        region = self._regions[self._key_type]
        rows = self._dims[:-1]
        shape = TupleShape((ArrayShape(self._key_type, rows), ArrayShape("s32", rows)))
        return self._writer.reduce(shape, region, (len(rows),), keys, places, lowest, first_place)

    def _keys(self, array: Instruction) -> Instruction:
        """Integers in the order of the elements; in reverse order for the smallest."""
        keys = self._flip_negatives(array, self._key_type)
        return keys if self._top_k.get("largest", True) else self._add("not", self._key_type, self._dims, keys)

    def _values(self, keys: Instruction) -> Instruction:
        """The elements of these keys."""
        dims = keys.shape.leaves[0].dimensions
        if not self._top_k.get("largest", True):
            keys = self._add("not", self._key_type, dims, keys)
        return self._flip_negatives(keys, self._type)

    def _flip_negatives(self, value: Instruction, into: str) -> Instruction:
        """Keys of elements, or elements of keys: all bits but the sign's are inverted in negative floats."""
        if self._type not in _FLOATS:
            return value
        dims = value.shape.leaves[0].dimensions
        bits = value
        if into == self._key_type:
            bits = self._add("bitcast-convert", into, dims, value)
        zero, mask = (
            self._spread(self._writer.constant(self._key_type, literal), dims) for literal in (0, self._all_but_sign)
        )
        is_negative = self._add("compare", "pred", dims, bits, zero, direction="LT")
        turned = self._add("xor", self._key_type, dims, bits, mask)
        keys = self._add("select", self._key_type, dims, is_negative, turned, bits)
        return keys if into == self._key_type else self._add("bitcast-convert", into, dims, keys)

    def _side_by_side(self, columns: list[Instruction]) -> Instruction:
        """A row's elements of each round along a new last dimension."""
        rows = self._dims[:-1]
        element_type = columns[0].shape.leaves[0].element_type
        parts = [self._add("reshape", element_type, (*rows, 1), column) for column in columns]
        if len(parts) == 1:
            return parts[0]
        return self._add("concatenate", element_type, (*rows, len(parts)), *parts, dimensions=f"{{{len(rows)}}}")

    def _spread(self, value: Instruction, dims: tuple[int, ...] | None = None) -> Instruction:
        """A scalar, or one element a row, over all of the array, or over `dims`."""
        return self._writer.spread(value, dims or self._dims, range(value.shape.leaves[0].rank))


def _larger(name: str, key_type: str) -> Computation:
    """The region of a search: of two (key, place), the one with the larger key, the first of equal ones."""
    pair = f"({key_type}[], s32[])"
    text = f"""HloModule region

ENTRY {name} {{
  {name}.a = {key_type}[] parameter(0)
  {name}.at_a = s32[] parameter(1)
  {name}.b = {key_type}[] parameter(2)
  {name}.at_b = s32[] parameter(3)
  {name}.above = pred[] compare({name}.a, {name}.b), direction=GT
  {name}.equal = pred[] compare({name}.a, {name}.b), direction=EQ
  {name}.ahead = pred[] compare({name}.at_a, {name}.at_b), direction=LT
  {name}.first = pred[] and({name}.equal, {name}.ahead)
  {name}.is_a = pred[] or({name}.above, {name}.first)
  {name}.key = {key_type}[] select({name}.is_a, {name}.a, {name}.b)
  {name}.at = s32[] select({name}.is_a, {name}.at_a, {name}.at_b)
  ROOT {name}.best = {pair} tuple({name}.key, {name}.at)
}}
"""
    region = parse(text).entry
    region.is_entry = False
    return region
