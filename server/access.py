"""Who may call what: tokens become callers, and calls that name a session carry its secret.

Every port of ours, of the master and of the nodes, has both interceptors: `AccessInterceptor` outermost, before a
message is read, and `SessionInterceptor` innermost, which looks into the messages.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor

from shardwright.clusters.access_tokens import DEFAULT_NAME, LOCAL_NAME, Caller, hash_of
from shardwright.clusters.cluster_file import read_tokens
from shardwright.errors import AuthenticationError, ClusterConfigError, ShardwrightError
from shardwright.proto.v1 import master_pb2, operators_pb2, worker_pb2
from shardwright.protocol.session_secrets import opens, value_of
from shardwright.server.handlers import (
    AioWrappingInterceptor,
    Send,
    WrappingInterceptor,
    abort,
    abort_aio,
    answer_aio,
    behaviour_of,
    refuse,
    with_behaviour,
)
from shardwright.server.security import Protection
from shardwright.server.tuning import TOKENS_LOOK_S

#: Health probes carry no token and learn nothing but "serving".
_OPEN_METHODS = "/grpc.health.v1.Health/"

_MASTER = master_pb2.DESCRIPTOR.services_by_name["Master"].full_name
_CLUSTER = worker_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name
_OPERATORS = operators_pb2.DESCRIPTOR.services_by_name["Operators"].full_name
_SNAPSHOTS = worker_pb2.DESCRIPTOR.services_by_name["Snapshots"].full_name

#: Calls of nodes and operators, by their beginning.
_OPERATORS_ONLY = (f"/{_CLUSTER}/", f"/{_SNAPSHOTS}/", f"/{_OPERATORS}/", f"/{_MASTER}/EndSession", f"/{_MASTER}/Drain")

#: Where nobody needs a token, everybody may do everything but take others' sessions.
_ANYBODY = Caller(name="", role="operator")

#: Names that do not say who it is.
_OF_MANY = ("", DEFAULT_NAME)

_BEARER = "Bearer "

_log = logging.getLogger("shardwright.server")


class _TokensFile:
    """Callers by the hash of their tokens; follows changes of the file, and keeps the last good ones.

    A server does not start with a wrong file (`Cluster.load` reads it); an executor that starts again while the file is
    wrong runs without people until it is mended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_s = time.monotonic()
        self._seen = _version_of(path)
        self._callers: Mapping[str, Caller] = {}
        self._read()

    def callers(self) -> Mapping[str, Caller]:
        now_s = time.monotonic()
        if now_s - self._looked_s >= TOKENS_LOOK_S:
            self._looked_s = now_s
            seen = _version_of(self._path)
            if seen != self._seen:
                self._seen = seen
                self._read()
                _log.info("%s has changed: %d tokens", self._path, len(self._callers))
        return self._callers

    def _read(self) -> None:
        try:
            self._callers = read_tokens(self._path, str(self._path))
        except ClusterConfigError as error:
            _log.error("the tokens that were read before stay valid: %s (%s)", error.message, error.remedy)


def _version_of(path: Path) -> tuple[int, ...]:
    """Another one after each change of the file."""
    try:
        facts = os.stat(path)
    except OSError:
        return ()
    return facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size


class Access:
    """The tokens of one process; finds the caller of a call, and what it may not do."""

    def __init__(self, protection: Protection) -> None:
        self._nodes: dict[str, Caller] = {}
        if protection.token is not None:
            name = LOCAL_NAME if protection.local_token else DEFAULT_NAME
            self._nodes[hash_of(protection.token)] = Caller(name=name, role="operator")
        self._people = _TokensFile(Path(protection.tokens_file)) if protection.tokens_file else None
        self._denial = _denial(protection)

    def caller(self, metadata: Any) -> Caller | None:
        """None: without a valid token. A token is looked up by its hash, so that the time taken tells nothing of it."""
        if not self._nodes and self._people is None:
            return _ANYBODY
        digest = hash_of(token_of(metadata))
        return self._nodes.get(digest) or (self._people.callers().get(digest) if self._people is not None else None)

    def person_of(self, context: Any) -> str:
        """Whose share a call takes of what there is: the name of its token, with the host it comes from where many
        have that one, or none is needed.
        """
        caller = self.caller(context.invocation_metadata()) or _ANYBODY
        if caller.name not in _OF_MANY:
            return caller.name
        host = unquote(context.peer()).partition(":")[2].rpartition(":")[0]
        return f"{caller.name or 'anybody'} at {host or 'this host'}"

    def refusal(self, method: str, metadata: Any) -> AuthenticationError | None:
        """Why a call is refused, whatever it asks for."""
        if method.startswith(_OPEN_METHODS):
            return None
        caller = self.caller(metadata)
        if caller is None:
            return self._denial
        if method.startswith(_OPERATORS_ONLY) and not caller.is_operator:
            return AuthenticationError(
                f"{method.rpartition('/')[2]} is for operators, and the token of {caller.name} has the role "
                f"{caller.role}",
                remedy="ask an operator of the cluster, or for a token with the role operator",
            )
        return None


def token_of(metadata: Any) -> str:
    """The token that a call carries; empty without one."""
    return value_of(metadata, "authorization").removeprefix(_BEARER)


def _denial(protection: Protection) -> AuthenticationError:
    given = "pass the token that the server's operator gave you (SHARDWRIGHT_TOKEN, or connect(token=…))"
    if not protection.local_token:
        return AuthenticationError("the call carries no valid token", remedy=given)
    own = (
        f"this server takes the token in {protection.local_token}, which clients of the user who started it find by "
        "themselves: run as that user, with the same HOME and XDG_STATE_HOME and without another SHARDWRIGHT_TOKEN, "
        "or set SHARDWRIGHT_TOKEN to the contents of that file"
    )
    remedy = f"{given}; {own}" if protection.tokens_file else own
    return AuthenticationError("the call carries no valid token", remedy=remedy)


# ---- tokens ---------------------------------------------------------------------
class AccessInterceptor(WrappingInterceptor):
    """Refuses calls of those who may not make them, on a threaded server.

    also: metadata, (key, value), that each call carries besides its token.
    """

    def __init__(self, access: Access, also: tuple[str, str] | None = None) -> None:
        self._access = access
        self._also = also

    def wrap(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:
        error = self._refusal(call)
        if handler is None or error is None:
            return handler

        def deny(request: Any, context: grpc.ServicerContext) -> None:
            abort(context, error)

        return with_behaviour(handler, deny)

    def _refusal(self, details: grpc.HandlerCallDetails) -> AuthenticationError | None:
        metadata = details.invocation_metadata
        error = self._access.refusal(details.method, metadata)
        if error is not None or self._also is None:
            return error
        key, value = self._also
        if hash_of(value_of(metadata, key)) == hash_of(value):
            return None
        return AuthenticationError("the call does not carry this service's key", remedy="only executors call it")


class AioAccessInterceptor(AioWrappingInterceptor):
    """The same on an asyncio server."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def wrap(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:
        error = self._access.refusal(call.method, call.invocation_metadata)
        if handler is None or error is None:
            return handler

        async def deny(request: Any, context: Any) -> None:
            await abort_aio(context, error)

        return with_behaviour(handler, deny)


# ---- sessions ---------------------------------------------------------------------
def _session_field(kind: Descriptor) -> str:
    """The field of a message that has a session's id, or a message with one; empty: it names no session."""
    if "session_id" in kind.fields_by_name:
        return "session_id"
    parts = ((field.name, field.message_type) for field in kind.fields)
    return next((name for name, part in parts if part is not None and "session_id" in part.fields_by_name), "")


#: Calls of clients that name a session: which field of their messages does.
SESSION_FIELDS: Mapping[str, str] = {
    f"/{service.full_name}/{method.name}": field
    for service in master_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if (field := _session_field(method.input_type))
}


class _SessionGuard:
    """Checks the messages of one call."""

    def __init__(self, field: str, metadata: Any) -> None:
        self._field = field
        self._metadata = metadata
        self._own = ""  # the session that this call has the secret of

    def check(self, request: Any) -> None:
        """Raises AuthenticationError where it names a session whose secret the call does not carry.

        The error is the same whether there is such a session or not.
        """
        message = getattr(request, "message", request)  # of a `ChunkedMessage`
        value = getattr(message, self._field)
        session_id = value if isinstance(value, str) else value.session_id
        if not session_id or session_id == self._own:
            return
        if not opens(self._metadata, session_id):
            raise AuthenticationError(
                f"the call does not carry the secret of session {session_id[:8]}",
                remedy="use the session of this client (connect() opens one): a session's id alone opens nothing",
            )
        self._own = session_id

    def each(self, requests: Iterator[Any]) -> Iterator[Any]:
        for request in requests:
            self.check(request)
            yield request

    async def each_aio(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            self.check(request)
            yield request


class SessionInterceptor(WrappingInterceptor):
    """Ends calls that name a session without its secret, on a threaded server."""

    def wrap(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:
        field = SESSION_FIELDS.get(call.method, "")
        if handler is None or not field:
            return handler
        behaviour, metadata = behaviour_of(handler), call.invocation_metadata

        @functools.wraps(behaviour)  # keeps gRPC's marks
        def checked(request: Any, context: grpc.ServicerContext, *send: Send) -> Any:
            guard = _SessionGuard(field, metadata)
            if handler.request_streaming:
                return behaviour(guard.each(request), context, *send)
            try:
                guard.check(request)
            except ShardwrightError as error:
                return refuse(context, error, send)
            return behaviour(request, context, *send)

        return with_behaviour(handler, checked, reads=handler.request_deserializer)


class AioSessionInterceptor(AioWrappingInterceptor):
    """The same on an asyncio server."""

    def wrap(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:
        field = SESSION_FIELDS.get(call.method, "")
        if handler is None or not field:
            return handler
        behaviour, metadata = behaviour_of(handler), call.invocation_metadata

        async def checked(request: Any, context: Any) -> Any:
            guard = _SessionGuard(field, metadata)
            if handler.request_streaming:
                return await answer_aio(behaviour, guard.each_aio(request), context)
            try:
                guard.check(request)
            except ShardwrightError as error:
                await abort_aio(context, error)
            return await answer_aio(behaviour, request, context)

        return with_behaviour(handler, checked, reads=handler.request_deserializer)
