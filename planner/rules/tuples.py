"""Values from nowhere and tuples: parameters, constants, iota, tuple and its elements."""

from __future__ import annotations

from shardwright.hlo import Instruction, TupleShape
from shardwright.planner.rules.base import (
    Factor,
    OpRule,
    factor,
    no_factors,
    rule,
    strategy_rule,
)


@strategy_rule("parameter", "constant", "iota")
def source(instruction: Instruction) -> OpRule:
    """`-> i j`: each device makes or holds the block it is asked for."""
    leaves = instruction.shape.leaves
    return rule(
        (
            factor(instruction, f"d{dim}" if len(leaves) == 1 else f"l{i}d{dim}", {}, {i: dim})
            for i, leaf in enumerate(leaves)
            for dim in range(leaf.rank)
        ),
        leafwise=len(leaves) > 1,
    )


def leafwise(instruction: Instruction, operand_leaf: dict[int, int]) -> OpRule:
    """Result leaf `i` is operand leaf `operand_leaf[i]`, each with a factor per dimension, on its own."""
    factors: list[Factor | None] = []
    for i, leaf in enumerate(instruction.shape.leaves):
        for dim in range(leaf.rank):
            factors.append(factor(instruction, f"l{i}d{dim}", {operand_leaf[i]: dim}, {i: dim}))
    return rule(factors, leafwise=True)


@strategy_rule("tuple", "opt-barrier", "domain", "add-dependency")
def identity(instruction: Instruction) -> OpRule:
    """Result leaf i is operand leaf i."""
    return leafwise(instruction, {i: i for i in range(len(instruction.shape.leaves))})


@strategy_rule("get-tuple-element")
def get_tuple_element(instruction: Instruction) -> OpRule:
    """The leaves of element `index`; the others are not touched."""
    shape = instruction.operands[0].shape
    if not isinstance(shape, TupleShape):
        return no_factors("its operand is not a tuple")
    first = sum(len(element.leaves) for element in shape.elements[: instruction.index])
    return leafwise(instruction, {i: first + i for i in range(len(instruction.shape.leaves))})
