"""The order in which kernels of products take their operands' dimensions, and what XLA adds to bring them into it.

After DotDecomposer (dot_decomposer.cc), the AlgebraicSimplifier behind it, which takes off dimensions of one element,
and TransposeFolding, which comes last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwright.hlo import Instruction

#: Mark of a dot that `needs_operand_copy`.
REORDERED = ("reordered",)

#: Dimensions in the order that a kernel takes them in, those that become one together.
DimensionGroups = tuple[tuple[int, ...], ...]


class _Side(NamedTuple):
    """One operand of a dot: its dimensions by what they are for, and their lengths on one device."""

    batch: tuple[int, ...]
    contracted: tuple[int, ...]
    free: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def is_canonical(self) -> bool:
        """Whether XLA leaves it as it is: batch dimensions first, a matrix or a vector behind."""
        return self.batch == tuple(range(len(self.batch))) and len(self.contracted) == 1 and len(self.free) <= 1

    def count_nontrivial(self, dims: tuple[int, ...]) -> int:
        """How many of some dimensions have more than one element."""
        return sum(self.lengths[dim] > 1 for dim in dims)

    def transposition_to(self, order: DimensionGroups) -> str:
        """What brings the dimensions into an order: `transpose`, or `bitcast` where elements stay where they are."""
        dims = [dim for group in order for dim in group if self.lengths[dim] > 1]
        return "bitcast" if dims == sorted(dims) else "transpose"


def _sides(dot: Instruction, shapes: Sequence[tuple[int, ...]]) -> Iterator[_Side]:
    for side, lengths in zip(("lhs", "rhs"), shapes, strict=True):
        batch = tuple(dot.get(f"{side}_batch_dims", ()))
        contracted = tuple(dot.get(f"{side}_contracting_dims", ()))
        free = tuple(dim for dim in range(len(lengths)) if dim not in (*batch, *contracted))
        yield _Side(batch, contracted, free, lengths)


def operand_orders(dot: Instruction, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[str, DimensionGroups]]:
    """What XLA makes of each operand of a dot, of these lengths on one device: `transpose`, `bitcast` where dimensions
    only become one or are taken off, or nothing, and the order it needs them in.

    Its DotDecomposer takes both operands, or none. A transposed matrix is read as it lies, unless dimensions of one
    element are taken off between (RemoveDegenerateDimensionFromDot in algebraic_simplifier.cc).
    """
    sides = tuple(_sides(dot, shapes))
    is_kept = all(side.is_canonical for side in sides)
    for side, is_rhs in zip(sides, (False, True), strict=True):
        batch, contracted, free, lengths = side
        natural = tuple(range(len(lengths)))
        order = (batch, contracted, free) if is_rhs else (batch, free, contracted)
        turned = (batch, free, contracted) if is_rhs else (batch, contracted, free)
        is_matrix = len(free) <= 1 and len(contracted) <= 1
        is_read = is_matrix and (natural == sum(order, ()) or (natural == sum(turned, ()) and 1 not in lengths))
        if is_kept or is_read:
            yield "bitcast" if 1 in lengths else "", (natural,)
        else:
            yield side.transposition_to(order), order


def needs_operand_copy(dot: Instruction, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether batch dimensions of a dot of such operands lie beside several free or several contracted ones.

    XLA:TPU lays such an operand out as the result is read: its batch dimensions come between the others, in a copy that
    the dot's kernel makes of what is stored (seen in its optimized HLO, libtpu 0.0.42.1).
    """
    return any(
        side.count_nontrivial(side.batch)
        and max(side.count_nontrivial(side.free), side.count_nontrivial(side.contracted)) > 1
        for side in _sides(dot, shapes)
    )


def is_elementwise_dot(dot: Instruction, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a dot of such operands only multiplies elements by elements: XLA spreads both and multiplies them, in
    any kernel (AlgebraicSimplifierVisitor::HandleDot)."""
    return all(side.lengths[dim] == 1 for side in _sides(dot, shapes) for dim in side.contracted)


def broadcast_orders(dot: Instruction, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """The dimensions of each operand in the order of the result's, but for contracted ones and those of one element."""
    for side in _sides(dot, shapes):
        yield tuple(dim for dim in (*side.batch, *side.free) if side.lengths[dim] > 1)


def has_other_dimensions(dot: Instruction, shapes: Sequence[tuple[int, ...]], result: tuple[int, ...]) -> bool:
    """Whether a dot's result has other dimensions than the kernel's that computes it: no more than one of rows and one
    of columns, and none of one element."""
    return 1 in result or any(len(side.free) > 1 for side in _sides(dot, shapes))
