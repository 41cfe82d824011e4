"""Dimension orders of products' operands in their kernels, and the instructions XLA adds to reach them.

After DotDecomposer (dot_decomposer.cc), the AlgebraicSimplifier after it, which removes dimensions of one element, and
finally TransposeFolding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwright.hlo import Instruction

#: Mark of a dot that `needs_operand_copy`.
REORDERED = ("reordered",)

#: Dimensions in a kernel's order, grouped by merged dimension.
DimensionGroups = tuple[tuple[int, ...], ...]


class _Side(NamedTuple):
    """One operand of a dot: its dimensions by role, and their lengths on one device."""

    batch: tuple[int, ...]
    contracted: tuple[int, ...]
    free: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def is_canonical(self) -> bool:
        """Whether XLA leaves the operand unchanged: batch dimensions first, then a matrix or a vector."""
        return self.batch == tuple(range(len(self.batch))) and len(self.contracted) == 1 and len(self.free) <= 1

    def count_nontrivial(self, dims: tuple[int, ...]) -> int:
        """Number of dimensions of more than one element among those given."""
        return sum(self.lengths[dim] > 1 for dim in dims)

    def transposition_to(self, order: DimensionGroups) -> str:
        """The opcode that reorders the dimensions: `transpose`, or `bitcast` if elements stay in place."""
        dims = [dim for group in order for dim in group if self.lengths[dim] > 1]
        return "bitcast" if dims == sorted(dims) else "transpose"


def _sides(dot: Instruction, shapes: Sequence[tuple[int, ...]]) -> Iterator[_Side]:
    for side, lengths in zip(("lhs", "rhs"), shapes, strict=True):
        batch = tuple(dot.get(f"{side}_batch_dims", ()))
        contracted = tuple(dot.get(f"{side}_contracting_dims", ()))
        free = tuple(dim for dim in range(len(lengths)) if dim not in (*batch, *contracted))
        yield _Side(batch, contracted, free, lengths)


def operand_orders(dot: Instruction, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[str, DimensionGroups]]:
    """Per operand of a dot of these lengths on one device: the added opcode and its dimension order. `transpose`;
    `bitcast` if dimensions are only merged or removed; or nothing.

    XLA's DotDecomposer rewrites both operands, or none. A transposed matrix is read in place, unless dimensions of one
    element are removed between (RemoveDegenerateDimensionFromDot in algebraic_simplifier.cc).
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
    """Whether a dot's operands have batch dimensions beside several free or several contracted ones.

    XLA:TPU gives such an operand the layout of the result's readers: batch dimensions between the others, in a copy
    that the dot's kernel makes of the stored value (seen in its optimized HLO, libtpu 0.0.42.1).
    """
    return any(
        side.count_nontrivial(side.batch)
        and max(side.count_nontrivial(side.free), side.count_nontrivial(side.contracted)) > 1
        for side in _sides(dot, shapes)
    )


def is_elementwise_dot(dot: Instruction, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a dot only multiplies elements by elements: XLA broadcasts and multiplies both operands, in any kernel
    (AlgebraicSimplifierVisitor::HandleDot).
    """
    return all(side.lengths[dim] == 1 for side in _sides(dot, shapes) for dim in side.contracted)


def broadcast_orders(dot: Instruction, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Dimensions of each operand in the result's order, without contracted ones and those of one element."""
    for side in _sides(dot, shapes):
        yield tuple(dim for dim in (*side.batch, *side.free) if side.lengths[dim] > 1)


def has_other_dimensions(dot: Instruction, shapes: Sequence[tuple[int, ...]], result: tuple[int, ...]) -> bool:
    """Whether a dot's result differs in dimensions from its kernel's: at most one of rows and one of columns, and none
    of one element.
    """
    return 1 in result or any(len(side.free) > 1 for side in _sides(dot, shapes))
