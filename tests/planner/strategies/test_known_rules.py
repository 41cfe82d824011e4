"""Rules are asked for once per distinct instruction, also of a program that much resembles another."""

from __future__ import annotations

from shardwright.hlo import Instruction, parse
from shardwright.planner.graph.signatures import identity, signature
from shardwright.planner.rules import rule_of
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


def test_equal_instructions_share_a_number_and_a_rule() -> None:
    one, two, last = _program(32)
    rules = RuleCache()
    assert rules(one) == rule_of(one)
    assert rules(two) is rules(one)
    assert rules.number(two) == rules.number(one)
    assert rules(last) == rule_of(last)
    assert rules.number(last) != rules.number(one)


def test_equal_instructions_of_other_objects_share_them_too() -> None:
    (one, *_), (alike, *_) = _program(32), _program(32)
    rules = RuleCache()
    assert rules.number(one) == rules.number(alike)
    assert rules(one) is rules(alike)


def test_equal_instructions_of_one_text_are_known_without_a_signature() -> None:
    """They share their components."""
    one, two, last = _program(32)
    assert identity(one) == identity(two) != identity(last)
    assert signature(one) == signature(two) != signature(last)


def test_a_program_much_like_another_is_numbered_as_it_was() -> None:
    first, second = RuleCache(), _program(64)
    numbers = [first.number(each) for each in _program(32)]
    rules = RuleCache(first)
    assert [rules.number(each) for each in second[:2]] == numbers[:2]
    assert rules.number(second[2]) not in numbers
    assert rules.of_number(rules.number(second[2])) == rule_of(second[2])
    assert rules(second[0]) is first.of_number(numbers[0])
