"""Uploads that end half-way: what they brought is freed, at once and to the machine, and bounded until then."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import numpy as np
import psutil
import pytest

from shardwright.errors import ResourceLimitError, SessionError
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh
from shardwright.proto.v1 import master_pb2, master_pb2_grpc, worker_pb2
from shardwright.protocol import wire
from shardwright.protocol.chunked_messages import ChunkedMessage
from shardwright.server.free_memory import FreeMemory
from shardwright.server.runtime.arrays import ArrayStore
from shardwright.server.runtime.transfer_service import TransferService
from shardwright.server.runtime.uploads import Uploads
from shardwright.server.security import Protection
from shardwright.server.tuning import STALL_S
from shardwright.server.worker.snapshot_service import SnapshotServer
from tests.server.raw_client import RawClient, Server, embedded, wait_until

MIB = 1 << 20
SIZE = 48 * MIB
LAYOUT = Layout.replicated("f32", (SIZE // 4,), Mesh.of({"data": 1}))


class Port:
    """A data port in this process, and a client of it."""

    def __init__(self, uploads: Uploads, threads: int = 4) -> None:
        self.store, self.uploads = ArrayStore(), uploads
        self.store.open("s")
        self._server = grpc.server(futures.ThreadPoolExecutor(threads), options=wire.CHANNEL_OPTIONS)
        TransferService(
            self.store, lambda session_id, arrays: None, uploads, lambda context: "bob", put_limit_bytes=1 << 40
        ).add_to(self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=wire.CHANNEL_OPTIONS)
        self.stub = master_pb2_grpc.ArrayTransferStub(self._channel)  # type: ignore[no-untyped-call]

    def put(self, array_id: int, parts: int, go_on: threading.Event | None = None) -> grpc.Future:
        """An upload of so many MiB of an array, which goes on after the event; without one, it ends there."""

        def requests() -> Iterator[master_pb2.PutArrayRequest]:
            header = master_pb2.PutArrayHeader(
                session_id="s", array_id=array_id, layout=wire.layout_to_proto(LAYOUT), devices=[0]
            )
            yield master_pb2.PutArrayRequest(header=header)
            for _ in range(parts):
                yield master_pb2.PutArrayRequest(chunk=b"x" * MIB)
            if go_on is not None:
                go_on.wait(30)
                yield master_pb2.PutArrayRequest(chunk=b"x" * MIB)

        return self.stub.PutArray.future(requests(), timeout=60)

    def held_bytes(self) -> int:
        return sum(upload.held_bytes for upload in self.uploads._under_way)

    def close(self) -> None:
        self._channel.close()
        self._server.stop(0)


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port(Uploads(session_bytes=1 << 40, person_bytes=1 << 40))
    yield port
    port.close()


def error_of(call: grpc.Future) -> Exception:
    with pytest.raises(grpc.RpcError) as failure:
        call.result(timeout=30)
    return wire.error_from_rpc(failure.value)


def test_broken_uploads_leave_nothing_behind(port: Port) -> None:
    """Their errors stay with gRPC until the collector runs, which it may not for hours."""
    me, forever = psutil.Process(), threading.Event()
    before_bytes = 0
    for number in range(7):
        call = port.put(number, SIZE // MIB - 1, forever)
        wait_until(lambda: port.held_bytes() == SIZE - MIB)
        call.cancel()
        wait_until(lambda: not port.uploads._under_way)
        before_bytes = before_bytes or me.memory_info().rss
    forever.set()
    assert me.memory_info().rss - before_bytes < 2 * SIZE, "six more would be six times as much"


def test_the_end_of_a_session_frees_its_uploads_at_once(port: Port) -> None:
    go_on, silent = threading.Event(), threading.Event()
    speaking, stalled = port.put(1, 8, go_on), port.put(2, 8, silent)
    wait_until(lambda: port.held_bytes() == 16 * MIB)
    assert port.uploads.sessions() == ["s"]
    port.store.close("s")
    port.uploads.end_session("s")
    assert port.held_bytes() == 0
    go_on.set()
    assert isinstance(error_of(speaking), SessionError)
    error_of(stalled)  # its thread is needed
    silent.set()


def test_unfinished_uploads_of_a_person_are_bounded() -> None:
    port = Port(Uploads(session_bytes=1 << 40, person_bytes=20 * MIB))
    forever = threading.Event()
    first = port.put(1, 12, forever)
    wait_until(lambda: port.held_bytes() == 12 * MIB)
    error = error_of(port.put(2, 12))
    assert isinstance(error, ResourceLimitError)
    assert "unfinished uploads of bob hold 21 MiB of this node, the limit is 20 MiB" in str(error).replace(".0 ", " ")
    first.cancel()
    wait_until(lambda: not port.uploads._under_way)
    forever.set()
    port.close()


def test_uploads_that_stall_leave_their_threads_to_others(port: Port) -> None:
    forever = threading.Event()
    stalled = [port.put(number, 1, forever) for number in range(4)]  # as many as there are threads
    wait_until(lambda: port.held_bytes() == 4 * MIB)
    port.uploads.cut_stalled(3, time.monotonic())
    assert len(port.uploads._under_way) == 4, "they brought something just now"
    port.uploads.cut_stalled(3, time.monotonic() + STALL_S + 1)
    wait_until(lambda: len(port.uploads._under_way) == 3)
    port.put(9, SIZE // MIB).result(timeout=30)
    forever.set()
    for call in stalled:
        call.cancel()


def test_a_broken_upload_of_a_snapshot_keeps_no_part_that_is_dropped() -> None:
    """An executor died in the midst of it, and its session ended."""
    me, server = psutil.Process(), SnapshotServer("127.0.0.1", Protection(), limit_bytes=1 << 40)
    errors = []
    before_bytes = me.memory_info().rss
    for number in range(1, 4):
        server.store.offer("s", 1, {(1, 0): SIZE}, keep=None, order=(number, 1))
        with pytest.raises(grpc.RpcError) as failure:
            server._put(broken_parts())
        errors.append(failure)  # as gRPC does
        server.store.retain({}, order=(number, 2))
    assert me.memory_info().rss - before_bytes < SIZE
    server.close()


def broken_parts() -> Iterator[ChunkedMessage[worker_pb2.PutPartsRequest]]:
    parts = [worker_pb2.ArrayParts(array_id=1, shards=[0])]
    message = worker_pb2.PutPartsRequest(session_id="s", arrays=parts)
    for _ in range(SIZE // MIB - 1):
        yield ChunkedMessage(message=message, pieces=[memoryview(b"x" * MIB)])
        message = worker_pb2.PutPartsRequest(session_id="s")
    raise grpc.RpcError


def test_freed_memory_goes_back_to_the_machine() -> None:
    """Small pieces, with one that stays above each."""
    me, freed = psutil.Process(), FreeMemory()
    pieces = [np.ones(96 << 10, np.uint8) for _ in range(1200)]
    full_bytes, stays = me.memory_info().rss, pieces[::100]
    pieces.clear()
    freed.note()
    freed.give_back()  # too early: who frees it may not be done
    before_bytes = me.memory_info().rss
    time.sleep(1.1)
    freed.give_back()
    assert me.memory_info().rss < before_bytes - 32 * MIB < full_bytes
    assert all(piece.all() for piece in stays)


# ---- real servers ------------------------------------------------------------------
_UPLOAD_ARRAY = """
import sys, time
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire
from tests.server.raw_client import RawClient
client = RawClient(sys.argv[1], sys.argv[2])
client.open()
layout = Layout.replicated("f32", (1 << 28,), Mesh.of({"data": 1}))
def requests():
    header = master_pb2.PutArrayHeader(
        session_id=client.session_id, array_id=1, layout=wire.layout_to_proto(layout), devices=[0])
    yield master_pb2.PutArrayRequest(header=header)
    for _ in range(256):
        yield master_pb2.PutArrayRequest(chunk=b"x" * (1 << 20))
    print("sent", flush=True)
    time.sleep(100)
client.data(client.session.nodes[0]).PutArray(requests(), metadata=client.metadata)
"""

_UPLOAD_PROGRAM = """
import base64, os, sys, time, zlib
from shardwright.proto.v1 import master_pb2
from tests.server.raw_client import RawClient
client = RawClient(sys.argv[1], sys.argv[2])
client.open()
def requests():
    packer, block = zlib.compressobj(level=0, wbits=31), base64.b64encode(os.urandom(3 << 18))
    for _ in range(160):
        yield master_pb2.UploadProgramRequest(session_id=client.session_id, chunk=packer.compress(block))
    print("sent", flush=True)
    time.sleep(100)
client.master.UploadProgram(requests(), metadata=client.metadata)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Server, RawClient]]:
    yield from embedded(1)


def kill_uploads(client: RawClient, script: str, count: int) -> None:
    """So many clients, two at a time, are killed in the midst of it."""
    assert client.token is not None
    for _ in range(0, count, 2):
        command = [sys.executable, "-c", script, client.channel_address, client.token]
        clients = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for each in clients:
            assert each.stdout is not None
            each.stdout.readline()
        for each in clients:
            each.kill()
            each.communicate()


@pytest.mark.cluster
def test_killed_clients_leave_no_memory_in_an_executor(server: tuple[Server, RawClient]) -> None:
    (executor,) = server[0].executors()
    kill_uploads(server[1], _UPLOAD_ARRAY, 2)
    before_bytes = executor.memory_info().rss
    kill_uploads(server[1], _UPLOAD_ARRAY, 8)
    wait_until(lambda: executor.memory_info().rss - before_bytes < 96 * MIB, 20)


@pytest.mark.cluster
def test_killed_clients_leave_no_memory_in_the_master(server: tuple[Server, RawClient]) -> None:
    master = psutil.Process(server[0].process.pid)
    before_bytes = master.memory_info().rss
    kill_uploads(server[1], _UPLOAD_PROGRAM, 6)
    wait_until(lambda: master.memory_info().rss - before_bytes < 64 * MIB, 20)


def slow_upload(session_id: str, layout: Layout) -> Iterator[master_pb2.PutArrayRequest]:
    """16 MiB in 13 s."""
    header = master_pb2.PutArrayHeader(
        session_id=session_id, array_id=1, layout=wire.layout_to_proto(layout), devices=[0]
    )
    yield master_pb2.PutArrayRequest(header=header)
    for _ in range(16):
        yield master_pb2.PutArrayRequest(chunk=bytes(MIB))
        time.sleep(0.8)


@pytest.mark.cluster
def test_an_upload_that_takes_long_keeps_its_session() -> None:
    """It holds nothing yet, and says nothing to the master: its executor does."""
    for _, client in embedded(1, "--sessions", "2", "--grace", "10"):
        assert client.session is not None
        layout = Layout.replicated("f32", (16 << 18,), Mesh.of({"data": 1}))
        port = client.data(client.session.nodes[0])
        call = port.PutArray.future(slow_upload(client.session_id, layout), metadata=client.metadata, timeout=60)
        time.sleep(11)
        rivals = [RawClient(client.channel_address, client.token) for _ in range(2)]
        rivals[0].open()
        with pytest.raises(ResourceLimitError):
            rivals[1].open()
        call.result(timeout=30)
        assert not client.fetch(1, layout).any()
