"""Two servers of four devices each as one mesh of eight: the same numbers, arrays spread over both."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright.client.array_specs import array_spec
from shardwright.client.arrays import RemoteArray
from shardwright.client.placement import Placement, RowParts
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh, TensorSharding
from tests.client.models import adamw_step, batches, distance, init_adamw, loss_of, train_as_on_one_device
from tests.client.recorded import open_recorded

pytestmark = pytest.mark.cluster

KEY = jax.random.key(0)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sw.Session]:
    folder: Path = tmp_path_factory.mktemp("cluster")
    master, worker = _free_ports(2)
    description = {
        "name": "two processes",
        "master": {"ip": "127.0.0.1", "port": master, "devices": 4},
        "workers": [{"ip": "127.0.0.1", "port": worker, "devices": 4}],
    }
    file = folder / "cluster.json"
    file.write_text(json.dumps(description))
    servers = []
    try:
        for task in (1, 0):
            log = (folder / f"task{task}.log").open("wb")
            command = [sys.executable, "-m", "shardwright.server", str(file), str(task)]
            servers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            log.close()
        with _connect(f"127.0.0.1:{master}") as session:
            yield session
    finally:
        for server in servers:
            server.terminate()
        codes = [server.wait(30) for server in servers]
    assert codes == [0, 0], [(folder / f"task{task}.log").read_text() for task in (1, 0)]


def _connect(address: str) -> sw.Session:
    for _ in range(300):
        try:
            return sw.connect(address)
        except sw.ServerUnavailableError:
            time.sleep(0.2)
    return sw.connect(address)


@pytest.mark.parametrize(
    ("force", "mesh"),
    [(None, None), ("data", None), ("tensor", "8"), ("mixed", "2x4"), ("fsdp", None)],
    ids=["planned", "data", "tensor", "mixed", "fsdp"],
)
def test_ten_sgd_steps_agree_with_single_device_jax(cluster: sw.Session, force: Any, mesh: Any) -> None:
    train_as_on_one_device(cluster, force=force, mesh=mesh)


def test_adamw_with_uploaded_state_an_eval_step_and_a_smaller_batch(cluster: sw.Session) -> None:
    step = cluster.parallelize(adamw_step, donate_argnums=(0, 1), force="fsdp")
    evaluate = cluster.parallelize(loss_of)
    expected = jax.device_get(jax.jit(init_adamw)(KEY))
    params, opt_state = expected
    for batch in [*batches(2), *batches(1, rows=6)]:
        params, opt_state, loss = step(params, opt_state, batch)
        *expected, expected_loss = jax.jit(adamw_step)(*expected, batch)
        assert abs(float(loss) - float(expected_loss)) <= 1e-5
        assert abs(float(evaluate(params, batch)) - float(loss_of(expected[0], batch))) <= 1e-5
    assert distance(params, expected[0]) <= 1e-3


def test_a_checkpoint_of_two_processes_is_restored_by_one_and_the_other_way_round(
    cluster: sw.Session, session: sw.Session, tmp_path: Path
) -> None:
    state = jax.device_get(jax.jit(init_adamw)(KEY))
    batch, later = batches(2)
    for name, first, second in (("shrinks", cluster, session), ("grows", session, cluster)):
        directory = tmp_path / name
        step = first.parallelize(adamw_step, donate_argnums=(0, 1), force="fsdp")
        params, opt_state, _ = step(*state, batch)
        step.save((params, opt_state), directory)
        *_, expected = step(params, opt_state, later)
        first.save({"n": 1}, tmp_path / f"{name} too")  # waits for the one before
        other = second.parallelize(adamw_step, donate_argnums=(0, 1), mesh="2x4", force="mixed")
        *_, loss = other(*other.restore(directory), later)
        assert abs(float(loss) - float(expected)) <= 1e-5
    wrote = sorted(path.name for path in (tmp_path / "shrinks" / "0" / "default").glob("ocdbt.process_*"))
    assert wrote == ["ocdbt.process_0", "ocdbt.process_1"], "each process wrote its own part"


def test_arrays_on_parts_of_the_cluster_are_saved_and_restored_elsewhere(cluster: sw.Session, tmp_path: Path) -> None:
    def on(first_device: int, rows: int) -> Layout:
        dims: tuple[tuple[str, ...], ...] = (("x",), ())
        return Layout(
            element_type="f32", shape=(rows, 6), stored_shape=(rows, 6), mesh=Mesh.of({"x": 4}),
            sharding=TensorSharding(dims), first_device=first_device,
        )  # fmt: skip

    def apart(first: int, first_rows: int) -> RowParts:
        """The first rows on four devices from `first` on, the others on the other four."""
        layouts = (on(first, first_rows), on(4 - first, 12 - first_rows))
        return RowParts(layouts, ((0, first_rows), (first_rows, 12)))

    value, spec = np.arange(72, dtype=np.float32).reshape(12, 6), array_spec((12, 6), np.dtype("float32"))
    places: list[Placement] = [on(0, 12), on(4, 12), on(2, 12), apart(0, 4), apart(4, 8)]
    for here, there in zip(places, [*places[1:], places[0]], strict=True):
        arrays = cluster._state.arrays
        handle = RemoteArray(arrays, spec, ids=arrays.upload([(value, here)])[0], place=here)
        cluster.save({"stage": handle}, tmp_path).wait()
        restored = cluster.restore(tmp_path)["stage"]
        restored._pending.materialize({id(restored): there})
        assert restored._place == there
        np.testing.assert_array_equal(np.asarray(restored), value)


def test_large_arrays_go_straight_to_both_nodes_and_back(cluster: sw.Session) -> None:
    assert [len(node.devices) for node in cluster.info.nodes] == [4, 4]
    x = np.random.default_rng(0).random((1024, 3072), np.float32)
    step = cluster.parallelize(lambda x: (x + 1, x.T), mesh="8", force="data")
    shifted, turned = step(x)
    np.testing.assert_array_equal(np.asarray(shifted), x + 1)
    np.testing.assert_array_equal(np.asarray(turned), x.T)


def test_many_leaves_come_from_both_nodes_together(cluster: sw.Session) -> None:
    state = {f"leaf{number:03}": np.full((8, 3), number, np.float32) for number in range(100)}
    layouts = [
        Layout(
            element_type="f32", shape=(8, 3), stored_shape=(8, 3), mesh=Mesh.of({"x": size}),
            sharding=TensorSharding((axes, ())), first_device=first,
        )
        for size, axes, first in ((8, ("x",), 0), (8, (), 0), (4, ("x",), 0), (4, ("x",), 4), (2, (), 6))
    ]  # fmt: skip
    places: list[Placement] = [*layouts, RowParts((layouts_of_rows(3, 0), layouts_of_rows(5, 4)), ((0, 3), (3, 8)))]
    values = [(value, places[number % len(places)]) for number, value in enumerate(state.values())]
    spec = array_spec((8, 3), np.dtype("float32"))
    own, calls = open_recorded(cluster)
    with own:
        handles = {
            name: RemoteArray(own._state.arrays, spec, ids=ids, place=place)
            for name, ids, (_, place) in zip(state, own._state.arrays.upload(values), values, strict=True)
        }
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(handles), state)
        assert calls.count("FetchArrays") == 2, "one call to each node"


def layouts_of_rows(rows: int, first_device: int) -> Layout:
    """That many rows, a copy on each of four devices."""
    return Layout.replicated("f32", (rows, 3), Mesh.of({"x": 4}), first_device)
