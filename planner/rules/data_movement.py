"""Operations that only move data: which dimensions go through unchanged."""

from __future__ import annotations

from math import prod

from shardwright.hlo import Instruction
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.planner.rules.base import (
    Factor,
    OpRule,
    factor,
    operand_leaves,
    rule,
    strategy_rule,
)
from shardwright.planner.rules.halo import Halo


@strategy_rule("broadcast")
def broadcast(instruction: Instruction) -> OpRule:
    """`i -> i j`: mapped dimensions from the operand, new ones from nothing."""
    mapped = {target: source for source, target in enumerate(instruction.get("dimensions", ()))}
    rank = instruction.shape.leaves[0].rank
    return rule(
        factor(instruction, f"d{dim}", {0: mapped[dim]} if dim in mapped else {}, {0: dim}) for dim in range(rank)
    )


@strategy_rule("transpose")
def transpose(instruction: Instruction) -> OpRule:
    """`i j -> j i`."""
    permutation = instruction.get("dimensions", ())
    return rule(
        factor(instruction, f"d{source}", {0: source}, {0: target}) for target, source in enumerate(permutation)
    )


@strategy_rule("reshape")
def reshape(instruction: Instruction) -> OpRule:
    """`(i j) k -> i (j k)`: per group of dimensions with equal products, the major part both sides share.

    A block of the merged dimension is a block of its major-most part; only that part is a factor. A split of any other
    part would be strided, and no sharding expresses that.
    """
    source, target = operand_leaves(instruction)[0].dimensions, instruction.shape.leaves[0].dimensions
    factors = [
        factor(instruction, f"g{i}", {0: source_dims[0]}, {0: target_dims[0]})
        for i, (source_dims, target_dims) in enumerate(reshape_groups(source, target))
    ]
    return rule(factors)


def reshape_groups(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Smallest groups of dimensions of `source` and `target` with equal numbers of elements, in order.

    Dimensions of size 1 are left out: `(2, 1, 6) -> (4, 3)` gives `[((0, 2), (0, 1))]`. Raises ValueError when the
    numbers of elements differ.
    """
    if prod(source) != prod(target):
        raise ValueError(f"a reshape from {source} to {target}")
    if prod(source) == 0:
        return []
    source_dims = [dim for dim, size in enumerate(source) if size > 1]
    target_dims = [dim for dim, size in enumerate(target) if size > 1]
    groups = []
    i = j = 0
    while i < len(source_dims):
        first_i, first_j = i, j
        left_size, right_size = source[source_dims[i]], target[target_dims[j]]
        i, j = i + 1, j + 1
        while left_size != right_size:
            if left_size < right_size:
                left_size, i = left_size * source[source_dims[i]], i + 1
            else:
                right_size, j = right_size * target[target_dims[j]], j + 1
        groups.append((tuple(source_dims[first_i:i]), tuple(target_dims[first_j:j])))
    return groups


@strategy_rule("bitcast-convert")
def bitcast_convert(instruction: Instruction) -> OpRule:
    """Every dimension that keeps its size; the minor one that appears or vanishes with the width stays whole."""
    source, target = operand_leaves(instruction)[0], instruction.shape.leaves[0]
    whole = "" if source.rank == target.rank else "the parts of one element stay together"
    return rule((factor(instruction, f"d{d}", {0: d}, {0: d}) for d in range(min(source.rank, target.rank))), whole)


@strategy_rule("slice")
def slice_(instruction: Instruction) -> OpRule:
    """Dimensions taken in full, or one element in every `stride`; along other ranges borders travel."""
    sizes, results = operand_leaves(instruction)[0].dimensions, instruction.shape.leaves[0].dimensions
    factors = []
    for dim, (start, _, stride) in enumerate(instruction.get("slice", ())):
        halo: tuple[Halo, ...] = ()
        if sizes[dim] != results[dim] * stride:
            halo = (Halo(operand=0, size=sizes[dim], result_size=results[dim], stride=stride, low=-start),)
        factors.append(factor(instruction, f"d{dim}", {0: dim}, {0: dim}, halo=halo))
    return rule(factors, _too_far(sizes, factors))


@strategy_rule("concatenate")
def concatenate(instruction: Instruction) -> OpRule:
    """All dimensions but the one that is joined."""
    (joined,) = instruction.get("dimensions")
    rank = instruction.shape.leaves[0].rank
    others = [dim for dim in range(rank) if dim != joined]
    every = range(len(instruction.operands))
    return rule(
        (factor(instruction, f"d{dim}", dict.fromkeys(every, dim), {0: dim}) for dim in others),
        _explain_left_out(rank, others, "joined"),
    )


@strategy_rule("pad")
def pad(instruction: Instruction) -> OpRule:
    """Every dimension; along padded ones borders travel. The padding value is a scalar."""
    sizes, padded = operand_leaves(instruction)[0].dimensions, instruction.shape.leaves[0].dimensions
    factors = []
    for dim, (low, high, interior) in enumerate(instruction.get("padding", ())):
        halo: tuple[Halo, ...] = ()
        if (low, high, interior) != (0, 0, 0):
            halo = (Halo(operand=0, size=sizes[dim], result_size=padded[dim], low=low, dilation=interior + 1),)
        factors.append(factor(instruction, f"d{dim}", {0: dim}, {0: dim}, halo=halo))
    return rule(factors, _too_far(sizes, factors))


@strategy_rule("reverse")
def reverse(instruction: Instruction) -> OpRule:
    """Every dimension; along a reversed one the shards change places."""
    reversed_dims = instruction.get("dimensions", ())
    factors = []
    for dim, size in enumerate(instruction.shape.leaves[0].dimensions):
        halo = (Halo(operand=0, size=size, result_size=size, mirrored=True),) if dim in reversed_dims else ()
        factors.append(factor(instruction, f"d{dim}", {0: dim}, {0: dim}, halo=halo))
    return rule(factors)


@strategy_rule("bitcast")
def bitcast(instruction: Instruction) -> OpRule:
    """Found after optimization only, where it may also transpose: a factor per dimension only if nothing moved."""
    source, target = operand_leaves(instruction)[0], instruction.shape.leaves[0]
    same_bits = ELEMENT_BITS[source.element_type] == ELEMENT_BITS[target.element_type]
    if source.dimensions != target.dimensions or source.layout != target.layout or not same_bits:
        return rule([], "a bitcast that changes dimensions or layout follows memory order, not dimensions")
    return rule(_through(instruction, list(range(source.rank))))


def _too_far(sizes: tuple[int, ...], factors: list[Factor | None]) -> str:
    dims = [str(dim) for dim, (size, f) in enumerate(zip(sizes, factors, strict=True)) if size > 1 and f is None]
    return f"dimension {', '.join(dims)} needs more than the neighbours hold, or does not split evenly" if dims else ""


def _through(instruction: Instruction, dims: list[int]) -> list[Factor | None]:
    return [factor(instruction, f"d{dim}", {0: dim}, {0: dim}) for dim in dims]


def _explain_left_out(rank: int, split_dims: list[int], how: str) -> str:
    dims = [str(dim) for dim in range(rank) if dim not in split_dims]
    return f"dimension {', '.join(dims)} is {how}" if dims else ""
