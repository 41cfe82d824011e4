from shardwright.proto.v1 import common_pb2 as _common_pb2
from shardwright.proto.v1 import master_pb2 as _master_pb2
from shardwright.proto.v1 import operators_pb2 as _operators_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ArrayParts(_message.Message):
    __slots__ = ("array_id", "shards", "shard_bytes")
    ARRAY_ID_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    array_id: int
    shards: _containers.RepeatedScalarFieldContainer[int]
    shard_bytes: int
    def __init__(self, array_id: _Optional[int] = ..., shards: _Optional[_Iterable[int]] = ..., shard_bytes: _Optional[int] = ...) -> None: ...

class OfferPartsRequest(_message.Message):
    __slots__ = ("session_id", "number", "arrays", "order")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    number: int
    arrays: _containers.RepeatedCompositeFieldContainer[ArrayParts]
    order: SnapshotOrder
    def __init__(self, session_id: _Optional[str] = ..., number: _Optional[int] = ..., arrays: _Optional[_Iterable[_Union[ArrayParts, _Mapping]]] = ..., order: _Optional[_Union[SnapshotOrder, _Mapping]] = ...) -> None: ...

class SnapshotOrder(_message.Message):
    __slots__ = ("generation", "sequence", "keep", "keeps_all")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    KEEPS_ALL_FIELD_NUMBER: _ClassVar[int]
    generation: int
    sequence: int
    keep: _containers.RepeatedScalarFieldContainer[int]
    keeps_all: bool
    def __init__(self, generation: _Optional[int] = ..., sequence: _Optional[int] = ..., keep: _Optional[_Iterable[int]] = ..., keeps_all: _Optional[bool] = ...) -> None: ...

class OfferPartsReply(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedCompositeFieldContainer[ArrayParts]
    def __init__(self, missing: _Optional[_Iterable[_Union[ArrayParts, _Mapping]]] = ...) -> None: ...

class PutPartsRequest(_message.Message):
    __slots__ = ("session_id", "arrays", "chunk", "crc32")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    arrays: _containers.RepeatedCompositeFieldContainer[ArrayParts]
    chunk: bytes
    crc32: int
    def __init__(self, session_id: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[ArrayParts, _Mapping]]] = ..., chunk: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class PutPartsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPartsRequest(_message.Message):
    __slots__ = ("session_id", "number")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    number: int
    def __init__(self, session_id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class ListPartsReply(_message.Message):
    __slots__ = ("arrays",)
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    arrays: _containers.RepeatedCompositeFieldContainer[ArrayParts]
    def __init__(self, arrays: _Optional[_Iterable[_Union[ArrayParts, _Mapping]]] = ...) -> None: ...

class FetchPartsRequest(_message.Message):
    __slots__ = ("session_id", "arrays")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    arrays: _containers.RepeatedCompositeFieldContainer[ArrayParts]
    def __init__(self, session_id: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[ArrayParts, _Mapping]]] = ...) -> None: ...

class FetchPartsReply(_message.Message):
    __slots__ = ("chunk", "crc32")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    crc32: int
    def __init__(self, chunk: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class DaemonHello(_message.Message):
    __slots__ = ("node_index", "cluster_hash", "shardwright_version", "jax_version", "coordinator_address", "executor_generation", "snapshot_address", "snapshot_key")
    NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_HASH_FIELD_NUMBER: _ClassVar[int]
    SHARDWRIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    JAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_GENERATION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_KEY_FIELD_NUMBER: _ClassVar[int]
    node_index: int
    cluster_hash: str
    shardwright_version: str
    jax_version: str
    coordinator_address: str
    executor_generation: int
    snapshot_address: str
    snapshot_key: str
    def __init__(self, node_index: _Optional[int] = ..., cluster_hash: _Optional[str] = ..., shardwright_version: _Optional[str] = ..., jax_version: _Optional[str] = ..., coordinator_address: _Optional[str] = ..., executor_generation: _Optional[int] = ..., snapshot_address: _Optional[str] = ..., snapshot_key: _Optional[str] = ...) -> None: ...

class ExecutorExited(_message.Message):
    __slots__ = ("generation", "exit_code", "last_lines", "coordinator_address", "works", "was_killed")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    LAST_LINES_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKS_FIELD_NUMBER: _ClassVar[int]
    WAS_KILLED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    exit_code: int
    last_lines: str
    coordinator_address: str
    works: _containers.RepeatedCompositeFieldContainer[ExecutorWork]
    was_killed: bool
    def __init__(self, generation: _Optional[int] = ..., exit_code: _Optional[int] = ..., last_lines: _Optional[str] = ..., coordinator_address: _Optional[str] = ..., works: _Optional[_Iterable[_Union[ExecutorWork, _Mapping]]] = ..., was_killed: _Optional[bool] = ...) -> None: ...

class ExecutorWork(_message.Message):
    __slots__ = ("sequence", "session_id", "key", "function", "batch")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    session_id: str
    key: str
    function: str
    batch: int
    def __init__(self, sequence: _Optional[int] = ..., session_id: _Optional[str] = ..., key: _Optional[str] = ..., function: _Optional[str] = ..., batch: _Optional[int] = ...) -> None: ...

class SupervisorEvent(_message.Message):
    __slots__ = ("hello", "exited", "heartbeat", "draining", "logs")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    EXITED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    hello: DaemonHello
    exited: ExecutorExited
    heartbeat: Heartbeat
    draining: Draining
    logs: _operators_pb2.LogLines
    def __init__(self, hello: _Optional[_Union[DaemonHello, _Mapping]] = ..., exited: _Optional[_Union[ExecutorExited, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., logs: _Optional[_Union[_operators_pb2.LogLines, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("figures",)
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    figures: _operators_pb2.HostFigures
    def __init__(self, figures: _Optional[_Union[_operators_pb2.HostFigures, _Mapping]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("reason", "limit_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    limit_s: float
    def __init__(self, reason: _Optional[str] = ..., limit_s: _Optional[float] = ...) -> None: ...

class StartExecutor(_message.Message):
    __slots__ = ("generation", "coordinator_address", "process_count", "process_id", "data_port", "lease_s")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    generation: int
    coordinator_address: str
    process_count: int
    process_id: int
    data_port: int
    lease_s: float
    def __init__(self, generation: _Optional[int] = ..., coordinator_address: _Optional[str] = ..., process_count: _Optional[int] = ..., process_id: _Optional[int] = ..., data_port: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...

class StopExecutor(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.Error
    def __init__(self, error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ("reason", "is_failure")
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_FAILURE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    is_failure: bool
    def __init__(self, reason: _Optional[str] = ..., is_failure: _Optional[bool] = ...) -> None: ...

class KeptSession(_message.Message):
    __slots__ = ("session_id", "number")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    number: int
    def __init__(self, session_id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class RetainSnapshots(_message.Message):
    __slots__ = ("sessions", "generation", "sequence")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[KeptSession]
    generation: int
    sequence: int
    def __init__(self, sessions: _Optional[_Iterable[_Union[KeptSession, _Mapping]]] = ..., generation: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class SupervisorCommand(_message.Message):
    __slots__ = ("start", "stop", "refused", "shutdown", "retain")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    start: StartExecutor
    stop: StopExecutor
    refused: Refused
    shutdown: Shutdown
    retain: RetainSnapshots
    def __init__(self, start: _Optional[_Union[StartExecutor, _Mapping]] = ..., stop: _Optional[_Union[StopExecutor, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., retain: _Optional[_Union[RetainSnapshots, _Mapping]] = ...) -> None: ...

class ExecutorHello(_message.Message):
    __slots__ = ("node_index", "generation", "data_address", "device_count", "transfer_address", "pid", "machine_code", "received")
    NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MACHINE_CODE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    node_index: int
    generation: int
    data_address: str
    device_count: int
    transfer_address: str
    pid: int
    machine_code: str
    received: int
    def __init__(self, node_index: _Optional[int] = ..., generation: _Optional[int] = ..., data_address: _Optional[str] = ..., device_count: _Optional[int] = ..., transfer_address: _Optional[str] = ..., pid: _Optional[int] = ..., machine_code: _Optional[str] = ..., received: _Optional[int] = ...) -> None: ...

class ExecutorHeartbeat(_message.Message):
    __slots__ = ("sequence", "doing", "transfers", "uploading", "figures")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    UPLOADING_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    doing: str
    transfers: int
    uploading: _containers.RepeatedScalarFieldContainer[str]
    figures: _operators_pb2.ExecutorFigures
    def __init__(self, sequence: _Optional[int] = ..., doing: _Optional[str] = ..., transfers: _Optional[int] = ..., uploading: _Optional[_Iterable[str]] = ..., figures: _Optional[_Union[_operators_pb2.ExecutorFigures, _Mapping]] = ...) -> None: ...

class CommandDone(_message.Message):
    __slots__ = ("sequence", "error", "values", "run_s", "written_bytes", "traces", "not_finite")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    RUN_S_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    error: _common_pb2.Error
    values: _containers.RepeatedCompositeFieldContainer[_master_pb2.ReadBack]
    run_s: float
    written_bytes: int
    traces: _containers.RepeatedCompositeFieldContainer[_master_pb2.StageTrace]
    not_finite: _containers.RepeatedCompositeFieldContainer[_master_pb2.NotFinite]
    def __init__(self, sequence: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., values: _Optional[_Iterable[_Union[_master_pb2.ReadBack, _Mapping]]] = ..., run_s: _Optional[float] = ..., written_bytes: _Optional[int] = ..., traces: _Optional[_Iterable[_Union[_master_pb2.StageTrace, _Mapping]]] = ..., not_finite: _Optional[_Iterable[_Union[_master_pb2.NotFinite, _Mapping]]] = ...) -> None: ...

class ArrayArrived(_message.Message):
    __slots__ = ("array_id", "logical_bytes", "first_device", "device_count")
    ARRAY_ID_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_COUNT_FIELD_NUMBER: _ClassVar[int]
    array_id: int
    logical_bytes: int
    first_device: int
    device_count: int
    def __init__(self, array_id: _Optional[int] = ..., logical_bytes: _Optional[int] = ..., first_device: _Optional[int] = ..., device_count: _Optional[int] = ...) -> None: ...

class ArraysArrived(_message.Message):
    __slots__ = ("session_id", "arrays")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    arrays: _containers.RepeatedCompositeFieldContainer[ArrayArrived]
    def __init__(self, session_id: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[ArrayArrived, _Mapping]]] = ...) -> None: ...

class ExecutorEvent(_message.Message):
    __slots__ = ("hello", "done", "arrived", "heartbeat", "recent", "report")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    hello: ExecutorHello
    done: CommandDone
    arrived: ArraysArrived
    heartbeat: ExecutorHeartbeat
    recent: RecentCommands
    report: ExecutorReport
    def __init__(self, hello: _Optional[_Union[ExecutorHello, _Mapping]] = ..., done: _Optional[_Union[CommandDone, _Mapping]] = ..., arrived: _Optional[_Union[ArraysArrived, _Mapping]] = ..., heartbeat: _Optional[_Union[ExecutorHeartbeat, _Mapping]] = ..., recent: _Optional[_Union[RecentCommands, _Mapping]] = ..., report: _Optional[_Union[ExecutorReport, _Mapping]] = ...) -> None: ...

class RecentCommands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[ExecutorCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[ExecutorCommand, _Mapping]]] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("number", "done", "is_save", "is_snapshot", "kept")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    IS_SAVE_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    number: int
    done: CommandDone
    is_save: bool
    is_snapshot: bool
    kept: _master_pb2.KeptState
    def __init__(self, number: _Optional[int] = ..., done: _Optional[_Union[CommandDone, _Mapping]] = ..., is_save: _Optional[bool] = ..., is_snapshot: _Optional[bool] = ..., kept: _Optional[_Union[_master_pb2.KeptState, _Mapping]] = ...) -> None: ...

class SessionReport(_message.Message):
    __slots__ = ("session_id", "arrays", "executables", "steps", "kept")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    arrays: _containers.RepeatedCompositeFieldContainer[ArrayArrived]
    executables: _containers.RepeatedScalarFieldContainer[str]
    steps: _containers.RepeatedCompositeFieldContainer[StepRecord]
    kept: _master_pb2.KeptState
    def __init__(self, session_id: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[ArrayArrived, _Mapping]]] = ..., executables: _Optional[_Iterable[str]] = ..., steps: _Optional[_Iterable[_Union[StepRecord, _Mapping]]] = ..., kept: _Optional[_Union[_master_pb2.KeptState, _Mapping]] = ...) -> None: ...

class ExecutorReport(_message.Message):
    __slots__ = ("sequence", "sessions")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    sessions: _containers.RepeatedCompositeFieldContainer[SessionReport]
    def __init__(self, sequence: _Optional[int] = ..., sessions: _Optional[_Iterable[_Union[SessionReport, _Mapping]]] = ...) -> None: ...

class OpenWorkerSession(_message.Message):
    __slots__ = ("session_id", "refused_datasets")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REFUSED_DATASETS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    refused_datasets: _containers.RepeatedCompositeFieldContainer[RefusedDataset]
    def __init__(self, session_id: _Optional[str] = ..., refused_datasets: _Optional[_Iterable[_Union[RefusedDataset, _Mapping]]] = ...) -> None: ...

class RefusedDataset(_message.Message):
    __slots__ = ("key", "error")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    key: str
    error: _common_pb2.Error
    def __init__(self, key: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class CloseWorkerSession(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ProgramChunk(_message.Message):
    __slots__ = ("executable_id", "chunk", "crc32")
    EXECUTABLE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    executable_id: str
    chunk: bytes
    crc32: int
    def __init__(self, executable_id: _Optional[str] = ..., chunk: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class CompileOption(_message.Message):
    __slots__ = ("name", "flag", "number", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    flag: bool
    number: int
    text: str
    def __init__(self, name: _Optional[str] = ..., flag: _Optional[bool] = ..., number: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class LoadProgram(_message.Message):
    __slots__ = ("session_id", "executable_id", "is_serialized", "arguments", "outputs", "donated", "mesh", "first_device", "compile_options")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLE_ID_FIELD_NUMBER: _ClassVar[int]
    IS_SERIALIZED_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    DONATED_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    FIRST_DEVICE_FIELD_NUMBER: _ClassVar[int]
    COMPILE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    executable_id: str
    is_serialized: bool
    arguments: _containers.RepeatedCompositeFieldContainer[_common_pb2.ArrayLayout]
    outputs: _containers.RepeatedCompositeFieldContainer[_common_pb2.ArrayLayout]
    donated: _containers.RepeatedScalarFieldContainer[int]
    mesh: _containers.RepeatedCompositeFieldContainer[_common_pb2.MeshAxis]
    first_device: int
    compile_options: _containers.RepeatedCompositeFieldContainer[CompileOption]
    def __init__(self, session_id: _Optional[str] = ..., executable_id: _Optional[str] = ..., is_serialized: _Optional[bool] = ..., arguments: _Optional[_Iterable[_Union[_common_pb2.ArrayLayout, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[_common_pb2.ArrayLayout, _Mapping]]] = ..., donated: _Optional[_Iterable[int]] = ..., mesh: _Optional[_Iterable[_Union[_common_pb2.MeshAxis, _Mapping]]] = ..., first_device: _Optional[int] = ..., compile_options: _Optional[_Iterable[_Union[CompileOption, _Mapping]]] = ...) -> None: ...

class StageProgram(_message.Message):
    __slots__ = ("name", "stage", "is_serialized", "arguments", "outputs", "donated")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    IS_SERIALIZED_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    DONATED_FIELD_NUMBER: _ClassVar[int]
    name: str
    stage: int
    is_serialized: bool
    arguments: _containers.RepeatedCompositeFieldContainer[_common_pb2.ArrayLayout]
    outputs: _containers.RepeatedCompositeFieldContainer[_common_pb2.ArrayLayout]
    donated: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., stage: _Optional[int] = ..., is_serialized: _Optional[bool] = ..., arguments: _Optional[_Iterable[_Union[_common_pb2.ArrayLayout, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[_common_pb2.ArrayLayout, _Mapping]]] = ..., donated: _Optional[_Iterable[int]] = ...) -> None: ...

class StageDevices(_message.Message):
    __slots__ = ("first_device", "mesh")
    FIRST_DEVICE_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    first_device: int
    mesh: _containers.RepeatedCompositeFieldContainer[_common_pb2.MeshAxis]
    def __init__(self, first_device: _Optional[int] = ..., mesh: _Optional[_Iterable[_Union[_common_pb2.MeshAxis, _Mapping]]] = ...) -> None: ...

class StageValue(_message.Message):
    __slots__ = ("name", "stage", "layout")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    stage: int
    layout: _common_pb2.ArrayLayout
    def __init__(self, name: _Optional[str] = ..., stage: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.ArrayLayout, _Mapping]] = ...) -> None: ...

class StageEntry(_message.Message):
    __slots__ = ("value", "stage", "layout")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    value: str
    stage: int
    layout: _common_pb2.ArrayLayout
    def __init__(self, value: _Optional[str] = ..., stage: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.ArrayLayout, _Mapping]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("node", "first_device", "device_count", "transfer_address", "snapshot_address", "snapshot_key")
    NODE_FIELD_NUMBER: _ClassVar[int]
    FIRST_DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_KEY_FIELD_NUMBER: _ClassVar[int]
    node: int
    first_device: int
    device_count: int
    transfer_address: str
    snapshot_address: str
    snapshot_key: str
    def __init__(self, node: _Optional[int] = ..., first_device: _Optional[int] = ..., device_count: _Optional[int] = ..., transfer_address: _Optional[str] = ..., snapshot_address: _Optional[str] = ..., snapshot_key: _Optional[str] = ...) -> None: ...

class LoadPipeline(_message.Message):
    __slots__ = ("session_id", "executable_id", "programs", "values", "arguments", "outputs", "donated", "tasks", "peers", "stages")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLE_ID_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    DONATED_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    executable_id: str
    programs: _containers.RepeatedCompositeFieldContainer[StageProgram]
    values: _containers.RepeatedCompositeFieldContainer[StageValue]
    arguments: _containers.RepeatedCompositeFieldContainer[StageEntry]
    outputs: _containers.RepeatedCompositeFieldContainer[StageEntry]
    donated: _containers.RepeatedScalarFieldContainer[int]
    tasks: bytes
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    stages: _containers.RepeatedCompositeFieldContainer[StageDevices]
    def __init__(self, session_id: _Optional[str] = ..., executable_id: _Optional[str] = ..., programs: _Optional[_Iterable[_Union[StageProgram, _Mapping]]] = ..., values: _Optional[_Iterable[_Union[StageValue, _Mapping]]] = ..., arguments: _Optional[_Iterable[_Union[StageEntry, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[StageEntry, _Mapping]]] = ..., donated: _Optional[_Iterable[int]] = ..., tasks: _Optional[bytes] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., stages: _Optional[_Iterable[_Union[StageDevices, _Mapping]]] = ...) -> None: ...

class AbortStep(_message.Message):
    __slots__ = ("sequence", "error")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    error: _common_pb2.Error
    def __init__(self, sequence: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class UnloadProgram(_message.Message):
    __slots__ = ("session_id", "executable_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    executable_id: str
    def __init__(self, session_id: _Optional[str] = ..., executable_id: _Optional[str] = ...) -> None: ...

class RunStep(_message.Message):
    __slots__ = ("step", "peers")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    step: _master_pb2.RunStepsRequest
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, step: _Optional[_Union[_master_pb2.RunStepsRequest, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class ReleaseWorkerArrays(_message.Message):
    __slots__ = ("session_id", "array_ids", "error")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARRAY_IDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    array_ids: _containers.RepeatedScalarFieldContainer[int]
    error: _common_pb2.Error
    def __init__(self, session_id: _Optional[str] = ..., array_ids: _Optional[_Iterable[int]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class WriteCheckpoint(_message.Message):
    __slots__ = ("session_id", "number")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    number: int
    def __init__(self, session_id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class FinishCheckpoint(_message.Message):
    __slots__ = ("session_id", "number", "is_commit")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_COMMIT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    number: int
    is_commit: bool
    def __init__(self, session_id: _Optional[str] = ..., number: _Optional[int] = ..., is_commit: _Optional[bool] = ...) -> None: ...

class StoreSnapshot(_message.Message):
    __slots__ = ("session_id", "number", "peers", "order")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    number: int
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    order: SnapshotOrder
    def __init__(self, session_id: _Optional[str] = ..., number: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., order: _Optional[_Union[SnapshotOrder, _Mapping]] = ...) -> None: ...

class SendRecent(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class SkipCommand(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Report(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExecutorCommand(_message.Message):
    __slots__ = ("sequence", "known", "open", "close", "chunk", "load", "unload", "run", "release", "write_checkpoint", "finish_checkpoint", "shutdown", "load_pipeline", "store_snapshot", "send_recent", "skip", "report", "abort")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    WRITE_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    FINISH_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    LOAD_PIPELINE_FIELD_NUMBER: _ClassVar[int]
    STORE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SEND_RECENT_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    known: int
    open: OpenWorkerSession
    close: CloseWorkerSession
    chunk: ProgramChunk
    load: LoadProgram
    unload: UnloadProgram
    run: RunStep
    release: ReleaseWorkerArrays
    write_checkpoint: WriteCheckpoint
    finish_checkpoint: FinishCheckpoint
    shutdown: Shutdown
    load_pipeline: LoadPipeline
    store_snapshot: StoreSnapshot
    send_recent: SendRecent
    skip: SkipCommand
    report: Report
    abort: AbortStep
    def __init__(self, sequence: _Optional[int] = ..., known: _Optional[int] = ..., open: _Optional[_Union[OpenWorkerSession, _Mapping]] = ..., close: _Optional[_Union[CloseWorkerSession, _Mapping]] = ..., chunk: _Optional[_Union[ProgramChunk, _Mapping]] = ..., load: _Optional[_Union[LoadProgram, _Mapping]] = ..., unload: _Optional[_Union[UnloadProgram, _Mapping]] = ..., run: _Optional[_Union[RunStep, _Mapping]] = ..., release: _Optional[_Union[ReleaseWorkerArrays, _Mapping]] = ..., write_checkpoint: _Optional[_Union[WriteCheckpoint, _Mapping]] = ..., finish_checkpoint: _Optional[_Union[FinishCheckpoint, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., load_pipeline: _Optional[_Union[LoadPipeline, _Mapping]] = ..., store_snapshot: _Optional[_Union[StoreSnapshot, _Mapping]] = ..., send_recent: _Optional[_Union[SendRecent, _Mapping]] = ..., skip: _Optional[_Union[SkipCommand, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., abort: _Optional[_Union[AbortStep, _Mapping]] = ...) -> None: ...
