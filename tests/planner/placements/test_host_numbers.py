"""Steps that use the host's memory, planned for eight devices and run on CPUs: the numbers are one device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compute_on import compute_on

import shardwright as sw
from shardwright.cost import compute_time_s, hardware_profile
from shardwright.hlo import parse
from tests.planner.running import xla_outputs

pytestmark = pytest.mark.dear

_POLICIES = {
    "names": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "dots": jax.checkpoint_policies.offload_dot_with_no_batch_dims(offload_src="device", offload_dst="pinned_host"),
}


def _plan(function: Callable[..., Any], *arguments: np.ndarray, **options: Any) -> sw.Plan:
    types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arguments]
    text = sw.lower(function, *types, platform="cuda").hlo_text
    return sw.plan(text, 8, cache=False, effort="fast", **options)


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("force", ["data", None])
def test_residuals_on_the_host(policy: str, force: str | None) -> None:
    def gradient(weights: jax.Array, x: jax.Array, *, is_offloaded: bool = True) -> jax.Array:
        def block(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(checkpoint_name(h, "h") @ w), None

        body = jax.checkpoint(block, policy=_POLICIES[policy]) if is_offloaded else block
        return jax.grad(lambda w: (jax.lax.scan(body, x, w)[0] ** 2).sum())(weights)

    weights, x = _random(3, 64, 64) / 8, _random(32, 64)
    planned = _plan(gradient, weights, x, force=force)
    assert planned.memory.host_temporaries_bytes >= 3 * 32 * 64 * 4 / 8
    assert not any("opaque" in note for note in planned.notes)
    (found,) = xla_outputs(planned, weights, x)
    np.testing.assert_allclose(found, gradient(weights, x, is_offloaded=False), rtol=1e-5, atol=1e-5)


def test_moments_on_the_host() -> None:
    adam = optax.adam(1e-2)

    def step(weights, state, x, *, is_offloaded=True):
        if is_offloaded:
            state = jax.device_put(state, jax.memory.Space.Device)
        gradients = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(weights)
        updates, state = adam.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
        return weights, jax.device_put(state, jax.memory.Space.Host) if is_offloaded else state

    weights, x = _random(64, 32), _random(16, 64)
    state = adam.init(weights)
    flat, tree = jax.tree.flatten((weights, state, x))
    arrays = [np.asarray(each) for each in flat]
    planned = _plan(lambda *leaves: step(*jax.tree.unflatten(tree, leaves)), *arrays, force="fsdp")
    assert sum(variable.is_on_host for variable in planned.parameters) == 3
    expected = jax.tree.leaves(step(weights, state, x, is_offloaded=False))
    for found, wanted in zip(xla_outputs(planned, *arrays), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_what_the_host_computes() -> None:
    @compute_on("device_host")
    @jax.jit
    def update(momentum: jax.Array, gradient: jax.Array) -> jax.Array:
        return momentum * 0.9 + gradient * 0.1

    momentum, gradient = _random(64, 32), _random(32, 64).T.copy()
    planned = _plan(lambda m, g: update(m, g) * 2, momentum, gradient)
    (found,) = xla_outputs(planned, momentum, gradient)
    np.testing.assert_allclose(found, (momentum * 0.9 + gradient * 0.1) * 2, rtol=1e-5, atol=1e-6)


def test_the_host_computes_at_its_own_speed() -> None:
    text = """HloModule m
ENTRY main {
  a = f32[1048576] parameter(0)
  here = f32[1048576] add(a, a)
  ROOT there = f32[1048576] add(here, a), frontend_attributes={_xla_compute_type="host"}
}
"""
    here, there = parse(text).entry.instructions[1:]
    profile, shape = hardware_profile("h200"), (1048576,)
    host, size = profile.require_host(), 4 * 1048576
    seconds = compute_time_s(there, [shape, shape], [shape], profile)
    ways = 2 * size / host.to_device_bytes_per_s + size / host.from_device_bytes_per_s
    assert seconds == pytest.approx(3 * size / host.memory_bandwidth_bytes_per_s + ways)
    assert seconds > 20 * compute_time_s(here, [shape, shape], [shape], profile)
