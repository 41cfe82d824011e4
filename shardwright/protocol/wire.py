"""Protocol messages ↔ our own values, which only this file and `plan_messages.py` know both.

Also the one table between gRPC status codes and our errors, and the helpers
that cut text and bytes into stream chunks.
"""

from __future__ import annotations

import errno
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import grpc

from shardwright.errors import (
    ERRORS_BY_CODE,
    AuthenticationError,
    DeadlineError,
    HloSyntaxError,
    InternalError,
    PlanError,
    ResourceLimitError,
    ServerUnavailableError,
    SessionError,
    ShardwrightError,
)
from shardwright.plans.layouts import Layout
from shardwright.plans.plan import OptionValue
from shardwright.plans.shardings import Mesh, MeshAxis, TensorSharding
from shardwright.proto.v1 import common_pb2, worker_pb2
from shardwright.tuning import CHUNK_BYTES

#: Of one array; what is done for each of them takes moments.
MAX_DEVICES = 1 << 16

#: Trailing metadata of a failed call that holds a serialized `Error`.
ERROR_METADATA_KEY = "shardwright-error-bin"

#: Initial metadata of a step stream, sent when it is open: a client that has lost the server knows that it is back.
STREAM_IS_OPEN = (("shardwright-stream", "open"),)

#: After so many seconds without an answer to a ping a connection is given up: the sum of time and timeout below.
KEEPALIVE_S = 40.0

#: Channel and server options of every connection: no message limit below our own
#: chunks, and pings that notice a peer that went away without closing.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),  # a network that is back is found at once
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.so_reuseport", 0),
)


# ---- layouts ---------------------------------------------------------------


def layout_to_proto(layout: Layout) -> common_pb2.ArrayLayout:
    return common_pb2.ArrayLayout(
        type=array_type_to_proto(layout.element_type, layout.shape),
        mesh=mesh_to_proto(layout.mesh),
        dimensions=[common_pb2.DimensionAxes(axes=axes) for axes in layout.sharding.dims],
        stored_dimensions=layout.stored_shape,
        view_of=layout.view_of or (),
        first_device=layout.first_device,
        is_on_host=layout.is_on_host,
    )


def layout_from_proto(message: common_pb2.ArrayLayout) -> Layout:
    """Raises PlanError if the message does not describe a layout, or one on more devices than a cluster has."""
    layout = Layout(
        element_type=message.type.element_type,
        shape=tuple(message.type.dimensions),
        mesh=mesh_from_proto(message.mesh),
        sharding=TensorSharding(tuple(tuple(dimension.axes) for dimension in message.dimensions)),
        stored_shape=tuple(message.stored_dimensions),
        view_of=tuple(message.view_of) or None,
        first_device=message.first_device,
        is_on_host=message.is_on_host,
    )
    if layout.mesh.device_count > MAX_DEVICES:
        raise PlanError(f"a layout on {layout.mesh.device_count} devices", where=f"mesh {layout.mesh}")
    return layout


def array_type_to_proto(element_type: str, shape: tuple[int, ...]) -> common_pb2.ArrayType:
    return common_pb2.ArrayType(element_type=element_type, dimensions=shape)


def mesh_to_proto(mesh: Mesh) -> list[common_pb2.MeshAxis]:
    return [common_pb2.MeshAxis(name=axis.name, size=axis.size) for axis in mesh.axes]


def mesh_from_proto(axes: Iterable[common_pb2.MeshAxis]) -> Mesh:
    return Mesh(axes=tuple(MeshAxis(name=axis.name, size=axis.size) for axis in axes))


def compile_options_to_proto(options: Mapping[str, OptionValue]) -> list[worker_pb2.CompileOption]:
    return [_option_to_proto(name, value) for name, value in options.items()]


def _option_to_proto(name: str, value: OptionValue) -> worker_pb2.CompileOption:
    if isinstance(value, bool):  # an int, too
        return worker_pb2.CompileOption(name=name, flag=value)
    if isinstance(value, int):
        return worker_pb2.CompileOption(name=name, number=value)
    return worker_pb2.CompileOption(name=name, text=value)


def compile_options_from_proto(options: Iterable[worker_pb2.CompileOption]) -> dict[str, OptionValue]:
    return {option.name: getattr(option, option.WhichOneof("value") or "text") for option in options}


# ---- chunks ----------------------------------------------------------------


def chunks(data: bytes | memoryview, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """`data` cut into pieces of at most `size` bytes; one empty piece where there is none."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    if not view.nbytes:
        yield b""
    for start in range(0, view.nbytes, size):
        yield bytes(view[start : start + size])


def compress_text(text: str) -> bytes:
    """gzip of UTF-8; the fastest level, since programs shrink tenfold anyway."""
    packer = zlib.compressobj(level=1, wbits=31)
    return packer.compress(text.encode()) + packer.flush()


class TextUnpacker:
    """Decompresses gzip-compressed text from chunks, never holding more than `limit_bytes`.

    `feed` and `text` raise ResourceLimitError past the limit and HloSyntaxError (`where` = `what`) on bytes other than
    gzip-compressed UTF-8.
    """

    def __init__(self, what: str, limit_bytes: int) -> None:
        self._what = what
        self._limit_bytes = limit_bytes
        self._inflater = zlib.decompressobj(wbits=31)
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def feed(self, chunk: bytes) -> None:
        try:
            part = self._inflater.decompress(chunk, self._limit_bytes - self._size_bytes + 1)
        except zlib.error as error:
            raise HloSyntaxError(f"not gzip-compressed: {error}", where=self._what) from None
        self._parts.append(part)
        self._size_bytes += len(part)
        if self._size_bytes > self._limit_bytes:
            raise ResourceLimitError(
                f"text is over the limit of {self._limit_bytes >> 20} MiB", where=self._what,
                remedy="hoist large constants into arguments",
            )  # fmt: skip

    def text(self) -> str:
        if not self._inflater.eof:
            raise HloSyntaxError("the compressed text ends early", where=self._what)
        try:
            return b"".join(self._parts).decode()
        except UnicodeDecodeError as error:
            raise HloSyntaxError(f"not UTF-8: {error}", where=self._what) from None


# ---- errors ----------------------------------------------------------------

#: Error code → the status its call ends with. Whatever is not named: INTERNAL.
STATUS_BY_CODE: dict[str, grpc.StatusCode] = {
    "hlo_syntax": grpc.StatusCode.INVALID_ARGUMENT,
    "unsupported_program": grpc.StatusCode.INVALID_ARGUMENT,
    "option": grpc.StatusCode.INVALID_ARGUMENT,
    "annotation": grpc.StatusCode.INVALID_ARGUMENT,
    "plan": grpc.StatusCode.FAILED_PRECONDITION,
    "cluster_config": grpc.StatusCode.FAILED_PRECONDITION,
    "compilation": grpc.StatusCode.FAILED_PRECONDITION,
    "compilation_aborted": grpc.StatusCode.FAILED_PRECONDITION,
    "platform": grpc.StatusCode.FAILED_PRECONDITION,
    "server_unavailable": grpc.StatusCode.UNAVAILABLE,
    "server_draining": grpc.StatusCode.UNAVAILABLE,
    "protocol": grpc.StatusCode.INVALID_ARGUMENT,
    "authentication": grpc.StatusCode.UNAUTHENTICATED,
    "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
    "session": grpc.StatusCode.NOT_FOUND,
    "array": grpc.StatusCode.NOT_FOUND,
    "worker_lost": grpc.StatusCode.ABORTED,  # not UNAVAILABLE, which invites blind retries
    "resource_limit": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "execution": grpc.StatusCode.ABORTED,
    "step_timeout": grpc.StatusCode.DEADLINE_EXCEEDED,
    "step_cancelled": grpc.StatusCode.ABORTED,
    "checkpoint": grpc.StatusCode.FAILED_PRECONDITION,
    "snapshot_lost": grpc.StatusCode.FAILED_PRECONDITION,
    "state_store": grpc.StatusCode.FAILED_PRECONDITION,
}

#: Status → (class, remedy) for calls that failed without an error of ours: transport, deadline, limits.
_ERROR_BY_STATUS: dict[grpc.StatusCode, tuple[type[ShardwrightError], str]] = {
    grpc.StatusCode.UNAVAILABLE: (ServerUnavailableError, "check the address, and that the server runs"),
    grpc.StatusCode.CANCELLED: (ServerUnavailableError, "the call was cancelled: the server or the client is closing"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlineError, "the server is busy or unreachable; try again"),
    grpc.StatusCode.UNAUTHENTICATED: (AuthenticationError, "pass the token that the cluster file names"),
    grpc.StatusCode.PERMISSION_DENIED: (AuthenticationError, "pass the token that the cluster file names"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (ResourceLimitError, "send less in one message, or raise the server's limit"),
    grpc.StatusCode.NOT_FOUND: (SessionError, "open a new session"),
    grpc.StatusCode.UNIMPLEMENTED: (ServerUnavailableError, "client and server are of different versions"),
}


def error_to_proto(error: ShardwrightError) -> common_pb2.Error:
    return common_pb2.Error(code=error.code, message=error.message, where=error.where, remedy=error.remedy)


def error_from_proto(message: common_pb2.Error) -> ShardwrightError:
    """The same class again; an unknown code (of a newer server) becomes ShardwrightError."""
    cls = ERRORS_BY_CODE.get(message.code, ShardwrightError)
    return cls(message.message, where=message.where, remedy=message.remedy)


def to_shardwright_error(error: BaseException) -> ShardwrightError:
    """`error` itself if it is ours; a machine's own limits by name; else an InternalError with its description."""
    if isinstance(error, ShardwrightError):
        return error
    if isinstance(error, MemoryError):
        return ResourceLimitError(
            f"the server is out of memory: {error or 'nothing is left of the machine'}",
            remedy="free memory on that machine, or hand over less at once",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = error.filename or tempfile.gettempdir()
        return ResourceLimitError(
            f"the disk is full: {error.strerror}",
            where=str(place),
            remedy="free space there, or set TMPDIR to another disk",
        )
    return InternalError(f"{type(error).__name__}: {error}", remedy="please report this with the server's log")


def status_of(error: ShardwrightError) -> grpc.StatusCode:
    return STATUS_BY_CODE.get(error.code, grpc.StatusCode.INTERNAL)


def error_from_rpc(error: grpc.RpcError, *, where: str = "") -> ShardwrightError:
    """Our error behind a failed call: the server's own, else one by its status.

    `where` (an address, a tensor) is added if it names none.
    """
    ours = _error_from_trailer(error)
    return ours if ours.where or not where else type(ours)(ours.message, where=where, remedy=ours.remedy)


def _error_from_trailer(error: grpc.RpcError) -> ShardwrightError:
    metadata: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in metadata or ():  # the same pairs in grpc and grpc.aio, other types
        if key == ERROR_METADATA_KEY:
            return error_from_proto(common_pb2.Error.FromString(bytes(value)))
    status = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = (error.details() if hasattr(error, "details") else None) or str(status)
    cls, remedy = _ERROR_BY_STATUS.get(status, (InternalError, "please report this with the server's log"))
    return cls(details, remedy=remedy)


def raise_from_rpc(error: grpc.RpcError, *, where: str = "") -> NoReturn:
    """Raises `error_from_rpc(error, where=where)`."""
    raise error_from_rpc(error, where=where) from None


def trailing_error(error: ShardwrightError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata carrying `error`; long messages are cut (metadata is limited to 8 KiB)."""
    message = error_to_proto(error)
    if message.ByteSize() > 6000:
        message.message = message.message[:2000] + " …"
        message.where, message.remedy = message.where[:500], message.remedy[:500]
    return ((ERROR_METADATA_KEY, message.SerializeToString()),)
