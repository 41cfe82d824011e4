"""How micro-batches compute instructions: asked for once where they are equal and read the same parts."""

from __future__ import annotations

import pytest

from shardwright.hlo import Instruction, parse
from shardwright.planner.microbatch import local_rules
from shardwright.planner.microbatch.kinds import SUM, WHOLE, Along, Kind
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


def test_equal_instructions_are_cut_alike_and_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    along = local_rules._along

    def counting(instruction: Instruction, kinds: tuple[Kind, ...], rules: RuleCache) -> LocalRule | None:
        asked.append(instruction.name)
        return along(instruction, kinds, rules)

    monkeypatch.setattr(local_rules, "_along", counting)
    one, two, last = parse(PROGRAM).entry.instructions[2:]
    readings, rows = LocalRules(RuleCache()), (Along(0), WHOLE)
    found = [readings.of(each, rows, adds_whole=False) for each in (one, two)]
    assert found == [LocalRule(rows, (Along(0),), 8)] * 2
    assert readings.of(last, (Along(0), Along(0)), adds_whole=False) == LocalRule((Along(0), Along(0)), (SUM,), 8)
    assert readings.of(two, (WHOLE, Along(0)), adds_whole=False) == LocalRule((Along(1), Along(0)), (SUM,), 4)
    assert asked == ["one", "last", "two"]
