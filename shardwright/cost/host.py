"""Seconds of what the host takes part in: moves between its memory and a device's, and what its processors compute.

A move takes its bytes by the bandwidth of the device's way to its host. XLA:GPU (jaxlib 0.10.2) makes of each an
asynchronous copy, but whether anything runs beside it depends on the order of its scheduler; no move counts as hidden
here. An instruction computed on the host (`compute_on("device_host")`) takes its bytes by the host's memory bandwidth
or its operations by the host's speed, whichever is longer (the roofline of `compute`), and the way there and back of
operands and results that lie on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf, prod

from shardwright.cost.profiles import HardwareProfile
from shardwright.hlo import ArrayShape, Instruction
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.placements import Placement


def transfer_time_s(placement: Placement, call: Instruction, shape: tuple[int, ...], profile: HardwareProfile) -> float:
    """Seconds of a placement of one device's part, of these dimensions; 0 where the value lies there already."""
    (source,), host = call.operands[0].shape.leaves, profile.require_host()
    if source.is_on_host == placement.is_to_host:
        return 0.0
    bandwidth = host.from_device_bytes_per_s if placement.is_to_host else host.to_device_bytes_per_s
    return 0.0 if isinf(bandwidth) else _bytes(source, shape) / bandwidth + profile.launch_s


def host_compute_time_s(
    instruction: Instruction,
    operand_shapes: Sequence[tuple[int, ...]],
    result_shapes: Sequence[tuple[int, ...]],
    operations: float,
    profile: HardwareProfile,
) -> float:
    """Seconds of an instruction that the host computes for one device. operations: of that part."""
    host = profile.require_host()
    operands = [
        (leaf, shape)
        for leaf, shape in zip(
            (leaf for operand in instruction.operands for leaf in operand.shape.leaves), operand_shapes, strict=True
        )
    ]
    results = [*zip(instruction.shape.leaves, result_shapes, strict=True)]
    touched = sum(_bytes(*each) for each in (*operands, *results))
    there = sum(_bytes(*each) for each in operands if not each[0].is_on_host)
    back = sum(_bytes(*each) for each in results if not each[0].is_on_host)
    return (
        max(touched / host.memory_bandwidth_bytes_per_s, operations / host.flops_per_s)
        + there / host.to_device_bytes_per_s
        + back / host.from_device_bytes_per_s
    )


def _bytes(leaf: ArrayShape, shape: tuple[int, ...]) -> float:
    return prod(shape) * ELEMENT_BITS[leaf.element_type] / 8
