"""Models of Equinox and Haiku: their states travel, and a whole Equinox module is told how to be split."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import numpy as np
import optax
import pytest

import shardwright as sw
from tests.client.models import distance

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = X[:, :2].copy()
OPTIMIZER = optax.adam(1e-2)


def model() -> Any:
    return eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))


def train(model: Any, state: Any, x: Any, y: Any) -> Any:
    loss, gradients = eqx.filter_value_and_grad(lambda model: ((jax.vmap(model)(x) - y) ** 2).mean())(model)
    updates, state = OPTIMIZER.update(gradients, state, model)
    return eqx.apply_updates(model, updates), state, loss


@pytest.mark.dear
def test_a_partitioned_equinox_module_trains(session: sw.Session) -> None:
    params, static = eqx.partition(model(), eqx.is_array)

    def step(params, state, x, y):
        new, state, loss = train(eqx.combine(params, static), state, x, y)
        return eqx.filter(new, eqx.is_array), state, loss

    remote, local = session.parallelize(step, donate_argnums=(0, 1)), jax.jit(step)
    ours = expected = (params, OPTIMIZER.init(params))
    for _ in range(2):
        *ours, loss = remote(*ours, X, Y)
        *expected, expected_loss = local(*expected, X, Y)
        assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert distance(ours[0], expected[0]) <= 1e-5
    assert eqx.combine(ours[0], static).layers[0].weight.shape == (8, 4)


def test_the_static_part_of_an_equinox_module_is_a_static_argument() -> None:
    params, static = eqx.partition(model(), eqx.is_array)
    program = sw.lower(lambda params, static, x: jax.vmap(eqx.combine(params, static))(x), params, static, X,
                       static_argnames="static")  # fmt: skip
    assert program.argument_names[0] == "params.layers[0].weight"


@pytest.mark.parametrize("fn", [train, eqx.filter_jit(train)], ids=["function", "filter_jit"])
def test_a_whole_equinox_module_is_told_how_to_be_split(fn: Any) -> None:
    state = OPTIMIZER.init(eqx.filter(model(), eqx.is_array))
    with pytest.raises(sw.UnsupportedProgramError, match=r"eqx\.partition\(model, eqx\.is_array\)") as caught:
        sw.lower(fn, model(), state, X, Y)
    assert caught.value.where.endswith(".activation")
    with pytest.raises(sw.UnsupportedProgramError, match=r"eqx\.filter\(model, eqx\.is_array\)"):
        sw.lower(model)


def test_a_filter_jit_of_arrays_is_a_step_like_any_other() -> None:
    assert "tanh" in sw.lower(eqx.filter_jit(jax.numpy.tanh), X).hlo_text


@pytest.mark.dear
def test_haiku_with_state_and_random_keys(session: sw.Session) -> None:
    def forward(x):
        x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training=True)
        return hk.Linear(2)(hk.dropout(hk.next_rng_key(), 0.1, x))

    network = hk.transform_with_state(forward)
    params, state = network.init(jax.random.PRNGKey(0), X)

    def step(params, state, key, x, y):
        def loss(params):
            output, new = network.apply(params, state, key, x)
            return ((output - y) ** 2).mean(), new

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), new, value

    arguments = (params, state, jax.random.PRNGKey(1), X, Y)
    ours, expected = session.parallelize(step)(*arguments), jax.jit(step)(*arguments)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    assert distance(ours, expected) <= 1e-5
