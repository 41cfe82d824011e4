"""Scatters into zeros: into the other term of a sum, or comparisons of indices."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.cost.peak.device_program import DeviceProgram
from tests.cost.one_device import program_of

TABLE = """HloModule table

sum {
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT s = f32[] add(l, r)
}

last {
  old = f32[] parameter(0)
  ROOT new = f32[] parameter(1)
}

ENTRY main {
  x = f32[32,8]{1,0} parameter(0)
  rows = s32[4,1]{1,0} parameter(1)
  updates = f32[4,8]{1,0} parameter(2)
  first = f32[] constant(FIRST)
  filled = f32[32,8]{1,0} broadcast(first), dimensions={}
  scattered = f32[32,8]{1,0} scatter(filled, rows, updates), PLACES, to_apply=APPLIED
  total = f32[32,8]{1,0} add(x, scattered)
  ROOT out = (f32[32,8]{1,0}, f32[32,8]{1,0}) tuple(total, OTHER)
}
"""
PLACES = "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1"


def program(first: str = "0", applied: str = "sum", other: str = "x") -> DeviceProgram:
    text = TABLE.replace("FIRST", first).replace("APPLIED", applied).replace("OTHER", other).replace("PLACES", PLACES)
    return program_of(text)


def test_the_zeros_and_the_sum_are_gone() -> None:
    result = program()
    assert result.opcodes.count("scatter") == 1
    assert not {"add", "broadcast"} & set(result.opcodes)
    (scatter,) = (node for node, opcode in enumerate(result.opcodes) if opcode == "scatter")
    read = [result.instructions[operand].name for operand in result.operands[scatter]]
    assert read == ["x", "rows", "updates"]
    assert result.instructions[scatter].name == "total"  # whose layout the plan gives it


@pytest.mark.parametrize("other", [{"first": "1"}, {"applied": "last"}, {"other": "scattered"}])
def test_sums_of_anything_else_stay(other: dict[str, str]) -> None:
    assert "add" in program(**other).opcodes


ROWS = """HloModule rows

sum {
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT s = f32[] add(l, r)
}

ENTRY main {
  labels = s32[32,LOOKUPS,1]{2,1,0} parameter(0)
  updates = f32[32,LOOKUPS]{1,0} parameter(1)
  first = f32[] constant(FIRST)
  filled = f32[32,8]{1,0} broadcast(first), dimensions={}
  ROOT scattered = f32[32,8]{1,0} scatter(filled, labels, updates), update_window_dims={}, inserted_window_dims={1},
    scatter_dims_to_operand_dims={1}, input_batching_dims={0}, scatter_indices_batching_dims={0}, index_vector_dim=2,
    to_apply=sum
}
"""


def rows(profile: str = "tpu-v5e", lookups: int = 1, first: str = "0") -> DeviceProgram:
    return program_of(ROWS.replace("LOOKUPS", str(lookups)).replace("FIRST", first), profile)


def test_one_element_a_row_is_put_there_by_comparing_indices() -> None:
    result = rows()
    assert result.opcodes[result.root] == "select"
    read = {result.instructions[result.operands[node][0]].name for node in result.operands[result.root]}
    assert read == {"labels", "updates"}
    assert result.sizes_bytes[result.root] == (32 * 8 * 4,)


@pytest.mark.parametrize("other", [{"profile": "cpu"}, {"lookups": 2}, {"first": "1"}])
def test_other_scatters_are_kernels(other: dict[str, Any]) -> None:
    result = rows(**other)
    assert result.opcodes[result.root] == "scatter"
