"""Gather, scatter and dynamic slices: the dimensions untouched by indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.hlo import Instruction
from shardwright.planner.rules.base import Factor, OpRule, factor, operand_leaves, rule, strategy_rule
from shardwright.planner.rules.reduction import reduction_of


@strategy_rule("dynamic-slice")
def dynamic_slice(instruction: Instruction) -> OpRule:
    """Dimensions taken in full, and those of which one row is taken (summed, like a gather's).

    Where a slice starts elsewhere is known only at run time: XLA gathers the operand for a split result along such a
    dimension, and takes wrong elements. For one row it gathers, too: `xla/one_row.py` emits a manual computation.
    """
    source, target = operand_leaves(instruction)[0].dimensions, instruction.shape.leaves[0].dimensions
    full = [dim for dim, size in enumerate(target) if source[dim] == size]
    single = _single(source, target)
    factors = [
        *(factor(instruction, f"d{d}", {0: d}, {0: d}) for d in full),
        *(factor(instruction, f"v{d}", {0: d}, {}, reduction="add") for d in single),
    ]
    return rule(factors, _cut(len(target), [*full, *single]))


@strategy_rule("dynamic-update-slice")
def dynamic_update_slice(instruction: Instruction) -> OpRule:
    """Dimensions the update covers in full, and those of which it is one row: the device that has the row writes it."""
    source, update = (leaf.dimensions for leaf in operand_leaves(instruction)[:2])
    full = [dim for dim, size in enumerate(update) if source[dim] == size]
    single = _single(source, update)
    factors = [
        *(factor(instruction, f"d{d}", {0: d, 1: d}, {0: d}) for d in full),
        *(factor(instruction, f"v{d}", {0: d}, {0: d}) for d in single),
    ]
    return rule(factors, _cut(len(update), [*full, *single]))


def without_rows(op_rule: OpRule) -> OpRule:
    """The rule of a dynamic slice, or an update, whose one row may lie on any device, without the split of the rows."""
    return replace(op_rule, factors=tuple(each for each in op_rule.factors if not each.name.startswith("v")))


def _single(whole: Sequence[int], part: Sequence[int]) -> list[int]:
    """The dimensions of which one row of several is taken."""
    return [dim for dim, size in enumerate(part) if size == 1 < whole[dim]]


def _cut(rank: int, full: list[int]) -> str:
    dims = [str(dim) for dim in range(rank) if dim not in full]
    return f"dimension {', '.join(dims)} starts at an index known only at run time" if dims else ""


@strategy_rule("gather")
def gather(instruction: Instruction) -> OpRule:
    """Index dimensions, full-size slice dimensions, batching dimensions, and indexed rows (summed).

    `n, v d -> n d` in an embedding: n from the indices, d a full slice. Each index picks one row of v; v is contracted:
    a device gives zeros in place of rows it does not hold, and the sum is the row.
    """
    operand, indices = operand_leaves(instruction)
    offset_dims = instruction.get("offset_dims", ())
    collapsed = instruction.get("collapsed_slice_dims", ())
    operand_batching = instruction.get("operand_batching_dims", ())
    indices_batching = instruction.get("start_indices_batching_dims", ())
    index_dims = [d for d in range(indices.rank) if d != instruction.get("index_vector_dim")]
    result_rank = instruction.shape.leaves[0].rank
    batch_dims = [d for d in range(result_rank) if d not in offset_dims]
    paired: dict[int, int] = dict(zip(indices_batching, operand_batching, strict=True))
    factors: list[Factor | None] = []
    for index_dim, result_dim in zip(index_dims, batch_dims, strict=True):
        batching = {0: paired[index_dim]} if index_dim in paired else {}
        factors.append(factor(instruction, f"i{index_dim}", {**batching, 1: index_dim}, {0: result_dim}))
    window = [d for d in range(operand.rank) if d not in collapsed and d not in operand_batching]
    sizes = instruction.get("slice_sizes", ())
    for operand_dim, result_dim in zip(window, offset_dims, strict=True):
        if sizes[operand_dim] == operand.dimensions[operand_dim]:
            factors.append(factor(instruction, f"w{operand_dim}", {0: operand_dim}, {0: result_dim}))
    mapped = instruction.get("start_index_map", ())
    single = [d for d in window if d in mapped and sizes[d] == 1 < operand.dimensions[d]]
    indexed = [d for d in (*collapsed, *single) if d in mapped]
    factors += [factor(instruction, f"v{d}", {0: d}, {}, reduction="add") for d in indexed]
    cut = [d for d in window if sizes[d] != operand.dimensions[d] and d not in single]
    return rule(factors, f"dimension {', '.join(map(str, cut))} is cut at run time" if cut else "")


#: Reductions by which scattered updates may be spread over devices and combined afterwards.
_COMBINABLE = ("add", "maximum", "minimum", "multiply")


@strategy_rule("scatter")
def scatter(instruction: Instruction) -> OpRule:
    """Window and batching dimensions, scattered-into rows, and, for reductions, the updates themselves.

    `v d, n, n d -> v d` in an embedding's gradient: d goes through; n is contracted. A device with a part of the rows v
    applies those of all updates that fall into it: no communication.
    """
    leaves = operand_leaves(instruction)
    count = (len(leaves) - 1) // 2
    operand, indices, updates = leaves[0], leaves[count], leaves[count + 1]
    arrays = range(count)
    window_dims = instruction.get("update_window_dims", ())
    inserted = instruction.get("inserted_window_dims", ())
    operand_batching = instruction.get("input_batching_dims", ())
    indices_batching = instruction.get("scatter_indices_batching_dims", ())
    index_dims = [d for d in range(indices.rank) if d != instruction.get("index_vector_dim")]
    update_dims = [d for d in range(updates.rank) if d not in window_dims]
    paired: dict[int, int] = dict(zip(indices_batching, operand_batching, strict=True))
    reduction = reduction_of(instruction.called["to_apply"][0]) if count == 1 else None
    factors: list[Factor | None] = []
    for index_dim, update_dim in zip(index_dims, update_dims, strict=True):
        split = {count: index_dim, **dict.fromkeys(range(count + 1, len(leaves)), update_dim)}
        name = f"i{index_dim}"
        if index_dim in paired:
            rows: dict[int, int] = dict.fromkeys(arrays, paired[index_dim])
            factors.append(factor(instruction, name, split | rows, rows, may_pad=False))
        elif reduction in _COMBINABLE:
            factors.append(factor(instruction, name, split, {}, reduction=reduction, may_pad=False))
    window = [d for d in range(operand.rank) if d not in inserted and d not in operand_batching]
    for operand_dim, update_dim in zip(window, window_dims, strict=True):
        if updates.dimensions[update_dim] == operand.dimensions[operand_dim]:
            columns = dict.fromkeys(arrays, operand_dim)
            split = columns | dict.fromkeys(range(count + 1, len(leaves)), update_dim)
            factors.append(factor(instruction, f"w{operand_dim}", split, columns))
    mapped = instruction.get("scatter_dims_to_operand_dims", ())
    single = [
        d
        for d, update_dim in zip(window, window_dims, strict=True)
        if d in mapped and updates.dimensions[update_dim] == 1 < operand.dimensions[d]
    ]
    for d in (*inserted, *single):
        factors.append(factor(instruction, f"v{d}", dict.fromkeys(arrays, d), dict.fromkeys(arrays, d)))
    return rule(factors, "" if reduction in _COMBINABLE else "updates that do not combine in any order stay whole")
