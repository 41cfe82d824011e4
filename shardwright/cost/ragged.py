"""Seconds and bytes of products of rows in groups, as devices make them.

Of M rows in G groups, of K × N matrices, the product and both its gradients are 2 M K N operations. A compiler that
knows no groups makes 2 G M K N of them: rows are stored G times over, zero in all groups but their own, and multiplied
with all matrices:

    seconds = (1 + G) · rows / bandwidth, for each operand that is masked  +  G · operations / (peak rate · efficiency)

The efficiency is that of a very large product, most of whose operands are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwright.cost.profiles import HardwareProfile, RaggedProducts
from shardwright.hlo import Instruction
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.kernels.ragged import RaggedCall

Shapes = Sequence[tuple[int, ...]]


def ragged_flops(product: Instruction, operand_shapes: Shapes, result_shapes: Shapes) -> float:
    """Operations of a `ragged-dot`, two a multiply-add, each row by its own group's matrix."""
    contracted: int = prod(operand_shapes[0][dim] for dim in product.get("lhs_contracting_dims", ()))
    groups = result_shapes[0][0] if _sums_rows(product) else 1
    return 2.0 * prod(result_shapes[0]) * contracted / max(groups, 1)


def ragged_time_s(
    product: Instruction, operand_shapes: Shapes, result_shapes: Shapes, memory_s: float, profile: HardwareProfile
) -> float:
    """Seconds of a `ragged-dot` that is left to a compiler. memory_s: of its operands and results, each once."""
    work = ragged_flops(product, operand_shapes, result_shapes)
    kind = product.operands[0].shape.leaves[0].element_type
    masked = _masks(product, profile.ragged)
    if masked is None:
        return max(work / profile.matmul_flops_per_s(kind), memory_s, profile.launch_s)
    peak = profile.peak_flops_per_s.get(kind, profile.peak_flops_per_s["default"])
    groups = operand_shapes[2][-1]
    stored = _masked_bytes(product, operand_shapes) if masked.stores_masked else 0.0
    masking_s = stored * (1 + 1 / max(groups, 1)) / profile.memory_bandwidth_bytes_per_s
    product_s = groups * work / (peak * masked.masked_efficiency)
    return max(product_s, memory_s + stored / profile.memory_bandwidth_bytes_per_s, profile.launch_s) + masking_s


def masked_bytes(product: Instruction, operand_bytes: Sequence[int], profile: HardwareProfile) -> int:
    """Bytes of rows that a compiler stores once per group while a `ragged-dot` runs, and of its product's workspace.

    operand_bytes: of the parts of its operands.
    """
    masked = _masks(product, profile.ragged)
    if masked is None or not masked.stores_masked:
        return 0
    groups = product.operands[2].shape.leaves[0].dimensions[-1]
    return groups * sum(operand_bytes[: _count_masked(product)]) + profile.compiler.product_workspace_bytes


def kernel_time_s(
    call: RaggedCall, element_type: str, operand_shapes: Shapes, result_shapes: Shapes, memory_s: float,
    profile: HardwareProfile,
) -> float:  # fmt: skip
    """Seconds of JAX's kernel; without it, as of a product. memory_s: of operands and results, each once."""
    work = call.flops(operand_shapes, result_shapes[0])
    efficiency = profile.ragged.kernel_efficiency if profile.ragged is not None else 0.0
    peak = profile.peak_flops_per_s.get(element_type, profile.peak_flops_per_s["default"])
    rate = peak * efficiency if efficiency else profile.matmul_flops_per_s(element_type)
    copied = call.copied_elements(operand_shapes, result_shapes[0]) * ELEMENT_BITS[element_type] / 8
    copies_s = max(2 * copied / profile.memory_bandwidth_bytes_per_s, profile.launch_s) if copied else 0.0
    return max(work / rate, memory_s, profile.launch_s) + copies_s


def _masks(product: Instruction, ragged: RaggedProducts | None) -> RaggedProducts | None:
    """How a compiler masks a product; None where it does not."""
    if ragged is None or not _count_masked(product):
        return None
    return ragged if (ragged.masks_weights if _sums_rows(product) else ragged.masks_rows) else None


def _sums_rows(product: Instruction) -> bool:
    """Whether it is a gradient of matrices: one result for each group."""
    return bool(set(product.get("lhs_ragged_dims", ())) & set(product.get("lhs_contracting_dims", ())))


def _count_masked(product: Instruction) -> int:
    """How many operands are masked: the rows, both kinds of rows in a gradient of matrices, none along a batch."""
    if set(product.get("lhs_ragged_dims", ())) & set(product.get("lhs_batch_dims", ())):
        return 0
    return 2 if _sums_rows(product) else 1


def _masked_bytes(product: Instruction, operand_shapes: Shapes) -> float:
    """Bytes of all masked operands, once per group."""
    masked = zip(product.operands[: _count_masked(product)], operand_shapes, strict=False)
    groups = operand_shapes[2][-1]
    return sum(
        groups * prod(shape) * ELEMENT_BITS[operand.shape.leaves[0].element_type] / 8 for operand, shape in masked
    )
