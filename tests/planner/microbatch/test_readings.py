"""How micro-batches compute instructions: asked for once where they are equal and read the same parts."""

from __future__ import annotations

from shardwright.hlo import parse
from shardwright.planner.microbatch.kinds import SUM, WHOLE, Along
from shardwright.planner.microbatch.local_rules import LocalRule, LocalRules
from shardwright.planner.strategies.rule_cache import RuleCache

PROGRAM = """HloModule two, entry_computation_layout={(f32[8,4], f32[4,4])->f32[4,4]}

ENTRY main {
  x = f32[8,4] parameter(0)
  w = f32[4,4] parameter(1)
  one = f32[8,4] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  two = f32[8,4] dot(one, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT last = f32[4,4] dot(one, two), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}
"""


def test_equal_instructions_are_cut_alike_and_asked_for_once() -> None:
    one, two, last = parse(PROGRAM).entry.instructions[2:]
    readings, rows = LocalRules(RuleCache()), (Along(0), WHOLE)
    first, second = (readings.of(each, rows, adds_whole=False) for each in (one, two))
    assert first == LocalRule(rows, (Along(0),), 8)
    assert second is first
    assert readings.of(last, (Along(0), Along(0)), adds_whole=False) == LocalRule((Along(0), Along(0)), (SUM,), 8)
    assert readings.of(two, (WHOLE, Along(0)), adds_whole=False) == LocalRule((Along(1), Along(0)), (SUM,), 4)
