"""Reductions over whole dimensions, over windows, and sorts."""

from __future__ import annotations

from shardwright.hlo import Computation, Instruction
from shardwright.planner.rules.base import Factor, OpRule, factor, operand_leaves, rule, strategy_rule

#: Region roots that combine partial results, and what an all-reduce calls them.
REDUCTIONS = ("add", "and", "maximum", "minimum", "multiply", "or")

#: Initial values that may be counted more than once; for the other reductions any may.
_NEUTRAL = {"add": 0, "multiply": 1}


def reduction_of(region: Computation) -> str | None:
    """What a scalar region `(a, b) -> a ∘ b` computes, or None where it is anything else."""
    root = region.root
    if root.opcode not in REDUCTIONS or len(region.parameters) != 2:
        return None
    arguments = list(root.operands)
    if arguments in (list(region.parameters), list(reversed(region.parameters))):
        return root.opcode
    return None


@strategy_rule("reduce")
def reduce(instruction: Instruction) -> OpRule:
    """`i j -> i`: kept dimensions, and reduced ones where the region is a plain reduction.

    A reduce of several arrays at once (argmax) has no all-reduce: its reduced dimensions stay whole.
    """
    count = len(instruction.operands) // 2
    arrays = range(count)
    reduced = instruction.get("dimensions", ())
    rank = operand_leaves(instruction)[0].rank
    kept = [dim for dim in range(rank) if dim not in reduced]
    factors = [
        factor(instruction, f"d{dim}", dict.fromkeys(arrays, dim), dict.fromkeys(arrays, position))
        for position, dim in enumerate(kept)
    ]
    reduction = reduction_of(instruction.called["to_apply"][0]) if count == 1 else None
    why_whole = _why_whole(instruction, reduction)
    if why_whole:
        return rule(factors, f"{why_whole}: reduced dimensions stay whole")
    factors += [factor(instruction, f"r{dim}", {0: dim}, {}, reduction=reduction) for dim in reduced]
    return rule(factors)


def _why_whole(instruction: Instruction, reduction: str | None) -> str:
    """Why reduced dimensions may not be split; empty where they may.

    XLA starts every device's partial reduction from the initial value, so that a sum from 5 over n devices
    ends 5 (n - 1) too high, and it has all-reduces of `and` and `or` for booleans only.
    """
    if reduction is None:
        return "its region has no all-reduce"
    if reduction in ("and", "or") and operand_leaves(instruction)[0].element_type != "pred":
        return "bitwise reductions have no all-reduce"
    if reduction in _NEUTRAL and not _is_constant(instruction.operands[1], _NEUTRAL[reduction]):
        return f"its initial value is not known to be {_NEUTRAL[reduction]}"
    return ""


def _is_constant(value: Instruction, wanted: int) -> bool:
    if value.opcode != "constant":
        return False
    try:
        return float(value.payload) == wanted
    except ValueError:  # a complex literal
        return value.payload.replace(" ", "") == f"({wanted},0)"


@strategy_rule("reduce-window")
def reduce_window(instruction: Instruction) -> OpRule:
    """Dimensions that no window spans; along the others neighbours would have to trade borders."""
    window = instruction.get("window")
    count = len(instruction.operands) // 2
    rank = operand_leaves(instruction)[0].rank
    free = [dim for dim in range(rank) if not spans(window, dim)]
    return rule(_windowless(instruction, free, count, count), _windowed_reason(rank, free))


@strategy_rule("select-and-scatter")
def select_and_scatter(instruction: Instruction) -> OpRule:
    """As its reduce-window: operand, source and result share the dimensions that no window spans."""
    window = instruction.get("window")
    rank = operand_leaves(instruction)[0].rank
    free = [dim for dim in range(rank) if not spans(window, dim)]
    return rule(_windowless(instruction, free, 2, 1), _windowed_reason(rank, free))


def spans(window: object, dim: int) -> bool:
    """Whether dimension `dim` of a window attribute does anything but pass elements through."""
    if window is None:
        return False
    fields = (
        ("sizes", 1), ("strides", 1), ("padding_low", 0), ("padding_high", 0),
        ("lhs_dilation", 1), ("rhs_dilation", 1), ("reversal", False),
    )  # fmt: skip
    return any(getattr(window, name)[dim] != neutral for name, neutral in fields)


def _windowless(instruction: Instruction, free: list[int], inputs: int, outputs: int) -> list[Factor | None]:
    return [
        factor(instruction, f"d{dim}", dict.fromkeys(range(inputs), dim), dict.fromkeys(range(outputs), dim))
        for dim in free
    ]


def _windowed_reason(rank: int, free: list[int]) -> str:
    dims = [str(dim) for dim in range(rank) if dim not in free]
    return f"a window spans dimension {', '.join(dims)}" if dims else ""


@strategy_rule("sort")
def sort(instruction: Instruction) -> OpRule:
    """All dimensions but the sorted one, the same for every array that is sorted along."""
    (sorted_dim,) = instruction.get("dimensions")
    leaves = operand_leaves(instruction)
    every = range(len(leaves))
    kept = [dim for dim in range(leaves[0].rank) if dim != sorted_dim]
    return rule(
        (factor(instruction, f"d{dim}", dict.fromkeys(every, dim), dict.fromkeys(every, dim)) for dim in kept),
        f"dimension {sorted_dim} is sorted",
    )
