from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EndStepsRequest(_message.Message):
    __slots__ = ("session", "number")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session: str
    number: int
    def __init__(self, session: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class EndStepsReply(_message.Message):
    __slots__ = ("session_id", "owner", "cancelled", "running")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    owner: str
    cancelled: _containers.RepeatedScalarFieldContainer[int]
    running: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[str] = ..., owner: _Optional[str] = ..., cancelled: _Optional[_Iterable[int]] = ..., running: _Optional[_Iterable[int]] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("time_s", "level", "process", "node", "pid", "session", "step", "plan", "call", "message", "traceback", "output")
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    level: str
    process: str
    node: int
    pid: int
    session: str
    step: int
    plan: str
    call: str
    message: str
    traceback: str
    output: str
    def __init__(self, time_s: _Optional[float] = ..., level: _Optional[str] = ..., process: _Optional[str] = ..., node: _Optional[int] = ..., pid: _Optional[int] = ..., session: _Optional[str] = ..., step: _Optional[int] = ..., plan: _Optional[str] = ..., call: _Optional[str] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., output: _Optional[str] = ...) -> None: ...

class ReadLogsRequest(_message.Message):
    __slots__ = ("node", "session", "level", "tail", "follow")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    node: int
    session: str
    level: str
    tail: int
    follow: bool
    def __init__(self, node: _Optional[int] = ..., session: _Optional[str] = ..., level: _Optional[str] = ..., tail: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class ReadLogsReply(_message.Message):
    __slots__ = ("lines", "has_gap")
    LINES_FIELD_NUMBER: _ClassVar[int]
    HAS_GAP_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[LogLine]
    has_gap: bool
    def __init__(self, lines: _Optional[_Iterable[_Union[LogLine, _Mapping]]] = ..., has_gap: _Optional[bool] = ...) -> None: ...

class LogLines(_message.Message):
    __slots__ = ("origin", "first_number", "lines")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    origin: str
    first_number: int
    lines: _containers.RepeatedCompositeFieldContainer[LogLine]
    def __init__(self, origin: _Optional[str] = ..., first_number: _Optional[int] = ..., lines: _Optional[_Iterable[_Union[LogLine, _Mapping]]] = ...) -> None: ...

class HostFigures(_message.Message):
    __slots__ = ("memory_bytes", "available_bytes", "resident_bytes", "snapshot_bytes", "snapshot_limit_bytes", "dropped_lines")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_LINES_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    available_bytes: int
    resident_bytes: int
    snapshot_bytes: int
    snapshot_limit_bytes: int
    dropped_lines: int
    def __init__(self, memory_bytes: _Optional[int] = ..., available_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ..., snapshot_limit_bytes: _Optional[int] = ..., dropped_lines: _Optional[int] = ...) -> None: ...

class DeviceFigures(_message.Message):
    __slots__ = ("position", "used_bytes", "limit_bytes", "peak_bytes")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    position: int
    used_bytes: int
    limit_bytes: int
    peak_bytes: int
    def __init__(self, position: _Optional[int] = ..., used_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ...) -> None: ...

class ExecutorFigures(_message.Message):
    __slots__ = ("devices", "resident_bytes", "received_bytes", "sent_bytes", "fetched_bytes")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[DeviceFigures]
    resident_bytes: int
    received_bytes: int
    sent_bytes: int
    fetched_bytes: int
    def __init__(self, devices: _Optional[_Iterable[_Union[DeviceFigures, _Mapping]]] = ..., resident_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., fetched_bytes: _Optional[int] = ...) -> None: ...
