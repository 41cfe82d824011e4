"""Training through an embedded server gives the numbers of single-device JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.client.models import (
    adamw_step,
    batches,
    distance,
    init_adamw,
    init_params,
    loss_of,
    sgd_step,
    train_as_on_one_device,
)

KEY = jax.random.key(0)


@pytest.mark.dear
@pytest.mark.parametrize(
    ("force", "mesh"),
    [
        (None, None),
        ("data", None),
        ("tensor", "8"),
        ("mixed", "2x4"),
        ("fsdp", None),
        ({"params['w1']": {1: "model"}, "batch[*": {0: "data"}}, {"data": 4, "model": 2}),
    ],
    ids=["planned", "data", "tensor", "mixed", "fsdp", "pins"],
)
def test_ten_sgd_steps_agree_with_single_device_jax(session: sw.Session, force: Any, mesh: Any) -> None:
    step = train_as_on_one_device(session, force=force, mesh=mesh)
    if force is not None:
        assert step.plan.origin != "search"
        assert "all-reduce" in step.report or "all-gather" in step.report
        assert "temporaries" in step.report


@pytest.mark.dear
def test_adamw_is_as_close_as_stock_jax_with_the_same_shardings(session: sw.Session) -> None:
    step = session.parallelize(adamw_step, donate_argnums=(0, 1), force="data")
    params, opt_state = step.init(init_adamw, KEY)
    expected = jax.jit(init_adamw)(KEY)
    reference = jax.jit(adamw_step)
    data = list(batches(10))
    step.compile(params, opt_state, data[0])
    stock, stock_state = _stock_jit(step.plan, expected, data[0])
    for batch in data:
        params, opt_state, loss = step(params, opt_state, batch)
        *expected, expected_loss = reference(*expected, batch)
        *stock_state, _ = stock(*stock_state, batch)
        assert abs(float(loss) - float(expected_loss)) <= 1e-5
    for ours, theirs, right in zip(
        jax.tree.leaves(params), jax.tree.leaves(stock_state[0]), jax.tree.leaves(expected[0]), strict=True
    ):
        assert distance(ours, right) <= max(2 * distance(theirs, right), 1e-6)


def _stock_jit(plan: sw.Plan, state: Any, batch: Any) -> tuple[Any, list[Any]]:
    """`jax.jit` of the AdamW step under the plan's shardings, and the state laid out for it."""
    arguments, _ = plan.shardings()
    params, opt_state, _ = jax.tree.map(jax.device_put, (*state, batch), arguments)
    return jax.jit(adamw_step, in_shardings=arguments), [params, opt_state]


@pytest.mark.dear
def test_uploaded_parameters_train_like_initialized_ones(session: sw.Session) -> None:
    step = session.parallelize(sgd_step, donate_argnums=0, force="fsdp")
    params = expected = jax.device_get(jax.jit(init_params)(KEY))
    for batch in batches(3):
        params, loss = step(params, batch)
        expected, expected_loss = jax.jit(sgd_step)(expected, batch)
    assert abs(float(loss) - float(expected_loss)) <= 1e-5
    assert distance(params, expected) <= 1e-5
    assert "data" in params["w1"].sharding


@pytest.mark.dear
def test_a_smaller_last_batch_and_an_eval_step_share_the_state(session: sw.Session) -> None:
    step = session.parallelize(sgd_step, donate_argnums=0, force="fsdp")
    evaluate = session.parallelize(loss_of)
    params = step.init(init_params, KEY)
    expected = jax.jit(init_params)(KEY)
    for batch in [*batches(2), *batches(1, rows=5), *batches(1, seed=1)]:
        params, loss = step(params, batch)
        before = {name: handle.sharding for name, handle in params.items()}
        expected, expected_loss = jax.jit(sgd_step)(expected, batch)
        assert abs(float(loss) - float(expected_loss)) <= 1e-5
        assert abs(float(evaluate(params, batch)) - float(loss_of(expected, batch))) <= 1e-5
        assert {name: handle.sharding for name, handle in params.items()} == before
    assert distance(params, expected) <= 1e-5


@pytest.mark.dear
def test_an_eval_step_may_come_first(session: sw.Session) -> None:
    """It runs the initializer in its own layout; the train step moves the state once."""
    step = session.parallelize(sgd_step, donate_argnums=0, force="fsdp", mesh="8")
    evaluate = session.parallelize(loss_of, mesh="8")
    params = step.init(init_params, KEY)
    (batch,) = batches(1)
    expected = jax.jit(init_params)(KEY)
    assert abs(float(evaluate(params, batch)) - float(loss_of(expected, batch))) <= 1e-5
    params, _ = step(params, batch)
    expected, _ = jax.jit(sgd_step)(expected, batch)
    assert abs(float(evaluate(params, batch)) - float(loss_of(expected, batch))) <= 1e-5
    assert distance(params, expected) <= 1e-5


def test_arrays_of_another_mesh_are_moved(session: sw.Session) -> None:
    (batch,) = batches(1)
    on_eight = session.parallelize(sgd_step, donate_argnums=0, mesh="8", force="fsdp")
    on_two_by_four = session.parallelize(sgd_step, donate_argnums=0, mesh="2x4", force="mixed")
    params, _ = on_eight(jax.device_get(jax.jit(init_params)(KEY)), batch)
    params, loss = on_two_by_four(params, batch)
    assert "model=4" in params["w1"].sharding
    expected, _ = jax.jit(sgd_step)(jax.jit(init_params)(KEY), batch)
    expected, expected_loss = jax.jit(sgd_step)(expected, batch)
    assert abs(float(loss) - float(expected_loss)) <= 1e-5
    assert distance(params, expected) <= 1e-5


def test_state_that_is_not_donated_settles(session: sw.Session) -> None:
    step = session.parallelize(sgd_step, force="fsdp")
    params = step.init(init_params, KEY)
    expected = jax.jit(init_params)(KEY)
    for batch in batches(4):
        old, (params, loss) = params, step(params, batch)
        expected, expected_loss = jax.jit(sgd_step)(expected, batch)
    assert abs(float(loss) - float(expected_loss)) <= 1e-5
    assert distance(params, expected) <= 1e-5
    assert not old["w1"].is_deleted()
    programs = next(iter(step._programs.plans.programs.values()))
    assert len(programs) <= 2


def test_keys_static_arguments_constants_and_scalars(session: sw.Session) -> None:
    table = np.linspace(0.5, 1.5, 256, dtype=np.float32)

    def step(state, x, rate, mode):
        key, use = jax.random.split(state["key"])
        result = jax.random.bernoulli(use, 1 - rate, x.shape)
        y = jnp.where(result, x * table, 0) if mode == "train" else x * table
        return {"key": key, "count": state["count"] + 1}, y.sum(axis=1)

    remote = session.parallelize(step, donate_argnums=0, static_argnums=3)
    local = jax.jit(step, static_argnums=3)
    x = np.ones((8, 256), np.float32)
    state = expected = {"key": jax.random.key(5), "count": 0}
    for mode in ("train", "train", "eval"):
        state, sums = remote(state, x, 0.4, mode)
        expected, expected_sums = local(expected, x, 0.4, mode)
        np.testing.assert_allclose(np.asarray(sums), expected_sums, rtol=1e-5)
    assert state["key"].dtype == expected["key"].dtype
    assert state["key"].shape == ()
    assert (state["key"].to_jax() == expected["key"]).all()
    assert int(state["count"]) == 3
