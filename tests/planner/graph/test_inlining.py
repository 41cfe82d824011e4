"""Inlined programs: no calls, the same numbers on one device, unique names, each call site free to differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardwright.clusters.cluster import Cluster
from shardwright.hlo import Module, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.graph.inlining import inline_calls
from tests.planner.rewrites.rewrite_programs import run

Function = Callable[..., Any]


def scanned_mlp(weights: Any, x: Any) -> Any:
    """Two stacks of weights of one shape: forward and backward scans slice and update both by the same helpers."""

    def loss(weights: Any) -> Any:
        body = lambda y, w: (jnp.tanh(jnp.where(y > 0, y @ w[0], 0.1 * y)) @ w[1], None)  # noqa: E731
        return jnp.sum(lax.scan(body, x, weights)[0] ** 2)

    return jax.grad(loss)(weights)


def called_loop(weights: Any, x: Any) -> Any:
    """A function with a loop and a conditional in it, called three times."""
    walk = jax.jit(lambda y: lax.fori_loop(0, 3, lambda i, z: lax.cond(i > 1, jnp.sin, jnp.cos, z), y))
    return walk(walk(x)), walk(2 * x), weights[0]


def identity(weights: Any, x: Any) -> Any:
    """Functions that hand an argument on, and one whose result is the program's."""
    same, swap = jax.jit(lambda y: y), jax.jit(lambda a, b: (b, a))
    first, second = swap(same(x), same(x + 1))
    return swap(first, second)


WEIGHTS = tuple(np.random.default_rng(0).normal(size=(3, 8, 8)).astype(np.float32) for _ in range(2))
X = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
PROGRAMS: dict[str, Function] = {"scanned": scanned_mlp, "loop": called_loop, "identity": identity}


def lower_text(function: Function) -> Module:
    return parse(jax.jit(function, keep_unused=True).lower(WEIGHTS, X).as_text("hlo", debug_info=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_inlined_programs_compute_the_same(name: str) -> None:
    module = lower_text(PROGRAMS[name])
    inlined = inline_calls(module)
    assert any(instruction.opcode == "call" for instruction in module.instructions())
    assert not any(instruction.opcode == "call" for instruction in inlined.instructions())
    names = [instruction.name for instruction in inlined.instructions()]
    assert len(set(names)) == len(names)
    text = inlined.to_text()
    assert [instruction.name for instruction in parse(text).instructions()] == names
    for ours, theirs in zip(run(text, [*WEIGHTS, X]), run(module.to_text(), [*WEIGHTS, X]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_is_called_once_keeps_its_names() -> None:
    module = lower_text(lambda weights, x: jax.jit(jnp.tanh)(x))
    values = {instruction.name for instruction in module.instructions() if instruction.opcode == "tanh"}
    assert values <= {instruction.name for instruction in inline_calls(module).instructions()}


def test_further_copies_carry_the_line_of_their_call() -> None:
    @jax.jit
    def helper(y: Any) -> Any:
        return lax.tanh(y)

    def program(weights: Any, x: Any) -> Any:
        first = helper(x)
        return helper(first + 1)

    inlined = inline_calls(lower_text(program))
    lines = [located.line for i in inlined.instructions() if i.opcode == "tanh" and (located := inlined.source(i))]
    start = program.__code__.co_firstlineno
    assert lines[1] == start + 2


def test_programs_without_calls_and_calls_that_mean_more_stay() -> None:
    plain = lower_text(lambda weights, x: x + 1)
    assert inline_calls(plain) is plain
    module = lower_text(identity)
    text = module.to_text().replace("to_apply=", "is_composite=true, to_apply=")
    marked = parse(text)
    calls = sum(instruction.opcode == "call" for instruction in marked.instructions())
    assert inline_calls(marked) is marked
    assert calls > 0


def test_call_sites_may_lie_otherwise() -> None:
    """One helper over two arguments that are pinned to different dimensions: inlined, nothing has to move."""
    helper = jax.jit(jnp.tanh)
    text = jax.jit(lambda a, b: (helper(a), helper(b))).lower(*2 * [jnp.ones((64, 64))]).as_text("hlo")
    rows, columns = (("data",), ()), ((), ("data",))
    options = PlanOptions(
        mesh={"data": 8}, argument_axes={0: rows, 1: columns}, output_axes={0: rows, 1: columns}
    )  # fmt: skip
    module = inline_calls(parse(text))
    assert plan(module.to_text(), Cluster.local(8), options).collectives == ()
