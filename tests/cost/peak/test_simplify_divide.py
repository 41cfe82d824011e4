"""Which quotients XLA:CPU writes as products with an inverse, by what its simplifier leaves of small programs."""

from __future__ import annotations

import pytest

from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.simplify_divide import OWN_BROADCAST, multiply_by_inverses
from tests.cost.one_device import program_of

HEAD = """HloModule quotients

ENTRY main {
  x = f32[8,16]{1,0} parameter(0)
  v = f32[8]{0} parameter(1)
  column = f32[8,1]{1,0} parameter(2)
  n = s32[8,16]{1,0} parameter(3)
  s = f32[8]{0} tanh(v)
  c = f32[8,1]{1,0} tanh(column)
  y = f32[8,16]{1,0} cosine(x)
"""

#: A broadcast along a dimension of one element as HLO spells it.
SPELLED = """
  same = f32[8,1]{1,0} broadcast(c), dimensions={0,1}
  short = f32[8]{0} reshape(same)
  spread = f32[8,16]{1,0} broadcast(short), dimensions={0}
"""
PLAIN = """
  spread = f32[8,16]{1,0} broadcast(s), dimensions={0}
"""
#: A reshape there and back, which leaves what it began with.
BACK = """
  wide = f32[8,1]{1,0} reshape(s)
  short = f32[8]{0} reshape(wide)
  spread = f32[8,16]{1,0} broadcast(short), dimensions={0}
"""
ONE_QUOTIENT = "  first = f32[8,16]{1,0} divide(x, spread)\n  second = f32[8,16]{1,0} sine(y)\n"
TWO_QUOTIENTS = "  first = f32[8,16]{1,0} divide(x, spread)\n  second = f32[8,16]{1,0} divide(y, spread)\n"
ROOT = "  ROOT out = (f32[8,16]{1,0}, f32[8,16]{1,0}) tuple(first, second)\n}\n"


def products(*lines: str, root: str = ROOT) -> list[str]:
    """The quotients that are products."""
    program = program_of("".join((HEAD, *lines, root)))
    return [
        instruction.name
        for opcode, instruction in zip(program.opcodes, program.instructions, strict=True)
        if instruction.opcode == "divide" and opcode == "multiply"
    ]


@pytest.mark.parametrize("divisor", [PLAIN, SPELLED, BACK])
def test_a_quotient_by_what_nobody_else_reads_is_a_product(divisor: str) -> None:
    assert products(divisor, ONE_QUOTIENT) == ["first"]


@pytest.mark.parametrize("divisor", [PLAIN, SPELLED, BACK])
def test_of_two_quotients_the_first_is_one(divisor: str) -> None:
    assert products(divisor, TWO_QUOTIENTS) == ["first"]


@pytest.mark.parametrize("divisor", [PLAIN, SPELLED, BACK])
def test_the_first_is_the_one_that_the_results_need_first(divisor: str) -> None:
    assert products(divisor, TWO_QUOTIENTS, root=ROOT.replace("(first, second)", "(second, first)")) == ["second"]


@pytest.mark.parametrize(("order", "expected"), [("first, second", {"first", "second"}), ("second, first", {"second"})])
def test_what_is_spread_apart_later_is_one_divisor_with_the_others_until_then(order: str, expected: set[str]) -> None:
    """As XLA:CPU leaves an attention of one sequence a device that is computed again (GPT-2 1.5B, jaxlib 0.10.2)."""
    plain = program_of("".join((HEAD, SPELLED, TWO_QUOTIENTS, ROOT.replace("(first, second)", f"({order})"))), "a100")
    apart, place = DeviceProgram(), list[int]()
    for node, (opcode, instruction) in enumerate(zip(plain.opcodes, plain.instructions, strict=True)):
        operands = [place[each] for each in plain.operands[node]]
        if instruction.name == "second":
            spread = plain.operands[node][1]
            operands[1] = apart.add_like(plain, spread, [place[each] for each in plain.operands[spread]])
            apart.marks[operands[1]] = OWN_BROADCAST
        place.append(apart.add_like(plain, node, operands, opcode))
    apart.root = place[plain.root]
    inverted = multiply_by_inverses(apart)
    names = {
        each.name for each, opcode in zip(inverted.instructions, inverted.opcodes, strict=True) if opcode == "multiply"
    }
    assert names == expected


@pytest.mark.parametrize(("divisor", "expected"), [(PLAIN, []), (BACK, []), (SPELLED, ["first"])])
def test_what_else_reads_the_divisor_counts_unless_the_broadcast_is_spelled_out(
    divisor: str, expected: list[str]
) -> None:
    other = """  squares = f32[8]{0} multiply(s, s)
  reshaped = f32[8]{0} reshape(c)
  sum = f32[8]{0} add(squares, reshaped)
  wider = f32[8,16]{1,0} broadcast(sum), dimensions={0}
  first = f32[8,16]{1,0} divide(x, spread)
  second = f32[8,16]{1,0} add(y, wider)
"""
    assert products(divisor, other) == expected


def test_whole_numbers_have_no_inverse() -> None:
    numbers = """
  m = s32[8]{0} convert(s)
  spread = s32[8,16]{1,0} broadcast(m), dimensions={0}
  whole = s32[8,16]{1,0} divide(n, spread)
  first = f32[8,16]{1,0} convert(whole)
  second = f32[8,16]{1,0} sine(y)
"""
    assert products(numbers) == []


def test_other_compilers_divide() -> None:
    program = program_of("".join((HEAD, PLAIN, TWO_QUOTIENTS, ROOT)), "a100")
    assert program.opcodes.count("divide") == 2
