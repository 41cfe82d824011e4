"""Kernels of a program's own: how their calls may be split, what they cost, and what they look like by parts."""

from shardwright.kernels.forms import (
    KERNEL_TARGET,
    NAME_ATTRIBUTE,
    KernelForm,
    KernelForms,
    decode_forms,
    encode_forms,
    read_forms,
)
from shardwright.kernels.prices import PRICE_ATTRIBUTE, Price, read_price
from shardwright.kernels.rules import RULE_ATTRIBUTE, ShardingRule, parse_rule, read_rule

__all__ = [
    "KERNEL_TARGET",
    "NAME_ATTRIBUTE",
    "PRICE_ATTRIBUTE",
    "RULE_ATTRIBUTE",
    "KernelForm",
    "KernelForms",
    "Price",
    "ShardingRule",
    "decode_forms",
    "encode_forms",
    "parse_rule",
    "read_forms",
    "read_price",
    "read_rule",
]
