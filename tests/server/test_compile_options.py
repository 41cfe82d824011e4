"""Options of XLA that a plan was priced with: from the hardware profile over the wire to every executor."""

from __future__ import annotations

import json
import queue
import zlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.errors import CompilationError, ProtocolError
from shardwright.options.plan_options import PlanOptions
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh, MeshAxis
from shardwright.proto.v1 import worker_pb2
from shardwright.protocol import wire
from shardwright.server.runtime.arrays import ArrayStore
from shardwright.server.runtime.executor import Executor
from tests.server.programs import layouts
from tests.server.raw_client import RawClient, Server
from tests.server.test_processes import cluster_file, connect

HIDING = "xla_gpu_enable_latency_hiding_scheduler"  # XLA:CPU knows it too, and schedules as ever
UNKNOWN = "xla_no_such_option"
ALONG_THE_BATCH = PlanOptions(force="data", mesh={"data": 4})

Step = tuple[jax.Array, jax.Array, jax.Array]


def step(first: jax.Array, second: jax.Array, x: jax.Array) -> Step:
    """Two layers: while the gradient of the second is reduced that of the first is computed."""

    def loss(first: jax.Array, second: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ first) @ second) ** 2)

    value, (one, other) = jax.value_and_grad(loss, (0, 1))(first, second)
    return first - 0.1 * one, second - 0.1 * other, value


def inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((8, 32), (32, 4), (64, 8))]


def hlo_text() -> str:
    return jax.jit(step).lower(*inputs()).as_text("hlo")


def profile(folder: Path, option: str) -> str:
    """A CPU that hides half of what gradients take, where XLA is told so by `option`."""
    text = (resources.files("shardwright.cost") / "data" / "cpu.toml").read_text(encoding="utf-8")
    path = folder / f"{option}.toml"
    path.write_text(
        text.replace("\noverlap = { value = 0.0", "\noverlap = { value = 0.5").replace(
            '\nhiding_option = { value = ""', f'\nhiding_option = {{ value = "{option}"'
        )
    )
    return str(path)


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RawClient]:
    """A client of two nodes of such CPUs."""
    path = cluster_file(tmp_path, hardware=profile(tmp_path, request.param))
    servers = [Server(str(path), str(task)) for task in range(len(json.loads(path.read_text())["workers"]) + 1)]
    try:
        yield connect(path)
    finally:
        for server in servers:
            server.stop()


@pytest.mark.cluster
@pytest.mark.parametrize("cluster", [HIDING], indirect=True)
def test_a_plan_that_hides_runs_with_the_option_that_it_takes(cluster: RawClient) -> None:
    executable, plan = cluster.ready_program(hlo_text(), ALONG_THE_BATCH)
    assert plan.cost.hidden_s > 0
    assert plan.compile_options == {HIDING: True}
    for array_id, (array, layout) in enumerate(zip(inputs(), layouts(plan)[0], strict=True), start=1):
        cluster.put(array_id, array, layout)
    steps = cluster.steps()
    steps.send(1, executable, [1, 2, 3], [10, 11, 12], read_back=[12])
    np.testing.assert_allclose(steps.value(), jax.jit(step)(*inputs())[2], rtol=1e-5)


@pytest.mark.cluster
@pytest.mark.parametrize("cluster", [UNKNOWN], indirect=True)
def test_an_option_that_xla_does_not_know_is_refused_by_name(cluster: RawClient) -> None:
    with pytest.raises(CompilationError, match=UNKNOWN) as refusal:
        cluster.ready_program(hlo_text(), ALONG_THE_BATCH)
    assert refusal.value.where == "worker 0, compile_options"
    assert "links.overlap" in refusal.value.remedy


def load_order(options: dict[str, bool | int | str]) -> worker_pb2.ExecutorCommand:
    mesh = Mesh(axes=(MeshAxis(name="data", size=1),))
    layout = wire.layout_to_proto(Layout.replicated("f32", (4,), mesh))
    load = worker_pb2.LoadProgram(
        session_id="s",
        executable_id="e",
        arguments=[layout],
        outputs=[layout],
        mesh=wire.mesh_to_proto(mesh),
        compile_options=wire.compile_options_to_proto(options),
    )
    return worker_pb2.ExecutorCommand(sequence=2, load=load)


@pytest.mark.dear
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({HIDING: True}, ""),
        ({"xla_cpu_parallel_codegen_split_count": 4, "xla_dump_hlo_pass_re": "none"}, ""),
        ({HIDING: True, UNKNOWN: 3}, UNKNOWN),
        ({HIDING: "perhaps"}, HIDING),
    ],
)
def test_executors_compile_with_options_and_name_themselves(options: dict[str, bool | int | str], message: str) -> None:
    events: queue.SimpleQueue[worker_pb2.ExecutorEvent] = queue.SimpleQueue()

    def transport_to(addresses: object) -> object:
        raise AssertionError("nothing is sent")

    executor = Executor(ArrayStore(), events.put, read_back_bytes=0, transport_to=transport_to, transfer_wait_s=1.0)  # type: ignore[arg-type]
    text = jax.jit(lambda x: x + x).lower(np.zeros(4, np.float32)).as_text()
    chunk = worker_pb2.ProgramChunk(executable_id="e", chunk=text.encode())
    executor.handle(worker_pb2.ExecutorCommand(sequence=1, chunk=chunk))
    executor.handle(load_order(options))
    done = events.get(timeout=60).done
    assert done.HasField("error") == bool(message)
    if message:
        error = wire.error_from_proto(done.error)
        assert isinstance(error, CompilationError)
        assert message in error.message
        assert error.where == "worker 0, compile_options"


@pytest.mark.dear
def test_a_program_that_was_changed_on_its_way_is_not_loaded() -> None:
    events: queue.SimpleQueue[worker_pb2.ExecutorEvent] = queue.SimpleQueue()
    executor = Executor(
        ArrayStore(), events.put, read_back_bytes=0, transport_to=lambda peers: None, transfer_wait_s=1.0
    )  # type: ignore[arg-type, return-value]
    text = jax.jit(lambda x: x + x).lower(np.zeros(4, np.float32)).as_text().encode()
    for payload, is_damaged in ((text.replace(b"add", b"sub"), True), (text, False)):
        chunk = worker_pb2.ProgramChunk(executable_id="e", chunk=payload, crc32=zlib.crc32(text))
        executor.handle(worker_pb2.ExecutorCommand(sequence=1, chunk=chunk))
        executor.handle(load_order({}))
        done = events.get(timeout=60).done
        assert done.HasField("error") == is_damaged
        if is_damaged:
            assert isinstance(wire.error_from_proto(done.error), ProtocolError)


@pytest.mark.dear
def test_options_keep_their_types_on_the_wire() -> None:
    options = {"a_flag": True, "a_number": 3, "a_text": "x"}
    message = wire.compile_options_from_proto(wire.compile_options_to_proto(options))
    assert message == options
    assert [type(value) for value in message.values()] == [bool, int, str]
