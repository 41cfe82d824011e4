"""Rules that custom calls declare, as Shardy writes them."""

from __future__ import annotations

import pytest

from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import Instruction, parse
from shardwright.kernels import parse_rule
from shardwright.planner.rules.base import rule_of
from shardwright.xla import emit_stablehlo
from tests.xla.hand import plan


def call(rule: str, *, target: str = "kernel", shape: str = "f32[8,4,6]", result: str = "f32[8,4,6]") -> Instruction:
    text = f"""HloModule m

ENTRY main {{
  x = {shape} parameter(0)
  ROOT y = {result} custom-call(x), custom_call_target="{target}",
    frontend_attributes={{xla.sdy.sharding_rule="{rule}"}}
}}
"""
    return parse(text).entry.root


def test_a_rule_is_read_as_shardy_prints_it() -> None:
    rule = parse_rule(
        "#sdy.op_sharding_rule<([ij, k], [], [z_1])->([k, i]) {i=2, j=4, k=6, z_1=3} reduction={j} "
        "need_replication={k, z_1} permutation={i} blocked_propagation={k}, custom>"
    )
    assert rule is not None
    assert rule.operands == ((("i", "j"), ("k",)), (), (("z_1",),))
    assert rule.results == ((("k",), ("i",)),)
    assert rule.sizes == {"i": 2, "j": 4, "k": 6, "z_1": 3}
    assert rule.whole == {"i", "j", "k", "z_1"}


#: Rule of one operand and one result of 8 × 4 × 6 → the dimensions that may be split, and into how many parts.
RULES = {
    "#sdy.op_sharding_rule<([i, j, k])->([i, j, k]) {i=8, j=4, k=6}>": {0: 8, 1: 4, 2: 6},
    "#sdy.op_sharding_rule<([i, j, k])->([i, j, k]) {i=8, j=4, k=6} need_replication={j, k}, custom>": {0: 8},
    "#sdy.op_sharding_rule<([i, j, k])->([i, j, l]) {i=8, j=4, k=6, l=6} reduction={k}>": {0: 8, 1: 4},
    "#sdy.op_sharding_rule<([ij, k, l])->([ij, k, l]) {i=2, j=4, k=4, l=6} permutation={l}>": {0: 2, 1: 4},
    "#sdy.op_sharding_rule<([i, i, k])->([i, j, k]) {i=4, j=4, k=6}>": {2: 6},
    "#sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=4}>": {},
    "no rule": {},
}


@pytest.mark.parametrize(("rule", "expected"), RULES.items())
def test_the_dimensions_that_may_be_split(rule: str, expected: dict[int, int]) -> None:
    result = rule_of(call(rule))
    assert {each.operands[0]: each.size for each in result.factors} == expected
    assert all(not each.may_pad for each in result.factors)
    assert bool(result.reason) == (expected != {0: 8, 1: 4, 2: 6})


def test_results_without_elements_or_dimensions_block_no_factor() -> None:
    rule = "#sdy.op_sharding_rule<([i, j, k])->([i, j, k], [l]) {i=8, j=4, k=6, l=0}>"
    split = rule_of(call(rule, result="(f32[8,4,6], u8[0])"))
    assert [(each.operands, each.results) for each in split.factors] == [((n,), (n, None)) for n in range(3)]
    number = "#sdy.op_sharding_rule<([i, j, k])->([i, j, k], []) {i=8, j=4, k=6} need_replication={k}>"
    split = rule_of(call(number, result="(f32[8,4,6], f32[])"))
    assert [(each.operands, each.results) for each in split.factors] == [((n,), (n, None)) for n in range(2)]
    read = "#sdy.op_sharding_rule<([i, j, k])->([i, j, k], [l]) {i=8, j=4, k=6, l=1}>"
    assert not rule_of(call(read, result="(f32[8,4,6], f32[1])")).factors, "an array that may be read is of all parts"


@pytest.mark.parametrize("target", ["tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call", "AwsNeuronFlash"])
def test_a_kernel_that_is_compiled_for_its_sizes_stays_whole(target: str) -> None:
    rule = rule_of(call(next(iter(RULES)), target=target))
    assert not rule.factors
    assert "compiled for the sizes" in rule.reason


SEVERAL_DEVICES = """HloModule jit_step, entry_computation_layout={(f32[8,4]{1,0}, f32[4,6]{1,0})->f32[8,6]{1,0}}

ENTRY main {
  x = f32[8,4]{1,0} parameter(0)
  w = f32[4,6]{1,0} parameter(1)
  ROOT y = f32[8,6]{1,0} custom-call(x, w), custom_call_target="CustomSPMDPartitioning",
    api_version=API_VERSION_STATUS_RETURNING, frontend_attributes={xla.sdy.sharding_rule=
    "#sdy.op_sharding_rule<([i, j], [j, k])->([i, k]) {i=8, j=4, k=6} reduction={j}, custom>"},
    backend_config="140073736605072"
}
""".replace("rule=\n    ", "rule=")


def test_text_that_jax_prints_for_several_devices_is_planned_and_not_run() -> None:
    rule = rule_of(parse(SEVERAL_DEVICES).entry.root)
    assert {each.operands for each in rule.factors} == {(0, None), (None, 1)}
    with pytest.raises(UnsupportedProgramError, match="can be planned, not run"):
        emit_stablehlo(SEVERAL_DEVICES, plan(SEVERAL_DEVICES, {"d": 4}))
