"""Attention as one operator, forward and backward: cuDNN's fused call, read, written, and cut into parts."""

from shardwright.attention.call import HIDDEN_BIAS, AttentionCall, read_call, read_form

__all__ = ["HIDDEN_BIAS", "AttentionCall", "read_call", "read_form"]
