"""Arrays that lie in another view than the user's program has: trained, read, evaluated, moved, made on the servers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.client.arrays import RemoteArray

pytestmark = pytest.mark.dear

WIDTH, HIDDEN, BATCH = 16, 32, 8


def init(key: Any) -> dict[str, Any]:
    first, second = jax.random.split(key)
    return {
        "w": jax.random.normal(first, (WIDTH, 2 * HIDDEN)) * 0.3,
        "v": jax.random.normal(second, (HIDDEN, WIDTH)) * 0.3,
    }


def forward(params: Any, x: Any) -> Any:
    gate, value = jnp.split(x @ params["w"], 2, axis=-1)
    return (jax.nn.silu(gate) * value) @ params["v"]


def train(params: Any, x: Any, y: Any) -> Any:
    loss, gradients = jax.value_and_grad(lambda p: jnp.mean((forward(p, x) - y) ** 2))(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), loss


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(number)
    return tuple(random.normal(size=(BATCH, WIDTH)).astype(np.float32) for _ in range(2))  # type: ignore[return-value]


@pytest.fixture
def trained(session: sw.Session) -> tuple[Any, Any, Any]:
    """(a step that split its fused weight, its parameters after three steps, those of single-device JAX)."""
    step = session.parallelize(train, donate_argnums=0, force="tensor", mesh="1x8")
    params = step.init(init, jax.random.key(0))
    expected = init(jax.random.key(0))
    for number in range(3):
        params, loss = step(params, *batch(number))
        expected, expected_loss = jax.jit(train)(expected, *batch(number))
        assert abs(float(loss) - float(expected_loss)) <= 1e-5
    return step, params, expected


def test_training_reads_and_shows_the_users_dimensions(trained: tuple[Any, Any, Any]) -> None:
    step, params, expected = trained
    (weight,) = (variable for variable in step.plan.parameters if variable.view_of is not None)
    assert (weight.shape, weight.view_of) == ((WIDTH, 2, HIDDEN), (WIDTH, 2 * HIDDEN))
    assert weight.sharding.dims[2]
    assert not step.plan.portable
    assert "all-gather" not in step.report
    assert params["w"].shape == (WIDTH, 2 * HIDDEN)
    np.testing.assert_allclose(np.asarray(params["w"]), expected["w"], atol=1e-5)
    assert params["w"].to_jax().shape == (WIDTH, 2 * HIDDEN)


def test_evaluation_takes_the_view_as_it_lies(session: sw.Session, trained: tuple[Any, Any, Any]) -> None:
    _, params, expected = trained
    before = params["w"].sharding
    evaluate = session.parallelize(forward)
    x, _ = batch(9)
    np.testing.assert_allclose(np.asarray(evaluate(params, x)), forward(expected, x), atol=1e-5)
    assert params["w"].sharding == before
    assert evaluate.plan.parameters[1].view_of == (WIDTH, 2 * HIDDEN)


def test_a_function_that_cannot_follow_the_view_still_takes_it(
    session: sw.Session, trained: tuple[Any, Any, Any]
) -> None:
    _, params, expected = trained
    result = session.parallelize(lambda p: jnp.cumsum(p["w"], 1) + 1)(params)
    np.testing.assert_allclose(np.asarray(result), np.cumsum(expected["w"], 1) + 1, atol=1e-4)


def test_arrays_move_between_views(session: sw.Session, trained: tuple[Any, Any, Any]) -> None:
    """A forced step that splits the dimension as it is written takes the array out of its view."""
    _, params, expected = trained
    plain = session.parallelize(train, donate_argnums=0, force={"params['w']": {1: "model"}}, mesh="1x8")
    params, loss = plain(params, *batch(3))
    assert plain.plan.portable
    expected, expected_loss = jax.jit(train)(expected, *batch(3))
    assert abs(float(loss) - float(expected_loss)) <= 1e-5
    np.testing.assert_allclose(np.asarray(params["w"]), expected["w"], atol=1e-5)


def test_uploaded_arrays_are_put_into_the_view(session: sw.Session) -> None:
    step = session.parallelize(train, donate_argnums=0, force="tensor", mesh="1x8")
    start = jax.tree.map(np.asarray, init(jax.random.key(1)))
    params, _ = step(start, *batch(0))
    expected, _ = jax.jit(train)(start, *batch(0))
    assert isinstance(params["w"], RemoteArray)
    np.testing.assert_allclose(np.asarray(params["w"]), expected["w"], atol=1e-5)
