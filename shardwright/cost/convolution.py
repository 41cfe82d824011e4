"""Arithmetic and layouts of convolutions; only positions on real input elements count."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np

from shardwright.hlo import Instruction
from shardwright.hlo.attributes import ConvDims


def convolution_flops(
    instruction: Instruction, operand_shapes: Sequence[tuple[int, ...]], result_shapes: Sequence[tuple[int, ...]]
) -> float:
    """2 × multiply-adds of one device's shards; padding and dilation holes are not counted.

    A split spatial dimension takes its share of the whole convolution's positions: halo elements count once.
    """
    dims, window = instruction.get("dim_labels"), instruction.get("window")
    lhs, rhs = (operand.shape.leaves[0].dimensions for operand in instruction.operands[:2])
    result = instruction.shape.leaves[0].dimensions
    local_rhs, local_result = operand_shapes[1], result_shapes[0]
    work = 2.0 * local_result[dims.output_batch] * local_result[dims.output_feature]
    work *= local_rhs[dims.kernel_input_feature]
    for i in range(len(dims.input_spatial)):
        output, kernel = result[dims.output_spatial[i]], rhs[dims.kernel_spatial[i]]
        met = _positions(
            lhs[dims.input_spatial[i]],
            output,
            kernel,
            window.strides[i],
            window.padding_low[i],
            window.lhs_dilation[i],
            window.rhs_dilation[i],
        )
        share = local_result[dims.output_spatial[i]] * local_rhs[dims.kernel_spatial[i]] / max(output * kernel, 1)
        work *= met * share
    return work if prod(local_result) else 0.0


def convolution_orders(dims: ConvDims) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Dimensions of input, kernel and output in the order of XLA:CPU's kernels, `b01f_01io->b01f`."""
    return (
        (dims.input_batch, *dims.input_spatial, dims.input_feature),
        (*dims.kernel_spatial, dims.kernel_input_feature, dims.kernel_output_feature),
        (dims.output_batch, *dims.output_spatial, dims.output_feature),
    )


def batch_groups(instruction: Instruction, input_shape: tuple[int, ...]) -> int:
    """Groups of batches convolved by one device, each with its own output features; 1 without grouping.

    input_shape: of the device's shard of the input.
    """
    dim: int = instruction.get("dim_labels").input_batch
    whole: int = instruction.operands[0].shape.leaves[0].dimensions[dim]
    groups: int = instruction.get("batch_group_count", 1)
    return max(1, groups * input_shape[dim] // whole)


@lru_cache(maxsize=4096)
def _positions(
    input_size: int, output_size: int, kernel_size: int, stride: int, padding: int, lhs_dilation: int, rhs_dilation: int
) -> int:
    """Pairs of (output, kernel) positions along one dimension with a real input element."""
    starts = np.arange(output_size, dtype=np.int64) * stride - padding
    reads = starts[:, None] + np.arange(kernel_size, dtype=np.int64)[None, :] * rhs_dilation
    inside = (reads >= 0) & (reads <= (input_size - 1) * lhs_dilation)
    return int((inside & (reads % lhs_dilation == 0)).sum())
