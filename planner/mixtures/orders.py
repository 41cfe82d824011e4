"""Orders of rows: which integer arrays are computed from a sort's permutation alone, and what they are.

A mixture sorts its pairs of token and expert by expert. With `perm` the sort's permutation (place → pair) and `inverse`
the other way round (pair → place), arrays such as `perm // k` are functions of one of them, element by element. They
are evaluated for every number that it holds, 0 to its length - 1: what comes out is exact, however it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from shardwright.hlo import ArrayShape, Computation, Instruction
from shardwright.planner.attention.elementwise import ELEMENTWISE, OPERATIONS, REDUCTIONS, Array, compare, convert
from shardwright.planner.attention.flow import Flow, text_of
from shardwright.planner.attention.whole import UnknownValueError, WholeValues, literal

_INTEGERS = frozenset({"s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "pred"})
_IDEMPOTENT = frozenset({"and", "or", "maximum", "minimum"})
_VIEWS = frozenset({"reshape", "copy", "bitcast"})


def is_view(value: Instruction) -> bool:
    """Whether an instruction has its operand's elements in their order."""
    if value.opcode != "broadcast":
        return value.opcode in _VIEWS
    dims = list(value.get("dimensions", ()))
    sizes = [prod(each.shape.leaves[0].dimensions) for each in (value, value.operands[0])]
    return sizes[0] == sizes[1] and dims == sorted(dims)


def number_of(flow: Flow, value: Instruction) -> float | None:
    """The only number of an array that depends on no argument."""
    value = flow.origin(value)
    while value.opcode in ("broadcast", "convert", *_VIEWS):
        value = flow.origin(value.operands[0])
    if not isinstance(value.shape, ArrayShape) or value.shape.rank:
        return None
    try:
        return float(WholeValues(flow).value(value))
    except UnknownValueError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """A permutation of pairs. keys: what the sort is by, before views of it. rows: pairs.

    direction: `sorted` holds at each place its pair, `pairs` at each pair its place.
    """

    keys: Instruction
    rows: int
    direction: Literal["sorted", "pairs"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """An array that is a function of one permutation's numbers.

    values: by number, or one number where the array holds no other. order: None for a constant.
    """

    order: Order | None
    values: Array

    @property
    def constant(self) -> int | None:
        """The only number of the array."""
        return int(self.values) if self.values.ndim == 0 else None

    @property
    def divisor(self) -> int | None:
        """k of an array `number // k`."""
        if self.order is None or self.values.ndim == 0:
            return None
        rows = len(self.values)
        groups = int(self.values[-1]) + 1
        if self.values[0] != 0 or groups < 1 or rows % groups:
            return None
        k = rows // groups
        return k if np.array_equal(self.values, np.arange(rows) // k) else None


class RowOrders:
    """The permutations of one computation, and the tables of its arrays."""

    def __init__(self, computation: Computation, flow: Flow) -> None:
        self._flow = flow
        self._tables: dict[Instruction, Table] = {}
        self._orders: dict[tuple[Instruction, str], Order] = {}
        self._computed: dict[object, Array] = {}
        self.permutations: dict[Instruction, Instruction] = {}  # keys → the first permutation by them
        for instruction in computation:
            table = self._evaluate(instruction)
            if table is not None:
                self._tables[instruction] = table

    def table(self, value: Instruction) -> Table | None:
        """What an array is a function of, if anything."""
        table = self._tables.get(self._flow.source(value))
        if table is None and self._flow.origin(value) is not self._flow.source(value):
            table = self._made_ahead(value)
        return table

    def _made_ahead(self, value: Instruction) -> Table | None:
        """Of an array that a loop finds made: of one number."""
        number, element_type = number_of(self._flow, value), value.shape.leaves[0].element_type
        if number is None or element_type not in _INTEGERS:
            return None
        return Table(order=None, values=np.asarray(bool(number) if element_type == "pred" else int(number)))

    def keys_of(self, value: Instruction) -> Instruction:
        """Where a sort's keys come from, before views of them."""
        value = self._flow.source(value)
        while is_view(value):
            value = self._flow.source(value.operands[0])
        return value

    # ---- one instruction -----------------------------------------------------------
    def _evaluate(self, instruction: Instruction) -> Table | None:
        shape, opcode = instruction.shape, instruction.opcode
        if not isinstance(shape, ArrayShape) or shape.element_type not in _INTEGERS:
            return None
        if opcode == "constant":
            return _scalar(instruction) if shape.rank == 0 else None
        if opcode == "get-tuple-element":
            sort = instruction.operands[0]
            if instruction.index == 1 and self._is_argsort(sort):
                return self._permutation(instruction, sort)
            source = self._flow.source(instruction)
            return self._tables.get(source) if source is not instruction else None
        if opcode == "scatter":
            return self._inverse_by_scatter(instruction)
        operands = [self.table(operand) for operand in instruction.operands]
        known = [each for each in operands if each is not None]
        orders = {each.order for each in known if each.order is not None}
        if not known or len(known) != len(operands) or len(orders) > 1:
            return None
        return self._apply(instruction, shape, known, orders.pop() if orders else None)

    def _apply(
        self, instruction: Instruction, shape: ArrayShape, operands: list[Table], order: Order | None
    ) -> Table | None:
        opcode = instruction.opcode
        is_constant = all(each.constant is not None for each in operands)
        if opcode in ELEMENTWISE:
            key = (text_of(instruction), tuple(id(each.values) for each in operands))
            if key not in self._computed:
                self._computed[key] = _narrowed(_elementwise(instruction, operands))
            return Table(order=order, values=self._computed[key])
        if opcode == "broadcast" and (is_constant or _keeps_rows(instruction, shape)):
            return operands[0]
        if opcode in _VIEWS and (is_constant or _is_one_number_a_row(instruction.operands[0], shape)):
            return operands[0]
        if opcode == "reduce" and len(operands) == 2:
            return _reduced(instruction, operands, is_constant)
        return None

    # ---- permutations --------------------------------------------------------------
    def _is_argsort(self, sort: Instruction) -> bool:
        if sort.opcode != "sort" or len(sort.operands) != 2 or sort.shape.leaves[0].rank != 1:
            return False
        numbers = self._flow.origin(sort.operands[1])
        if numbers.opcode != "iota" or sort.shape.leaves[0].element_type not in _INTEGERS:
            return False
        region = sort.called["to_apply"][0]
        root = region.root
        return (
            root.opcode == "compare"
            and root.get("direction") == "LT"
            and [each.index if each.opcode == "parameter" else -1 for each in root.operands] == [0, 1]
        )

    def _permutation(self, instruction: Instruction, sort: Instruction) -> Table:
        """The second result of a sort of keys and numbers: a permutation, or the inverse of what is sorted."""
        rows = sort.shape.leaves[0].dimensions[0]
        of = self.table(sort.operands[0])
        if of is not None and of.order is not None and of.divisor == 1:
            return Table(order=self._turned(of.order), values=_count(rows, self._computed))
        keys = self.keys_of(sort.operands[0])
        self.permutations.setdefault(keys, instruction)
        order = self._orders.setdefault((keys, "sorted"), Order(keys=keys, rows=rows, direction="sorted"))
        return Table(order=order, values=_count(rows, self._computed))

    def _turned(self, order: Order) -> Order:
        direction: Literal["sorted", "pairs"] = "pairs" if order.direction == "sorted" else "sorted"
        return self._orders.setdefault(
            (order.keys, direction), Order(keys=order.keys, rows=order.rows, direction=direction)
        )

    def _inverse_by_scatter(self, scatter: Instruction) -> Table | None:
        """`zeros.at[perm].set(arange)`."""
        if len(scatter.operands) != 3 or scatter.shape.leaves[0].rank != 1:
            return None
        places, numbers = self.table(scatter.operands[1]), self._flow.origin(scatter.operands[2])
        root = scatter.called["to_apply"][0].root
        is_set = root.opcode == "parameter" and root.index == 1
        if places is None or places.order is None or places.divisor != 1 or numbers.opcode != "iota" or not is_set:
            return None
        rows = places.order.rows
        if scatter.shape.leaves[0].dimensions != (rows,) or numbers.shape.leaves[0].dimensions != (rows,):
            return None
        return Table(order=self._turned(places.order), values=_count(rows, self._computed))


def _count(rows: int, computed: dict[object, Array]) -> Array:
    return computed.setdefault(("rows", rows), np.arange(rows))


def _scalar(constant: Instruction) -> Table | None:
    try:
        return Table(order=None, values=literal(constant))
    except UnknownValueError:
        return None


def _elementwise(instruction: Instruction, operands: list[Table]) -> Array:
    values = [each.values for each in operands]
    if instruction.opcode == "compare":
        return compare(instruction.get("direction"), values[0], values[1])
    if instruction.opcode == "convert":
        return convert(values[0], instruction.shape.leaves[0].element_type)
    return np.asarray(OPERATIONS[instruction.opcode](*values))


def _narrowed(values: Array) -> Array:
    """One number in place of equal ones."""
    return np.asarray(values.flat[0]) if values.ndim and (values == values.flat[0]).all() else values


def _keeps_rows(broadcast: Instruction, shape: ArrayShape) -> bool:
    """Whether each row of the result repeats the number of its row."""
    (source,) = broadcast.operands[0].shape.leaves
    along = broadcast.get("dimensions", ())
    one_a_row = source.rank > 0 and prod(source.dimensions) == source.dimensions[0]
    return one_a_row and along[0] == 0 and shape.dimensions[0] == source.dimensions[0]


def _is_one_number_a_row(operand: Instruction, shape: ArrayShape) -> bool:
    (source,) = operand.shape.leaves
    rows = source.dimensions[0] if source.rank else 0
    return rows > 0 and prod(source.dimensions) == rows and shape.rank > 0 and shape.dimensions[0] == rows


def _reduced(reduce: Instruction, operands: list[Table], is_constant: bool) -> Table | None:
    """A reduction of rows of equal numbers."""
    root, dims = reduce.called["to_apply"][0].root, tuple(reduce.get("dimensions"))
    source = reduce.operands[0].shape.leaves[0].dimensions
    is_single = all(source[dim] == 1 for dim in dims)
    if root.opcode not in REDUCTIONS or not (is_single or root.opcode in _IDEMPOTENT):
        return None
    if not is_constant and 0 in dims:
        return None
    values = np.asarray(OPERATIONS[root.opcode](operands[0].values, operands[1].values))
    return Table(order=operands[0].order, values=_narrowed(values))
