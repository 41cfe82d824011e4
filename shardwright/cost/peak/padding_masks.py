"""Masks the SPMD partitioner inserts before reductions over padded shards.

The last shards of a dimension not divided by its axes contain padding. Reductions replace it with their initial value,
products with zeros in both operands: a NaN in one is not masked by zeros in the other (`PartitionedHlo::PadWithValue`
in xla/service/spmd/spmd_partitioner.cc, from HandleReduce and, in products, from PartitionBaseCase and
PartitionDotGroupOnContracting in dot_handler.cc).

A mask compares positions: it is loop-invariant. Masks of reductions count the devices of the mesh, those of products
the devices of a group along the contracted dimension alone: equal masks are merged if both are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.hlo import Instruction
from shardwright.plans.shardings import Mesh, TensorSharding


def dims_to_mask(instruction: Instruction, number: int, used: Sequence[TensorSharding], mesh: Mesh) -> tuple[int, ...]:
    """Dimensions of an instruction's operand read through a mask.

    number: of the operand. used: the sharding of each operand in its use, arrays only.
    """
    dims = used[number].dims
    shape = instruction.operands[number].shape.leaves[0].dimensions
    return tuple(
        dim for dim in contraction_dims(instruction, number) if dims[dim] and shape[dim] % mesh.size(dims[dim])
    )


def contraction_dims(instruction: Instruction, number: int) -> Sequence[int]:
    """Dimensions of an operand that an instruction sums or otherwise reduces over."""
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
    """Whether an instruction's masks count the devices of a group, not of the mesh: a product with split dimensions
    besides the contracted ones.
    """
    if instruction.opcode == "reduce":
        return False
    contracted = {axis for dim in contraction_dims(instruction, 0) for axis in used[0].dims[dim]}
    return any(axis not in contracted for sharding in used for dim in sharding.dims for axis in dim)
