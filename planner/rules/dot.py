"""Matrix products."""

from __future__ import annotations

from shardwright.hlo import Instruction
from shardwright.planner.rules.base import OpRule, factor, operand_leaves, rule, strategy_rule


@strategy_rule("dot")
def dot(instruction: Instruction) -> OpRule:
    """`b m k, b k n -> b m n`: batch, left, right, and contracted dimensions (summed)."""
    if len(instruction.operands) != 2:
        return rule([], "a dot with sparsity operands")
    lhs, rhs = operand_leaves(instruction)
    lhs_batch, rhs_batch = instruction.get("lhs_batch_dims", ()), instruction.get("rhs_batch_dims", ())
    lhs_contracting = instruction.get("lhs_contracting_dims", ())
    rhs_contracting = instruction.get("rhs_contracting_dims", ())
    lhs_free = [d for d in range(lhs.rank) if d not in lhs_batch and d not in lhs_contracting]
    rhs_free = [d for d in range(rhs.rank) if d not in rhs_batch and d not in rhs_contracting]
    factors = []
    for i, (lhs_dim, rhs_dim) in enumerate(zip(lhs_batch, rhs_batch, strict=True)):
        factors.append(factor(instruction, f"b{i}", {0: lhs_dim, 1: rhs_dim}, {0: i}))
    for i, lhs_dim in enumerate(lhs_free):
        factors.append(factor(instruction, f"m{i}", {0: lhs_dim}, {0: len(lhs_batch) + i}))
    for i, rhs_dim in enumerate(rhs_free):
        factors.append(factor(instruction, f"n{i}", {1: rhs_dim}, {0: len(lhs_batch) + len(lhs_free) + i}))
    for i, (lhs_dim, rhs_dim) in enumerate(zip(lhs_contracting, rhs_contracting, strict=True)):
        factors.append(factor(instruction, f"k{i}", {0: lhs_dim, 1: rhs_dim}, {}, reduction="add"))
    return rule(factors)


@strategy_rule("ragged-dot")
def ragged_dot(instruction: Instruction) -> OpRule:
    """`b m k, b g k n, b g -> b m n`, rows in g groups: all but the ragged dimension and the groups.

    With a contracted ragged dimension, in the gradient of the weights, the groups are the result's first dimension: `m
    k, m n, g -> g k n`.
    """
    lhs, rhs, groups = operand_leaves(instruction)
    lhs_batch, rhs_batch = instruction.get("lhs_batch_dims", ()), instruction.get("rhs_batch_dims", ())
    lhs_contracting = instruction.get("lhs_contracting_dims", ())
    rhs_contracting = instruction.get("rhs_contracting_dims", ())
    (ragged,) = instruction.get("lhs_ragged_dims")
    rhs_whole = {*rhs_batch, *rhs_contracting, *instruction.get("rhs_group_dims", ())}
    lhs_free = [d for d in range(lhs.rank) if d not in lhs_batch and d not in lhs_contracting]
    rhs_free = [d for d in range(rhs.rank) if d not in rhs_whole]
    first = 1 if ragged in lhs_contracting else 0  # the result's dimensions after its groups
    has_own_groups = groups.rank == 1 + len(lhs_batch)  # each element of the batch
    factors = []
    for i, (lhs_dim, rhs_dim) in enumerate(zip(lhs_batch, rhs_batch, strict=True)):
        own = {2: i} if has_own_groups and lhs_batch else {}
        factors.append(factor(instruction, f"b{i}", {0: lhs_dim, 1: rhs_dim, **own}, {0: first + i}))
    for i, lhs_dim in enumerate(lhs_free):
        factors.append(factor(instruction, f"m{i}", {0: lhs_dim}, {0: first + len(lhs_batch) + i}))
    for i, rhs_dim in enumerate(rhs_free):
        position = first + len(lhs_batch) + len(lhs_free) + i
        factors.append(factor(instruction, f"n{i}", {1: rhs_dim}, {0: position}))
    for i, (lhs_dim, rhs_dim) in enumerate(zip(lhs_contracting, rhs_contracting, strict=True)):
        factors.append(factor(instruction, f"k{i}", {0: lhs_dim, 1: rhs_dim}, {}, reduction="add"))
    if groups.rank > 1 and not has_own_groups:
        return rule([], "rows of several dimensions have groups of their own")
    legal = [one for one in factors if one is not None and one.operands[0] != ragged]
    return rule(legal, "the ragged dimension and the groups stay whole: XLA gathers them")
