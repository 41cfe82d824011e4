"""Calls to the master, with deadlines; every failure is one of our errors."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import grpc

from shardwright.client.limits import (
    BEST_PLAN_TIMEOUT_S,
    CALL_TIMEOUT_S,
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    LONG_CALL_TIMEOUT_S,
    PLAN_ON_ITS_WAY_S,
    PLAN_TEXT_LIMIT_BYTES,
)
from shardwright.client.retries import OutageError, Retries, is_outage, to_outage
from shardwright.client.tls import explain_no_channel
from shardwright.clusters.cluster import Cluster, ClusterNode
from shardwright.errors import (
    DeadlineError,
    InternalError,
    OptionError,
    PlanError,
    ServerUnavailableError,
    SessionError,
    ShardwrightError,
    StepCancelledError,
)
from shardwright.interrupts import first_interrupt
from shardwright.options.plan_options import PlanOptions
from shardwright.plans.plan_text import plan_from_json
from shardwright.progress import PlanProgress
from shardwright.proto.v1 import master_pb2, master_pb2_grpc
from shardwright.protocol import plan_messages, wire
from shardwright.protocol.session_secrets import session_metadata
from shardwright.tuning import CHUNK_BYTES
from shardwright.user_plans import PipelinePlan, Plan, to_user_plan
from shardwright.xla.cudnn_checks import AttentionDevice

_log = logging.getLogger("shardwright")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """A node of the cluster: its devices, and the address of its arrays' transfers."""

    index: int
    data_address: str
    devices: range  # positions in the cluster's device order


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """The server's reply to opening a session."""

    session_id: str
    server_version: str
    cluster_name: str
    platform: str
    nodes: tuple[NodeInfo, ...]
    chunk_bytes: int
    jax_version: str
    grace_s: float  # how long the server keeps the session without a connection
    session_secret: str = field(default="", repr=False)  # whoever has it has the session
    is_elastic: bool = False  # whether nodes may come and go
    compute_capability: str = ""  # of CUDA devices, "9.0"; "": not known
    cudnn_version: str = ""  # likewise, "9.11"

    @property
    def device_count(self) -> int:
        return sum(len(node.devices) for node in self.nodes)

    @property
    def cluster(self) -> Cluster:
        """Its nodes and devices; what links and hardware they have, the servers alone know."""
        addresses = [urlsplit(f"//{node.data_address}") for node in self.nodes]
        nodes = [
            ClusterNode(index=node.index, ip=at.hostname or "", port=at.port or 0, device_count=len(node.devices))
            for node, at in zip(self.nodes, addresses, strict=True)
        ]
        return Cluster(name=self.cluster_name, nodes=tuple(nodes), platform=self.platform)

    @property
    def attention_device(self) -> AttentionDevice:
        """What JAX is to know of the devices while it traces."""
        return AttentionDevice(
            platform=self.platform,
            compute_capability=self.compute_capability,
            cudnn_version=self.cudnn_version,
            is_here=self.cluster.is_loopback,
        )


#: States of nodes that take no part in the cluster as it runs.
_OUTSIDE = ("joining", "away", "left out")


def nodes_of(nodes: Iterable[master_pb2.Node]) -> tuple[NodeInfo, ...]:
    return tuple(
        NodeInfo(
            index=node.index,
            data_address=node.data_address,
            devices=range(node.first_device, node.first_device + node.device_count),
        )
        for node in nodes
    )


def team_of(status: master_pb2.StatusReply) -> list[master_pb2.NodeStatus]:
    """The nodes that take part; of an elastic cluster there may be others."""
    return [node for node in status.nodes if node.state not in _OUTSIDE]


class Dialer:
    """Opens channels with one set of credentials, to the master and to the nodes alike."""

    def __init__(self, token: str | None, ca_file: str | None) -> None:
        self.metadata: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {token}"),) if token else ()
        self.ca_file = ca_file
        self._credentials: grpc.ChannelCredentials | None = None
        if ca_file is not None:
            try:
                self._credentials = grpc.ssl_channel_credentials(Path(ca_file).read_bytes())
            except OSError as error:
                raise OptionError(
                    f"cannot read the certificate: {error}", where="SHARDWRIGHT_CA", remedy="name a PEM file"
                ) from None

    def dial(self, address: str) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(address, options=wire.CHANNEL_OPTIONS)
        return grpc.secure_channel(address, self._credentials, options=wire.CHANNEL_OPTIONS)


class Preparation:
    """What a thread plans and loads; another one may cancel it."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self.call: Any = None  # the one that it waits for

    def cancel(self) -> None:
        self.is_cancelled = True
        call = self.call
        if call is not None:
            call.cancel()

    def check(self) -> None:
        """Raises StepCancelledError once it is cancelled."""
        if self.is_cancelled:
            raise StepCancelledError("the call was cancelled before its program was ready", remedy="call it again")


class MasterConnection:
    """The master's calls for one session."""

    def __init__(self, address: str, dialer: Dialer, is_gone: Callable[[], bool] = lambda: False) -> None:
        self.address = address
        self.retries = Retries(is_gone)
        self._metadata = dialer.metadata
        self._ca_file = dialer.ca_file
        self._channel = dialer.dial(address)
        self._stub = master_pb2_grpc.MasterStub(self._channel)  # type: ignore[no-untyped-call]
        self._client_version = self._server_version = ""
        self._preparing = threading.local()
        self._cut_short: set[str] = set()  # plans of searches that were interrupted
        self.is_closed = False
        self.taken_up: master_pb2.OpenSessionReply | None = None  # where the session was another client's before
        self.info: SessionInfo

    @contextmanager
    def preparation(self, preparation: Preparation | None = None) -> Iterator[Preparation]:
        """Within, this thread's plans and loads may be cancelled by others, through `preparation` where it is given."""
        outer = getattr(self._preparing, "now", None)
        self._preparing.now = preparation = preparation or outer or Preparation()
        try:
            yield preparation
        finally:
            self._preparing.now = outer

    def open(self, client_version: str, name: str = "") -> SessionInfo:
        """name: of a session to take up, or to open under it.

        Raises ServerUnavailableError, at once when nothing listens.
        """
        _require_listener(self.address)
        self._client_version = client_version
        try:
            grpc.channel_ready_future(self._channel).result(timeout=CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            self._channel.close()
            problem, remedy = explain_no_channel(self.address, self._ca_file, HANDSHAKE_TIMEOUT_S) or (
                f"something listens, but no server answers within {CONNECT_TIMEOUT_S:.0f} s",
                "check the port",
            )
            raise ServerUnavailableError(problem, where=self.address, remedy=remedy) from None
        request = master_pb2.OpenSessionRequest(client_version=client_version, name=name)
        try:
            reply = self._call(self._stub.OpenSession, request)
        except DeadlineError as error:
            raise self._missing_nodes() or error from None
        self._server_version = reply.server_version
        if reply.is_taken_up:
            self.taken_up = reply
        _compare_versions(client_version, reply.server_version, self.address)
        self.info = SessionInfo(
            session_id=reply.session_id,
            server_version=reply.server_version,
            cluster_name=reply.cluster_name,
            platform=reply.platform,
            nodes=nodes_of(reply.nodes),
            chunk_bytes=reply.chunk_bytes or CHUNK_BYTES,
            jax_version=reply.jax_version,
            grace_s=reply.grace_s,
            session_secret=reply.session_secret,
            is_elastic=reply.is_elastic,
            compute_capability=reply.compute_capability,
            cudnn_version=reply.cudnn_version,
        )
        self._metadata += session_metadata(reply.session_secret)
        self.retries.grace_s = reply.grace_s
        return self.info

    def _missing_nodes(self) -> ServerUnavailableError | None:
        """Why the cluster is not complete; None when it is."""
        nodes = team_of(self.status())
        absent = [node for node in nodes if node.state in ("waiting", "lost")]
        starting = [node for node in nodes if node.state == "starting"]
        if absent:
            numbers = ", ".join(str(node.node.index) for node in absent)
            named = "; ".join(f"node {node.node.index} is missing ({node.detail})" for node in absent)
            remedy = f"start launch_worker.sh with the same cluster file and task number {numbers}, then connect again"
            return ServerUnavailableError(f"the cluster is not complete: {named}", where=self.address, remedy=remedy)
        if starting:
            numbers = ", ".join(str(node.node.index) for node in starting)
            return ServerUnavailableError(
                f"the executors of node {numbers} are still starting after {CALL_TIMEOUT_S:g} s",
                where=self.address,
                remedy="connect again in a moment; `shardwright status` shows how far they are",
            )
        return None

    def close(self, *, leaves: bool = False) -> None:
        """Closes the session (where the server still answers, and unless it `leaves` it) and the channel."""
        self.is_closed = True
        self.retries.close()
        if leaves:
            self._channel.close()
            return
        try:
            request = master_pb2.CloseSessionRequest(session_id=self.info.session_id)
            self._stub.CloseSession(request, timeout=CLOSE_TIMEOUT_S, metadata=self._metadata)
        except (grpc.RpcError, ValueError):
            pass  # the server is gone, and the session with it
        self._channel.close()

    def upload_program(self, hlo_text: str) -> str:
        """Program id of the text."""
        session_id = self.info.session_id

        def requests() -> Iterator[master_pb2.UploadProgramRequest]:
            for chunk in wire.chunks(wire.compress_text(hlo_text), self.info.chunk_bytes):
                yield master_pb2.UploadProgramRequest(session_id=session_id, chunk=chunk)

        def upload(_: int) -> master_pb2.UploadProgramReply:
            reply: master_pb2.UploadProgramReply = self._call_once(
                self._stub.UploadProgram, requests(), timeout_s=LONG_CALL_TIMEOUT_S
            )
            return reply

        return str(self.retries.call(upload).program_id)

    def plan(
        self,
        program_id: str,
        hlo_text: str,
        options: PlanOptions,
        on_progress: Callable[[PlanProgress], None],
        devices: range | None = None,
        *,
        takes_first: bool = False,
        in_background: bool = False,
    ) -> tuple[str, Plan | PipelinePlan]:
        """(plan id, plan) for these devices of the cluster, default all.

        on_progress: called during planning; an exception from it ends the planning.
        takes_first: the first plan that fits will do.
        in_background: nobody waits for it, and it is made at the lowest priority.

        Ctrl-C raises KeyboardInterrupt once the best plan so far is there, which the server keeps for the next call; a
        second one raises it at once.
        """
        request = plan_messages.plan_request(
            options, session_id=self.info.session_id, program_id=program_id, devices=devices
        )
        request.first_plan, request.in_background = takes_first, in_background

        def plan(_: int) -> tuple[str, str]:
            unpacker = wire.TextUnpacker("the plan", PLAN_TEXT_LIMIT_BYTES)
            plan_id = ""
            with closing(self._stream(self._stub.PlanProgram, request)) as replies:
                for reply in replies:
                    kind = reply.WhichOneof("kind")
                    if kind == "progress":
                        on_progress(plan_messages.plan_progress_from_proto(reply.progress))
                    elif kind == "result":
                        plan_id = reply.result.plan_id
                    elif kind == "plan_chunk":
                        unpacker.feed(reply.plan_chunk)
            return plan_id, unpacker.text()

        is_done, began_s = threading.Event(), time.monotonic()
        with (
            self.preparation() as preparation,
            first_interrupt(lambda: self._interrupt(preparation, is_done, time.monotonic() - began_s)) as interrupt,
        ):
            try:
                plan_id, text = self.retries.call(plan)
            except (PlanError, StepCancelledError) as error:
                if interrupt.came:
                    raise KeyboardInterrupt("planning was interrupted before there was any plan") from error
                raise
            finally:
                is_done.set()
        if interrupt.came:
            self._cut_short.add(plan_id)
            raise KeyboardInterrupt("planning was interrupted; the next call runs the best plan so far")
        if plan_id in self._cut_short:
            _log.warning(
                "the best plan that was found until planning was interrupted is used; a new session plans anew"
            )
        return plan_id, to_user_plan(plan_from_json(text, hlo_text=hlo_text))

    def _interrupt(self, preparation: Preparation, is_done: threading.Event, planned_s: float) -> None:
        """Ask for the best plan so far, after so many seconds of planning; end the call where none comes soon.

        In another thread: this may be a signal handler.
        """
        _log.warning("planning ends with the best plan so far; Ctrl-C once more leaves at once")

        def ask() -> None:
            request = master_pb2.InterruptPlanningRequest(session_id=self.info.session_id)
            try:
                is_planned = self._call(self._stub.InterruptPlanning, request).searches > 0
                if is_done.wait(max(BEST_PLAN_TIMEOUT_S, planned_s / 2) if is_planned else PLAN_ON_ITS_WAY_S):
                    return
            except (ShardwrightError, ValueError) as error:
                _log.debug("planning is ended at once: %s", error)
            preparation.cancel()

        threading.Thread(target=ask, name="shardwright-interrupt", daemon=True).start()

    def load(self, plan_id: str, on_progress: Callable[[str, float], None]) -> master_pb2.LoadResult:
        """Compiles and loads a plan on every worker."""
        request = master_pb2.LoadPlanRequest(session_id=self.info.session_id, plan_id=plan_id)

        def load(_: int) -> master_pb2.LoadResult:
            with closing(self._stream(self._stub.LoadPlan, request)) as replies:
                for reply in replies:
                    if reply.WhichOneof("kind") == "result":
                        result: master_pb2.LoadResult = reply.result
                        return result
                    on_progress(reply.progress.phase, reply.progress.elapsed_s)
            raise InternalError("the server ended a load without a result", where=self.address)

        return self.retries.call(load)

    def dump(self, plan_id: str) -> Iterator[tuple[str, str, str]]:
        """(program, form, text) of what was compiled of a loaded plan; see `DumpPlanReply`."""
        request = master_pb2.DumpPlanRequest(session_id=self.info.session_id, plan_id=plan_id)
        with closing(self._stream(self._stub.DumpPlan, request)) as replies:
            for (program, form), parts in itertools.groupby(replies, lambda reply: (reply.program, reply.form)):
                unpacker = wire.TextUnpacker(f"{program}.{form}", PLAN_TEXT_LIMIT_BYTES)
                for part in parts:
                    unpacker.feed(part.chunk)
                yield program, form, unpacker.text()

    def run_steps(self, requests: Iterator[master_pb2.RunStepsRequest]) -> Any:
        """The raw stream of replies; its consumer converts errors (see stream.py)."""
        return self._stub.RunSteps(requests, metadata=self._metadata)

    def cancel_steps(self, numbers: Sequence[int]) -> int:
        """Asks to end steps; the number of those that had not ended yet."""
        request = master_pb2.CancelStepsRequest(session_id=self.info.session_id, numbers=numbers)
        reply = self._call(self._stub.CancelSteps, request)
        return len(reply.cancelled) + len(reply.running)

    def wait_for_save(self, number: int) -> tuple[int, float]:
        """(bytes written, seconds) of the save whose step had this number, once its checkpoint is complete."""
        request = master_pb2.WaitForSaveRequest(session_id=self.info.session_id, number=number)
        reply = self._call(self._stub.WaitForSave, request, timeout_s=LONG_CALL_TIMEOUT_S)
        return reply.written_bytes, reply.save_s

    def release(self, array_ids: Sequence[int]) -> None:
        request = master_pb2.ReleaseArraysRequest(session_id=self.info.session_id, array_ids=array_ids)
        self._call(self._stub.ReleaseArrays, request)

    def status(self) -> master_pb2.StatusReply:
        def ask(_: int) -> master_pb2.StatusReply:
            reply: master_pb2.StatusReply = self._call_once(self._stub.Status, master_pb2.StatusRequest())
            return reply

        return self.retries.call(ask)

    def require_session(self, status: master_pb2.StatusReply) -> None:
        """Raises SessionError where the server does not have this session any more."""
        mine = self.info.session_id
        if not any(mine.startswith(other.session_id) for other in status.sessions):
            raise SessionError(
                f"no session {mine[:8]}: it was closed, expired, or belongs to a server that was restarted",
                remedy="open a new session, and restore a checkpoint",
            )

    # ---- one way to call, one way to fail -----------------------------------------

    def _call(self, method: Callable[..., Any], request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """A call that is made once, also in an outage."""
        try:
            return self._call_once(method, request, timeout_s=timeout_s)
        except OutageError as error:
            raise ServerUnavailableError(error.message, where=error.where, remedy=error.remedy) from None

    def _call_once(self, method: Callable[..., Any], request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """An attempt of `Retries.call`."""
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except (grpc.RpcError, ValueError) as error:
            self._raise(error)

    def _raise(self, error: grpc.RpcError | ValueError) -> NoReturn:
        self.retries.check_open()
        if isinstance(error, ValueError):  # gRPC's own of a closed channel
            raise error
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            server = self._server_version or "of another version"
            raise ServerUnavailableError(
                f"the server is Shardwright {server} and does not know a call of this client, {self._client_version}",
                where=self.address,
                remedy="install the same version on both sides",
            ) from None
        ours = wire.error_from_rpc(error, where=self.address)
        raise (to_outage(ours) if is_outage(error) else ours) from None

    def _stream(self, method: Callable[..., Any], request: Any) -> Generator[Any, None, None]:
        """Replies of a call; closing the generator cancels it. Raises StepCancelledError where another thread did."""
        preparation: Preparation = getattr(self._preparing, "now", None) or Preparation()
        preparation.check()
        self.retries.check_open()
        call = preparation.call = method(request, timeout=LONG_CALL_TIMEOUT_S, metadata=self._metadata)
        try:
            preparation.check()
            yield from call
        except grpc.RpcError as error:
            preparation.check()
            self._raise(error)
        finally:
            preparation.call = None
            call.cancel()


def _compare_versions(client: str, server: str, address: str) -> None:
    """Warns about a server of another minor version: either side may lack a feature of the other."""
    if client.split(".")[:2] != server.split(".")[:2]:
        _log.warning(
            "the client is Shardwright %s, the server at %s %s: install the same version on both sides if calls fail",
            client, address, server,
        )  # fmt: skip


def _require_listener(address: str) -> None:
    """Tries a plain connection first: an absent server is reported at once, with the reason."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ServerUnavailableError(
            f"no server: {error}",
            where=address,
            remedy="start one with launch_worker.sh, check SERVER_IP and SERVER_PORT, or call connect() with no "
            "address for an embedded server",
        ) from None
