"""What custom calls say that they cost: read, shared out among parts and micro-batches."""

from __future__ import annotations

import pytest

from shardwright.cost.kernels import kernel_price
from shardwright.hlo import Instruction, parse
from shardwright.kernels import Price, read_price
from shardwright.kernels.prices import BY_KERNEL, parse_price
from shardwright.planner.microbatch.shapes import local_attributes

TEXT = """HloModule m

ENTRY main {{
  x = f32[{rows},16] parameter(0)
  w = f32[16,8] parameter(1)
  ROOT y = f32[{rows},8] custom-call(x, w), custom_call_target="{target}", {said}
}}
"""
RULE = (
    'xla.sdy.sharding_rule="#sdy.op_sharding_rule<([i, k], [k, j])->([i, j]) {i=64, k=16, j=8} reduction={k}, custom>"'
)
COST = 'shardwright.cost="flops=1000.0,bytes=640.0,source=sw.cost"'
TPU = (
    '{"custom_call_config": {"body": "TUzv", "cost_estimate": {"flops": 9, "bytes_accessed": 5, "transcendentals": 1}}}'
)


def call(said: str, rows: int = 64, target: str = "kernel") -> Instruction:
    return parse(TEXT.format(rows=rows, target=target, said=said)).entry.root


@pytest.mark.parametrize("rule", [f"{RULE}, ", ""], ids=["by its rule", "by its operands"])
def test_parts_share_a_price(rule: str) -> None:
    priced = call(f"frontend_attributes={{{rule}{COST}}}")
    assert kernel_price(priced, [(64, 16), (16, 8)]) == Price(flops=1000, size_bytes=640)
    assert kernel_price(priced, [(16, 16), (16, 8)]) == Price(flops=250, size_bytes=160)
    assert (kernel_price(priced, [(16, 16), (16, 4)]) == Price(flops=125, size_bytes=80)) == bool(rule)
    assert kernel_price(call(f'frontend_attributes={{{rule}a="b"}}'), [(64, 16), (16, 8)]) is None


def test_a_micro_batch_pays_its_part() -> None:
    whole = call(f"frontend_attributes={{{RULE}, {COST}}}")
    half = call("frontend_attributes={}", rows=32)
    local = local_attributes(whole, half.operands, half.shape.leaves[0])["frontend_attributes"]
    assert "flops=500.0,bytes=320.0" in local.text
    assert "i=32, k=16, j=8" in local.text


def test_prices_of_tpu_kernels_are_in_their_configuration() -> None:
    expected = Price(flops=9, size_bytes=5, transcendentals=1, source=BY_KERNEL)
    assert read_price(call(f"backend_config={TPU}", target="tpu_custom_call")) == expected
    assert read_price(call(f"backend_config={TPU}")) is None
    assert read_price(call("backend_config={}", target="tpu_custom_call")) is None
    assert parse_price(expected.to_text()) == expected


@pytest.mark.parametrize(
    "text", ["", "flops", "flops=x", "flops=-1", "flops=nan", "flops=inf", "bytes=1", "flops=1,bytes=-2"]
)
def test_what_is_no_price_is_none(text: str) -> None:
    assert parse_price(text) is None
