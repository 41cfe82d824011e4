"""Reductions of several arrays at once, split along what they reduce: devices gather one another's partial results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.cost import wire_bytes
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.plans.plan import InstructionPlan, Plan
from shardwright.user_plans import compile_and_prove
from tests.planner.programs import PLAIN_A100
from tests.planner.test_numbers import assert_same, run_planned, run_single


def step(table: Any, hidden: Any) -> Any:
    """One row against many words: only the words can be split, and the likeliest one is looked for in every part."""
    return table, jnp.argmax(hidden @ table, axis=-1)


def make_plan(width: int, words: int, mesh: dict[str, int]) -> Plan:
    arguments = (jax.ShapeDtypeStruct((width, words), jnp.float32), jax.ShapeDtypeStruct((1, width), jnp.float32))
    text = jax.jit(step, donate_argnums=(0,), keep_unused=True).lower(*arguments).as_text("hlo", debug_info=True)
    return plan(text, replace(Cluster.local(8), hardware=PLAIN_A100), PlanOptions(mesh=mesh))


def reduction(step_plan: Plan) -> InstructionPlan:
    (result,) = (entry for entry in step_plan.instructions if entry.opcode == "reduce" and len(entry.operands) > 2)
    return result


@pytest.mark.parametrize(
    ("width", "words", "mesh"),
    [(8, 1 << 22, {"data": 8}), (3, 1 << 26, {"data": 4, "model": 2}), (8, (1 << 22) + 3, {"data": 8})],
    ids=str,
)
def test_partial_results_are_gathered_not_what_is_searched(width: int, words: int, mesh: dict[str, int]) -> None:
    step_plan = make_plan(width, words, mesh)
    split = reduction(step_plan).operands[0][0]
    assert split.dims == ((), tuple(mesh))
    assert reduction(step_plan).partial == tuple(mesh)
    number_and_index = [each for each in step_plan.collectives if each.kind == "all-gather"]
    line = step.__code__.co_firstlineno + 2
    assert {each.cause for each in number_and_index} == {f"partial results of reduction (test_gathered.py:{line})"}
    assert [(each.payload_bytes, each.wire_bytes) for each in number_and_index] == [
        (32, wire_bytes("all-gather", 32, 8))
    ] * 2
    proof = compile_and_prove(step_plan)
    assert proof.holds, proof.explain(everything=True)
    assert not proof.differences, proof.explain(everything=True)


@pytest.mark.dear
def test_the_likeliest_word_is_that_of_one_device() -> None:
    keys = jax.random.split(jax.random.key(0))
    arguments = (jax.random.normal(keys[0], (8, 1 << 22)), jax.random.normal(keys[1], (1, 8)))
    program = (step, arguments, (0,))
    assert_same(run_planned(program, make_plan(8, 1 << 22, {"data": 8})), run_single(program))
