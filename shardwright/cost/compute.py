"""Seconds of one instruction on one device, by the roofline model.

time = max(flops / attainable rate, bytes / memory bandwidth, kernel launch) (Williams, Waterman, Patterson, "Roofline:
an insightful visual performance model", 2009). XLA fuses chains of elementwise instructions into one kernel: each pays
a part of its bytes (`HardwareProfile.fused_traffic`), and the chain pays one launch, a lower bound on its last
instruction's time.

Shapes are dimensions of one device's shards, per array leaf of all operands in order (`operand_shapes`) and of the
result (`result_shapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import log2, prod
from typing import NamedTuple

from shardwright.attention import read_call
from shardwright.cost.attention import attention_flops, attention_time_s
from shardwright.cost.convolution import convolution_flops
from shardwright.cost.host import host_compute_time_s, transfer_time_s
from shardwright.cost.kernels import kernel_price, kernel_time_s
from shardwright.cost.opcodes import IDENTITIES, LOOPS, MARKER_TARGETS
from shardwright.cost.profiles import HardwareProfile
from shardwright.cost.ragged import kernel_time_s as ragged_kernel_time_s
from shardwright.cost.ragged import ragged_flops, ragged_time_s
from shardwright.hlo import ArrayShape, Instruction
from shardwright.hlo.opcodes import COLLECTIVES
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.kernels.ragged import read_ragged
from shardwright.placements import computes_on_host, read_placement

ShardShapes = Sequence[tuple[int, ...]]


class Traffic(NamedTuple):
    """Memory traffic of an instruction's kernels: reads per operand leaf, and whether they write its results."""

    reads: tuple[float, ...]
    writes: float


#: Instructions without a kernel of their own: bookkeeping, views, and calls of computations.
FREE_OPCODES = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "bitcast-convert", "reshape", "after-all",
    "add-dependency", "opt-barrier", "optimization-barrier", "partition-id", "replica-id", "domain",
    "get-dimension-size", "set-dimension-size", "while", "conditional", "call", "fusion", "infeed", "outfeed",
    "send", "send-done", "recv", "recv-done", "async-start", "async-update", "async-done", "broadcast", "iota",
})  # fmt: skip

#: Instructions never fused by XLA: each is a separate kernel and moves all its bytes.
_KERNEL_OPCODES = frozenset({
    "dot", "convolution", "sort", "scatter", "fft", "cholesky", "triangular-solve", "custom-call", "topk",
    "ragged-dot", "select-and-scatter", "rng-bit-generator", "all-gather", "all-reduce", "all-to-all", "reduce-scatter",
    "collective-permute", "copy",
})  # fmt: skip

#: Instructions fused into a product: it reads operands in any order.
_REORDERING = IDENTITIES | {"transpose", "copy"}


def is_free(instruction: Instruction) -> bool:
    """Whether the instruction itself takes no time."""
    if instruction.opcode == "custom-call":
        return instruction.get("custom_call_target") in MARKER_TARGETS
    return instruction.opcode in FREE_OPCODES


def flops(instruction: Instruction, operand_shapes: ShardShapes, result_shapes: ShardShapes) -> float:
    """Arithmetic operations of one instruction on one device; a multiply-add counts as two."""
    opcode = instruction.opcode
    if is_free(instruction) or not result_shapes:
        return 0.0
    if opcode == "dot":
        contracted: tuple[int, ...] = instruction.get("lhs_contracting_dims", ())
        return 2.0 * prod(result_shapes[0]) * prod(operand_shapes[0][dim] for dim in contracted)
    if opcode == "convolution":
        return convolution_flops(instruction, operand_shapes, result_shapes)
    if opcode == "custom-call" and (call := read_call(instruction)) is not None:
        return attention_flops(call, operand_shapes)
    if opcode == "custom-call" and (ragged := read_ragged(instruction)) is not None:
        return ragged.flops(operand_shapes, result_shapes[0])
    if opcode == "custom-call" and (price := kernel_price(instruction, operand_shapes)) is not None:
        return price.flops
    if opcode in _WORK:
        return _WORK[opcode](instruction, operand_shapes, result_shapes)
    return 0.0 if opcode in _MOVES_ONLY else float(prod(result_shapes[0]))


def memory_traffic_bytes(instruction: Instruction, operand_shapes: ShardShapes, result_shapes: ShardShapes) -> float:
    """Bytes read and written by one instruction as a kernel of its own on one device."""
    if is_free(instruction):
        return 0.0
    results = instruction.shape.leaves
    written = _bytes(results, result_shapes)
    operands = [leaf for operand in instruction.operands for leaf in operand.shape.leaves]
    opcode = instruction.opcode
    if opcode in ("gather", "dynamic-slice", "slice"):  # reads no more than it writes
        return 2 * written + _bytes(operands[1:], operand_shapes[1:])
    if opcode == "dynamic-update-slice":  # in place: only the update moves
        return 2 * _bytes(operands[1:2], operand_shapes[1:2])
    if opcode == "scatter":  # in place: the updates are read, combined and written
        arrays = len(results)
        return _bytes(operands[arrays:], operand_shapes[arrays:]) + 2 * _bytes(
            operands[arrays + 1 :], operand_shapes[arrays + 1 :]
        )
    return written + _bytes(operands, operand_shapes)


def kernel_bytes(
    instruction: Instruction, operand_shapes: ShardShapes, result_shapes: ShardShapes, traffic: Traffic
) -> float:
    """Memory traffic in bytes of one instruction on one device, within fused kernels."""
    leaves = [leaf for operand in instruction.operands for leaf in operand.shape.leaves]
    operand_bytes = [_bytes([leaf], [shape]) for leaf, shape in zip(leaves, operand_shapes, strict=True)]
    written = _bytes(instruction.shape.leaves, result_shapes)
    opcode = instruction.opcode
    if opcode == "transpose" and _is_view(instruction, operand_shapes[0]):
        return 0.0
    if opcode in ("gather", "dynamic-slice", "slice"):  # reads no more than it writes
        operand_bytes[0] = written
    elif opcode == "dynamic-update-slice":  # in place
        operand_bytes[0], written = 0.0, operand_bytes[1]
    elif opcode == "scatter":  # in place, once the array is there
        arrays = len(result_shapes)
        updates = sum(operand_bytes[arrays + 1 :])
        return updates * 3 + sum(operand_bytes[arrays : arrays + 1]) + traffic.reads[0] * written
    return (
        sum(size * count for size, count in zip(operand_bytes, traffic.reads, strict=True)) + written * traffic.writes
    )


def _is_view(instruction: Instruction, shape: tuple[int, ...]) -> bool:
    """Whether a transpose leaves the elements in place: only dimensions of one element move."""
    order = [dim for dim in instruction.get("dimensions", ()) if shape[dim] > 1]
    return order == sorted(order)


def compute_time_s(
    instruction: Instruction,
    operand_shapes: ShardShapes,
    result_shapes: ShardShapes,
    profile: HardwareProfile,
    *,
    ends_kernel: bool = False,
    traffic: Traffic | None = None,
) -> float:
    """Seconds of one execution of `instruction` on one device.

    ends_kernel: whether it is the last of a kernel of fused instructions; the others share that launch. traffic: its
        memory traffic; None: all the traffic of a separate kernel, of which fused instructions pay a part.

    Collectives, those of manual regions, take none: they are priced as what they send. Moves to the host and back, and
    what it computes, take what `cost.host` says.
    """
    if is_free(instruction) or instruction.opcode in COLLECTIVES:
        return 0.0
    placement = read_placement(instruction)
    if placement is not None:
        return transfer_time_s(placement, instruction, result_shapes[0], profile)
    if computes_on_host(instruction):
        operations = flops(instruction, operand_shapes, result_shapes)
        return host_compute_time_s(instruction, operand_shapes, result_shapes, operations, profile)
    work = flops(instruction, operand_shapes, result_shapes)
    size_bytes = (
        memory_traffic_bytes(instruction, operand_shapes, result_shapes)
        if traffic is None
        else kernel_bytes(instruction, operand_shapes, result_shapes, traffic)
    )
    memory_s = size_bytes / profile.memory_bandwidth_bytes_per_s
    if instruction.opcode == "custom-call" and (call := read_call(instruction)) is not None:
        return attention_time_s(call, operand_shapes, memory_s, profile)
    if instruction.opcode == "custom-call" and (ragged := read_ragged(instruction)) is not None:
        kind = instruction.operands[0].shape.leaves[0].element_type
        return ragged_kernel_time_s(ragged, kind, operand_shapes, result_shapes, memory_s, profile)
    if instruction.opcode == "custom-call" and (price := kernel_price(instruction, operand_shapes)) is not None:
        return kernel_time_s(instruction, price, size_bytes, profile)
    if instruction.opcode == "ragged-dot":
        return ragged_time_s(instruction, operand_shapes, result_shapes, memory_s, profile)
    if instruction.opcode in _KERNEL_OPCODES:
        rate = profile.vector_flops_per_s
        if instruction.opcode in ("dot", "convolution"):
            rate = profile.matmul_flops_per_s(instruction.operands[0].shape.leaves[0].element_type)
        masked_s = 0.0
        if traffic is not None and instruction.opcode == "dot":
            masked = _count_masked_bytes(instruction, operand_shapes)
            masked_s = sum(max(size / profile.memory_bandwidth_bytes_per_s, profile.launch_s) for size in masked)
        return max(work / rate, memory_s, profile.launch_s) + masked_s
    time_s = max(work / profile.vector_flops_per_s, memory_s * (profile.fused_traffic if traffic is None else 1.0))
    return max(time_s, profile.launch_s) if ends_kernel else time_s


def _count_masked_bytes(dot: Instruction, operand_shapes: ShardShapes) -> Iterator[float]:
    """Memory traffic in bytes of XLA's masking kernels: they zero padding of a product's operands along uneven
    contracted dimensions. The operand is read and written once more; a producing loop writes both.
    """
    for operand, shape, side in zip(dot.operands, operand_shapes, ("lhs", "rhs"), strict=True):
        (leaf,) = operand.shape.leaves
        contracted: tuple[int, ...] = dot.get(f"{side}_contracting_dims", ())
        if any(shape[dim] and leaf.dimensions[dim] % shape[dim] for dim in contracted):
            yield _bytes([leaf], [shape]) * (1 if _is_made_by_loop(operand) else 2)


def _is_made_by_loop(value: Instruction) -> bool:
    """Whether a loop kernel produces a value. An add of a scatter is no loop: XLA scatters into the other operand."""
    while value.opcode in _REORDERING:
        value = value.operands[0]
    is_scattered = value.opcode == "add" and any(operand.opcode == "scatter" for operand in value.operands)
    return value.opcode in LOOPS and not is_scattered


def _bytes(leaves: Sequence[ArrayShape], shapes: ShardShapes) -> float:
    """Bytes of parts of arrays in the device's memory."""
    return sum(
        prod(shape) * ELEMENT_BITS[leaf.element_type] / 8
        for leaf, shape in zip(leaves, shapes, strict=False)
        if not leaf.is_on_host
    )


def _reduce_flops(instruction: Instruction, operand_shapes: ShardShapes, result_shapes: ShardShapes) -> float:
    return float(max(prod(operand_shapes[0]) - prod(result_shapes[0]), 0))


def _window_flops(instruction: Instruction, operand_shapes: ShardShapes, result_shapes: ShardShapes) -> float:
    window = instruction.get("window")
    size = prod(window.sizes) if window is not None else 1
    outputs = result_shapes[0] if instruction.opcode == "reduce-window" else operand_shapes[1]
    return float(prod(outputs) * size)


def _sort_flops(instruction: Instruction, operand_shapes: ShardShapes, result_shapes: ShardShapes) -> float:
    dims = instruction.get("dimensions", ())
    length = prod(operand_shapes[0][dim] for dim in dims) if dims else 1
    return prod(operand_shapes[0]) * max(log2(max(length, 2)), 1.0)


def _fft_flops(instruction: Instruction, operand_shapes: ShardShapes, result_shapes: ShardShapes) -> float:
    length = prod(instruction.get("fft_length", ()) or (1,))
    return 5.0 * prod(operand_shapes[0]) * log2(max(length, 2))  # Cooley-Tukey


def _cholesky_flops(instruction: Instruction, operand_shapes: ShardShapes, result_shapes: ShardShapes) -> float:
    return prod(operand_shapes[0]) * operand_shapes[0][-1] / 3.0


def _solve_flops(instruction: Instruction, operand_shapes: ShardShapes, result_shapes: ShardShapes) -> float:
    return float(prod(result_shapes[0]) * operand_shapes[0][-1])


def _scatter_flops(instruction: Instruction, operand_shapes: ShardShapes, result_shapes: ShardShapes) -> float:
    return float(sum(prod(shape) for shape in operand_shapes[len(result_shapes) + 1 :]))


_WORK: dict[str, Callable[[Instruction, ShardShapes, ShardShapes], float]] = {
    "reduce": _reduce_flops,
    "reduce-window": _window_flops,
    "select-and-scatter": _window_flops,
    "sort": _sort_flops,
    "fft": _fft_flops,
    "cholesky": _cholesky_flops,
    "triangular-solve": _solve_flops,
    "scatter": _scatter_flops,
    "ragged-dot": ragged_flops,
}

#: Instructions that move elements and compute nothing.
_MOVES_ONLY = frozenset({
    "copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "gather", "reverse",
    "custom-call", "all-gather", "all-to-all", "collective-permute",
})  # fmt: skip
