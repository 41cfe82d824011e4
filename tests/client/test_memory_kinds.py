"""Memory kinds of arguments and results are in the lowered text, and in plans of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.hlo import parse
from shardwright.placements import read_boundary

pytestmark = pytest.mark.dear

_CLUSTER = replace(Cluster.local(8), platform="cuda", hardware="h100")


def _on(kind: str, *axes: str | None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec(*axes), memory_kind=kind)


def _type(sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharding)


def _there_and_back(x: jax.Array) -> jax.Array:
    return jax.device_put(jax.device_put(x, _on("device", "d")) * 2, _on("pinned_host", "d"))


def _fetch(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Device) * 2


def _double(x: jax.Array) -> jax.Array:
    return x * 2


@pytest.mark.parametrize(
    ("function", "argument", "on_host"),
    [
        (lambda: jax.jit(_there_and_back, in_shardings=_on("pinned_host", "d")), _type, (1, 1)),
        (lambda: jax.jit(_double, out_shardings=_on("pinned_host", "d")), _type, (0, 1)),
        (lambda: _there_and_back, lambda: _type(_on("pinned_host", "d")), (1, 1)),
        (lambda: _fetch, lambda: _type(_on("pinned_host")), (1, 0)),
        (lambda: _fetch, lambda: _type(SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")), (1, 0)),
        (lambda: _fetch, lambda: jax.device_put(np.ones((64, 32), np.float32), _on("pinned_host")), (1, 0)),
        (lambda: _double, _type, (0, 0)),
    ],
)
def test_kinds_are_kept(function: Callable[[], Any], argument: Callable[[], Any], on_host: tuple[int, int]) -> None:
    text = sw.lower(function(), argument(), platform="cuda").hlo_text
    planned = sw.plan(text, _CLUSTER, cache=False, effort="fast")
    assert (int(planned.parameters[0].is_on_host), int(planned.outputs[0].is_on_host)) == on_host
    assert len(read_boundary(parse(text))[0]) == on_host[0]
    moves = 2e-6 * sum(on_host)
    assert planned.cost.transfers_s == pytest.approx(moves, rel=0.1)


def test_the_users_split_on_the_host_is_kept() -> None:
    text = sw.lower(_there_and_back, _type(_on("pinned_host", "d")), platform="cuda").hlo_text
    planned = sw.plan(text, _CLUSTER, cache=False, effort="fast")
    assert [str(each.sharding) for each in (*planned.parameters, *planned.outputs)] == ["[d, -]", "[d, -]"]


def test_shardings_of_a_plan_name_the_memory() -> None:
    text = sw.lower(_there_and_back, _type(_on("pinned_host", "d")), platform="cuda").hlo_text
    shardings = sw.plan(text, _CLUSTER, cache=False, effort="fast").shardings()
    assert [each.memory_kind for each in (*shardings[0], *shardings[1])] == ["pinned_host", "pinned_host"]
