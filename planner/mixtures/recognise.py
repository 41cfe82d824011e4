"""Finds mixtures: sorts of pairs by expert, and the ragged products whose groups are the experts' counts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from shardwright.hlo import Computation, Instruction, Module
from shardwright.planner.attention.elementwise import ELEMENTWISE, OPERATIONS, Array, compare, convert
from shardwright.planner.attention.flow import Flow
from shardwright.planner.attention.whole import UnknownValueError
from shardwright.planner.mixtures.orders import RowOrders, is_view, number_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixture:
    """Ragged products of one order of rows.

    order_keys: what the pairs are sorted by, as `Order.keys`. groups_of_pairs: of each pair its group, or a number
    behind the last. rows: pairs. products: all three forms.
    """

    order_keys: Instruction
    groups_of_pairs: Instruction
    rows: int
    groups: int
    products: tuple[Instruction, ...]


def find_all_mixtures(module: Module) -> list[Mixture]:
    """The mixtures of all computations of a module."""
    if not any(each.opcode == "ragged-dot" for each in module.instructions()):
        return []
    flow = Flow(module)
    return [each for inner in module.computations for each in find_mixtures(inner, flow, RowOrders(inner, flow))]


def find_mixtures(computation: Computation, flow: Flow, orders: RowOrders) -> list[Mixture]:
    """The mixtures of a computation, in its order."""
    found: dict[tuple[Instruction, int], list[Instruction]] = {}
    groups_of_pairs: dict[tuple[Instruction, int], Instruction] = {}
    for product in computation:
        if product.opcode != "ragged-dot" or not is_plain(product):
            continue
        groups = product.operands[2].shape.leaves[0].dimensions[0]
        counted = _counted(flow, flow.source(product.operands[2]), orders, groups)
        if counted is None:
            continue
        order_keys, pairs = counted
        if prod(pairs.shape.leaves[0].dimensions) == rows_of(product):
            found.setdefault((order_keys, groups), []).append(product)
            groups_of_pairs.setdefault((order_keys, groups), pairs)
    return [
        Mixture(
            order_keys=order_keys,
            groups_of_pairs=groups_of_pairs[order_keys, groups],
            rows=rows_of(products[0]),
            groups=groups,
            products=tuple(products),
        )
        for (order_keys, groups), products in found.items()
    ]


def rows_of(product: Instruction) -> int:
    return product.operands[0].shape.leaves[0].dimensions[0]


def is_weights(product: Instruction) -> bool:
    """Whether a ragged product is a gradient of matrices."""
    return bool(product.get("lhs_ragged_dims") == product.get("lhs_contracting_dims"))


def is_plain(product: Instruction) -> bool:
    """Whether a ragged product is one of rows, first, with matrices, or of rows with rows."""
    if product.get("lhs_batch_dims") or tuple(product.get("lhs_ragged_dims")) != (0,):
        return False
    rows, other, sizes = (operand.shape.leaves[0] for operand in product.operands)
    if rows.rank != 2 or sizes.rank != 1 or not rows.size_bytes or not other.size_bytes:
        return False
    if is_weights(product):
        return other.rank == 2 and tuple(product.get("rhs_contracting_dims")) == (0,)
    is_matrices = other.rank == 3 and tuple(product.get("rhs_group_dims")) == (0,)
    return bool(is_matrices and tuple(product.get("lhs_contracting_dims")) == (1,))


def _counted(flow: Flow, sizes: Instruction, orders: RowOrders, groups: int) -> tuple[Instruction, Instruction] | None:
    """The keys that a sort is by, and the group of each pair, of sizes that count these groups."""
    while sizes.opcode == "convert" or is_view(sizes):
        sizes = flow.source(sizes.operands[0])
    groups_of_pairs = _scattered(flow, sizes) if sizes.opcode == "scatter" else _compared(flow, sizes)
    if groups_of_pairs is None:
        return None
    cone = _Cone(flow, orders.permutations)
    keys = cone.leaf(groups_of_pairs)
    if keys is None:
        return None
    numbers = _possible(flow, keys, groups)
    try:
        counted = cone.value(groups_of_pairs, keys, numbers)
    except (UnknownValueError, KeyError):
        return None
    counted = np.broadcast_to(counted, numbers.shape)
    is_rising = bool((np.diff(counted) >= 0).all()) and counted[0] >= 0
    return (keys, groups_of_pairs) if is_rising else None


def _scattered(flow: Flow, scatter: Instruction) -> Instruction | None:
    """The indices of `zeros.at[indices].add(1)`."""
    if len(scatter.operands) != 3 or scatter.called["to_apply"][0].root.opcode != "add":
        return None
    zeros, indices, ones = (flow.source(operand) for operand in scatter.operands)
    if number_of(flow, zeros) != 0 or number_of(flow, ones) != 1 or scatter.shape.leaves[0].rank != 1:
        return None
    return indices


def _compared(flow: Flow, total: Instruction) -> Instruction | None:
    """The operand of `(operand[:, None] == arange(groups)).sum(0)`."""
    if total.opcode != "reduce" or len(total.operands) != 2 or total.called["to_apply"][0].root.opcode != "add":
        return None
    if number_of(flow, flow.source(total.operands[1])) != 0:
        return None
    is_own = flow.source(total.operands[0])
    while is_own.opcode == "convert":
        is_own = flow.source(is_own.operands[0])
    last = is_own.shape.leaves[0].rank - 1
    if is_own.opcode != "compare" or is_own.get("direction") != "EQ" or last in total.get("dimensions"):
        return None
    first, second = (flow.origin(operand) for operand in is_own.operands)
    if _counts_along(flow, first, last):
        first, second = second, first
    if not _counts_along(flow, second, last) or first.opcode != "broadcast":
        return None
    pairs = flow.source(first.operands[0])
    dims = pairs.shape.leaves[0].dimensions
    is_spread = [dim for dim, size in zip(first.get("dimensions", ()), dims, strict=True) if size != 1] == [
        dim for dim in range(last) if first.shape.leaves[0].dimensions[dim] != 1
    ]
    return pairs if is_spread and pairs.shape.leaves[0].element_type == "s32" else None


def _counts_along(flow: Flow, value: Instruction, dim: int) -> bool:
    """Whether elements are 0, 1, 2 … along `dim`, and equal along all others."""
    if value.opcode == "iota":
        return int(value.get("iota_dimension")) == dim
    if value.opcode not in ("broadcast", "reshape"):
        return False
    source = flow.origin(value.operands[0])
    size = value.shape.leaves[0].dimensions[dim]
    if prod(source.shape.leaves[0].dimensions) != size:
        return False
    if value.opcode == "broadcast":
        sized = [d for d, each in zip(value.get("dimensions", ()), source.shape.leaves[0].dimensions, strict=True)
                 if each != 1]  # fmt: skip
        if sized != [dim]:
            return False
    inner = [d for d, each in enumerate(source.shape.leaves[0].dimensions) if each != 1]
    return len(inner) == 1 and _counts_along(flow, source, inner[0])


def _possible(flow: Flow, keys: Instruction, groups: int) -> Array:
    """Numbers that keys may be, in order: all of them, or those around the groups and the extremes."""
    whole = flow.source(keys)
    if whole.opcode == "get-tuple-element" and whole.index == 1 and whole.operands[0].opcode == "topk":
        searched = whole.operands[0].operands[0].shape.leaves[0].dimensions
        return np.arange(searched[-1])
    extremes = np.iinfo(np.int32)
    return np.concatenate([[extremes.min], np.arange(-2 * groups - 2, 3 * groups + 2), [extremes.max]])


class _Cone:
    """Elementwise functions of keys, of which a sort is by one."""

    def __init__(self, flow: Flow, keys: dict[Instruction, Instruction]) -> None:
        self._flow, self._keys = flow, keys

    def leaf(self, value: Instruction) -> Instruction | None:
        """The only keys that a value is computed from."""
        leaves: set[Instruction] = set()
        pending, seen = [value], set[Instruction]()
        while pending:
            each = self._flow.source(pending.pop())
            if each in seen:
                continue
            seen.add(each)
            if each in self._keys:
                leaves.add(each)
            elif number_of(self._flow, each) is not None:
                continue
            elif each.opcode in ELEMENTWISE or is_view(each):
                pending += each.operands
            else:
                return None
        return leaves.pop() if len(leaves) == 1 else None

    def value(self, value: Instruction, keys: Instruction, numbers: Array) -> Array:
        """What a value is for each number that keys may be. Raises UnknownValueError."""
        value = self._flow.source(value)
        if value is keys:
            return numbers
        number = number_of(self._flow, value)
        if number is not None:
            return np.asarray(bool(number) if value.shape.leaves[0].element_type == "pred" else int(number))
        operands = [self.value(operand, keys, numbers) for operand in value.operands]
        if is_view(value):
            return operands[0]
        if value.opcode == "compare":
            return compare(value.get("direction"), operands[0], operands[1])
        if value.opcode == "convert":
            return convert(operands[0], value.shape.leaves[0].element_type)
        return np.asarray(OPERATIONS[value.opcode](*operands))
