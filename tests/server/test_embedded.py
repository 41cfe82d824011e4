"""A real embedded server with a real executor, driven by a bare gRPC client."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import grpc
import jax
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shardwright.errors import (
    ArrayError,
    AuthenticationError,
    DeadlineError,
    HloSyntaxError,
    OptionError,
    PlanError,
    ResourceLimitError,
    SessionError,
    ShardwrightError,
    WorkerLostError,
)
from shardwright.options.plan_options import PlanOptions
from shardwright.plans.layouts import Layout, distinct_shards, pad_to_stored
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.proto.v1 import master_pb2, master_pb2_grpc
from shardwright.protocol import wire
from tests.server.programs import inputs, layouts, reference, training_step
from tests.server.raw_client import (
    RawClient,
    Server,
    StepStream,
    all_gone,
    embedded,
    inline,
    wait_until,
)
from tests.two_nodes import TwoNodes

pytestmark = pytest.mark.cluster

DEVICES = 4


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Server, RawClient]]:
    yield from embedded(DEVICES)


@pytest.fixture(scope="module")
def loaded(running: tuple[Server, RawClient]) -> tuple[str, Plan]:
    """The training step, parameters split so that every transfer has several shards."""
    _, client = running
    options = PlanOptions(mesh={"data": DEVICES}, argument_axes={0: (("data",), ()), 1: ((), ("data",))})
    return client.ready_program(training_step(), options)


@pytest.fixture
def client(running: tuple[Server, RawClient]) -> Iterator[RawClient]:
    """A session of its own."""
    _, main = running
    other = RawClient(main.channel_address, main.token)
    other.open()
    yield other
    other.call("CloseSession", master_pb2.CloseSessionRequest(session_id=other.session_id))
    other.close()


@pytest.fixture
def ready(client: RawClient, loaded: tuple[str, Plan]) -> tuple[RawClient, StepStream, str, Plan]:
    """A session with the program loaded (compiled before), arrays 1, 2, 3 put, a stream open."""
    options = PlanOptions(mesh={"data": DEVICES}, argument_axes={0: (("data",), ()), 1: ((), ("data",))})
    executable, plan = client.ready_program(training_step(), options)
    arguments, _ = layouts(plan)
    for array_id, (array, layout) in enumerate(zip(inputs(), arguments, strict=True), start=1):
        client.put(array_id, array, layout)
    return client, client.steps(), executable, plan


# ---- the main path -------------------------------------------------------------
def test_steps_train_like_numpy(ready: tuple[RawClient, StepStream, str, Plan]) -> None:
    client, steps, executable, plan = ready
    expected, x, y = inputs()
    parameters = 1
    for number in range(1, 11):
        new, loss = 10 * number, 10 * number + 1
        steps.send(number, executable, [parameters, 2, 3], [new, loss], read_back=[loss])
        expected, expected_loss = reference(expected, x, y)
        np.testing.assert_allclose(steps.value(), expected_loss, rtol=1e-5)
        parameters = new
    _, outputs = layouts(plan)
    np.testing.assert_allclose(client.fetch(parameters, outputs[0]), expected, rtol=1e-4, atol=1e-6)


def test_donated_arrays_are_gone_by_name_and_memory_is_counted(
    ready: tuple[RawClient, StepStream, str, Plan],
) -> None:
    client, steps, executable, plan = ready
    steps.send(1, executable, [1, 2, 3], [10, 11])
    steps.reply()
    with pytest.raises(ArrayError, match="donated to step 1"):
        client.fetch(1, layouts(plan)[0][0])
    steps.send(2, executable, [1, 2, 3], [20, 21], read_back=[21])
    with pytest.raises(ArrayError, match="array 1 was donated to step 1"):
        steps.value()
    status = client.call("Status", master_pb2.StatusRequest())
    mine = next(session for session in status.sessions if client.session_id.startswith(session.session_id))
    assert (mine.last_step, mine.array_count) == (2, 4)
    assert mine.array_bytes == 4 * (8 * 4 + 16 * 8 + 16 * 4 + 1)


def test_fetch_waits_for_a_step_that_waits_for_its_arguments(ready: tuple[RawClient, StepStream, str, Plan]) -> None:
    client, steps, executable, plan = ready
    arguments, outputs = layouts(plan)
    w, x, y = inputs()
    steps.send(1, executable, [100, 2, 3], [10, 11], read_back=[11])
    with pytest.raises(DeadlineError):
        client.fetch(11, outputs[1], timeout_s=0.3)
    client.put(100, w, arguments[0])
    np.testing.assert_allclose(client.fetch(11, outputs[1]), reference(w, x, y)[1], rtol=1e-5)
    assert steps.reply().number == 1


def test_inline_arguments_and_releases(ready: tuple[RawClient, StepStream, str, Plan]) -> None:
    client, steps, executable, plan = ready
    arguments, _ = layouts(plan)
    w, x, y = inputs()
    steps.send(1, executable, [100, 101, 3], [10, 11], read_back=[11],
               inline=[inline(100, w, arguments[0]), inline(101, x, arguments[1])])  # fmt: skip
    np.testing.assert_allclose(steps.value(), reference(w, x, y)[1], rtol=1e-5)
    steps.send(2, executable, [10, 2, 3], [20, 21], released=[101])
    assert not steps.reply().HasField("error")
    client.call("ReleaseArrays", master_pb2.ReleaseArraysRequest(session_id=client.session_id, array_ids=[20, 999]))
    steps.send(3, executable, [20, 2, 3], [30, 31], read_back=[31])
    with pytest.raises(ArrayError, match="array 20 was released"):
        steps.value()


def test_all_sessions_are_its_client_s(client: RawClient) -> None:
    status = client.call("Status", master_pb2.StatusRequest())
    assert [person.session_limit for person in status.people] == [64]


def test_padded_arrays_come_back_without_their_padding(client: RawClient) -> None:
    layout = Layout(
        element_type="s32", shape=(6, 5), mesh=Mesh.of({"a": 2, "b": 2}),
        sharding=TensorSharding((("b", "a"), ())), stored_shape=(8, 5),
    )  # fmt: skip
    array = np.arange(30, dtype=np.int32).reshape(6, 5)
    client.put(1, array, layout)
    np.testing.assert_array_equal(client.fetch(1, layout), array)


def test_a_padded_output_is_read_back_without_its_padding(client: RawClient) -> None:
    text = jax.jit(lambda x: (x + 1, x.sum())).lower(jax.ShapeDtypeStruct((13,), np.float32)).as_text("hlo")
    split = {0: (("data",),)}
    options = PlanOptions(mesh={"data": DEVICES}, argument_axes=split, output_axes=split)
    executable, plan = client.ready_program(text, options)
    assert plan.outputs[0].stored_shape == (16,)
    x = np.arange(13, dtype=np.float32)
    client.put(1, x, layouts(plan)[0][0])
    steps = client.steps()
    steps.send(1, executable, [1], [10, 0], read_back=[10])
    np.testing.assert_array_equal(steps.value(), x + 1)


def test_an_upload_over_the_limit_is_refused_before_it_comes(client: RawClient) -> None:
    assert client.session is not None
    layout = Layout.replicated("f32", (1 << 43,), Mesh.of({"data": DEVICES}))  # 32 TiB
    header = master_pb2.PutArrayHeader(
        session_id=client.session_id, array_id=1, layout=wire.layout_to_proto(layout), devices=[0]
    )
    with pytest.raises(ResourceLimitError, match="limit is"):
        client.put_bytes(client.session.nodes[0], header, b"")


def odd_calls(client: RawClient, array: Layout) -> Iterator[tuple[str, Callable[[], object]]]:
    """(what, a call) of sizes that no client of ours asks for."""
    assert client.session is not None
    (node,) = client.session.nodes

    def put(layout: Layout, devices: list[int]) -> None:
        header = master_pb2.PutArrayHeader(
            session_id=client.session_id, array_id=900, layout=wire.layout_to_proto(layout), devices=devices
        )
        client.put_bytes(node, header, b"")

    for name, length in (("34 GB", 1 << 33), ("2^63 bytes", 1 << 61)):
        layout = Layout.replicated("f32", (length,), Mesh.of({"data": DEVICES}))
        yield f"an upload of {name}", lambda layout=layout: put(layout, [0])
    yield "a device named a million times", lambda: put(array, [0] * 1_000_000)
    fetched = master_pb2.FetchArrayRequest(session_id=client.session_id, array_id=2, devices=[77] * 1_000_000)
    yield (
        "a million reads of a device that there is not",
        lambda: list(client.data(node).FetchArray(fetched, metadata=client.metadata, timeout=60)),
    )
    over_bytes = bytes((64 << 20) + 1)
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    chunk = master_pb2.PutArrayRequest(chunk=over_bytes)
    part = master_pb2.UploadProgramRequest(session_id=client.session_id, chunk=over_bytes)
    version = master_pb2.OpenSessionRequest(client_version="x" * len(over_bytes))
    for address, stub, method, message in (
        (node.data_address, master_pb2_grpc.ArrayTransferStub, "PutArray", chunk),
        (client.channel_address, master_pb2_grpc.MasterStub, "UploadProgram", part),
        (client.channel_address, master_pb2_grpc.MasterStub, "OpenSession", version),
    ):
        with grpc.insecure_channel(address, options=options) as channel:
            make = getattr(stub(channel), method)
            request = message if method == "OpenSession" else iter([message])
            yield (
                f"{method} with a message over gRPC's limit",
                lambda make=make, request=request: make(request, metadata=client.metadata, timeout=60),
            )


def test_odd_sizes_are_refused_by_type_and_cost_nothing(
    running: tuple[Server, RawClient], ready: tuple[RawClient, StepStream, str, Plan]
) -> None:
    server, _ = running
    client, steps, executable, plan = ready
    before = [process.pid for process in server.executors()]
    for what, call in odd_calls(client, layouts(plan)[0][0]):
        try:
            call()
        except (grpc.RpcError, ShardwrightError) as error:
            ours = wire.error_from_rpc(error) if isinstance(error, grpc.RpcError) else error
            assert isinstance(ours, ResourceLimitError | ArrayError), (what, ours)
            assert ours.message, what
        else:
            raise AssertionError(f"{what} was accepted")
    known = wire.layout_to_proto(layouts(plan)[0][1])
    vast = wire.layout_to_proto(Layout.replicated("f32", (16, 8), Mesh.of({"data": (1 << 31) - 1})))
    move = master_pb2.MovedArray(
        sources=[master_pb2.MovedPart(layout=vast)], targets=[master_pb2.MovedPart(layout=known)]
    )
    steps.send(1, "", [2], [20], move=master_pb2.MoveArrays(arrays=[move]))
    with pytest.raises(PlanError, match="a layout on 2147483647 devices"):
        steps.value()
    assert [process.pid for process in server.executors()] == before
    steps.send(2, executable, [1, 2, 3], [10, 11], read_back=[11])
    np.testing.assert_allclose(steps.value(), reference(*inputs())[1], rtol=1e-5)


def test_arrays_far_over_a_message_travel_in_chunks(client: RawClient) -> None:
    layout = Layout(
        element_type="f32", shape=(2048, 2048), mesh=Mesh.of({"data": DEVICES}),
        sharding=TensorSharding((("data",), ())), stored_shape=(2048, 2048),
    )  # fmt: skip
    array = np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32)
    client.put(1, array, layout)
    np.testing.assert_array_equal(client.fetch(1, layout), array)


def test_many_arrays_of_protobuf_s_own_messages(client: RawClient) -> None:
    assert client.session is not None
    node, split = client.session.nodes[0], Layout(
        element_type="s32", shape=(6,), mesh=Mesh.of({"data": DEVICES}),
        sharding=TensorSharding((("data",),)), stored_shape=(8,),
    )  # fmt: skip
    whole = Layout.replicated("s32", (6,), Mesh.of({"data": DEVICES}))
    array, calls = np.arange(6, dtype=np.int32), client.data(node)
    everywhere = [shard.holders[0] for shard in distinct_shards(split, range(DEVICES))]
    announced = [
        master_pb2.NodeShards(array_id=1, layout=0, devices=everywhere),
        master_pb2.NodeShards(array_id=2, layout=1, devices=[0]),
    ]
    layouts_sent = [wire.layout_to_proto(split), wire.layout_to_proto(whole)]
    contents = pad_to_stored(array, split).tobytes() + array.tobytes()
    requests = [
        master_pb2.PutArraysRequest(session_id=client.session_id, layouts=layouts_sent, arrays=announced),
        *(master_pb2.PutArraysRequest(chunk=contents[at : at + 7]) for at in range(0, len(contents), 7)),
    ]
    calls.PutArrays(iter(requests), metadata=client.metadata, timeout=60)
    client.put(77, array, whole)
    client.call("ReleaseArrays", master_pb2.ReleaseArraysRequest(session_id=client.session_id, array_ids=[77]))

    def is_gone() -> bool:
        try:
            client.fetch(77, whole)
        except ArrayError:
            return True
        return False

    wait_until(is_gone)
    wanted = [master_pb2.NodeShards(array_id=77, devices=[0]), *announced]
    asked = master_pb2.FetchArraysRequest(session_id=client.session_id, arrays=wanted)
    replies = list(calls.FetchArrays(asked, metadata=client.metadata, timeout=60))
    assert b"".join(reply.chunk for reply in replies) == contents
    ((number, code),) = [(each.number, each.error.code) for reply in replies for each in reply.unread]
    assert (number, code) == (0, "array")


@pytest.mark.parametrize(
    ("contents", "layout", "message"),
    [(bytes(15), 0, "ended after 15 of 16"), (bytes(17), 0, "more than the 16"), (bytes(16), 1, "has layout 1 of 1")],
)
def test_uploads_of_many_that_do_not_fit_are_refused(
    client: RawClient, contents: bytes, layout: int, message: str
) -> None:
    assert client.session is not None
    whole = Layout.replicated("f32", (4,), Mesh.of({"data": DEVICES}))
    request = master_pb2.PutArraysRequest(
        session_id=client.session_id,
        layouts=[wire.layout_to_proto(whole)],
        arrays=[master_pb2.NodeShards(array_id=1, layout=layout, devices=[0])],
        chunk=contents,
    )
    with pytest.raises(grpc.RpcError) as caught:
        client.data(client.session.nodes[0]).PutArrays(iter([request]), metadata=client.metadata, timeout=60)
    error = wire.error_from_rpc(caught.value)
    assert isinstance(error, ArrayError)
    assert message in error.message


def test_a_snapshot_is_restored_in_the_layouts_that_it_has_or_not_at_all(
    ready: tuple[RawClient, StepStream, str, Plan],
) -> None:
    client, steps, _, plan = ready
    known = layouts(plan)[0][1]
    steps.send(1, "", [2], [], snapshot=master_pb2.SnapshotArrays())
    while not (reply := steps.reply()).HasField("snapshot"):
        assert reply.number == 1
    other = [Layout.replicated("f32", (rows, 8), known.mesh) for rows in (32, 8)]
    cases = [(other[0], "not of the sizes", "array"), (other[1], "cannot be moved", "plan"), (known, "", "")]
    for number, (said, message, code) in enumerate(cases, start=2):
        stored = master_pb2.StoredArray(ids=[2], parts=[master_pb2.MovedPart(layout=wire.layout_to_proto(said))])
        order = master_pb2.RestoreSnapshot(snapshot=1, layouts=[wire.layout_to_proto(known)], stored=[stored])
        steps.send(number, "", [], [20 + number], restore_snapshot=order)
        reply = steps.reply()
        assert reply.number == number
        assert message in reply.error.message
        assert reply.error.code == code
    np.testing.assert_array_equal(client.fetch(24, known), inputs()[1])


# ---- exactly once ----------------------------------------------------------------
def test_a_reconnected_client_sends_again_and_nothing_runs_twice(
    ready: tuple[RawClient, StepStream, str, Plan],
) -> None:
    client, steps, executable, _ = ready
    w, x, y = inputs()
    steps.send(1, executable, [1, 2, 3], [10, 11], read_back=[11])
    first = steps.value()
    steps.send(2, executable, [10, 2, 3], [20, 21], read_back=[21])
    steps.end()
    again = client.steps()
    for number, before in ((1, 1), (2, 10)):  # 1 was donated: running it again would be an error
        out = 10 * number
        again.send(number, executable, [before, 2, 3], [out, out + 1], read_back=[out + 1])
    np.testing.assert_array_equal(again.value(), first)
    np.testing.assert_allclose(again.value(), reference(reference(w, x, y)[0], x, y)[1], rtol=1e-5)


def test_sessions_share_plans_of_equal_programs_and_options(
    ready: tuple[RawClient, StepStream, str, Plan], loaded: tuple[str, Plan]
) -> None:
    assert ready[2] == loaded[0]


# ---- refusals -----------------------------------------------------------------------
def test_whoever_waits_for_an_output_of_a_failed_step_is_told_why(
    ready: tuple[RawClient, StepStream, str, Plan],
) -> None:
    client, steps, executable, plan = ready
    arguments, outputs = layouts(plan)
    short = inline(100, inputs()[0][:1], arguments[0])
    steps.send(1, executable, [100, 2, 3], [10, 11], inline=[short])
    for read in (steps.value, lambda: client.fetch(11, outputs[1], timeout_s=10)):
        with pytest.raises(ArrayError, match="16 bytes for an array of 128"):
            read()


def test_wrong_calls_are_refused_with_typed_errors(client: RawClient) -> None:
    with pytest.raises(HloSyntaxError):
        client.plan(client.upload("HloModule nonsense\nENTRY {"))
    with pytest.raises(PlanError, match="no program"):
        client.plan("feedbeef")
    with pytest.raises(PlanError, match="no plan"):
        client.load("feedbeef")
    program = client.upload(training_step())
    request = master_pb2.PlanProgramRequest(session_id=client.session_id, program_id=program, forced_strategy="magic")
    with pytest.raises(OptionError, match="magic"):
        _drain(client, request)
    with pytest.raises(AuthenticationError, match="secret of session gone"):
        client.call("ReleaseArrays", master_pb2.ReleaseArraysRequest(session_id="gone"))
    client.call("Status", master_pb2.StatusRequest())


def _drain(client: RawClient, request: master_pb2.PlanProgramRequest) -> None:
    try:
        list(client.master.PlanProgram(request, metadata=client.metadata, timeout=30))
    except grpc.RpcError as error:
        wire.raise_from_rpc(error)


@pytest.mark.parametrize(
    ("size", "devices", "message"),
    [
        (17, [0], "more than the 16 bytes"),
        (8, [0], "ended after 8 of 16"),
        (0, [], "shard of device 0 is missing"),
    ],
)
def test_uploads_that_do_not_fit_are_refused(client: RawClient, size: int, devices: list[int], message: str) -> None:
    layout = Layout.replicated("f32", (4,), Mesh.of({"data": DEVICES}))
    assert client.session is not None
    header = master_pb2.PutArrayHeader(
        session_id=client.session_id, array_id=1, layout=wire.layout_to_proto(layout), devices=devices
    )
    with pytest.raises(ArrayError, match=message):
        client.put_bytes(client.session.nodes[0], header, bytes(size))
    client.put(1, np.zeros(4, np.float32), layout)
    with pytest.raises(ArrayError, match="in use already"):
        client.put(1, np.zeros(4, np.float32), layout)


@pytest.mark.parametrize("token", [None, "", "wrong"])
def test_every_port_asks_for_the_token(running: tuple[Server, RawClient], token: str | None) -> None:
    _, main = running
    stranger = RawClient(main.channel_address, token)
    with pytest.raises(AuthenticationError):
        stranger.open()
    stranger.session = main.session
    with pytest.raises(AuthenticationError):
        stranger.fetch(1, Layout.replicated("f32", (), Mesh.of({"data": DEVICES})))
    stream = stranger.steps()
    with pytest.raises(AuthenticationError):
        stream.reply()
    stranger.close()


def test_health_and_reflection_are_served(running: tuple[Server, RawClient]) -> None:
    _, main = running
    health = health_pb2_grpc.HealthStub(main.channel)
    reply = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(main.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (services,) = reflection.ServerReflectionInfo(iter([request]), metadata=main.metadata, timeout=10)
    names = {service.name for service in services.list_services_response.service}
    assert "shardwright.proto.v1.Master" in names


def test_closing_a_session_frees_it(running: tuple[Server, RawClient], client: RawClient) -> None:
    layout = Layout.replicated("f32", (4,), Mesh.of({"data": DEVICES}))
    client.put(1, np.zeros(4, np.float32), layout)
    other = RawClient(client.channel_address, client.token)
    session_id = other.open()
    other.put(1, np.zeros(4, np.float32), layout)
    for _ in range(2):
        other.call("CloseSession", master_pb2.CloseSessionRequest(session_id=session_id))
    with pytest.raises(SessionError):
        other.fetch(1, layout)
    other.close()
    np.testing.assert_array_equal(client.fetch(1, layout), np.zeros(4))


# ---- loss (last: the executor is another one afterwards) ---------------------------------
@pytest.fixture(params=["embedded", "two nodes"])
def losing(request: pytest.FixtureRequest) -> Iterator[tuple[Server, RawClient]]:
    """A server whose executor is lost, and a client of its master with a session."""
    if request.param == "embedded":
        server, main = request.getfixturevalue("running")
        client = RawClient(main.channel_address, main.token)
    else:
        nodes: TwoNodes = request.getfixturevalue("two_nodes")
        server, client = nodes.servers[1], RawClient(nodes.address)
    client.open()
    yield server, client
    client.close()


def test_a_killed_executor_is_a_typed_error_and_the_session_recovers(losing: tuple[Server, RawClient]) -> None:
    server, client = losing
    options = PlanOptions(mesh={"data": DEVICES}, argument_axes={0: (("data",), ())})
    executable, plan = client.ready_program(training_step(), options)
    arguments, outputs = layouts(plan)
    w, x, y = inputs()
    for array_id, (array, layout) in enumerate(zip((w, x, y), arguments, strict=True), start=1):
        client.put(array_id, array, layout)
    generation = client.call("Status", master_pb2.StatusRequest()).nodes[0].generation
    steps = client.steps()
    (executor,) = server.executors()
    executor.send_signal(signal.SIGKILL)
    wait_until(lambda: all_gone([executor]))
    time.sleep(0.2)
    steps.send(1, executable, [1, 2, 3], [10, 11], read_back=[11])
    with pytest.raises(WorkerLostError, match="run init again"):
        steps.value()
    fresh = [inline(at + 50, array, layout) for at, (array, layout) in enumerate(zip(inputs(), arguments, strict=True))]
    steps.send(2, executable, [50, 51, 52], [20, 21], read_back=[21], inline=fresh)
    np.testing.assert_allclose(steps.value(), reference(w, x, y)[1], rtol=1e-5)
    np.testing.assert_allclose(client.fetch(20, outputs[0]), reference(w, x, y)[0], rtol=1e-5, atol=1e-6)
    assert client.call("Status", master_pb2.StatusRequest()).nodes[0].generation == generation + 1
