"""Attention that a program writes out, replaced by calls of the operator."""

from shardwright.planner.attention.fuse import Fused, Replaced, fuse_attention, note_calls, note_recomputed
from shardwright.planner.attention.kernel_limits import KernelLimits, kernel_limits

__all__ = ["Fused", "KernelLimits", "Replaced", "fuse_attention", "kernel_limits", "note_calls", "note_recomputed"]
