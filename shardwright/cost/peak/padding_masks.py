"""What XLA's partitioner puts in the place of padding where shards are uneven and a kernel adds up along them.

The last shards of a dimension that its axes do not divide hold elements that are none. Reductions read the number they
begin with instead, products zeros, in both operands: what is no number in one is not masked by zeros in the other
(`PartitionedHlo::PadWithValue` in xla/service/spmd/spmd_partitioner.cc, from HandleReduce and, for products, from
PartitionBaseCase and PartitionDotGroupOnContracting in dot_handler.cc).

A mask compares positions, so it is the same in each pass of a loop. Masks of reductions count the devices of the mesh,
those of products the devices of a group that differs along the contracted dimension alone: equal masks are merged
where both are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.hlo import Instruction
from shardwright.shardings import Mesh, TensorSharding


def dims_to_mask(instruction: Instruction, number: int, used: Sequence[TensorSharding], mesh: Mesh) -> tuple[int, ...]:
    """Dimensions of an instruction's operand along which it is read through a mask.

    number: of the operand. used: how each operand lies as it is read, arrays only.
    """
    dims = used[number].dims
    shape = instruction.operands[number].shape.leaves[0].dimensions
    return tuple(
        dim for dim in contraction_dims(instruction, number) if dims[dim] and shape[dim] % mesh.size(dims[dim])
    )


def contraction_dims(instruction: Instruction, number: int) -> Sequence[int]:
    """Dimensions of an operand that an instruction adds up along, or reduces otherwise."""
    if instruction.opcode == "reduce":
        is_reduced = number < len(instruction.operands) // 2
        return tuple(instruction.get("dimensions", ())) if is_reduced else ()
    if number > 1:
        return ()
    if instruction.opcode == "dot":
        return tuple(instruction.get(f"{('lhs', 'rhs')[number]}_contracting_dims", ()))
    if instruction.opcode == "convolution":
        labels = instruction.get("dim_labels")
        return ((labels.input_feature, labels.kernel_input_feature)[number],)
    return ()


def is_counted_in_group(instruction: Instruction, used: Sequence[TensorSharding]) -> bool:
    """Whether an instruction's masks count the devices of a group, not of the mesh: other dimensions of a product than
    those that it adds up are split, too."""
    if instruction.opcode == "reduce":
        return False
    contracted = {axis for dim in contraction_dims(instruction, 0) for axis in used[0].dims[dim]}
    return any(axis not in contracted for each in used for dim in each.dims for axis in dim)
