"""Programs and arrays on a part of the cluster's devices: inside one node, over some nodes, beside each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shardwright.errors import ArrayError, ClusterConfigError
from shardwright.options.plan_options import PlanOptions
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire
from tests.server.programs import inputs, layouts, reference, training_step
from tests.server.raw_client import RawClient, inline
from tests.two_nodes import TwoNodes

pytestmark = pytest.mark.cluster


@pytest.fixture
def client(two_nodes: TwoNodes) -> Iterator[RawClient]:
    two_nodes.heal()
    client = RawClient(two_nodes.address)
    client.open()
    yield client
    client.close()


@pytest.mark.parametrize("devices", [range(1), range(2, 4), range(1, 3)], ids=["one", "a node", "across nodes"])
def test_a_step_on_some_devices_leaves_the_others_alone(client: RawClient, devices: range) -> None:
    options = PlanOptions(mesh={"data": len(devices)})
    executable, plan = client.ready_program(training_step(), options, devices)
    arguments, outputs = layouts(plan, devices.start)
    w, x, y = inputs()
    for array_id, (array, layout) in enumerate(zip((w, x), arguments[:2], strict=True), start=1):
        client.put(array_id, array, layout)
    steps = client.steps()
    for number, before in ((1, 1), (2, 10)):
        steps.send(
            number, executable, [before, 2, 100 + number], [10 * number, 10 * number + 1],
            inline=[inline(100 + number, y, arguments[2])], read_back=[10 * number + 1],
        )  # fmt: skip
        w, loss = reference(w, x, y)
        np.testing.assert_allclose(steps.value(), loss, rtol=1e-5)
    np.testing.assert_allclose(client.fetch(20, outputs[0]), w, rtol=1e-4, atol=1e-6)
    holders = [n for n, node in enumerate(client.session.nodes) if any(2 * n <= at < 2 * n + 2 for at in devices)]
    for number, node in enumerate(client.session.nodes):
        if number not in holders:
            with pytest.raises(ArrayError):
                client.put_bytes(node, _header(client, 300, arguments[1]), b"")


def test_devices_that_the_cluster_lacks_are_refused(client: RawClient) -> None:
    with pytest.raises(ClusterConfigError, match="devices 3 to 4 of a cluster that has 4"):
        client.ready_program(training_step(), PlanOptions(mesh={"data": 2}), range(3, 5))


def _header(client: RawClient, array_id: int, layout: Layout) -> master_pb2.PutArrayHeader:
    return master_pb2.PutArrayHeader(
        session_id=client.session_id, array_id=array_id, layout=wire.layout_to_proto(layout), devices=[]
    )


@pytest.mark.parametrize(("source", "target"), [(range(2), range(2, 4)), (range(1, 3), range(4)), (range(4), range(1))])
def test_arrays_move_between_devices_without_the_client(client: RawClient, source: range, target: range) -> None:
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    layouts = [
        Layout(
            element_type="f32", shape=(6, 4), mesh=Mesh.of({"x": len(devices)}), sharding=TensorSharding(dims),
            stored_shape=stored, first_device=devices.start,
        )
        for devices, dims, stored in (
            (source, (("x",), ()), (-(-6 // len(source)) * len(source), 4)),
            (target, ((), ("x",)), (6, 4)),
        )
    ]  # fmt: skip
    client.put(1, x, layouts[0])
    before, after = ([master_pb2.MovedPart(layout=wire.layout_to_proto(layout))] for layout in layouts)
    move = master_pb2.MoveArrays(arrays=[master_pb2.MovedArray(sources=before, targets=after)])
    steps = client.steps()
    for number, item in ((1, 2), (2, 3)):
        steps.send(number, "", [1], [item], move=move)
        assert not steps.reply().HasField("error")
        np.testing.assert_array_equal(client.fetch(item, layouts[1]), x)
    steps.send(3, "", [9], [10], move=move, released=[1])
    client.put(9, x, layouts[0])
    assert not steps.reply().HasField("error"), "it waits for its array like any step"
