"""A step before it runs, and functions of every kind."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw


def test_lowering_and_compiling_need_types_only(session: sw.Session) -> None:
    step = session.parallelize(lambda x, y: {"product": x @ y}, force="data")
    types = [jax.ShapeDtypeStruct((16, 4), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)]
    lowered = step.lower(*types)
    assert lowered.as_text().startswith("HloModule")
    assert (lowered.argument_names, lowered.output_names) == (("x", "y"), ("result['product']",))
    with pytest.raises(sw.PlanError, match=r"no plan yet(.|\n)*step.compile"):
        _ = step.plan
    plan = step.compile(*types)
    assert step.plan is plan
    assert plan.mesh.device_count == 8
    assert [variable.name for variable in plan.parameters] == ["x", "y"]
    np.testing.assert_array_equal(np.asarray(step(np.ones((16, 4)), np.ones((4, 8)))["product"]), 4)
    assert step.plan is plan


class Scale:
    factor = 3.0

    def __call__(self, x: Any) -> Any:
        return x * self.factor

    def method(self, x: Any) -> Any:
        return x + self.factor


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (jax.jit(lambda x: x + 1), 3),
        (functools.partial(jnp.multiply, 2.0), 4),
        (Scale(), 6),
        (Scale().method, 5),
        (jnp.negative, -2),
    ],
    ids=["jit", "partial", "callable", "method", "ufunc"],
)
def test_functions_of_every_kind(session: sw.Session, fn: Any, expected: float) -> None:
    np.testing.assert_array_equal(np.asarray(session.parallelize(fn)(np.full(8, 2.0, np.float32))), expected)


def test_steps_return_before_they_have_run(session: sw.Session) -> None:
    step = session.parallelize(lambda s: jax.lax.fori_loop(0, 400, lambda _, s: jnp.tanh(s @ s), s), donate_argnums=0)
    state = step(np.eye(256, dtype=np.float32))
    state.block_until_ready()
    results = []
    for _ in range(3):
        state = step(state)
        results.append(state._result)
    assert not results[-1].is_done
    state.block_until_ready()
    assert all(result.is_done for result in results)


def test_threads_may_share_a_step(session: sw.Session) -> None:
    step = session.parallelize(lambda x, factor: x * factor)
    step(np.ones(4), 1)
    sums: dict[int, float] = {}

    def work(number: int) -> None:
        sums[number] = float(np.asarray(step(np.ones(4), number)).sum())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {number: 4.0 * number for number in range(12)}


def test_errors_of_the_function_itself_come_through(session: sw.Session) -> None:
    step = session.parallelize(lambda x: x + jnp.ones(3))
    with pytest.raises(TypeError, match="incompatible shapes"):
        step(np.ones(4))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        step()
    unhashable = session.parallelize(lambda x, names: x, static_argnums=1)
    with pytest.raises(sw.OptionError, match="cannot be hashed"):
        unhashable(np.ones(4), ["a"])


def test_annotations_decide_layouts(session: sw.Session) -> None:
    def step(x):
        y = sw.annotate(jnp.tanh(x), {0: None, 1: "data"})
        return y, y.sum()

    y, _ = session.parallelize(step, mesh="8")(np.ones((16, 8), np.float32))
    assert y.sharding.startswith("[-, data]")


def test_programs_of_equal_text_are_planned_once(session: sw.Session) -> None:
    def double(x):
        return x * 2

    first, second = session.parallelize(double, mesh="8"), session.parallelize(double, mesh="8")
    x = np.ones(8, np.float32)
    first(x)
    second(x)  # another line: the text holds the caller's
    assert first._require_program().executable_id == second._require_program().executable_id


def test_programs_of_equal_text_keep_their_own_constants_and_results(session: sw.Session) -> None:
    x = np.ones(64, np.float32)
    for number in range(3):
        table = np.full(64, number, np.float32)
        step = session.parallelize(lambda x: x + table)  # noqa: B023
        np.testing.assert_array_equal(np.asarray(step(x)), x + number)
    for wrap in (tuple, list):
        result = session.parallelize(lambda x: wrap([x * 3]))(x)  # noqa: B023
        assert type(result) is wrap
