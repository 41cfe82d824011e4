"""Instructions that the search takes for one another: those that rules cannot tell apart, and no others."""

from __future__ import annotations

import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.hlo import Instruction, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.graph.signatures import identity, signature
from shardwright.plans.plan import Plan


def _region(name: str, body: str) -> str:
    return f"""{name} {{
  a.{name} = f32[] parameter(0)
  b.{name} = f32[] parameter(1)
  {body.format(a=f"a.{name}", b=f"b.{name}")}
}}
"""


def _reduces(first: str, second: str) -> str:
    """Two sums over rows that differ in what their regions do with a (the sum so far) and b (the next element)."""
    return f"""HloModule reduces

{_region("first", first)}
{_region("second", second)}
ENTRY main {{
  x = f32[8,4096]{{1,0}} parameter(0)
  y = f32[8,4096]{{1,0}} parameter(1)
  zero = f32[] constant(0)
  one = f32[8]{{0}} reduce(x, zero), dimensions={{1}}, to_apply=first
  two = f32[8]{{0}} reduce(y, zero), dimensions={{1}}, to_apply=second
  ROOT both = (f32[8]{{0}}, f32[8]{{0}}) tuple(one, two)
}}
"""


def _pair(first: str, second: str) -> tuple[Instruction, ...]:
    return tuple(i for i in parse(_reduces(first, second)).entry if i.opcode == "reduce")


SUM = "ROOT s.{a} = f32[] add({a}, {b})"


@pytest.mark.parametrize(
    "other",
    [
        "ROOT s.{a} = f32[] add({b}, {b})",
        "ROOT s.{a} = f32[] subtract({a}, {b})",
        "s.{a} = f32[] add({a}, {b})\n  ROOT t.{a} = f32[] add(s.{a}, {b})",
    ],
)
def test_regions_are_told_apart_by_what_they_compute(other: str) -> None:
    one, two = _pair(SUM, other)
    assert signature(one) != signature(two)
    assert identity(one) != identity(two)


def test_literals_of_regions_count() -> None:
    scaled = "c.{a} = f32[] constant(%d)\n  m.{a} = f32[] multiply(c.{a}, {b})\n  ROOT s.{a} = f32[] add({a}, m.{a})"
    one, two = _pair(scaled % 1, scaled % 2)
    assert signature(one) != signature(two)
    assert identity(one) != identity(two)


def test_names_of_regions_do_not_count() -> None:
    one, two = _pair(SUM, SUM)
    assert signature(one) == signature(two)


def test_constants_count_by_the_operand_that_they_are() -> None:
    text = """HloModule m

ENTRY main {
  x = f32[] parameter(0)
  c = f32[] constant(0)
  left = f32[] subtract(c, x)
  right = f32[] subtract(x, c)
  ROOT both = (f32[], f32[]) tuple(left, right)
}
"""
    left, right = (i for i in parse(text).entry if i.opcode == "subtract")
    assert signature(left) != signature(right)
    assert identity(left) != identity(right)


def test_the_batch_that_a_library_call_declares_counts() -> None:
    text = """HloModule m

ENTRY main {
  x = f32[8,4,4] parameter(0)
  one = f32[8,4,4] custom-call(x), custom_call_target="f", frontend_attributes={num_batch_dims="1"}
  two = f32[8,4,4] custom-call(one), custom_call_target="f", frontend_attributes={other="1"}
  ROOT three = f32[8,4,4] custom-call(two), custom_call_target="f", frontend_attributes={xla.sdy.sharding_rule="r"}
}
"""
    calls = [i for i in parse(text).entry if i.opcode == "custom-call"]
    assert len({signature(each) for each in calls}) == 3
    assert len({identity(each) for each in calls}) == 3


def test_equal_instructions_of_one_text_are_made_of_the_same() -> None:
    text = """HloModule m

ENTRY main {
  x = f32[8,4] parameter(0)
  one = f32[4,8] transpose(x), dimensions={1,0}, metadata={op_name="one"}
  other = f32[4,8] transpose(x), dimensions={1,0}, metadata={op_name="other"}
  ROOT both = (f32[4,8], f32[4,8]) tuple(one, other)
}
"""
    one, other = (i for i in parse(text).entry if i.opcode == "transpose")
    assert identity(one) == identity(other)


@pytest.mark.parametrize("order", [1, -1])
def test_no_reduce_is_split_by_the_rule_of_another(order: int) -> None:
    """What keeps only the last element twice over has no all-reduce, though it has a sum's opcodes and shapes."""
    keeps_last = "ROOT s.{a} = f32[] add({b}, {b})"
    options = PlanOptions(mesh={"x": 8}, argument_axes=dict.fromkeys((0, 1), ((), ("x",))))
    planned = plan(_reduces(*[SUM, keeps_last][::order]), Cluster.local(8), options)
    assert isinstance(planned, Plan)
    entries = {entry.name: entry for entry in planned.instructions}
    summed, last = (entries[name] for name in ("one", "two")[::order])
    assert summed.operands[0][0].dims[1]
    assert not last.operands[0][0].dims[1]
