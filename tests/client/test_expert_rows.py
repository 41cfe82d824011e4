"""Rows over the experts' capacity: one more result of the program, told after each step and counted."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.client.expert_rows import RowsOver
from shardwright.client.frontends.hlo import HloFunction
from shardwright.client.frontends.jax import JaxFunction
from shardwright.client.frontends.program import Program
from shardwright.client.step import Step
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions


def step(w: jax.Array, x: jax.Array, sizes: jax.Array, over: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jax.lax.ragged_dot(x, w, sizes)
    return w + 0.0 * over.astype(w.dtype), y.sum()


W, X = np.ones((2, 4, 4), np.float32), np.ones((8, 4), np.float32)
SIZES = np.array([3, 5], np.int32)
TYPES = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (W, X, SIZES, np.int32(0))]


def lowered() -> Program:
    function = JaxFunction(step, donate_argnums=0)
    signature, _, _ = function.describe(tuple(TYPES), {}, takes_types=True)
    return function.lower(signature, platform="cuda")


def test_a_program_gets_one_more_result_that_no_caller_sees() -> None:
    program = lowered()
    assert RowsOver(None).count_in(program) is program
    counted = RowsOver(1.25).count_in(program)
    assert counted.result_count == program.result_count == 2
    assert (counted.output_names[-1], counted.results[-1].shape) == ("rows_over", ())
    assert counted.aliases == program.aliases == {0: 0}
    module = parse(counted.hlo_text)
    assert [leaf.element_type for leaf in module.entry.root.shape.leaves] == ["f32", "f32", "s32"]
    assert module.entry.root.operands[-1].get("custom_call_target") == "shardwright.rows_over"
    assert [(alias.output_index, alias.parameter_number) for alias in module.aliases] == [((0,), 0)]
    assert module.header["entry_computation_layout"].text.endswith("f32[], s32[])}")
    lines = {str(module.source(i)) for i in module.instructions() if i.opcode == "ragged-dot"}
    assert any("test_expert_rows.py" in line for line in lines)  # places in reports


def test_a_result_that_is_no_tuple_becomes_one() -> None:
    text = """HloModule one, input_output_alias={ {}: (0, {}, may-alias) }, entry_computation_layout={(f32[8,4]{1,0}, f32[2,4,4]{2,1,0}, s32[2]{0})->f32[8,4]{1,0}}

ENTRY main {
  x = f32[8,4]{1,0} parameter(0)
  w = f32[2,4,4]{2,1,0} parameter(1)
  sizes = s32[2]{0} parameter(2)
  ROOT y = f32[8,4]{1,0} ragged-dot(x, w, sizes), lhs_contracting_dims={1}, rhs_contracting_dims={1}, lhs_ragged_dims={0}, rhs_group_dims={0}, sharding={replicated}
}
"""  # noqa: E501
    counted = RowsOver(2.0).count_in(HloFunction(text).lower((), platform="cpu"))
    module = parse(counted.hlo_text)
    assert module.entry.root.opcode == "tuple"
    assert [operand.name for operand in module.entry.root.operands] == ["y", "rows_over"]
    assert module.entry.root.attributes["sharding"].text == "{{replicated}, {replicated}}"
    assert module.header["entry_computation_layout"].text.endswith("->(f32[8,4]{1,0}, s32[])}")
    assert counted.aliases == {0: 0}


def test_a_program_without_ragged_products_stays_as_it_is() -> None:
    function = JaxFunction(jnp.sin)
    signature, _, _ = function.describe((TYPES[1],), {}, takes_types=True)
    program = function.lower(signature, platform="cpu")
    assert RowsOver(1.25).count_in(program) is program


class _CountsByArgument:
    """The step of above, with twice its last argument in the place of the number that the planner writes."""

    name = "step"

    def __init__(self, rows: RowsOver) -> None:
        self._function, self._rows = JaxFunction(step, donate_argnums=0), rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def lower(self, signature: Any, *, platform: str) -> Program:
        del platform
        counted = self._rows.count_in(self._function.lower(signature, platform="cuda"))
        over = parse(counted.hlo_text).entry.parameters[3].name
        text = re.sub(r"custom-call\(\), custom_call_target=.*", f"add(%{over}, %{over})", counted.hlo_text)
        return replace(counted, hlo_text=text)


@pytest.mark.cluster
def test_rows_over_are_told_once_a_step_and_summed(caplog: pytest.LogCaptureFixture) -> None:
    rows = RowsOver(1.25)
    with sw.connect(devices=2) as session, caplog.at_level(logging.WARNING, "shardwright"):
        options = PlanOptions(mesh={"data": 2}, stages=1, micro_batches=1)
        counting = Step(session._state, _CountsByArgument(rows), options)
        for over in (0, 1, 2000):
            w, y = counting(W, X, SIZES, np.int32(over))
            assert float(y) == 4 * X.sum()
            assert w.shape == W.shape
        jax.effects_barrier()
        roomy = session.parallelize(step, expert_capacity=1.25, mesh="2", stages=1, micro_batches=1)
        roomy(W, X, SIZES, np.int32(5))
        assert roomy.rows_over == 0
    assert rows.total == 4002
    told = [record.message for record in caplog.records if "capacity" in record.message]
    assert told == [
        "step 2: 2 rows were over the experts' capacity 1.25, and left out",
        "step 3: 4,000 rows were over the experts' capacity 1.25, and left out",
    ]


def test_rows_of_a_step_are_told_where_the_plan_knows_them(caplog: pytest.LogCaptureFixture) -> None:
    rows = RowsOver(1.25)
    counted = rows.count_in(lowered())
    plan = sw.plan(counted.hlo_text, 2, mesh="2", stages=1, effort="fast", cache=False)
    assert {note.rows for note in plan.mixtures} == {8}
    rows.note_plan(counted, plan)
    (call,) = counted.debug.entries
    with caplog.at_level(logging.WARNING, "shardwright"):
        for _ in call.list_calls([np.int32(3)]):
            call.say("step 12: ", [np.int32(3)])
    assert caplog.messages == ["step 12: 3 of 8 rows were over the experts' capacity 1.25, and left out"]
    assert rows.total == rows.under(2.0).total == 3


TOKENS, WIDTH, EXPERTS, ACTIVE, DEVICES = 1024, 16, 8, 2, 8


def mixture(x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), ACTIVE)
    of_pair = chosen.reshape(-1)
    order = jnp.argsort(of_pair)
    sizes = jnp.bincount(of_pair, length=EXPERTS)
    hidden = jax.nn.relu(jax.lax.ragged_dot(x[order // ACTIVE], up, sizes))
    rows = jax.lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)]
    return jnp.einsum("tkd,tk->td", rows.reshape(TOKENS, ACTIVE, WIDTH), weights)


@pytest.mark.cluster
def test_rows_of_a_mixture_over_its_capacity_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """As many as a loop over what each device would send to each other one counts, and none where there is room."""
    shapes = ((TOKENS, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, 32), (EXPERTS, 32, WIDTH))
    random = np.random.default_rng(0)
    arguments = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    text = sw.lower(mixture, *arguments, platform="cuda").as_text()
    chosen = np.asarray(jax.lax.top_k(arguments[0] @ arguments[1], ACTIVE)[1]).reshape(DEVICES, -1)
    sent = np.stack([np.bincount(pairs, minlength=EXPERTS) for pairs in chosen])  # by source and destination
    over = int(np.maximum(sent - TOKENS * ACTIVE // DEVICES**2, 0).sum())
    assert over > 50
    with sw.connect(devices=DEVICES) as session, caplog.at_level(logging.WARNING, "shardwright"):
        step = session.program(text, expert_capacity=1.0, mesh="8", stages=1, micro_batches=1)
        result = np.asarray(step(*arguments))
        assert "8 blocks, capacity 1" in step.plan.explain(width=200)
        assert step.rows_over == over
        np.asarray(step(*arguments))
        assert step.rows_over == 2 * over
    told = [record.message for record in caplog.records if "capacity" in record.message]
    assert told[0].endswith(f" {over} of 2,048 rows were over the experts' capacity 1, and left out")
    assert len(told) == 2
    parts = {note.part: note for note in step.plan.mixtures}
    assert parts["experts"].flops > 2 * 2 * TOKENS * ACTIVE * WIDTH * 32 / DEVICES
    assert parts["dispatch"].wire_bytes > 0
    assert parts["combine"].wire_bytes > 0
    whole = np.asarray(jax.jit(mixture)(*arguments))
    is_whole = np.isclose(result, whole, atol=1e-4).all(-1)
    assert TOKENS - over <= is_whole.sum() < TOKENS  # other tokens have all their rows
