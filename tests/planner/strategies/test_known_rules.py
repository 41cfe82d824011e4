"""Rules are asked for once per distinct instruction, also of a program that much resembles another."""

from __future__ import annotations

import pytest

from shardwright.hlo import Instruction, parse
from shardwright.planner.graph.signatures import signature
from shardwright.planner.rules import OpRule, rule_of
from shardwright.planner.strategies import rule_cache
from shardwright.planner.strategies.rule_cache import RuleCache


def _program(width: int) -> list[Instruction]:
    """Two equal products and one of another shape."""
    module = parse(f"""HloModule products

ENTRY main {{
  a = f32[8,16]{{1,0}} parameter(0)
  b = f32[16,16]{{1,0}} parameter(1)
  c = f32[16,{width}]{{1,0}} parameter(2)
  one = f32[8,16]{{1,0}} dot(a, b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  two = f32[8,16]{{1,0}} dot(one, b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT last = f32[8,{width}]{{1,0}} dot(two, c), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
""")
    return [instruction for instruction in module.entry if instruction.opcode == "dot"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the instructions whose rules were made."""
    found: list[str] = []

    def counting(instruction: Instruction) -> OpRule:
        found.append(instruction.name)
        return rule_of(instruction)

    monkeypatch.setattr(rule_cache, "rule_of", counting)
    return found


def test_equal_instructions_share_a_number_and_a_rule(asked: list[str]) -> None:
    one, two, last = _program(32)
    rules = RuleCache()
    assert rules(one) == rule_of(one)
    assert rules(two) is rules(one)
    assert rules.number(two) == rules.number(one)
    assert rules(last) == rule_of(last)
    assert rules.number(last) != rules.number(one)
    assert asked == ["one", "last"]


def test_equal_instructions_of_other_objects_share_them_too(asked: list[str]) -> None:
    (one, *_), (alike, *_) = _program(32), _program(32)
    rules = RuleCache()
    assert rules.number(one) == rules.number(alike)
    assert asked == ["one"]


def test_signatures_are_made_once_for_equal_instructions_of_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counting(instruction: Instruction) -> object:
        made.append(instruction.name)
        return signature(instruction)

    monkeypatch.setattr(rule_cache, "signature", counting)
    rules = RuleCache()
    for each in _program(32):
        rules.number(each)
    assert made == ["one", "last"]


def test_a_program_much_like_another_is_numbered_as_it_was(asked: list[str]) -> None:
    first, second = RuleCache(), _program(64)
    numbers = [first.number(each) for each in _program(32)]
    rules = RuleCache(first)
    assert [rules.number(each) for each in second[:2]] == numbers[:2]
    assert rules.number(second[2]) not in numbers
    assert rules.of_number(rules.number(second[2])) == rule_of(second[2])
    assert asked == ["one", "last", "last"]
