"""Seconds of a kernel of the program's own, by what its author says that it costs."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.cost.profiles import HardwareProfile
from shardwright.hlo import Instruction
from shardwright.kernels import Price, read_forms, read_price, read_rule

#: What products are made of, by how the names of element types begin.
_FLOATS = ("f", "bf")


def kernel_price(instruction: Instruction, operand_shapes: Sequence[tuple[int, ...]]) -> Price | None:
    """The price of one device's part of a custom call; None where nobody says one.

    operand_shapes: of the part. What the user says is shared out among equal parts; of a kernel that comes with its
    parts, each says its own.
    """
    price, own = read_price(instruction), read_forms(instruction)
    if price is None and own is not None:
        form = own.get(tuple(operand_shapes))
        if form is not None:
            return form.price
        price = next(iter(own.values())).price if own else None
    if price is None:
        return None
    return price.divide(max(count_parts(instruction, operand_shapes), 1.0))


def count_parts(instruction: Instruction, operand_shapes: Sequence[tuple[int, ...]]) -> float:
    """How many equal parts a call is split into: by its rule, or by the largest cut of an operand."""
    whole = [leaf.dimensions for operand in instruction.operands for leaf in operand.shape.leaves]
    declared = read_rule(instruction)
    if declared is not None:
        return declared.count_parts(whole, operand_shapes)
    counts = [
        size / part
        for dims, local in zip(whole, operand_shapes, strict=False)
        for size, part in zip(dims, local, strict=False)
        if part
    ]
    return max(counts, default=1.0)


def kernel_time_s(instruction: Instruction, price: Price, traffic_bytes: float, profile: HardwareProfile) -> float:
    """Seconds of one run. price: of the part. traffic_bytes: of its operands and results, each once.

    By the roofline of a product of the same operations: in the type of the first operand of floats.
    """
    types = [leaf.element_type for operand in instruction.operands for leaf in operand.shape.leaves]
    floats = [kind for kind in types if kind.startswith(_FLOATS)]
    rate = profile.matmul_flops_per_s(floats[0]) if floats else profile.vector_flops_per_s
    size_bytes = traffic_bytes if price.size_bytes is None else price.size_bytes
    return max(
        price.flops / rate,
        price.transcendentals / profile.vector_flops_per_s,
        size_bytes / profile.memory_bandwidth_bytes_per_s,
        profile.launch_s,
    )
