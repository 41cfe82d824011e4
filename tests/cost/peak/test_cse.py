"""Equal instructions are one, whatever they are called; what only looks equal stays apart."""

from __future__ import annotations

import pytest

from shardwright.cost import hardware_profile
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.inline import inline_calls
from shardwright.cost.peak.lowering import Lowering
from shardwright.hlo import parse
from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding
from tests.cost.one_device import program_of

HEAD = """HloModule hand

left {
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT s = f32[] add(l, r)
}

right {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT t = f32[] add(a, b)
}

largest {
  c = f32[] parameter(0)
  d = f32[] parameter(1)
  ROOT u = f32[] maximum(c, d)
}

ENTRY main {
  x = f32[8,16]{1,0} parameter(0)
  y = f32[8,16]{1,0} parameter(1)
  zero = f32[] constant(0)
"""


def program(body: str, root: str) -> DeviceProgram:
    text = f"{HEAD}{body}\n  ROOT out = (f32[8,16]{{1,0}}, f32[8,16]{{1,0}}) tuple({root})\n}}\n"
    return program_of(text)


def program_of_pair(a: str, b: str) -> DeviceProgram:
    return program(f"  a = f32[8,16]{{1,0}} {a}\n  b = f32[8,16]{{1,0}} {b}", "a, b")


@pytest.mark.parametrize(
    "pair",
    [
        ('multiply(x, y), metadata={op_name="forward"}', 'multiply(x, y), metadata={op_name="backward"}'),
        ("add(x, y)", "add(y, x)"),
    ],
)
def test_equal_instructions_are_one(pair: tuple[str, str]) -> None:
    result = program_of_pair(*pair)
    first, second = result.operands[result.root]
    assert first == second
    assert len(result.opcodes) == 4  # x, y, one of the two, the tuple


@pytest.mark.parametrize(
    "pair",
    [
        ("subtract(x, y)", "subtract(y, x)"),
        ("compare(x, y), direction=LT", "compare(x, y), direction=GT"),
        ("opt-barrier(x)", "opt-barrier(x)"),
    ],
)
def test_what_differs_stays_apart(pair: tuple[str, str]) -> None:
    result = program_of_pair(*pair)
    first, second = result.operands[result.root]
    assert first != second


@pytest.mark.parametrize(("applied", "count"), [("right", 1), ("largest", 2)])
def test_reductions_are_equal_where_they_apply_the_same(applied: str, count: int) -> None:
    sums = f"""
  a = f32[8]{{0}} reduce(x, zero), dimensions={{1}}, to_apply=left
  b = f32[8]{{0}} reduce(x, zero), dimensions={{1}}, to_apply={applied}
  c = f32[8,16]{{1,0}} broadcast(a), dimensions={{0}}
  d = f32[8,16]{{1,0}} broadcast(b), dimensions={{0}}"""
    assert program(sums, "c, d").opcodes.count("reduce") == count


def test_what_reads_duplicates_is_equal_too() -> None:
    chain = """
  a = f32[8,16]{1,0} multiply(x, y)
  b = f32[8,16]{1,0} tanh(a)
  c = f32[8,16]{1,0} multiply(x, y)
  d = f32[8,16]{1,0} tanh(c)"""
    result = program(chain, "b, d")
    assert result.opcodes.count("tanh") == 1


SPREAD = """HloModule spread

ENTRY main {
  x = s32[64,64]{1,0} parameter(0)
  rows = s32[64]{0} iota(), iota_dimension=0
  first = s32[64,64]{1,0} broadcast(rows), dimensions={0}
  again = s32[64]{0} iota(), iota_dimension=0
  second = s32[64,64]{1,0} broadcast(again), dimensions={0}
  part = s32[64,64]{1,0} add(x, first)
  ROOT whole = s32[64,64]{1,0} multiply(part, second)
}
"""


@pytest.mark.parametrize(("profile", "gathered"), [("tpu-v5e", ["broadcast", "add"]), ("cpu", ["add"])])
def test_equal_values_that_lie_otherwise_are_brought_from_the_first_where_they_are_merged_early(
    profile: str, gathered: list[str]
) -> None:
    split, whole = TensorSharding((("x",), ())), TensorSharding.replicated(2)

    def entry(name: str, operands: list[TensorSharding], result: TensorSharding) -> InstructionPlan:
        used = tuple((each,) for each in operands)
        return InstructionPlan(computation="main", name=name, opcode=name, operands=used, result=(result,))

    vector = TensorSharding.replicated(1)
    plans = {
        "x": entry("x", [], split),
        "first": entry("first", [TensorSharding((("x",),))], split),
        "second": entry("second", [vector], whole),
        "part": entry("part", [split, split], split),
        "whole": entry("whole", [whole, whole], whole),
    }
    lowering = Lowering(Mesh.of({"x": 2}), plans, hardware_profile(profile))
    outcome = lowering.program(inline_calls(parse(SPREAD).entry))
    gathers = [node for node, opcode in enumerate(outcome.opcodes) if opcode == "all-gather"]
    assert [outcome.opcodes[outcome.operands[node][0]] for node in gathers] == gathered
