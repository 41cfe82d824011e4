"""Many clients, and what one may not do to the others: waiting reads, bombs, malformed messages, a full log, dying."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import jax
import numpy as np
import psutil
import pytest

import shardwright as sw
from benchmarks.bench_clients import measure
from shardwright.errors import (
    DeadlineError,
    HloSyntaxError,
    ProtocolError,
    ResourceLimitError,
    SessionError,
    ShardwrightError,
)
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.progress import PlanProgress
from shardwright.proto.v1 import master_pb2, operators_pb2, worker_pb2
from shardwright.protocol import wire
from shardwright.server.logs import LogWriter
from shardwright.server.master.planning import core_count
from tests.faults.test_hung_steps import in_thread
from tests.server.programs import inputs, layouts, reference, training_step
from tests.server.raw_client import DEADLINE_S, ROOT, RawClient, Server, command_of, embedded, inline, wait_until
from tests.server.test_processes import free_port

pytestmark = pytest.mark.cluster

LAYOUT = Layout(
    element_type="f32",
    shape=(1 << 18,),
    mesh=Mesh.of({"data": 2}),
    sharding=TensorSharding(dims=(("data",),)),
    stored_shape=(1 << 18,),
)
VALUES = np.arange(1 << 18, dtype=np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Server, RawClient]]:
    yield from embedded(2)


@pytest.fixture
def others(server: tuple[Server, RawClient]) -> Iterator[list[RawClient]]:
    """Two further clients of the server."""
    first = server[1]
    clients = [RawClient(first.channel_address, first.token) for _ in range(2)]
    for client in clients:
        client.open()
    yield clients
    for client in clients:
        client.call("CloseSession", master_pb2.CloseSessionRequest(session_id=client.session_id))
        client.close()


def test_reads_that_wait_leave_the_data_port_to_others(others: list[RawClient]) -> None:
    waiting, busy = others
    busy.put(1, VALUES, LAYOUT)
    (node,) = waiting.session.nodes
    request = master_pb2.FetchArrayRequest(session_id=waiting.session_id, array_id=7, devices=[0, 1])
    port = waiting.data(node)
    calls = [port.FetchArray(request, metadata=waiting.metadata, timeout=DEADLINE_S) for _ in range(80)]
    time.sleep(0.5)
    began_s = time.monotonic()
    busy.put(2, VALUES, LAYOUT)
    np.testing.assert_array_equal(busy.fetch(1, LAYOUT), VALUES)
    assert time.monotonic() - began_s < 5
    with pytest.raises(DeadlineError):
        waiting.fetch(7, LAYOUT, timeout_s=0.5)
    for call in calls[40:]:
        call.cancel()
    waiting.put(7, VALUES, LAYOUT)
    for call in calls[:40]:
        data = b"".join(reply.chunk for reply in call)
        np.testing.assert_array_equal(np.frombuffer(data, np.float32), VALUES)


def test_a_read_that_waits_hears_that_its_session_is_closed(server: tuple[Server, RawClient]) -> None:
    client = RawClient(server[1].channel_address, server[1].token)
    client.open()
    errors: list[ShardwrightError] = []

    def read() -> None:
        try:
            client.fetch(9, LAYOUT)
        except ShardwrightError as error:
            errors.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    time.sleep(0.3)
    client.call("CloseSession", master_pb2.CloseSessionRequest(session_id=client.session_id))
    reading.join(10)
    client.close()
    assert [type(error).code for error in errors] == ["session"]


def gzip_of_blanks(size_bytes: int) -> bytes:
    packer = zlib.compressobj(level=9, wbits=31)
    block = b" " * (1 << 20)
    return b"".join([*(packer.compress(block) for _ in range(size_bytes >> 20)), packer.flush()])


def upload(client: RawClient, packed: bytes) -> str:
    requests = (
        master_pb2.UploadProgramRequest(session_id=client.session_id, chunk=part) for part in wire.chunks(packed)
    )
    return client.call("UploadProgram", requests).program_id


def test_a_program_that_unpacks_to_much_costs_others_nothing(
    server: tuple[Server, RawClient], others: list[RawClient]
) -> None:
    sender, asking = others
    master = psutil.Process(server[0].process.pid)
    packed = gzip_of_blanks(128 << 20)
    assert len(packed) < 1 << 18
    before_bytes = master.memory_info().rss
    uploads = [threading.Thread(target=upload, args=(sender, packed)) for _ in range(2)]
    for thread in uploads:
        thread.start()
    longest_s, peak_bytes = 0.0, 0
    while any(thread.is_alive() for thread in uploads):
        began_s = time.monotonic()
        asking.call("Status", master_pb2.StatusRequest())
        longest_s = max(longest_s, time.monotonic() - began_s)
        peak_bytes = max(peak_bytes, master.memory_info().rss)
    assert longest_s < 1.0
    assert peak_bytes - before_bytes < 64 << 20, "it stays compressed"
    packed = gzip_of_blanks(1 << 20)
    for broken, words in ((b"HloModule", "not gzip"), (packed[:-4], "ends early"), (packed + b"more", "bytes after")):
        with pytest.raises(HloSyntaxError, match=words):
            upload(sender, broken)


def methods(service: str, module: object) -> list[tuple[str, bool, bool]]:
    descriptor = module.DESCRIPTOR.services_by_name[service]  # type: ignore[attr-defined]
    return [
        (f"/{descriptor.full_name}/{method.name}", method.client_streaming, method.server_streaming)
        for method in descriptor.methods
    ]


def everywhere(master: grpc.Channel, data: grpc.Channel) -> list[tuple[grpc.Channel, tuple[str, bool, bool]]]:
    """Each method that clients, operators and nodes call, and where."""
    of_master = [*methods("Master", master_pb2), *methods("Cluster", worker_pb2), *methods("Operators", operators_pb2)]
    of_data = [method for name in ("ArrayTransfer", "Checkpoints", "Datasets") for method in methods(name, master_pb2)]
    return [*((master, method) for method in of_master), *((data, method) for method in of_data)]


def test_malformed_messages_are_refused_by_type(server: tuple[Server, RawClient]) -> None:
    client = server[1]
    (node,) = client.session.nodes
    with grpc.insecure_channel(node.data_address) as data:
        calls = everywhere(client.channel, data)
        assert len(calls) >= 25
        for channel, (path, streams_in, streams_out) in calls:
            for garbage in (b"\xff\xff\xff\xff", b"\x0a\x7fxx", b"\x08" + b"\xff" * 11):
                if path.endswith(("/Supervise", "/Execute")):
                    told = last_message(channel, path, garbage, client.metadata)
                    assert "the message cannot be read" in told, (path, garbage, told)
                    continue
                answer = refusal(channel, path, streams_in, streams_out, garbage, client.metadata)
                assert isinstance(answer, ProtocolError), (path, garbage, answer)


def last_message(channel: grpc.Channel, path: str, message: bytes, metadata: object) -> str:
    """What a node is told last whose stream has these bytes."""
    replies = channel.stream_stream(path)(iter([message]), metadata=metadata, timeout=20)
    last = list(replies)[-1]
    command = worker_pb2.SupervisorCommand if path.endswith("/Supervise") else worker_pb2.ExecutorCommand
    return str(command.FromString(last))


def refusal(
    channel: grpc.Channel, path: str, streams_in: bool, streams_out: bool, message: bytes, metadata: object
) -> ShardwrightError | None:
    """The error that a call with these bytes ends with, if its status is INVALID_ARGUMENT."""
    kind = f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"
    call = getattr(channel, kind)(path)
    try:
        reply = call(iter([message]) if streams_in else message, metadata=metadata, timeout=20)
        if streams_out:
            list(reply)
    except grpc.RpcError as error:
        is_typed = error.code() is grpc.StatusCode.INVALID_ARGUMENT
        return wire.error_from_rpc(error) if is_typed else None
    return None


def test_idle_sessions_give_way_and_those_with_arrays_stay() -> None:
    """In a server for three sessions."""
    for _, client in embedded(1, "--sessions", "3"):
        rivals = [RawClient(client.channel_address, client.token) for _ in range(4)]
        layout = Layout.replicated("f32", (4,), Mesh.of({"data": 1}))
        client.put(1, np.ones(4, np.float32), layout)
        stream = client.steps()  # as clients have
        streams = []
        for rival in rivals[:2]:
            rival.open()
            streams.append(rival.steps())
        with pytest.raises(ResourceLimitError, match="the server has 3 sessions, its limit"):
            rivals[2].open()
        time.sleep(11)
        rivals[2].open()
        with pytest.raises(SessionError, match="the server was full, and the session had been idle for 1"):
            streams[0].reply()
        rivals[3].open()
        np.testing.assert_array_equal(client.fetch(1, layout), np.ones(4, np.float32))
        stream.end()
        for rival in rivals:
            rival.close()


def test_a_session_that_asks_for_nothing_ends() -> None:
    for _, client in embedded(1, "--session-idle", "3"):
        stream = client.steps()
        time.sleep(1)
        assert client.call("Status", master_pb2.StatusRequest()).sessions
        with pytest.raises(SessionError, match="its client asked for nothing for 3 s"):
            stream.reply()


#: Cores of the servers that plan for many.
CORES = min(2, core_count())


@contextlib.contextmanager
def few_cores() -> Iterator[None]:
    """Processes that are started within have no more than those."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:CORES])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@pytest.fixture(scope="module")
def forgetful() -> Iterator[tuple[Server, sw.Session, str]]:
    """A server that keeps a lost client's session for a second, a client of it, and its token."""
    with contextlib.ExitStack() as stack:
        with few_cores():
            server, client = stack.enter_context(contextlib.contextmanager(embedded)(1, "--grace", "1"))
        assert client.token is not None
        with sw.connect(client.channel_address, token=client.token) as session:
            yield server, session, client.token


def test_many_clients_at_once_take_turns_and_lose_nothing() -> None:
    """Each checks a counter in its own state, see `measure`."""
    clients = 8
    with few_cores():
        load = measure(clients, 5)
    assert len(load.first_s) == len(load.step_s) == clients
    assert 1 <= load.planners <= CORES
    assert load.first_s[-1] <= 4 * statistics.median(load.first_s)


def test_a_client_that_waits_for_a_planner_hears_its_place(forgetful: tuple[Server, sw.Session, str]) -> None:
    """All planners are frozen meanwhile."""
    server, first, token = forgetful
    heard: list[PlanProgress] = []
    sessions = [sw.connect(first._state.master.address, token=token) for _ in range(CORES + 2)]

    def freeze_planners() -> bool:
        for planner in server.planners():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                planner.suspend()
        return any(report.phase == "queue" for report in heard)

    wait_until(server.planners, timeout_s=60)
    freeze_planners()
    steps = [session.parallelize(times(number), progress=heard.append) for number, session in enumerate(sessions, 2)]
    calls = [in_thread(lambda step=step: np.asarray(step(np.ones(4, np.float32)))) for step in steps]
    try:
        wait_until(freeze_planners, timeout_s=90)
        assert len(server.planners()) <= CORES
    finally:
        for planner in server.planners():
            planner.resume()
        for thread, _ in calls:
            thread.join(90)
    for number, (_, outcome) in enumerate(calls, 2):
        np.testing.assert_array_equal(outcome, [np.full(4, number)])
    assert {report.detail for report in heard if report.phase == "queue"} <= {"position 1", "position 2"}
    for session in sessions:
        session.close()


def times(factor: float) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x * factor


_HOLDER = """
import sys, time
import numpy as np, shardwright as sw

session = sw.connect(sys.argv[1])
array = session.parallelize(lambda x: x)(np.ones(32 << 20, np.float32)).block_until_ready()
print("holds", flush=True)
time.sleep(600)
"""


def test_memory_of_a_killed_client_is_freed(forgetful: tuple[Server, sw.Session, str]) -> None:
    server, session, token = forgetful
    (executor,) = server.executors()
    command = [sys.executable, "-c", _HOLDER, session._state.master.address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "SHARDWRIGHT_TOKEN": token}
    ) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "holds\n"
            full_bytes = executor.memory_info().rss
        finally:
            holder.kill()
    wait_until(lambda: len(session.status().sessions) == 1, timeout_s=60)
    wait_until(lambda: full_bytes - executor.memory_info().rss > 100e6, timeout_s=60)
    assert float(session.parallelize(lambda x: x + 1)(np.float32(1))) == 2


def test_thousands_of_steps_leave_no_memory_taken(forgetful: tuple[Server, sw.Session, str]) -> None:
    server, session, _ = forgetful
    processes = [psutil.Process(server.process.pid), *server.executors()]
    count_up = session.parallelize(lambda n: n + 1, donate_argnums=0)
    n = count_up(np.int32(0))
    for _ in range(200):
        n = count_up(n)
    assert int(n) == 201
    before_bytes = [process.memory_info().rss for process in processes]
    for _ in range(2000):
        n = count_up(n)
    assert int(n) == 2201
    for process, bytes_before in zip(processes, before_bytes, strict=True):
        assert process.memory_info().rss - bytes_before < 16e6, command_of(process)


def test_a_log_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    port = free_port()
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"master": {"ip": "127.0.0.1", "port": port, "devices": 1}}))
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    command = [sys.executable, "-m", "shardwright.server", str(path), "0", "--log-level", "debug"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=writer)
    try:
        client = RawClient(f"127.0.0.1:{port}")
        client.open_soon()
        executable, plan = client.ready_program(training_step())
        arguments, _ = layouts(plan)
        steps = client.steps()
        parts = [inline(at, each, layout) for at, (each, layout) in enumerate(zip(inputs(), arguments, strict=True), 1)]
        steps.send(1, executable, [1, 2, 3], [10, 11], read_back=[11], inline=parts)
        np.testing.assert_allclose(steps.value(), reference(*inputs())[1], rtol=1e-5)
        client.close()
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)


def test_lines_of_the_log_that_do_not_fit_are_counted() -> None:
    reader, writer = os.pipe()
    log = LogWriter(writer, waiting_lines=100)
    began_s = time.monotonic()
    for number in range(20_000):
        log.put(f"line {number} {'x' * 100}")
    assert time.monotonic() - began_s < 5
    assert log.dropped > 10_000
    log.put("the last one is lost, too")
    lines: list[str] = []

    def read() -> None:
        with os.fdopen(reader) as pipe:
            lines.extend(pipe)

    reading = threading.Thread(target=read)
    reading.start()
    log.wait_until_written(10)
    for number in range(3):
        log.put(f"after {number}")
    log.wait_until_written(10)
    os.close(writer)
    reading.join(10)
    told = sum(int(line.split()[0]) for line in lines if "lines of the log were dropped" in line)
    assert told == log.dropped
    assert lines[0].startswith("line 0 ")
    assert sum(line.startswith("line ") for line in lines) + log.dropped == 20_001
    assert [line.strip() for line in lines if line.startswith("after")] == ["after 0", "after 1", "after 2"]


@pytest.fixture(scope="module", autouse=True)
def _no_tracebacks(server: tuple[Server, RawClient]) -> Iterator[None]:
    """Nothing in this file is worth a traceback in the log."""
    yield
    server[0].process.terminate()
    code, errors = server[0].end()
    assert code == 0
    assert "Traceback" not in errors
    wait_until(lambda: server[0].process.poll() is not None)
