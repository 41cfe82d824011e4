"""Arithmetic of matrix products and convolutions, from the partitioned text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from math import prod

from benchmarks.planner.partitioned_text import CountingError, Instruction

Dims = Callable[[str], tuple[int, ...]]

_LABELS = re.compile(r"dim_labels=([0-9a-z?]+)_([0-9a-z?]+)->([0-9a-z?]+)")


def dot_flops(instruction: Instruction, dims: Dims) -> float:
    """2 × result elements × contracted elements."""
    lhs = dims(instruction.operands[0])
    return 2.0 * prod(instruction.dims) * prod(lhs[dim] for dim in instruction.numbers("lhs_contracting_dims"))


def convolution_flops(instruction: Instruction, dims: Dims) -> float:
    """2 × batch × output features × input features of a group × taps on real elements."""
    return flops_of_shapes(instruction, dims(instruction.operands[0]), dims(instruction.operands[1]), instruction.dims)


def flops_of_shapes(
    instruction: Instruction, lhs: tuple[int, ...], rhs: tuple[int, ...], out: tuple[int, ...]
) -> float:
    """FLOPs of a convolution with the instruction's labels and window, on arrays of these shapes."""
    labels = _LABELS.search(instruction.attributes)
    if labels is None:
        raise CountingError(f"convolution {instruction.name} has no dim_labels")
    operand, kernel, result = labels[1], labels[2], labels[3]
    spatial = sorted(label for label in operand if label.isdigit())
    taps = 1
    for position, label in enumerate(spatial):
        window = _parse_window(instruction.attributes, position)
        sizes = lhs[operand.index(label)], rhs[kernel.index(label)], out[result.index(label)]
        taps *= _count_taps(*sizes, *window)
    outer = out[result.index("b")] * out[result.index("f")]
    return 2.0 * outer * rhs[kernel.index("i")] * taps


def _parse_window(attributes: str, position: int) -> tuple[int, int, int, int]:
    """(stride, low padding, dilation of the operand, dilation of the kernel) along one spatial dimension."""
    window = re.search(r"window=\{([^}]*)\}", attributes)
    text = window[1] if window else ""

    def parse_part(key: str, default: str) -> str:
        match = re.search(rf"\b{key}=(\S+)", text)
        return match[1].split("x")[position] if match else default

    low = int(parse_part("pad", "0_0").split("_")[0])
    return int(parse_part("stride", "1")), low, int(parse_part("lhs_dilate", "1")), int(parse_part("rhs_dilate", "1"))


@cache
def _count_taps(
    size: int, kernel: int, outputs: int, stride: int, low: int, operand_dilation: int, kernel_dilation: int
) -> int:
    """Number of pairs (output, kernel element) along one dimension on an element of the operand."""
    extent = (size - 1) * operand_dilation + 1
    return sum(
        1
        for output in range(outputs)
        for tap in range(kernel)
        if 0 <= (place := output * stride - low + tap * kernel_dilation) < extent and place % operand_dilation == 0
    )
