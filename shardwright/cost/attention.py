"""Seconds of an attention call on one device.

Operations, two a multiply-add, of n heads, t rows and s keys in a batch of b, widths d (of q and k) and e (of v):

    forward: 2 b n t s (d + e);  backward: 2.5 times as many (five products for two; Dao, "FlashAttention-2", 2023,
    arXiv 2307.08691, section 4.1);  times the part of the t × s scores that the mask leaves

A fused kernel computes blocks of scores, of which those on the diagonal are half masked: under a causal mask the
operations count 1 + x / t times, x rows. Its rate depends on the width, not on the length:

    seconds = kernel start + operations / (peak rate · efficiency(width))

Devices without the kernel run the call written out: products at the device's rate, and passes over float32 scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.attention import AttentionCall
from shardwright.cost.profiles import AttentionKernel, HardwareProfile
from shardwright.cost.tuning import SCORE_PASSES, SCORES_HELD
from shardwright.hlo.shapes import ELEMENT_BITS

#: Products of the backward call for each of the forward one's.
_BACKWARD_WORK = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """What one device computes of a call.

    operations: of the scores that the mask leaves, two a multiply-add. score_bytes: of float32 scores, masked ones too.
    rows: of the part. is_causal: whether its kernel leaves out keys after a row.
    """

    operations: float
    score_bytes: float
    rows: int
    is_causal: bool


def attention_work(call: AttentionCall, operand_shapes: Sequence[tuple[int, ...]]) -> AttentionWork:
    """The work of a device's part of `call`. operand_shapes: dimensions of its parts of the operands.

    Of rows that are split, each device may have the last ones: they count all keys. No device works longer.
    """
    sizes = _sizes(call, operand_shapes)
    scores = float(sizes["b"] * sizes["n"] * sizes["t"] * sizes["s"])
    is_split = sizes["t"] < call.rows
    seen_part = 1.0 if is_split else _part_left(call)
    products = _BACKWARD_WORK if call.backward else 1.0
    return AttentionWork(
        operations=2.0 * scores * (sizes["d"] + sizes["e"]) * products * seen_part,
        score_bytes=4.0 * scores,
        rows=sizes["t"],
        is_causal=call.is_causal and not is_split,
    )


def attention_flops(call: AttentionCall, operand_shapes: Sequence[tuple[int, ...]]) -> float:
    """Operations of a device's part of `call`."""
    return attention_work(call, operand_shapes).operations


def attention_time_s(
    call: AttentionCall, operand_shapes: Sequence[tuple[int, ...]], memory_s: float, profile: HardwareProfile
) -> float:
    """Seconds of a device's part of `call`. memory_s: of reading its operands and writing its results once."""
    work, kernel = attention_work(call, operand_shapes), _kernel_of(call, profile)
    if kernel is None:
        passes = SCORE_PASSES * (2 if call.backward else 1)
        scores_s = passes * work.score_bytes / profile.memory_bandwidth_bytes_per_s
        return max(work.operations / profile.matmul_flops_per_s(call.element_type), memory_s) + scores_s
    efficiencies, extra = (
        (kernel.backward_efficiency, kernel.backward_extra_rows)
        if call.backward
        else (kernel.forward_efficiency, kernel.forward_extra_rows)
    )
    peak = profile.peak_flops_per_s.get(_computed_type(call), profile.peak_flops_per_s["default"])
    rate = peak * _at_width(efficiencies, max(call.width, call.value_width))
    operations = work.operations * (1 + extra / max(work.rows, 1) if work.is_causal else 1)
    return max(kernel.start_s + operations / rate, memory_s, profile.launch_s)


def written_out_bytes(call: AttentionCall, result_bytes: int, profile: HardwareProfile) -> int:
    """Bytes of scores that a device's part of `call` holds while it runs; 0 by a fused kernel.

    result_bytes: of the part of its first result, the output or the gradient of q.
    """
    if _kernel_of(call, profile) is not None:
        return 0
    width = call.width if call.backward else call.value_width
    rows = 8 * result_bytes // (width * ELEMENT_BITS[call.element_type])
    return SCORES_HELD * 4 * rows * call.keys


def runs_fused(call: AttentionCall, kernel: AttentionKernel | None) -> bool:
    """Whether a device with this kernel, or none, runs `call` by it; else it is written out. Kernels of 8-bit floats
    came with Hopper, as those of other widths of v did."""
    if call.is_f8:
        return kernel is not None and kernel.widths_may_differ and kernel.takes("bf16", call.width, call.value_width)
    return kernel is not None and kernel.takes(_computed_type(call), call.width, call.value_width)


def _kernel_of(call: AttentionCall, profile: HardwareProfile) -> AttentionKernel | None:
    """The device's kernel that runs `call`; None where it is written out."""
    return profile.attention if runs_fused(call, profile.attention) else None


def _computed_type(call: AttentionCall) -> str:
    """The element type that a kernel computes in: float32 is rounded to bfloat16."""
    return "bf16" if call.element_type == "f32" else call.element_type


def _part_left(call: AttentionCall) -> float:
    """The part of rows × keys that a causal mask and a window leave."""
    if not call.is_causal:
        return 1.0
    rows, keys = call.rows, call.keys
    seen = min(call.window or keys, keys)
    growing = min(seen, rows)  # rows that see fewer keys than the last ones
    return (growing * (growing + 1) / 2 + (rows - growing) * seen) / max(rows * keys, 1)


def _sizes(call: AttentionCall, operand_shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """Elements of a part's dimensions: of q, then of k and v."""
    sizes: dict[str, int] = {}
    for dims, shape in zip(call.operand_dims[:3], operand_shapes[:3], strict=True):
        sizes |= {letter: size for letter, size in zip(dims, shape, strict=True) if letter not in sizes}
    return sizes


def _at_width(efficiencies: Sequence[tuple[int, float]], width: int) -> float:
    """The part of the peak attained at a width: between two known ones on the line, in proportion below the first."""
    widths, parts = zip(*efficiencies, strict=True)
    if width < widths[0]:
        return float(parts[0] * width / widths[0])
    return float(np.interp(width, widths, parts))
