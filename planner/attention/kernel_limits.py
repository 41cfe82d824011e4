"""Which attention is replaced: what the device's kernel computes, as JAX 0.10.2's `check_is_flash_attention` asks."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.attention import AttentionCall
from shardwright.cost.profiles import AttentionKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLimits:
    """What is replaced.

    kernel: of the device; None: calls are written out again there. with_float32: whether float32 is rounded for it.
    """

    kernel: AttentionKernel | None
    with_float32: bool

    def problem(self, call: AttentionCall) -> str | None:
        """Why `call` is not to stand for a program's attention; None where it is."""
        if call.element_type == "f32" and not self.with_float32:
            return 'its operands are float32: fused_attention="on" rounds them to bfloat16'
        if self.kernel is None:
            return None
        element_type = "bf16" if call.element_type == "f32" else call.element_type
        if not self.kernel.takes(element_type, call.width, call.value_width):
            return f"the kernel has no widths {call.width} and {call.value_width}"
        if call.statistics and call.bias and (call.rows % 2 or call.keys % 2):
            return f"{call.rows} × {call.keys} with a bias: the kernel takes even numbers"
        return None


def kernel_limits(option: str, kernel: AttentionKernel | None) -> KernelLimits | None:
    """What `fused_attention=option` replaces on devices with this kernel; None: nothing."""
    if option == "off" or (option == "auto" and kernel is None):
        return None
    return KernelLimits(kernel=kernel, with_float32=option == "on")
