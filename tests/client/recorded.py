"""Sessions whose calls to master and nodes are recorded, as gRPC makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from shardwright.client.connection import Dialer
from shardwright.client.session import Session
from shardwright.client.session_state import SessionState
from shardwright.clusters.local_token import read_token


class CallRecorder(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Records calls by the name of their method.

    methods: of all calls, in order.
    content_bytes: array contents sent to nodes, apart from the steps' own.
    """

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.content_bytes = 0

    def count(self, method: str) -> int:
        return self.methods.count(method)

    def clear(self) -> None:
        self.methods.clear()
        self.content_bytes = 0

    def _record(self, details: grpc.ClientCallDetails) -> str:
        self.methods.append(details.method.rpartition("/")[2])
        return self.methods[-1]

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        self._record(details)
        return continuation(details, request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        self._record(details)
        return continuation(details, request)

    def intercept_stream_unary(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:
        is_put = self._record(details) == "PutArrays"
        return continuation(details, self._measured(requests) if is_put else requests)

    def intercept_stream_stream(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:
        self._record(details)
        return continuation(details, requests)

    def _measured(self, requests: Iterator[Any]) -> Iterator[Any]:
        for request in requests:
            self.content_bytes += sum(piece.nbytes for piece in request.pieces)
            yield request


class RecordingDialer(Dialer):
    """Opens channels whose calls are recorded."""

    def __init__(self, token: str | None = None) -> None:
        super().__init__(token, None)
        self.calls = CallRecorder()

    def dial(self, address: str) -> grpc.Channel:
        return grpc.intercept_channel(super().dial(address), self.calls)


def open_recorded(session: Session) -> tuple[Session, CallRecorder]:
    """Another session with the servers of `session`, and the record of its calls."""
    server = session._state.server
    address = session._state.master.address
    dialer = RecordingDialer(read_token(int(address.rpartition(":")[2])) if server is None else server.token)
    return Session(SessionState(address, dialer, None)), dialer.calls
