"""Rules never fail on real programs, and every factor fits the shapes it speaks of."""

from __future__ import annotations

from collections import Counter

import jax
import pytest

from shardwright.hlo import ArrayShape, Attribute, Instruction, parse
from shardwright.planner.rules import OpRule, rule_of
from shardwright.planner.rules.base import operand_leaves
from tests.planner.rules.rule_programs import MODELS, hlo_text, operations


def _faults(instruction: Instruction, rule: OpRule) -> list[str]:
    """What is inconsistent in a rule; empty if nothing is."""
    inputs, outputs = operand_leaves(instruction), instruction.shape.leaves
    faults = []
    if "do not fit" in rule.reason:
        faults.append(rule.reason)
    if (
        not rule.factors
        and not rule.exchange_factors
        and not rule.reason
        and any(size > 1 for leaf in outputs for size in leaf.dimensions)
    ):
        faults.append("no factor and no reason")
    taken: Counter[tuple[int, int]] = Counter()
    for factor in (*rule.factors, *rule.exchange_factors):
        if len(factor.operands) != len(inputs) or len(factor.results) != len(outputs):
            faults.append(f"{factor.name} speaks of other leaves")
            continue
        if factor.size < 2:
            faults.append(f"{factor.name} has size {factor.size}")
        if factor.contracted != (set(factor.results) == {None}):
            faults.append(f"{factor.name} is contracted and in the result, or neither")
        dims = (*factor.operands, *factor.results)
        for number, (leaf, dim) in enumerate(zip((*inputs, *outputs), dims, strict=True)):
            if dim is None:
                continue
            taken[number, dim] += factor in rule.factors
            if not 0 <= dim < leaf.rank or leaf.dimensions[dim] % factor.size:
                faults.append(f"{factor.name} splits dimension {dim} of {leaf}")
        if (bool(factor.halo) or factor.reduction == "gather") != (factor in rule.exchange_factors):
            faults.append(f"{factor.name} has borders and is not said to, or the reverse")
        if factor.may_pad and {
            leaf.dimensions[d] for leaf, d in zip((*inputs, *outputs), dims, strict=True) if d is not None
        } != {factor.size}:
            faults.append(f"{factor.name} may be padded but names dimensions of other sizes")
    names = Counter(factor.name for factor in (*rule.factors, *rule.exchange_factors))
    faults += [f"{name} twice" for name, count in names.items() if count > 1]
    faults += [f"dimension {where} in two factors" for where, count in taken.items() if count > 1]
    return faults


def _assert_consistent(text: str) -> None:
    for instruction in parse(text).instructions():
        rule = rule_of(instruction)
        faults = [] if rule.leafwise else _faults(instruction, rule)
        assert not faults, (instruction, faults)


@pytest.mark.dear
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    _assert_consistent(hlo_text(MODELS[name]()))


def test_operations() -> None:
    for program in operations().values():
        _assert_consistent(hlo_text(program))


@pytest.mark.dear
@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "gpt2_scan"])
def test_optimized_models(name: str) -> None:
    function, arguments = MODELS[name]()
    compiled = jax.jit(function, keep_unused=True).lower(*arguments).compile()
    _assert_consistent(compiled.as_text())


def test_models_leave_little_replicated() -> None:
    """Of GPT-2's opcodes only calls (planned inside) and opaque random bits have no factors."""
    without = {
        instruction.opcode
        for instruction in parse(hlo_text(MODELS["gpt2"]())).instructions()
        if any(size > 1 for leaf in instruction.shape.leaves for size in leaf.dimensions)
        and not rule_of(instruction).factors
    }
    assert without <= {"call"}


def test_attributes_that_do_not_fit_replicate_with_a_reason() -> None:
    operand = Instruction("p", "parameter", ArrayShape("f32", (4, 8)), index=0)
    wrong = {"dimensions": Attribute("dimensions", "{0,7}", (0, 7))}
    for opcode in ("transpose", "concatenate", "gather", "convolution", "sort"):
        instruction = Instruction("x", opcode, ArrayShape("f32", (8, 4)), (operand,), wrong)
        rule = rule_of(instruction)
        assert rule.factors == ()
        assert "do not fit its shapes" in rule.reason


def test_dimensions_with_dynamic_size_are_not_split() -> None:
    shape = ArrayShape("f32", (4, 8), dynamic=(True, False))
    operand = Instruction("p", "parameter", shape, index=0)
    rule = rule_of(Instruction("x", "negate", shape, (operand,)))
    assert [factor.operands for factor in rule.factors] == [(1,)]
    assert "run time" in rule.reason
