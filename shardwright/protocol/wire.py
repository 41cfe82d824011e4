"""Protocol messages ↔ our own values: the only place that knows both.

Also the one table between gRPC status codes and our errors, and the helpers
that cut text and bytes into stream chunks.
"""

from __future__ import annotations

import errno
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NoReturn

import grpc

from shardwright.errors import (
    ERRORS_BY_CODE,
    AuthenticationError,
    DeadlineError,
    HloSyntaxError,
    InternalError,
    OptionError,
    PlanError,
    ResourceLimitError,
    ServerUnavailableError,
    SessionError,
    ShardwrightError,
)
from shardwright.options.plan_options import FORCED_STRATEGIES, REPLICATED, Pin, PlanOptions, TensorPins
from shardwright.options.user_options import check_limits
from shardwright.plans.layouts import Layout
from shardwright.plans.plan import OptionValue
from shardwright.plans.plan_json.reading import TEXT_LIMIT_BYTES
from shardwright.plans.shardings import Mesh, MeshAxis, TensorSharding
from shardwright.progress import PlanProgress
from shardwright.proto.v1 import common_pb2, master_pb2, worker_pb2
from shardwright.tuning import CHUNK_BYTES
from shardwright.xla.compiled import CompiledProgram, ObservedCollective

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


# ---- plan options ----------------------------------------------------------

#: Options that a request spells as messages.
_COMPOSITE_OPTIONS = frozenset(
    {"mesh", "force", "argument_axes", "output_axes", "argument_views", "output_views"}
    | {"argument_names", "output_names", "background", "local_arguments", "plan_json"}
)

#: Field of the request → option, of all others: numbers, words and truth values. A field that is not set, or zero or
#: empty where its absence cannot be told, leaves the option at its default.
_OPTION_OF_FIELD = {
    "memory_budget_bytes" if option.name == "memory_budget" else option.name: option.name
    for option in fields(PlanOptions)
    if option.name not in _COMPOSITE_OPTIONS
}


def plan_request(
    options: PlanOptions, *, session_id: str, program_id: str, devices: range | None = None
) -> master_pb2.PlanProgramRequest:
    """The request of a plan under `options`, on these devices of the cluster (default all); `plan_options` reads the
    options back.
    """
    mesh = options.mesh or {}
    request = master_pb2.PlanProgramRequest(
        session_id=session_id,
        program_id=program_id,
        mesh=[common_pb2.MeshAxis(name=name, size=size) for name, size in mesh.items()],
        argument_layouts=_to_pinned_layouts(options.argument_axes, options.argument_views),
        output_layouts=_to_pinned_layouts(options.output_axes, options.output_views),
        argument_names=options.argument_names,
        output_names=options.output_names,
        local_arguments=options.local_arguments,
        first_device=devices.start if devices is not None else 0,
        device_count=len(devices) if devices is not None else 0,
        plan_gzip=compress_text(options.plan_json) if options.plan_json else b"",
        **{field: getattr(options, option) for field, option in _OPTION_OF_FIELD.items()},  # None leaves a field unset
    )
    if isinstance(options.force, str):
        request.forced_strategy = options.force
    elif options.force is not None:
        for pattern, pins in options.force.items():
            request.forced_pins.extend(_pins_to_proto(pattern, pins))
    return request


def _pins_to_proto(pattern: str, pins: TensorPins) -> list[master_pb2.ForcedPin]:
    if isinstance(pins, str):
        return [master_pb2.ForcedPin(name_pattern=pattern, replicated=True)]
    return [
        master_pb2.ForcedPin(name_pattern=pattern, dimension=dimension, axes=_pin_text(pin))
        for dimension, pin in pins.items()
    ]


def plan_options(request: master_pb2.PlanProgramRequest) -> PlanOptions:
    """Raises OptionError on options unknown or mutually exclusive, or on a plan that cannot be unpacked."""
    if request.forced_strategy and request.forced_pins:
        raise OptionError("a forced strategy and forced pins exclude each other", where="force")
    if request.forced_strategy and request.forced_strategy not in FORCED_STRATEGIES:
        remedy = f"one of {', '.join(FORCED_STRATEGIES)}"
        raise OptionError(f"{request.forced_strategy!r} is no strategy", where="force", remedy=remedy)
    pins = _pins_from_proto(request.forced_pins)
    by_name = pins if pins or request.rest not in ("", "search") else None
    options = PlanOptions(
        mesh={axis.name: axis.size for axis in request.mesh} or None,
        force=request.forced_strategy or by_name,
        argument_axes=_axes_by_number(request.argument_layouts),
        output_axes=_axes_by_number(request.output_layouts),
        argument_views=_views_by_number(request.argument_layouts),
        output_views=_views_by_number(request.output_layouts),
        argument_names=tuple(request.argument_names),
        output_names=tuple(request.output_names),
        local_arguments=tuple(request.local_arguments),
        plan_json=_unpack_plan(request.plan_gzip),
        **{
            _OPTION_OF_FIELD[field.name]: value
            for field, value in request.ListFields()
            if field.name in _OPTION_OF_FIELD
        },
    )
    check_limits(options)
    return options


def _unpack_plan(packed: bytes) -> str:
    """JSON of a plan in a request; "": none. Raises OptionError: it cannot be unpacked."""
    if not packed:
        return ""
    unpacker = TextUnpacker("plan", TEXT_LIMIT_BYTES)
    try:
        unpacker.feed(packed)
        return unpacker.text()
    except (HloSyntaxError, ResourceLimitError) as error:
        raise OptionError(error.message, where="plan", remedy="send a plan's JSON, gzip-compressed") from None


def _pins_from_proto(forced_pins: Iterable[master_pb2.ForcedPin]) -> dict[str, TensorPins]:
    by_dim: dict[str, dict[int, Pin]] = {}
    pins: dict[str, TensorPins] = {}
    for forced in forced_pins:
        if forced.replicated:
            pins[forced.name_pattern] = REPLICATED
            continue
        by_dim.setdefault(forced.name_pattern, {})[forced.dimension] = _pin_value(forced.axes)
        pins[forced.name_pattern] = by_dim[forced.name_pattern]
    return pins


def _to_pinned_layouts(
    axes: Mapping[int, tuple[tuple[str, ...], ...]], views: Mapping[int, tuple[int, ...]]
) -> list[master_pb2.PinnedLayout]:
    return [
        master_pb2.PinnedLayout(
            number=number,
            dimensions=[common_pb2.DimensionAxes(axes=dim) for dim in dims],
            view=views.get(number, ()),
        )
        for number, dims in axes.items()
    ]


def _axes_by_number(layouts: Iterable[master_pb2.PinnedLayout]) -> dict[int, tuple[tuple[str, ...], ...]]:
    return {layout.number: tuple(tuple(dim.axes) for dim in layout.dimensions) for layout in layouts}


def _views_by_number(layouts: Iterable[master_pb2.PinnedLayout]) -> dict[int, tuple[int, ...]]:
    return {layout.number: tuple(layout.view) for layout in layouts if layout.view}


def _pin_text(pin: Pin) -> str:
    if pin is None or pin is False:
        return ""
    if pin is True:
        return "*"
    return pin if isinstance(pin, str) else ",".join(pin)


def _pin_value(text: str) -> Pin:
    if text == "":
        return None
    if text == "*":
        return True
    axes = tuple(text.split(","))
    return axes[0] if len(axes) == 1 else axes


def plan_progress_to_proto(step: PlanProgress) -> master_pb2.PlanProgress:
    return master_pb2.PlanProgress(
        phase=step.phase,
        detail=step.detail,
        incumbent_s=step.incumbent_s,
        lower_bound_s=step.lower_bound_s,
        elapsed_s=step.elapsed_s,
    )


def plan_progress_from_proto(message: master_pb2.PlanProgress) -> PlanProgress:
    return PlanProgress(
        phase=message.phase,
        detail=message.detail,
        incumbent_s=message.incumbent_s,
        lower_bound_s=message.lower_bound_s,
        elapsed_s=message.elapsed_s,
    )


# ---- compiled programs -----------------------------------------------------


def load_result(executable_id: str, compiled: CompiledProgram) -> master_pb2.LoadResult:
    """The client's view of a loaded plan; `collectives_from_result` reads its collectives back."""
    memory = compiled.memory
    result = master_pb2.LoadResult(
        executable_id=executable_id,
        compile_s=compiled.emit_s + compiled.compile_s,
        collectives=[
            master_pb2.ObservedCollective(
                kind=collective.kind,
                payload_bytes=collective.payload_bytes,
                wire_bytes=collective.wire_bytes,
                group_size=collective.group_size,
                group_count=collective.group_count,
                executions=collective.count,
                trip_counts_known=collective.trip_counts_known,
                instruction=collective.instruction,
                op_name=collective.op_name,
                groups=collective.groups,
            )
            for collective in compiled.collectives
        ],
    )
    if memory is not None:
        result.arguments_bytes = memory.argument_bytes
        result.outputs_bytes = memory.output_bytes
        result.temporaries_bytes = memory.temporary_bytes
        result.aliased_bytes = memory.alias_bytes
    return result


def collectives_from_result(result: master_pb2.LoadResult) -> tuple[ObservedCollective, ...]:
    return tuple(
        ObservedCollective(
            kind=message.kind,
            payload_bytes=message.payload_bytes,
            wire_bytes=message.wire_bytes,
            group_size=message.group_size,
            group_count=message.group_count,
            count=message.executions,
            trip_counts_known=message.trip_counts_known,
            groups=message.groups,
            instruction=message.instruction,
            op_name=message.op_name,
        )
        for message in result.collectives
    )


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
