"""Pipelines over nodes that come and go: stages, and the rows of stacked layers on them, are planned anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.elasticity.clusters import ElasticCluster, running, snapshot_of, wait_for_nodes
from tests.server.raw_client import wait_until

pytestmark = pytest.mark.cluster

KEY, X = jax.random.key(5), np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


def init(key: Any) -> Any:
    """Four equal layers, stacked, and a head."""
    return {"layers": jax.random.normal(key, (4, 16, 16)) * 0.3, "head": jax.random.normal(key, (16, 16)) * 0.1}


def train(params: Any, x: Any) -> tuple[Any, Any]:
    def loss_of(params: Any) -> Any:
        hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
        return jnp.mean((hidden @ params["head"] - x) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticCluster]:
    with running(tmp_path_factory.mktemp("pipelines"), [2, 2, 2], "--rejoin-grace", "1") as cluster:
        yield cluster


@pytest.mark.parametrize("every", [4, 100])
def test_stacked_layers_go_on_on_fewer_nodes(cluster: ElasticCluster, every: int) -> None:
    """every=100: there is no snapshot yet, and the initializer runs again. From three nodes to two, then to one."""
    if len(cluster.servers) == 1:
        cluster.start(1)
    *left, last = sorted(cluster.servers)
    with cluster.connect() as looking:
        wait_for_nodes(looking, *left, last)
    with cluster.connect(snapshot_every=every) as session:
        step = session.parallelize(train, donate_argnums=0, stages=2, micro_batches=2, schedule="1f1b", force="data")
        params, expected = step.init(init, KEY), init(KEY)
        losses, expected_losses = [], []
        for number in range(1, 11):
            params, loss = step(params, X)
            losses.append(loss)
            expected, expected_loss = jax.jit(train)(expected, X)
            expected_losses.append(expected_loss)
            if number == 6:
                assert re.search("rows [123]:4", str(params["layers"].sharding)), "each stage has some of them"
                if every < number:
                    wait_until(lambda: snapshot_of(session))
                cluster.kill(last)
        np.testing.assert_allclose([float(loss) for loss in losses], expected_losses, rtol=1e-5)
        for name, leaf in expected.items():
            np.testing.assert_allclose(params[name], leaf, atol=1e-5)
        (report,) = session.recoveries
        assert (report.restored_bytes > 0) == (every < 6)
        assert session.info.device_count == 2 * len(left)
        assert len(step.plan.stages) == 2
