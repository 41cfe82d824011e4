"""In which order axes split one dimension together.

Everywhere else they stand in mesh order, the first axis major: batches are split so, for what gathers them along the
last axis, inside a node, leaves them split along the first. State wants it the other way round. A weight that the last
axis splits for computing is summed over the first, the data-parallel one, and what each device keeps of the sum, of the
optimizer's state and of the weight itself between steps is a part of its part: split along the last axis first. In mesh
order every device would have to hand its part to another one before it is gathered.

Mostly the two axes split two dimensions of a weight, and there is no order to choose. A table of embeddings whose
number of rows no axis divides has one dimension for all of them: such arrays may be *turned*, split along the first
axis of the mesh last, by whatever computes element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwright.hlo import ArrayShape
from shardwright.planner.rules import Factor
from shardwright.shardings import Mesh, TensorSharding, rotate_axes

#: Elements of the smallest array that may be turned: of less, no order saves what planning it takes.
MIN_ELEMENTS = 1 << 20


def may_rotate(dims: Sequence[int], mesh: Mesh) -> bool:
    """Whether an array of these dimensions, in elements, may be split in either order: where one dimension alone is
    divided by axes, and the first two or more divide it together."""
    sizes = [axis.size for axis in mesh.axes if axis.size > 1]
    if len(sizes) < 2 or prod(dims) < MIN_ELEMENTS:
        return False
    divided = [dim for dim in dims if any(dim % size == 0 for size in sizes)]
    return len(divided) == 1 and any(divided[0] % (sizes[0] * size) == 0 for size in sizes[1:])


def with_rotation(lies: TensorSharding, dims: Sequence[int], mesh: Mesh) -> tuple[TensorSharding, ...]:
    """A sharding in mesh order, and turned, if the array may be, and that is another one, of even shards."""
    if lies.unreduced or not may_rotate(dims, mesh) or not lies.is_even(tuple(dims), mesh):
        return (lies,)
    return tuple(dict.fromkeys((lies, rotate_axes(lies, mesh))))


def may_rotate_all(leaves: Sequence[ArrayShape], factors: Sequence[Factor | None], mesh: Mesh) -> bool:
    """Whether a strategy may be turned whose operands and results are these arrays, by the factors that axes take: of
    what computes element by element, on arrays that may."""
    ranked = {leaf.dimensions for leaf in leaves if leaf.rank}
    if len(ranked) != 1 or not may_rotate(next(iter(ranked)), mesh):
        return False
    taken = [factor for factor in factors if factor is not None]
    return all(
        factor.reduction is None and not factor.halo and len({*factor.operands, *factor.results} - {None}) == 1
        for factor in taken
    )
