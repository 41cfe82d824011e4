"""The order of several axes that split one dimension.

The default is mesh order, the first axis major: batches are split so. A gather of a batch along the last axis, inside
a node, then leaves it split along the first. State needs the reverse order. A weight split along the last axis for
compute is summed over the first, the data-parallel one. Between steps each device keeps a part of its part: of the
sum, of the optimizer's state and of the weight itself, split along the last axis first. In mesh order every device
would have to send its part to another one before the gather.

Mostly the two axes split two dimensions of a weight, and there is no order to choose. An embedding table with a
number of rows that no axis divides has one dimension for all axes. Such arrays may be *rotated*, split along the
first axis of the mesh last, by elementwise instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwright.hlo import ArrayShape
from shardwright.planner.rules import Factor
from shardwright.planner.tuning import MIN_ROTATED_ELEMENTS
from shardwright.plans.shardings import Mesh, TensorSharding, rotate_axes


def may_rotate(dims: Sequence[int], mesh: Mesh) -> bool:
    """Whether an array of these dimensions, in elements, may be split in either order.

    Condition: axes divide one dimension alone, and the first two or more divide it together.
    """
    sizes = [axis.size for axis in mesh.axes if axis.size > 1]
    if len(sizes) < 2 or prod(dims) < MIN_ROTATED_ELEMENTS:
        return False
    divided = [dim for dim in dims if any(dim % size == 0 for size in sizes)]
    return len(divided) == 1 and any(divided[0] % (sizes[0] * size) == 0 for size in sizes[1:])


def with_rotation(sharding: TensorSharding, dims: Sequence[int], mesh: Mesh) -> tuple[TensorSharding, ...]:
    """A sharding in mesh order, and rotated, if allowed and different, with even shards."""
    if sharding.unreduced or not may_rotate(dims, mesh) or not sharding.is_even(tuple(dims), mesh):
        return (sharding,)
    return tuple(dict.fromkeys((sharding, rotate_axes(sharding, mesh))))


def may_rotate_all(leaves: Sequence[ArrayShape], factors: Sequence[Factor | None], mesh: Mesh) -> bool:
    """Whether a strategy may be rotated, given the arrays of its operands and results and the factors of its axes.

    Condition: the instruction is elementwise, and its arrays may be rotated.
    """
    ranked = {leaf.dimensions for leaf in leaves if leaf.rank}
    if len(ranked) != 1 or not may_rotate(next(iter(ranked)), mesh):
        return False
    used = [factor for factor in factors if factor is not None]
    return all(
        factor.reduction is None and not factor.halo and len({*factor.operands, *factor.results} - {None}) == 1
        for factor in used
    )
