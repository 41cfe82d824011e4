"""Reductions over whole dimensions, over windows, and sorts."""

from __future__ import annotations

from math import inf

from shardwright.hlo import Computation, Instruction
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.planner.rules.base import OpRule, factor, operand_leaves, rule, strategy_rule
from shardwright.planner.rules.halo import Halo
from shardwright.planner.rules.windows import Span, span, window_halo

#: Region roots that combine partial results, and what an all-reduce calls them.
REDUCTIONS = ("add", "and", "maximum", "minimum", "multiply", "or")


def reductions_of(region: Computation) -> tuple[str, ...] | None:
    """The reduction of each array in a region `(a…, b…) -> a ∘ b, …`, or None when it is anything else."""
    results = region.root.operands if region.root.opcode == "tuple" else (region.root,)
    count = len(results)
    if len(region.parameters) != 2 * count:
        return None
    for result, lhs, rhs in zip(results, region.parameters[:count], region.parameters[count:], strict=True):
        if result.opcode not in REDUCTIONS or list(result.operands) not in ([lhs, rhs], [rhs, lhs]):
            return None
    return tuple(result.opcode for result in results)


def reduction_of(region: Computation) -> str | None:
    """The reduction in a scalar region `(a, b) -> a ∘ b`, or None when it is anything else."""
    reductions = reductions_of(region)
    return reductions[0] if reductions is not None and len(reductions) == 1 else None


#: Opcodes of a region that only chooses among its arguments.
_CHOOSING = frozenset({"parameter", "compare", "select", "and", "or", "not", "maximum", "minimum", "tuple"})


def _chooses(region: Computation) -> bool:
    """Whether a region returns one of its arguments: an initial value may then be counted more than once."""
    return all(instruction.opcode in _CHOOSING for instruction in region)


@strategy_rule("reduce")
def reduce(instruction: Instruction) -> OpRule:
    """`i j -> i`: kept dimensions, and reduced ones where the region is a plain reduction.

    A reduce of several arrays at once (argmax, two sums) has no all-reduce: XLA gathers the devices' partial results.
    """
    count = len(instruction.operands) // 2
    arrays = range(count)
    reduced = instruction.get("dimensions", ())
    rank = operand_leaves(instruction)[0].rank
    kept_dims = [dim for dim in range(rank) if dim not in reduced]
    factors = [
        factor(instruction, f"d{dim}", dict.fromkeys(arrays, dim), dict.fromkeys(arrays, position))
        for position, dim in enumerate(kept_dims)
    ]
    why_whole = _why_whole(instruction)
    if why_whole:
        return rule(factors, f"{why_whole}: reduced dimensions stay whole")
    reduction = reduction_of(instruction.called["to_apply"][0]) or "gather"
    return rule(
        [
            *factors,
            *(factor(instruction, f"r{dim}", dict.fromkeys(arrays, dim), {}, reduction=reduction) for dim in reduced),
        ]
    )


def _why_whole(instruction: Instruction) -> str:
    """Why reduced dimensions may not be split; empty when they may.

    XLA assumes that initial values are neutral: every device starts its partial reduction from them (a sum from 5 over
    n devices ends 5 (n - 1) too high), and omits them when a device has one element to reduce. It has all-reduces of
    `and` and `or` on booleans only.
    """
    count = len(instruction.operands) // 2
    region = instruction.called["to_apply"][0]
    reductions = reductions_of(region)
    if reductions is None:
        return "" if count > 1 and _chooses(region) else "its region has no all-reduce"
    if count == 1 and reductions[0] in ("and", "or") and operand_leaves(instruction)[0].element_type != "pred":
        return "bitwise reductions have no all-reduce"
    for reduction, value in zip(reductions, instruction.operands[count:], strict=True):
        neutral = neutral_element(reduction, value.shape.leaves[0].element_type)
        if not _is_constant(value, neutral):
            return f"its initial value is not known to be {neutral}"
    return ""


def has_initial_value(instruction: Instruction) -> bool:
    """Whether only its initial value keeps a reduce of one array whole."""
    if instruction.opcode != "reduce" or len(instruction.operands) != 2:
        return False
    reduction = reduction_of(instruction.called["to_apply"][0])
    value = instruction.operands[1]
    element_type = value.shape.leaves[0].element_type
    if reduction is None or (reduction in ("and", "or") and element_type != "pred"):
        return False
    return not _is_constant(value, neutral_element(reduction, element_type))


def neutral_element(reduction: str, element_type: str) -> float:
    """The neutral element: `neutral ∘ a = a`."""
    if reduction in ("add", "multiply", "or"):
        return 1 if reduction == "multiply" else 0
    if element_type != "pred" and element_type[0] not in "su":
        return -inf if reduction == "maximum" else inf
    bits = 1 if element_type == "pred" else ELEMENT_BITS[element_type]
    lowest = -(2 ** (bits - 1)) if element_type[0] == "s" else 0
    if reduction == "and":
        return -1 if lowest else 2**bits - 1
    return lowest if reduction == "maximum" else lowest + 2**bits - 1


_BOOLEANS = {"false": 0, "true": 1}


def _is_constant(value: Instruction, expected: float) -> bool:
    if value.opcode != "constant":
        return False
    literal = value.payload.replace(" ", "")
    if literal in _BOOLEANS:
        return _BOOLEANS[literal] == expected
    try:
        return (int(literal) if literal.lstrip("-").isdigit() else float(literal)) == expected
    except ValueError:  # a complex literal
        return literal == f"({expected},0)"


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
    far = [str(dim) for dim, (size, f) in enumerate(zip(sizes, factors, strict=True)) if size > 1 and f is None]
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
    others = [dim for dim in range(leaves[0].rank) if dim != sorted_dim]
    return rule(
        (factor(instruction, f"d{dim}", dict.fromkeys(every, dim), dict.fromkeys(every, dim)) for dim in others),
        f"dimension {sorted_dim} is sorted",
    )
