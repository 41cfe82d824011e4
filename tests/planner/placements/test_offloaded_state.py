"""Plans of a step whose optimizer state lies on the host: beside the same step with its state on the devices."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.errors import MemoryBudgetError, OptionError
from shardwright.plans.plan_json import decode

pytestmark = pytest.mark.dear

_WIDTH, _HIDDEN, _LAYERS, _BATCH = 256, 1024, 3, 512

_OPTIMIZER = optax.adam(1e-3)


def _loss(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    def block(h: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return h + jax.nn.gelu(h @ weights[0]) @ weights[1], None

    h, _ = jax.lax.scan(jax.checkpoint(block), x, params)
    return (h**2).mean()


def _text(*, is_offloaded: bool) -> str:
    def step(params, state, x):
        if is_offloaded:
            state = jax.device_put(state, jax.memory.Space.Device)
        loss, gradients = jax.value_and_grad(_loss)(params, x)
        updates, state = _OPTIMIZER.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return params, (jax.device_put(state, jax.memory.Space.Host) if is_offloaded else state), loss

    shape = jax.ShapeDtypeStruct
    params = (
        shape((_LAYERS, _WIDTH, _HIDDEN), jnp.float32),
        shape((_LAYERS, _HIDDEN, _WIDTH), jnp.float32),
    )
    state = jax.eval_shape(_OPTIMIZER.init, params)
    x = shape((_BATCH, _WIDTH), jnp.float32)
    return sw.lower(step, params, state, x, platform="cuda", donate_argnums=(0, 1)).hlo_text


def _cluster(**changes: object) -> Cluster:
    return replace(Cluster.local(8), platform="cuda", hardware="h100", **changes)


@pytest.fixture(scope="module")
def offloaded() -> sw.Plan:
    return sw.plan(_text(is_offloaded=True), _cluster(), cache=False, effort="fast")


def test_moments_are_split_and_lie_on_the_host(offloaded: sw.Plan) -> None:
    moments = 2 * 2 * _LAYERS * _WIDTH * _HIDDEN * 4
    on_host = [variable for variable in offloaded.parameters if variable.is_on_host]
    assert {variable.name.split("[")[1].removeprefix("0]") for variable in on_host} == {".mu", ".nu", ".count"}
    held = sum(variable.sharding.shard_shape(variable.shape, offloaded.mesh) != () for variable in on_host)
    assert held == 4
    assert moments / 8 <= offloaded.memory.host_arguments_bytes <= moments + 4
    params = [variable for variable in offloaded.parameters if not variable.is_on_host]
    assert offloaded.memory.arguments_bytes < sum(4 * _LAYERS * _WIDTH * _HIDDEN for _ in params)


def test_moves_take_their_bytes_by_the_link(offloaded: sw.Plan) -> None:
    host = hardware_profile("h100").require_host()
    there = offloaded.memory.host_arguments_bytes / host.to_device_bytes_per_s
    launches = 10 * hardware_profile("h100").launch_s  # four moments and a count, each way
    assert offloaded.cost.transfers_s == pytest.approx(2 * there + launches, rel=1e-6)
    cost = offloaded.cost
    assert cost.step_s == cost.compute_s + cost.communication_s + cost.transfers_s
    assert "to and from the host" in offloaded.explain()
    assert "GiB)" in next(line for line in offloaded.explain().splitlines() if "host memory" in line)


def test_the_plan_is_read_again(offloaded: sw.Plan) -> None:
    again = decode(offloaded.to_json(), offloaded.hlo_text)
    assert again.memory == offloaded.memory
    assert again.cost == offloaded.cost
    assert [v.is_on_host for v in again.parameters] == [v.is_on_host for v in offloaded.parameters]


def test_emitted_programs_name_memories_and_keep_moves(offloaded: sw.Plan) -> None:
    text = offloaded.emit()
    assert text.count("@annotate_device_placement") == 10
    main = next(line for line in text.splitlines() if "func.func public @main" in line or "func.func @main" in line)
    assert main.count('mhlo.memory_kind = "pinned_host"') == 10


def test_hosts_with_too_little_memory_are_refused() -> None:
    cluster = _cluster(host_memory_bytes_per_device=1 << 20)
    with pytest.raises(MemoryBudgetError, match=r"in the memory of the hosts, which have 1\.00 MiB for each"):
        sw.plan(_text(is_offloaded=True), cluster, cache=False, effort="fast")


def test_stages_are_refused() -> None:
    with pytest.raises(OptionError, match="uses the host's memory, which pipelines do not cut around"):
        sw.plan(_text(is_offloaded=True), _cluster(), cache=False, stages=2)


def test_the_rest_of_the_step_is_planned_as_without(offloaded: sw.Plan) -> None:
    plain = sw.plan(_text(is_offloaded=False), _cluster(), cache=False, effort="fast")
    assert plain.memory.host_bytes == 0
    assert plain.cost.transfers_s == 0
    assert offloaded.memory.arguments_bytes < plain.memory.arguments_bytes
    assert offloaded.cost.compute_s == pytest.approx(plain.cost.compute_s, rel=0.1)
