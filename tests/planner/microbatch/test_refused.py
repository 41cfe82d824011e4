"""What needs the whole batch is refused, with the instruction and the line that needs it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.errors import MicroBatchError
from shardwright.hlo import Instruction, parse
from shardwright.planner.microbatch import split_step
from tests.planner.microbatch.microbatch_programs import BATCH, BATCH_NORM, LENGTH, WIDTH, descent, normal
from tests.planner.programs import Program, lower


def expert_capacity() -> Program:
    """Each expert takes the first tokens of the whole batch that choose it."""
    params = {"gate": normal(1, WIDTH, 2), "up": normal(2, 2, WIDTH, WIDTH)}

    def loss(p: Any, x: Any) -> Any:
        tokens = x.reshape(-1, WIDTH)
        gates = jax.nn.softmax(tokens @ p["gate"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 2)
        place = jnp.cumsum(chosen, axis=0) * chosen
        result = chosen * (place <= LENGTH)
        return jnp.mean(jnp.einsum("te,td,edf->tf", result * gates, tokens, p["up"]) ** 2)

    return descent(loss, params, normal(3, BATCH, LENGTH, WIDTH))


def largest_logit() -> Program:
    params = {"w": normal(1, WIDTH, WIDTH)}

    def loss(p: Any, x: Any) -> Any:
        logits = x @ p["w"]
        return jnp.mean((logits / jnp.max(logits)) ** 2)

    return descent(loss, params, normal(2, BATCH, WIDTH))


def contrastive() -> Program:
    """Every example beside all others of the batch."""
    params = {"w": normal(1, WIDTH, WIDTH)}

    def loss(p: Any, x: Any) -> Any:
        z = jnp.tanh(x @ p["w"])
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(z @ z.T)))

    return descent(loss, params, normal(2, BATCH, WIDTH))


def inside_a_loop() -> Program:
    """Batch norm in layers that a scan runs."""
    params = normal(1, 3, WIDTH, WIDTH)

    def loss(p: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            h = x @ w
            return (h - h.mean(0)) / (h.std(0) + 1e-3), None

        return jnp.mean(jax.lax.scan(layer, x, p)[0] ** 4)

    return descent(loss, params, normal(2, BATCH, WIDTH))


def refusal_of(program: Program) -> tuple[MicroBatchError, Instruction]:
    """The error, and the instruction that it names first."""
    module = parse(lower(program))
    with pytest.raises(MicroBatchError) as caught:
        split_step(module)
    (named,) = [i for i in module.instructions() if i.name == caught.value.where.split(",")[0]]
    return caught.value, named


@pytest.mark.parametrize(
    ("program", "opcode", "line"),
    [
        (BATCH_NORM, "reduce", "mean, var = h.mean((0, 1, 2))"),
        (expert_capacity, "reduce-window", "place = jnp.cumsum"),
        (largest_logit, "reduce", "jnp.max(logits)"),
        (contrastive, "dot", "z @ z.T"),
        (inside_a_loop, "reduce", "h.mean(0)"),
    ],
    ids=["batch norm", "expert capacity", "maximum", "contrastive", "inside a loop"],
)
def test_names_what_needs_the_whole_batch(program: Any, opcode: str, line: str) -> None:
    error, named = refusal_of(program())
    assert named.opcode == opcode
    file, number = error.where.split(", ")[1].split(" ")[0].rsplit(":", 1)
    with open(file) as source:
        assert line in source.readlines()[int(number) - 1]
    assert "needs the whole batch" in error.message
    assert "plan without micro-batches" in error.remedy


def test_what_happens_once_a_step() -> None:
    text = """HloModule m
ENTRY main {
  x = f32[4,8]{1,0} parameter(0)
  y = f32[4,8]{1,0} tanh(x)
  told = f32[4,8]{1,0} custom-call(y), custom_call_target="tell", custom_call_has_side_effect=true
  ROOT r = (f32[4,8]{1,0}) tuple(y)
}
"""
    with pytest.raises(MicroBatchError, match="custom-call told has an effect"):
        split_step(parse(text))


def test_without_a_batch() -> None:
    def step(params: Any, rate: Any) -> Any:
        return jax.tree.map(lambda p: p - rate * p, params)

    with pytest.raises(MicroBatchError, match="no argument carries a batch"):
        split_step(parse(lower((step, ({"w": normal(1, WIDTH)}, normal(2)), (0,)))))
