"""Local statistics are those of equal parts of the batch, on any devices, and cost no collectives of their own."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import shardwright as sw

GROUPS = 4
IMAGES = np.random.default_rng(0).normal(1.0, 2.0, (16, 3, 3, 5)).astype(np.float32)


def batch_norm(x):
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / jnp.sqrt(variance + 1e-5)


def expected(x: np.ndarray) -> np.ndarray:
    parts = x.astype(np.float64).reshape(GROUPS, -1, *x.shape[1:])
    mean, variance = parts.mean((1, 2, 3), keepdims=True), parts.var((1, 2, 3), keepdims=True)
    return ((parts - mean) / np.sqrt(variance + 1e-5)).reshape(x.shape)


def train_step(weight, images, groups):
    def loss(weight):
        return jnp.square(sw.local_statistics(batch_norm, groups=groups)(images @ weight) - 1.0).mean()

    value, gradient = jax.value_and_grad(loss)(weight)
    return weight - 0.1 * gradient, value


def test_each_part_has_its_own_statistics() -> None:
    normalize = sw.local_statistics(batch_norm, groups=GROUPS)
    np.testing.assert_allclose(normalize(IMAGES), expected(IMAGES), atol=1e-4)
    assert not np.allclose(batch_norm(IMAGES), expected(IMAGES), atol=1e-2)
    np.testing.assert_array_equal(sw.local_statistics(batch_norm, groups=1)(IMAGES), batch_norm(IMAGES))


def test_running_statistics_of_a_framework_are_averaged() -> None:
    module = linen.BatchNorm(use_running_average=False, momentum=0.0)
    variables = module.init(jax.random.key(0), IMAGES)
    normalize = sw.local_statistics(partial(module.apply, variables, mutable=["batch_stats"]), groups=GROUPS)
    normalized, updated = normalize(IMAGES)
    np.testing.assert_allclose(normalized, expected(IMAGES), atol=1e-4)
    parts = IMAGES.astype(np.float64).reshape(GROUPS, -1, 5)
    np.testing.assert_allclose(updated["batch_stats"]["mean"], parts.mean(1).mean(0), atol=1e-5)
    np.testing.assert_allclose(updated["batch_stats"]["var"], parts.var(1).mean(0), atol=1e-4)


def test_counters_stay_integers() -> None:
    normalize = sw.local_statistics(lambda x: (batch_norm(x), jnp.int32(7)), groups=GROUPS)
    _, count = normalize(IMAGES)
    assert (count, count.dtype) == (7, jnp.int32)


def test_a_plan_moves_gradients_and_loss_only() -> None:
    def collectives(groups: int) -> int:
        shapes = jax.ShapeDtypeStruct((5, 6), "float32"), jax.ShapeDtypeStruct((16, 3, 3, 5), "float32")
        text = sw.lower(partial(train_step, groups=groups), *shapes, donate_argnums=0).as_text()
        return sum(collective.count for collective in sw.plan(text, GROUPS, force="data", cache=False).collectives)

    assert collectives(GROUPS) == 2
    assert collectives(1) > 2


def test_it_means_the_same_on_many_devices(session: sw.Session) -> None:
    weight = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
    step = session.parallelize(partial(train_step, groups=GROUPS), force="data")
    updated, value = step(weight, IMAGES)
    alone, value_alone = jax.jit(train_step, static_argnums=2)(weight, IMAGES, GROUPS)
    np.testing.assert_allclose(np.asarray(updated), alone, atol=1e-5)
    np.testing.assert_allclose(float(value), value_alone, rtol=1e-5)


@pytest.mark.parametrize("groups", [0, -1, 2.0, True, "4"])
def test_wrong_groups_are_refused(groups) -> None:
    with pytest.raises(sw.OptionError, match="groups of a batch") as caught:
        sw.local_statistics(batch_norm, groups=groups)
    assert caught.value.where == "groups"


@pytest.mark.parametrize("shape", [(), (10, 3, 3, 5)])
def test_a_batch_that_does_not_divide_is_named(shape) -> None:
    with pytest.raises(sw.ArgumentError, match=r"4 groups divide") as caught:
        sw.local_statistics(batch_norm, groups=GROUPS)(np.ones(shape, np.float32))
    assert "multiple" in caught.value.remedy
