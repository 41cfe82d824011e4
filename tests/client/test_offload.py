"""Optimizer state on the host through servers: born there, trained, read, saved, restored, planned again; the numbers
are those of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw

pytestmark = pytest.mark.cluster

WIDTH = 512  # a square of it is the least array that may go to the host
OPTIMIZER = optax.adamw(1e-2, eps=1e-3)  # one that does not blow up what rounding leaves of small gradients


def init(key: jax.Array) -> tuple[Any, Any]:
    params = {name: jax.random.normal(jax.random.fold_in(key, n), (WIDTH, WIDTH)) * 0.05 for n, name in enumerate("ab")}
    params["bias"] = jnp.zeros(WIDTH)
    return params, OPTIMIZER.init(params)


def train_step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        return ((jnp.tanh(batch @ params["a"] + params["bias"]) @ params["b"] - 1.0) ** 2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def batches(count: int) -> list[np.ndarray]:
    return [np.random.default_rng(n).normal(size=(64, WIDTH)).astype(np.float32) for n in range(count)]


def on_one_device(count: int) -> tuple[Any, Any, list[float]]:
    params, state = jax.jit(init)(jax.random.key(0))
    losses, step = [], jax.jit(train_step)
    for batch in batches(count):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return params, state, losses


def assert_equal(values: Any, expected: Any) -> None:
    for value, wanted in zip(jax.tree.leaves(values), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(value), np.asarray(wanted), rtol=2e-4, atol=2e-6)


def test_training_with_moments_on_the_host_has_one_devices_numbers(session: sw.Session, tmp_path: Path) -> None:
    params_wanted, state_wanted, losses = on_one_device(6)
    step = session.parallelize(train_step, donate_argnums=(0, 1), offload="optimizer")
    params, state = step.init(init, jax.random.key(0))
    for batch, wanted in zip(batches(3), losses[:3], strict=True):
        params, state, loss = step(params, state, batch)
        assert float(loss) == pytest.approx(wanted, rel=1e-5)
    moments = {variable.name for variable in step.plan.parameters if variable.is_on_host}
    assert len(moments) == 4
    assert all(".mu" in name or ".nu" in name for name in moments)
    assert "optimizer state on the host: 4 arrays" in step.plan.explain()
    step.save((params, state), tmp_path, step=3).wait()
    restored = step.restore(tmp_path)
    for again in ((params, state), restored):
        params, state = again
        for batch, wanted in zip(batches(6)[3:], losses[3:], strict=True):
            params, state, loss = step(params, state, batch)
            assert float(loss) == pytest.approx(wanted, rel=1e-5)
        assert_equal((params, state), (params_wanted, state_wanted))
