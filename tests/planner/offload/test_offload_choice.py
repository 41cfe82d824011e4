"""`offload=`: state on the host where nothing faster fits the devices, and what plans say of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.errors import OptionError, PlanError
from shardwright.plans.plan_json import decode

pytestmark = pytest.mark.dear

WIDTH, LAYERS, ROWS = 1024, 2, 256
OPTIMIZER = optax.adam(1e-3)
SHAPE = jax.ShapeDtypeStruct
PARAMETERS = [SHAPE((WIDTH, WIDTH), jnp.float32) for _ in range(LAYERS)]
PROFILE = hardware_profile("h100")
MOMENTS_BYTES = 2 * LAYERS * WIDTH * WIDTH * 4
#: All on one mesh, without recomputation and micro-batches: a search takes a second.
HOW: dict[str, Any] = {"cache": False, "mesh": "8", "remat": "none", "micro_batches": 1}


def step(params: Any, state: Any, x: jax.Array) -> Any:
    def loss_of(params: Any) -> jax.Array:
        h = x
        for weight in params:
            h = jnp.tanh(h @ weight)
        return (h**2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


@pytest.fixture(scope="module")
def text() -> str:
    state = jax.eval_shape(OPTIMIZER.init, PARAMETERS)
    x = SHAPE((ROWS, WIDTH), jnp.float32)
    return sw.lower(step, PARAMETERS, state, x, platform="cuda", donate_argnums=(0, 1)).hlo_text


def cluster(**changes: object) -> Cluster:
    return replace(Cluster.local(8), platform="cuda", hardware="h100", **changes)


@pytest.fixture(scope="module")
def plain(text: str) -> sw.Plan:
    return sw.plan(text, cluster(), offload="none", **HOW)


@pytest.fixture(scope="module")
def offloaded(text: str) -> sw.Plan:
    return sw.plan(text, cluster(), offload="optimizer", **HOW)


def test_moments_alone_lie_on_the_host_and_the_step_is_compute_and_moves(plain: sw.Plan, offloaded: sw.Plan) -> None:
    names = {variable.name for variable in offloaded.parameters if variable.is_on_host}
    assert len(names) == 2 * LAYERS
    assert all(".mu" in name or ".nu" in name for name in names)
    assert [v.alias for v in offloaded.parameters] == [v.alias for v in plain.parameters]
    memory, cost = offloaded.memory, offloaded.cost
    moments = memory.host_arguments_bytes
    assert moments >= MOMENTS_BYTES / 8
    host, launch_s = PROFILE.require_host(), PROFILE.launch_s
    each_way = moments / host.to_device_bytes_per_s + len(names) * launch_s
    assert cost.transfers_s == pytest.approx(2 * each_way, rel=1e-6)
    assert cost.step_s == pytest.approx(cost.compute_s + cost.communication_s + cost.transfers_s)
    assert plain.cost.transfers_s == 0


def test_plans_say_so_first_and_stay_whole_in_json(offloaded: sw.Plan, plain: sw.Plan) -> None:
    first = "\n".join(offloaded.explain().splitlines()[:10])
    assert "optimizer state on the host: 4 arrays, 2.00 MiB a device" in first
    assert decode(offloaded.to_json(), offloaded.hlo_text).is_offloaded
    assert not plain.is_offloaded
    assert "optimizer state on the host" not in plain.explain()
    with pytest.raises(PlanError, match="keeps optimizer state on the host"):
        offloaded.require_portable()


def test_what_has_no_state_says_so_and_stages_are_refused(text: str) -> None:
    undonated = sw.lower(lambda w, x: (x @ w).sum(), PARAMETERS[0], SHAPE((ROWS, WIDTH), jnp.float32)).hlo_text
    plan = sw.plan(undonated, cluster(), offload="optimizer", **HOW)
    assert any("nothing is kept on the host" in note for note in plan.notes)
    with pytest.raises(OptionError, match="stages of a pipeline keep their state on their devices"):
        sw.plan(text, cluster(), cache=False, offload="optimizer", stages=2)
    with pytest.raises(OptionError, match="offload"):
        sw.plan(text, cluster(), cache=False, offload="host")
