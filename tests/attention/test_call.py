"""cuDNN's attention calls are read as JAX writes them, and written as JAX does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.attention import AttentionCall, read_call
from shardwright.hlo import Instruction, parse
from tests.attention.calls import program_of

FORWARD = AttentionCall(
    backward=False, batch=4, heads=8, kv_heads=2, rows=64, keys=32, width=16, value_width=16, element_type="bf16",
    rows_first=True, scale=0.25,
)  # fmt: skip
CALLS = [
    FORWARD,
    replace(FORWARD, statistics=False, rows_first=False, mask="causal", window=7),
    replace(FORWARD, backward=True, statistics=False, bias=(1, 8, 64, 32), bias_gradient=True),
    replace(FORWARD, backward=True, statistics=False, dropout_rate=0.1, seed=3, mask="padding_causal"),
    replace(FORWARD, value_width=8, element_type="f32", bias=(4, 1, 64, 32)),
]


def instruction_of(call: AttentionCall) -> Instruction:
    entry = parse(program_of(call)).entry
    return next(instruction for instruction in entry if instruction.name == "attend")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.target)
def test_a_call_is_read_as_it_was_written(call: AttentionCall) -> None:
    assert read_call(instruction_of(call)) == call


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"mask_type": "NO_MASK"', '"mask_type": "ALIBI"'),
        ('"max_seg_per_batch": 1', '"max_seg_per_batch": 4'),
        ('"is_paged_attention": false', '"is_paged_attention": true'),
        ("fmhaSoftmax", "fmhaSoftmaxF8"),
        ('"fmha_scale": 0.25, ', ""),
    ],
)
def test_what_is_not_understood_is_no_attention(before: str, after: str) -> None:
    instruction = instruction_of(FORWARD)
    for attribute in instruction.attributes.values():
        if isinstance(attribute.value, str):
            attribute.value = attribute.value.replace(before, after)
    assert read_call(instruction) is None
