"""A bare gRPC client and process helpers: what the server says, without our own client in between."""

from __future__ import annotations

import ipaddress
import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import grpc
import numpy as np
import psutil

from shardwright.clusters.local_token import read_token
from shardwright.dtypes import to_dtype
from shardwright.errors import ServerUnavailableError
from shardwright.options.plan_options import PlanOptions
from shardwright.plans.layouts import Layout, distinct_shards, logical_part, pad_to_stored
from shardwright.plans.plan import Plan
from shardwright.plans.plan_json import decode
from shardwright.proto.v1 import master_pb2, master_pb2_grpc
from shardwright.protocol import plan_messages, wire
from shardwright.protocol.session_secrets import session_metadata

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


class RawClient:
    """One session, numbered steps, arrays."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.channel_address, self.token = address, token
        self.channel = grpc.insecure_channel(address, options=wire.CHANNEL_OPTIONS)
        self.master = master_pb2_grpc.MasterStub(self.channel)
        self.session: master_pb2.OpenSessionReply | None = None
        self._data: dict[str, master_pb2_grpc.ArrayTransferStub] = {}

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The token (on loopback the local user's, unless one was given), and the secret of the session."""
        token = read_token(int(self.channel_address.rpartition(":")[2])) if self.token is None else self.token
        secret = self.session.session_secret if self.session is not None else ""
        pairs = (("authorization", f"Bearer {token}"),) if token is not None else ()
        return pairs + (session_metadata(secret) if secret else ())

    def call(self, method: str, request: Any, timeout_s: float = DEADLINE_S) -> Any:
        """A unary call; raises our own error."""
        try:
            return getattr(self.master, method)(request, metadata=self.metadata, timeout=timeout_s)
        except grpc.RpcError as error:
            wire.raise_from_rpc(error)

    def open(self) -> str:
        self.session = self.call("OpenSession", master_pb2.OpenSessionRequest(client_version="test"))
        return self.session.session_id

    def open_soon(self) -> None:
        """Open a session once a server listens."""

        def is_open() -> bool:
            try:
                self.open()
            except ServerUnavailableError:
                return False
            return True

        wait_until(is_open)

    @property
    def session_id(self) -> str:
        assert self.session is not None
        return self.session.session_id

    def upload(self, hlo_text: str) -> str:
        chunks = wire.chunks(wire.compress_text(hlo_text), 1000)
        requests = (master_pb2.UploadProgramRequest(session_id=self.session_id, chunk=chunk) for chunk in chunks)
        return self.call("UploadProgram", requests).program_id

    def plan(
        self, program_id: str, options: PlanOptions | None = None, devices: range | None = None
    ) -> tuple[str, Plan]:
        request = plan_messages.plan_request(
            options or PlanOptions(), session_id=self.session_id, program_id=program_id, devices=devices
        )
        unpacker = wire.TextUnpacker("plan", 1 << 30)
        plan_id = ""
        try:
            for reply in self.master.PlanProgram(request, metadata=self.metadata, timeout=DEADLINE_S):
                if reply.WhichOneof("kind") == "result":
                    plan_id = reply.result.plan_id
                elif reply.WhichOneof("kind") == "plan_chunk":
                    unpacker.feed(reply.plan_chunk)
        except grpc.RpcError as error:
            wire.raise_from_rpc(error)
        return plan_id, decode(unpacker.text())

    def load(self, plan_id: str) -> master_pb2.LoadResult:
        request = master_pb2.LoadPlanRequest(session_id=self.session_id, plan_id=plan_id)
        try:
            replies = list(self.master.LoadPlan(request, metadata=self.metadata, timeout=DEADLINE_S))
        except grpc.RpcError as error:
            wire.raise_from_rpc(error)
        return replies[-1].result

    def ready_program(
        self, hlo_text: str, options: PlanOptions | None = None, devices: range | None = None
    ) -> tuple[str, Plan]:
        """Upload, plan and load; (executable id, plan)."""
        plan_id, plan = self.plan(self.upload(hlo_text), options, devices)
        return self.load(plan_id).executable_id, plan

    # ---- arrays ------------------------------------------------------------
    def data(self, node: master_pb2.Node) -> master_pb2_grpc.ArrayTransferStub:
        if node.data_address not in self._data:
            channel = grpc.insecure_channel(node.data_address, options=wire.CHANNEL_OPTIONS)
            self._data[node.data_address] = master_pb2_grpc.ArrayTransferStub(channel)
        return self._data[node.data_address]

    def put(self, array_id: int, array: np.ndarray, layout: Layout) -> None:
        stored = pad_to_stored(array, layout)
        assert self.session is not None
        for node in self.session.nodes:
            positions = range(node.first_device, node.first_device + node.device_count)
            shards = distinct_shards(layout, positions)
            if not shards:
                continue
            header = master_pb2.PutArrayHeader(
                session_id=self.session_id,
                array_id=array_id,
                layout=wire.layout_to_proto(layout),
                devices=[shard.holders[0] for shard in shards],
            )
            body = b"".join(np.ascontiguousarray(stored[shard.slices]).tobytes() for shard in shards)
            self.put_bytes(node, header, body)

    def put_bytes(self, node: master_pb2.Node, header: master_pb2.PutArrayHeader, body: bytes) -> None:
        requests = [master_pb2.PutArrayRequest(header=header)]
        requests += [master_pb2.PutArrayRequest(chunk=chunk) for chunk in wire.chunks(body)]
        try:
            self.data(node).PutArray(iter(requests), metadata=self.metadata, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            wire.raise_from_rpc(error)

    def fetch(self, array_id: int, layout: Layout, timeout_s: float = DEADLINE_S) -> np.ndarray:
        stored = np.empty(layout.stored_shape, layout.dtype)
        assert self.session is not None
        for node in self.session.nodes:
            positions = range(node.first_device, node.first_device + node.device_count)
            shards = distinct_shards(layout, positions)
            if not shards:
                continue
            request = master_pb2.FetchArrayRequest(
                session_id=self.session_id, array_id=array_id, devices=[shard.holders[0] for shard in shards]
            )
            try:
                replies = self.data(node).FetchArray(request, metadata=self.metadata, timeout=timeout_s)
                data = b"".join(reply.chunk for reply in replies)
            except grpc.RpcError as error:
                wire.raise_from_rpc(error)
            for number, shard in enumerate(shards):
                piece = data[number * layout.shard_bytes : (number + 1) * layout.shard_bytes]
                stored[shard.slices] = np.frombuffer(piece, layout.dtype).reshape(layout.shard_shape)
        return logical_part(stored, layout)

    def steps(self) -> StepStream:
        return StepStream(self)

    def close(self) -> None:
        self.channel.close()


class StepStream:
    """A RunSteps stream: `send`, then `reply`."""

    def __init__(self, client: RawClient) -> None:
        self._client = client
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = client.master.RunSteps(iter(self._requests.get, None), metadata=client.metadata)
        self._requests.put(master_pb2.RunStepsRequest(session_id=client.session_id))

    def send(
        self,
        number: int,
        executable_id: str,
        arguments: Sequence[int],
        outputs: Sequence[int],
        *,
        read_back: Sequence[int] = (),
        released: Sequence[int] = (),
        inline: Sequence[master_pb2.InlineArray] = (),
        **orders: Any,
    ) -> None:
        """orders: instead of an executable: `move`, `snapshot`, …"""
        self._requests.put(
            master_pb2.RunStepsRequest(
                session_id=self._client.session_id,
                number=number,
                executable_id=executable_id,
                arguments=arguments,
                outputs=outputs,
                read_back=read_back,
                released=released,
                inline_arguments=inline,
                **orders,
            )
        )

    def reply(self) -> master_pb2.RunStepsReply:
        """The next reply; raises our error where the stream ended with one."""
        try:
            return next(self._call)
        except grpc.RpcError as error:
            wire.raise_from_rpc(error)

    def value(self) -> np.ndarray:
        """The first value that the next reply brings; raises the step's error."""
        reply = self.reply()
        if reply.HasField("error"):
            raise wire.error_from_proto(reply.error)
        value = reply.values[0]
        return np.frombuffer(value.data, to_dtype(value.type.element_type)).reshape(tuple(value.type.dimensions))

    def end(self) -> None:
        self._call.cancel()


def inline(array_id: int, array: np.ndarray, layout: Layout) -> master_pb2.InlineArray:
    return master_pb2.InlineArray(array_id=array_id, layout=wire.layout_to_proto(layout), data=array.tobytes())


# ---- processes ---------------------------------------------------------------
class Server:
    """A server process of ours and its stderr. prefix: a command that becomes the one behind it."""

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        stderr: int | IO[bytes] = subprocess.PIPE,
        prefix: Sequence[str] = (),
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "shardwright.server", *arguments],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip

    def ready_line(self) -> dict[str, str]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def family(self) -> list[psutil.Process]:
        """This process and everything it started."""
        mine = psutil.Process(self.process.pid)
        return [mine, *mine.children(recursive=True)]

    def executors(self) -> list[psutil.Process]:
        return [child for child in self.family() if "shardwright.server.worker.executor" in command_of(child)]

    def planners(self) -> list[psutil.Process]:
        return [child for child in self.family() if "planner_child" in command_of(child)]

    def compilers(self) -> list[psutil.Process]:
        return [child for child in self.family() if "compile_child" in command_of(child)]

    def hang_up(self) -> None:
        """Close its stdin, like a client that ends; `stop` works afterwards, too."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.stdin = None  # `communicate` flushes what it finds here, closed or not

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self, timeout_s: float = 20.0) -> tuple[int, str]:
        """Wait for its end: (exit code, stderr)."""
        self.process.wait(timeout=timeout_s)  # first: communicate closes stdin, which ends an embedded server
        _, errors = self.process.communicate()
        return self.process.returncode, errors

    def stop(self) -> None:
        """For fixtures: end it whatever it does."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.communicate()


def command_of(process: psutil.Process) -> str:
    """Its command line; empty where it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended meanwhile
        return ""


def listening_addresses(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """(host, port) of all TCP sockets that they listen at."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def wait_until(condition: Any, timeout_s: float = 30.0) -> None:
    """Look again and again until it holds; AssertionError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.05)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(_is_running(process) for process in processes)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two looks
        return False


def embedded(devices: int, *arguments: str) -> Iterator[tuple[Server, RawClient]]:
    """An embedded server and a client with an open session; both end afterwards."""
    server = Server("--embedded", str(devices), *arguments)
    try:
        ready = server.ready_line()
        client = RawClient(ready["address"], ready["token"])
        client.open()
        yield server, client
        client.close()
    finally:
        server.stop()
