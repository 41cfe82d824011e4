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
    for i, (left, right) in enumerate(zip(lhs_batch, rhs_batch, strict=True)):
        factors.append(factor(instruction, f"b{i}", {0: left, 1: right}, {0: i}))
    for i, left in enumerate(lhs_free):
        factors.append(factor(instruction, f"m{i}", {0: left}, {0: len(lhs_batch) + i}))
    for i, right in enumerate(rhs_free):
        factors.append(factor(instruction, f"n{i}", {1: right}, {0: len(lhs_batch) + len(lhs_free) + i}))
    for i, (left, right) in enumerate(zip(lhs_contracting, rhs_contracting, strict=True)):
        factors.append(factor(instruction, f"k{i}", {0: left, 1: right}, {}, reduction="add"))
    return rule(factors)
