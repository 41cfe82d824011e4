"""Which instructions of a program are which part of a mixture, and what a plan says of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import shardwright as sw
from examples.moe import deepseek
from shardwright.hlo import Instruction, parse
from shardwright.planner.graph.inlining import inline_calls
from shardwright.planner.mixtures.parts import Parts, find_parts
from shardwright.planner.mixtures.rows_over import with_no_rows_over
from shardwright.plans.plan_json import decode, encode

TOKENS, WIDTH, HIDDEN, EXPERTS, ACTIVE = 64, 16, 24, 4, 2
ROWS = TOKENS * ACTIVE


def forward(x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    scores = jax.nn.softmax(x @ router)
    weights, chosen = jax.lax.top_k(scores, ACTIVE)
    of_pair = chosen.reshape(-1)
    order = jnp.argsort(of_pair)
    sizes = jnp.bincount(of_pair, length=EXPERTS)
    hidden = jax.nn.relu(jax.lax.ragged_dot(x[order // ACTIVE], up, sizes))
    rows = jax.lax.ragged_dot(hidden, down, sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // ACTIVE].add(rows)


TYPES = [
    jax.ShapeDtypeStruct(shape, "float32")
    for shape in ((TOKENS, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
]


def parts_of(text: str) -> tuple[Parts, dict[str, Instruction]]:
    module = inline_calls(parse(text))
    return find_parts(module), {instruction.name: instruction for instruction in module.instructions()}


@pytest.fixture(scope="module")
def text() -> str:
    return str(sw.lower(forward, *TYPES, platform="cuda").as_text())


def test_rows_are_sent_multiplied_and_brought_back(text: str) -> None:
    parts, instructions = parts_of(text)
    opcodes = {
        part: Counter(instructions[name].opcode for name, each in parts.by_name.items() if each == part)
        for part in ("dispatch", "experts", "combine")
    }
    assert opcodes["experts"]["ragged-dot"] == 2
    assert opcodes["experts"]["maximum"] == 1  # relu
    assert opcodes["dispatch"]["topk"] == opcodes["dispatch"]["sort"] == opcodes["dispatch"]["gather"] == 1
    assert opcodes["dispatch"]["scatter"] == 1  # the histogram
    assert opcodes["combine"]["scatter"] == 1
    assert opcodes["combine"]["multiply"] == opcodes["combine"]["gather"] == 1  # with the weights of rows
    routers = [i.name for i in instructions.values() if i.opcode == "dot"]
    assert [parts.part_of(name) for name in routers] == [""]
    assert list(parts.mixtures.values()) == [ROWS]


def test_a_program_without_ragged_products_has_no_parts() -> None:
    plain = sw.lower(lambda x, w: x @ w, TYPES[0], TYPES[1]).as_text()
    assert parts_of(plain)[0] == Parts()


def test_what_is_written_in_the_place_of_an_instruction_is_of_its_part() -> None:
    parts = Parts(by_name={"a.1": "experts", "a": "dispatch"}, names=frozenset({"a", "a.1", "a.2"}))
    named = {name: parts.part_of(name) for name in ("a", "a.1", "a.2", "a.1.dot", "a.1.dot.gather2", "b.dot")}
    assert named == {
        "a": "dispatch", "a.1": "experts", "a.2": "", "a.1.dot": "experts", "a.1.dot.gather2": "experts", "b.dot": "",
    }  # fmt: skip


def test_the_number_of_rows_over_is_none_where_there_is_room_for_all(text: str) -> None:
    head, _, tail = text.rpartition("ROOT ")
    asked = f'{head}asked.1 = s32[] custom-call(), custom_call_target="shardwright.rows_over"\n  ROOT {tail}'
    (number,) = [i for i in with_no_rows_over(parse(asked)).instructions() if i.name == "asked.1"]
    assert (number.opcode, number.payload, number.attributes) == ("constant", "0", {})
    module = parse(text)
    assert with_no_rows_over(module) is module


@pytest.mark.dear
def test_a_plan_says_what_its_parts_take() -> None:
    """Operations of the experts as of the tiles that are multiplied, layers in a loop or not."""
    notes = {}
    for scan in (False, True):
        config = replace(deepseek.PRESETS["tiny"], layers=3, scan=scan)
        init, train_step, _ = deepseek.make_steps(config, optax.sgd(0.1))
        state = jax.eval_shape(init, jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((config.batch, config.context + 1), "int32")
        lowered = sw.lower(train_step, *state, tokens, donate_argnums=(0, 1), platform="cuda")
        plan = sw.plan(lowered.as_text(), 2, mesh="2", stages=1, micro_batches=1, effort="fast", cache=False)
        assert decode(json.dumps(encode(plan)), plan.hlo_text).mixtures == plan.mixtures
        assert "mixtures     dispatch" in plan.explain(width=200)
        notes[scan] = {note.part: note for note in plan.mixtures}
        rows = config.batch * config.context * config.active
        # what each of two layers computes again for its gradient is not counted
        assert {(note.mixtures, note.rows) for note in plan.mixtures} == {(2, 2 * rows)}
        products = 2 * rows * config.width * config.hidden  # operations of one
        experts = notes[scan]["experts"].flops * 2  # devices
        assert 2 * 12 * products < experts < 1.6 * 2 * 12 * products
        assert 0 < sum(note.time_s for note in plan.mixtures) < plan.cost.step_s
    assert notes[False]["experts"].flops == pytest.approx(notes[True]["experts"].flops, rel=0.02)
