"""Each worker of a cluster reads what its devices hold, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright.plans.pipeline_plan import PipelinePlan
from tests.datasets import sources
from tests.datasets.training import BATCH, BATCHES, MODULE, assert_close, expected, run
from tests.server.raw_client import Server
from tests.two_nodes import Running


def rows_read(servers: list[Server], log: Path) -> list[set[int]]:
    """By node, all rows that it was asked for, but for the one that tells the structure."""
    events = sources.events(log, "read")
    return [
        {row for line in events.get(server.executors()[0].pid, []) for row in line["rows"] if line["rows"] != [0]}
        for server in servers
    ]


@pytest.mark.cluster
def test_workers_read_their_slices(healed: Running, tmp_path: Path) -> None:
    servers, session = healed
    data = session.dataset(BATCHES, batch=BATCH, log=str(tmp_path))
    assert_close(run(session, data, 6, force="data"), expected(6))
    assert rows_read(servers, tmp_path) == [set(range(8)), set(range(8, 16))]


@pytest.mark.cluster
def test_uneven_slices(healed: Running, tmp_path: Path) -> None:
    servers, session = healed
    data = session.dataset(BATCHES, batch=10, log=str(tmp_path))
    assert_close(run(session, data, 4, force="data"), expected(4, batch=10))
    assert rows_read(servers, tmp_path) == [set(range(6)), set(range(6, 10))]


@pytest.mark.cluster
def test_a_node_that_holds_padding_alone(healed: Running, tmp_path: Path) -> None:
    servers, session = healed
    data = session.dataset(BATCHES, batch=2, log=str(tmp_path))
    step = session.parallelize(lambda x: x * 2, mesh="4", force={"x": {0: "data"}})
    for number in range(3):
        np.testing.assert_array_equal(step(next(data)["x"]), sources.whole_batch(number, 2, 0)["x"] * 2)
    assert rows_read(servers, tmp_path) == [{0, 1}, set()]


@pytest.mark.cluster
def test_a_whole_batch_on_every_device(healed: Running, tmp_path: Path) -> None:
    servers, session = healed
    data = session.dataset(BATCHES, batch=BATCH, log=str(tmp_path))
    assert_close(run(session, data, 4, force="replicated"), expected(4))
    assert rows_read(servers, tmp_path) == [set(range(BATCH))] * 2


@pytest.mark.cluster
def test_columns_of_all_rows(healed: Running, tmp_path: Path) -> None:
    _, session = healed
    data = session.dataset(BATCHES, batch=BATCH, log=str(tmp_path))
    step = session.parallelize(lambda x: x * 2, mesh=(2, 2), force={"x": {0: "model", 1: "data"}})
    for number in range(3):
        np.testing.assert_array_equal(step(next(data)["x"]), sources.whole_batch(number, BATCH, 0)["x"] * 2)


@pytest.mark.cluster
def test_micro_batches(healed: Running) -> None:
    _, session = healed
    data = session.dataset(BATCHES, batch=BATCH)
    assert_close(run(session, data, 4, force="data", micro_batches=2), expected(4))


def deep_step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        hidden = batch["x"]
        for weight in params[:-1]:
            hidden = jax.numpy.tanh(hidden @ weight)
        return jax.numpy.mean((hidden @ params[-1] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optax.sgd(0.1).update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


@pytest.mark.cluster
def test_stages_of_a_pipeline(healed: Running, tmp_path: Path) -> None:
    """The first stage reads what the model takes, the last one what it is held against."""
    servers, session = healed
    data = session.dataset(f"{MODULE}:lazy", batch=BATCH, log=str(tmp_path))
    keys = jax.random.split(jax.random.key(1), 4)
    width = sources.WIDTH
    params: Any = [jax.random.normal(key, (width, width)) / 4 for key in keys[:3]]
    params.append(jax.random.normal(keys[3], (width, 1)))
    state: Any = optax.sgd(0.1).init(params)
    step, alone = session.parallelize(deep_step, donate_argnums=(0, 1), stages=2, micro_batches=4), jax.jit(deep_step)
    mine, others = (params, state), (params, state)
    for number in range(4):
        *mine, loss = step(*mine, next(data))
        *others, other_loss = alone(*others, sources.whole_batch(number, BATCH, 0))
        assert_close([float(loss)], [float(other_loss)])
    assert isinstance(step.plan, PipelinePlan)
    made = {name: sources.events(tmp_path, name) for name in ("x", "y")}
    readers = {
        name: [any(len(line["rows"]) > 1 for line in found.get(server.executors()[0].pid, [])) for server in servers]
        for name, found in made.items()
    }
    assert readers == {"x": [True, False], "y": [False, True]}


@pytest.mark.cluster
def test_a_reader_that_fails_on_one_node_leaves_the_state_as_it_is(healed: Running, tmp_path: Path) -> None:
    _, session = healed
    trouble = tmp_path / "trouble"
    trouble.touch()
    data = session.dataset(BATCHES, batch=BATCH, fails_at=4, fails_while=str(trouble), second_node=8)

    def losses() -> list[float]:
        return run(session, data, 8, force="data")

    with pytest.raises(sw.DatasetError, match=r"(?s)worker 1, .*no shard 4"):
        losses()
    trouble.unlink()
    data.seek(0)
    assert_close(losses(), expected(8))


@pytest.mark.cluster
def test_the_end_is_that_of_the_worker_with_the_fewest_rows(healed: Running) -> None:
    _, session = healed
    data = session.dataset(BATCHES, batch=BATCH, count=4, last_rows=BATCH - 1)
    step = session.parallelize(lambda batch: batch["x"].sum(), force="data")
    assert len([float(step(batch)) for batch in data]) == 4


@pytest.mark.dear
def test_modules_of_the_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    entry = {"ip": "127.0.0.1", "port": 1}
    path.write_text(json.dumps({"master": entry, "dataset_modules": ["a.b", "c"]}))
    assert sw.Cluster.load(path).dataset_modules == ("a.b", "c")
    path.write_text(json.dumps({"master": entry, "dataset_modules": ["a b"]}))
    with pytest.raises(sw.ClusterConfigError, match="'a b' is no name of a module"):
        sw.Cluster.load(path)
