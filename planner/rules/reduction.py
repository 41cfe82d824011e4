"""Reductions over whole dimensions, over windows, and sorts."""

from __future__ import annotations

from shardwright.hlo import Computation, Instruction
from shardwright.planner.rules.base import OpRule, factor, operand_leaves, rule, strategy_rule
from shardwright.planner.rules.halo import Halo
from shardwright.planner.rules.windows import Span, span, window_halo

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


#: Opcodes of a region that only chooses among its arguments.
_CHOOSING = frozenset({"parameter", "compare", "select", "and", "or", "not", "maximum", "minimum", "tuple"})


def _chooses(region: Computation) -> bool:
    """Whether a region hands on one of its arguments, so that an initial value may be counted more than once."""
    return all(instruction.opcode in _CHOOSING for instruction in region)


@strategy_rule("reduce")
def reduce(instruction: Instruction) -> OpRule:
    """`i j -> i`: kept dimensions, and reduced ones where the region is a plain reduction.

    A reduce of several arrays at once (argmax) has no all-reduce: XLA gathers the devices' partial results.
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
    region = instruction.called["to_apply"][0]
    if count > 1 and _chooses(region):
        gathered = (
            factor(instruction, f"r{dim}", dict.fromkeys(arrays, dim), {}, reduction="gather") for dim in reduced
        )
        return rule([*factors, *gathered])
    reduction = reduction_of(region) if count == 1 else None
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
    """Dimensions that no window spans, that windows tile, or along which neighbours exchange borders."""
    count = len(instruction.operands) // 2
    window = instruction.get("window")
    sizes, results = operand_leaves(instruction)[0].dimensions, instruction.shape.leaves[0].dimensions
    every = range(count)
    factors = []
    for dim, size in enumerate(sizes):
        halo: tuple[Halo, ...] = ()
        if span(window, dim, size) not in (Span.NONE, Span.TILES):
            halo = tuple(window_halo(window, dim, i, size, results[dim]) for i in every)
        factors.append(factor(instruction, f"d{dim}", dict.fromkeys(every, dim), dict.fromkeys(every, dim), halo=halo))
    far = [str(dim) for dim, (size, found) in enumerate(zip(sizes, factors, strict=True)) if size > 1 and found is None]
    return rule(factors, f"windows reach beyond the neighbours along dimension {', '.join(far)}" if far else "")


@strategy_rule("select-and-scatter")
def select_and_scatter(instruction: Instruction) -> OpRule:
    """As its reduce-window: operand, source and result go together, where windows have no borders.

    Along others XLA exchanges borders and computes wrong sums.
    """
    window = instruction.get("window")
    sizes = operand_leaves(instruction)[0].dimensions
    apart = [dim for dim, size in enumerate(sizes) if span(window, dim, size) in (Span.NONE, Span.TILES)]
    left_out = [str(dim) for dim in range(len(sizes)) if dim not in apart]
    return rule(
        (factor(instruction, f"d{dim}", {0: dim, 1: dim}, {0: dim}) for dim in apart),
        f"windows overlap or are padded along dimension {', '.join(left_out)}" if left_out else "",
    )


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
