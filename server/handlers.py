"""How calls end with our errors, on threaded and on asyncio servers; also where a message is none of the protocol's.

gRPC answers bytes that it cannot read with a status of its own and a traceback in the log, for each of them. The
interceptors here answer with `ProtocolError`, and log nothing.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from shardwright.errors import ProtocolError, ShardwrightError
from shardwright.protocol import wire

if TYPE_CHECKING:  # generic for type checkers only
    Handler = grpc.RpcMethodHandler[Any, Any]
    Interceptor = grpc.ServerInterceptor[Any, Any]
    AioInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Handler, Interceptor, AioInterceptor = grpc.RpcMethodHandler, grpc.ServerInterceptor, grpc.aio.ServerInterceptor

#: Takes a reply of a call, or None at its end; may be called from any thread.
Send = Callable[[Any], None]
F = TypeVar("F", bound=Callable[..., Any])

_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


# ---- ends of calls -------------------------------------------------------------
def abort(context: grpc.ServicerContext, error: ShardwrightError) -> None:
    """End a call of a threaded server with our error; does not return."""
    context.set_trailing_metadata(wire.trailing_error(error))
    context.abort(wire.status_of(error), error.message)


async def abort_aio(context: Any, error: ShardwrightError) -> None:
    """End a call of an asyncio server with our error; does not return."""
    await context.abort(wire.status_of(error), error.message, wire.trailing_error(error))


def end_with(context: grpc.ServicerContext, error: ShardwrightError) -> None:
    """Have a call that is `without_thread` end with our error, once None is sent."""
    context.set_trailing_metadata(wire.trailing_error(error))
    context.set_code(wire.status_of(error))
    context.set_details(error.message)


def refuse(context: grpc.ServicerContext, error: ShardwrightError, send: Sequence[Send]) -> None:
    """End a call of a threaded server with our error. send: of a call that is `without_thread`, else nothing."""
    if not send:
        return abort(context, error)
    end_with(context, error)
    return send[0](None)


def without_thread(behaviour: F) -> F:
    """A behaviour `(request, context, send)` with one request, that returns at once and sends its replies later."""

    @functools.wraps(behaviour)
    def begin(*arguments: Any) -> None:
        behaviour(*arguments)

    begin.experimental_non_blocking = True  # type: ignore[attr-defined]  # gRPC's name for it, as grpc_health uses it
    return begin  # type: ignore[return-value]


# ---- handlers that are wrapped ---------------------------------------------------
def behaviour_of(handler: Any) -> Any:
    """What answers the calls of a handler."""
    kinds = {
        (False, False): handler.unary_unary,
        (False, True): handler.unary_stream,
        (True, False): handler.stream_unary,
        (True, True): handler.stream_stream,
    }
    return kinds[handler.request_streaming, handler.response_streaming]


def with_behaviour(handler: Any, behaviour: Any, *, reads: Callable[[bytes], Any] | None = None) -> Handler:
    """The same kind of handler with another behaviour. reads: its requests; without, they are bytes."""
    make = _MAKERS[handler.request_streaming, handler.response_streaming]
    return make(behaviour, request_deserializer=reads, response_serializer=handler.response_serializer)


async def answer_aio(behaviour: Any, request: Any, context: Any) -> Any:
    """Run a behaviour of an asyncio server, whether it returns its reply, yields replies or writes them."""
    replies = behaviour(request, context)
    if not hasattr(replies, "__aiter__"):
        return await replies
    async for reply in replies:
        await context.write(reply)
    return None


class WrappingInterceptor(Interceptor):
    """Puts another handler in the place of each call's, on a threaded server."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        return cast(Handler | None, self.wrap(continuation(handler_call_details), handler_call_details))

    @abc.abstractmethod
    def wrap(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:
        """What answers a call in the place of `handler`, which is None where nobody knows the call."""


class AioWrappingInterceptor(AioInterceptor):
    """The same on an asyncio server."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        return cast(Handler, self.wrap(await continuation(handler_call_details), handler_call_details))

    @abc.abstractmethod
    def wrap(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:
        """See `WrappingInterceptor`."""


class _Malformed:
    """In the place of a message."""

    def __init__(self, cause: str) -> None:
        self.error = ProtocolError(
            f"the message cannot be read: {cause}", remedy="use the client of this server's version"
        )


def _reader(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """A deserializer that never raises."""

    def read(data: bytes) -> Any:
        try:
            return data if deserialize is None else deserialize(data)
        except (DecodeError, ValueError) as error:
            return _Malformed(str(error) or type(error).__name__)

    return read


class ProtocolInterceptor(WrappingInterceptor):
    """Ends calls with malformed messages by ProtocolError, on a threaded server."""

    def wrap(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:
        if handler is None:
            return None
        behaviour = behaviour_of(handler)

        @functools.wraps(behaviour)  # keeps gRPC's marks
        def checked(request: Any, context: grpc.ServicerContext, *send: Send) -> Any:
            if isinstance(request, _Malformed):
                return refuse(context, request.error, send)
            return behaviour(_checked(request) if handler.request_streaming else request, context, *send)

        return with_behaviour(handler, checked, reads=_reader(handler.request_deserializer))


class AioProtocolInterceptor(AioWrappingInterceptor):
    """The same on an asyncio server."""

    def wrap(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:
        if handler is None:  # a call that nobody knows
            return None
        behaviour = behaviour_of(handler)

        async def checked(request: Any, context: Any) -> Any:
            try:
                if isinstance(request, _Malformed):
                    raise request.error
                return await answer_aio(
                    behaviour, _checked_aio(request) if handler.request_streaming else request, context
                )
            except ProtocolError as error:
                await abort_aio(context, error)

        return with_behaviour(handler, checked, reads=_reader(handler.request_deserializer))


def _checked(requests: Iterator[Any]) -> Iterator[Any]:
    """Raises ProtocolError at a malformed one."""
    for request in requests:
        if isinstance(request, _Malformed):
            raise request.error
        yield request


async def _checked_aio(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Malformed):
            raise request.error
        yield request
