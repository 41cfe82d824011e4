"""A maximum of a maximum and what that one began with is the maximum."""

from __future__ import annotations

import pytest

from shardwright.cost.peak.device_program import DeviceProgram
from tests.cost.one_device import program_of

LIMIT = """HloModule limit, entry_computation_layout={(f32[8,4]{1,0})->f32[8]{0}}

largest {
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT m = f32[] maximum(l, r)
}

ENTRY main {
  x = f32[8,4]{1,0} parameter(0)
  least = f32[] constant(-inf)
  first = f32[] constant(FIRST)
  most = f32[8]{0} reduce(x, least), dimensions={1}, to_apply=largest
  spread = f32[8]{0} broadcast(first), dimensions={}
  limited = f32[8]{0} OPCODE(ORDER)
  ROOT out = f32[8]{0} negate(limited)
}
"""


def program(first: str = "-inf", opcode: str = "maximum", order: str = "spread, most") -> DeviceProgram:
    return program_of(LIMIT.replace("FIRST", first).replace("OPCODE", opcode).replace("ORDER", order))


@pytest.mark.parametrize("order", ["spread, most", "most, spread"])
def test_the_limit_is_gone(order: str) -> None:
    result = program(order=order)
    read = [result.opcodes[operand] for operand in result.operands[result.root]]
    assert read == ["reduce"]
    assert not {"maximum", "broadcast"} & set(result.opcodes)


@pytest.mark.parametrize("other", [{"first": "0"}, {"opcode": "minimum"}])
def test_what_can_change_the_maximum_stays(other: dict[str, str]) -> None:
    result = program(**other)
    assert result.opcodes[result.operands[result.root][0]] in ("maximum", "minimum")
