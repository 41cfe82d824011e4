"""A refusal of memory names the custom calls that no plan splits, where it is due to them."""

from __future__ import annotations

import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.errors import MemoryBudgetError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan


def attention(call: str) -> str:
    return f"""HloModule attention

ENTRY main {{
  x = f32[64,1024] parameter(0)
  w = f32[1024,1024] parameter(1)
  q = f32[64,1024] dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  b = f32[64,16,1024] broadcast(q), dimensions={{0,2}}
  k = f32[64,16,1024] tanh(b)
  a = f32[64,16,1024] {call}
  ROOT out = f32[64,16,1024] multiply(a, b)
}}
"""


OPAQUE = attention('custom-call(k, k, k), custom_call_target="__cudnn$fmhaSoftmax"')
RULE = "#sdy.op_sharding_rule<([i, j, k], [i, j, k], [i, j, k])->([i, j, k]) {i=64, j=16, k=1024} need_replication={k}>"
RULED = OPAQUE.replace('Softmax"', f'Softmax", frontend_attributes={{xla.sdy.sharding_rule="{RULE}"}}')
CODE = attention("add(k, k)")
TIGHT = PlanOptions(memory_budget=6 << 20)


def test_the_calls_their_bytes_and_the_way_out_are_named() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        plan(OPAQUE, Cluster.local(4), TIGHT)
    assert "custom call '__cudnn$fmhaSoftmax' runs whole on every device and keeps 8.00 MiB there" in str(caught.value)
    assert "jax.experimental.custom_partitioning" in (caught.value.remedy or "")


def test_with_a_rule_the_step_fits() -> None:
    assert plan(RULED, Cluster.local(4), TIGHT).memory.peak_bytes <= 6 << 20


@pytest.mark.parametrize(("text", "budget"), [(CODE, 1 << 20), (OPAQUE, 64)], ids=["no call", "too little anyway"])
def test_where_calls_are_not_to_blame_none_is_named(text: str, budget: int) -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        plan(text, Cluster.local(2), PlanOptions(memory_budget=budget))
    assert "custom call" not in str(caught.value)
