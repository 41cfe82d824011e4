"""States of the libraries people use: Optax, Flax (both APIs), dataclasses, keyword arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import shardwright as sw
from tests.client.models import distance

X = np.random.default_rng(0).normal(size=(16, 12)).astype(np.float32)
Y = X[:, :4].copy()


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.LayerNorm()(linen.Dense(16)(x))
        return linen.Dense(4)(linen.relu(x))


@pytest.mark.dear
def test_a_linen_train_state(session: sw.Session) -> None:
    model = Dense()

    def init(key):
        params = model.init(key, X)["params"]
        return TrainState.create(
            apply_fn=model.apply, params=params, tx=optax.chain(optax.clip(1.0), optax.sgd(0.1, 0.9))
        )

    def step(state, x, y):
        def loss(params):
            return ((state.apply_fn({"params": params}, x) - y) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    remote = session.parallelize(step, donate_argnums=0, force="data")
    state, expected = remote.init(init, jax.random.key(0)), jax.jit(init)(jax.random.key(0))
    for _ in range(3):
        state, loss = remote(state, X, Y)
        expected, expected_loss = jax.jit(step)(expected, X, Y)
        assert abs(float(loss) - float(expected_loss)) <= 1e-5
    assert int(state.step) == 3
    assert distance(state.params, expected.params) <= 1e-5


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(12, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.second = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


@pytest.mark.dear
def test_an_nnx_module_with_batch_norm_and_dropout(session: sw.Session) -> None:
    """Split into graph and state, as for jax.jit; the state holds PRNG keys, counters and statistics."""
    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def step(state, x, y):
        def loss(state):
            model = nnx.merge(graph, state)
            value = ((model(x) - y) ** 2).mean()
            return value, nnx.state(model)

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True, allow_int=True)(state)
        params = nnx.filter_state(new, nnx.Param)
        gradients = nnx.filter_state(gradients, nnx.Param)
        updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return nnx.merge_state(new, updated), value

    remote = session.parallelize(step, donate_argnums=0, force="data")
    expected = state = jax.tree.map(lambda leaf: leaf, state)
    for _ in range(3):
        state, loss = remote(state, X, Y)
        expected, expected_loss = jax.jit(step)(expected, X, Y)
        assert abs(float(loss) - float(expected_loss)) <= 1e-4
    assert jax.tree.structure(state) == jax.tree.structure(expected)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Nested:
    left: Any
    right: Any = None


def test_dataclasses_none_leaves_and_keyword_arguments(session: sw.Session) -> None:
    def step(state, *, scale, extra=()):
        total = state.left["a"] * scale + sum(extra, 0.0)
        return Nested(left=[total, (state.right,)], right=total.sum())

    remote = session.parallelize(step)
    for extra in ((), (1.0, np.float32(2))):
        state = Nested(left={"a": np.arange(8.0, dtype=np.float32)})
        result, expected = remote(state, scale=2.0, extra=extra), jax.jit(step)(state, scale=2.0, extra=extra)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        np.testing.assert_allclose(np.asarray(result.left[0]), expected.left[0])
        assert float(result.right) == pytest.approx(float(expected.right))


def test_legacy_keys_and_batches_of_keys(session: sw.Session) -> None:
    def step(legacy, keys):
        return jax.random.normal(legacy, (8,)), jax.vmap(lambda key: jax.random.uniform(key, (4,)))(keys), keys[::-1]

    legacy, keys = jax.random.PRNGKey(3), jax.random.split(jax.random.key(4), 8)
    normal, uniform, flipped = session.parallelize(step)(legacy, keys)
    expected = jax.jit(step)(legacy, keys)
    np.testing.assert_allclose(np.asarray(normal), expected[0], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(uniform), expected[1], rtol=1e-5)
    assert (flipped.to_jax() == expected[2]).all()


def test_sixty_four_bit_types_pass_as_they_are(session: sw.Session) -> None:
    with jax.enable_x64(True):
        step = session.parallelize(lambda x, n: (x / 3, n + 2**40))
        x = np.linspace(0, 1, 8)
        third, big = step(x, np.arange(8))
        assert (third.dtype, big.dtype) == (np.float64, np.int64)
        np.testing.assert_array_equal(np.asarray(third), x / 3)
        np.testing.assert_array_equal(np.asarray(big), np.arange(8) + 2**40)
