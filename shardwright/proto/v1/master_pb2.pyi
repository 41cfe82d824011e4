from shardwright.proto.v1 import common_pb2 as _common_pb2
from shardwright.proto.v1 import operators_pb2 as _operators_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenSessionRequest(_message.Message):
    __slots__ = ("client_version", "name")
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    client_version: str
    name: str
    def __init__(self, client_version: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("index", "data_address", "first_device", "device_count")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_COUNT_FIELD_NUMBER: _ClassVar[int]
    index: int
    data_address: str
    first_device: int
    device_count: int
    def __init__(self, index: _Optional[int] = ..., data_address: _Optional[str] = ..., first_device: _Optional[int] = ..., device_count: _Optional[int] = ...) -> None: ...

class OpenSessionReply(_message.Message):
    __slots__ = ("session_id", "server_version", "cluster_name", "platform", "nodes", "chunk_bytes", "jax_version", "max_pending_steps", "grace_s", "read_back_bytes", "is_taken_up", "last_step", "next_array_id", "kept", "snapshot_kept", "snapshot", "was_kept", "session_secret", "is_elastic", "compute_capability", "cudnn_version")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    JAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_PENDING_STEPS_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    READ_BACK_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_TAKEN_UP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    NEXT_ARRAY_ID_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_KEPT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    WAS_KEPT_FIELD_NUMBER: _ClassVar[int]
    SESSION_SECRET_FIELD_NUMBER: _ClassVar[int]
    IS_ELASTIC_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    CUDNN_VERSION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    server_version: str
    cluster_name: str
    platform: str
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    chunk_bytes: int
    jax_version: str
    max_pending_steps: int
    grace_s: float
    read_back_bytes: int
    is_taken_up: bool
    last_step: int
    next_array_id: int
    kept: KeptState
    snapshot_kept: KeptState
    snapshot: int
    was_kept: bool
    session_secret: str
    is_elastic: bool
    compute_capability: str
    cudnn_version: str
    def __init__(self, session_id: _Optional[str] = ..., server_version: _Optional[str] = ..., cluster_name: _Optional[str] = ..., platform: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., chunk_bytes: _Optional[int] = ..., jax_version: _Optional[str] = ..., max_pending_steps: _Optional[int] = ..., grace_s: _Optional[float] = ..., read_back_bytes: _Optional[int] = ..., is_taken_up: _Optional[bool] = ..., last_step: _Optional[int] = ..., next_array_id: _Optional[int] = ..., kept: _Optional[_Union[KeptState, _Mapping]] = ..., snapshot_kept: _Optional[_Union[KeptState, _Mapping]] = ..., snapshot: _Optional[int] = ..., was_kept: _Optional[bool] = ..., session_secret: _Optional[str] = ..., is_elastic: _Optional[bool] = ..., compute_capability: _Optional[str] = ..., cudnn_version: _Optional[str] = ...) -> None: ...

class KeptState(_message.Message):
    __slots__ = ("description", "array_ids", "updates")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ARRAY_IDS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    description: bytes
    array_ids: _containers.RepeatedScalarFieldContainer[int]
    updates: int
    def __init__(self, description: _Optional[bytes] = ..., array_ids: _Optional[_Iterable[int]] = ..., updates: _Optional[int] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class EndSessionReply(_message.Message):
    __slots__ = ("session_id", "owner")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    owner: str
    def __init__(self, session_id: _Optional[str] = ..., owner: _Optional[str] = ...) -> None: ...

class InterruptPlanningRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class InterruptPlanningReply(_message.Message):
    __slots__ = ("searches",)
    SEARCHES_FIELD_NUMBER: _ClassVar[int]
    searches: int
    def __init__(self, searches: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("limit_s",)
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    limit_s: float
    def __init__(self, limit_s: _Optional[float] = ...) -> None: ...

class UploadProgramRequest(_message.Message):
    __slots__ = ("session_id", "chunk")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    chunk: bytes
    def __init__(self, session_id: _Optional[str] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class UploadProgramReply(_message.Message):
    __slots__ = ("program_id",)
    PROGRAM_ID_FIELD_NUMBER: _ClassVar[int]
    program_id: str
    def __init__(self, program_id: _Optional[str] = ...) -> None: ...

class PinnedLayout(_message.Message):
    __slots__ = ("number", "dimensions", "view")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    number: int
    dimensions: _containers.RepeatedCompositeFieldContainer[_common_pb2.DimensionAxes]
    view: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., dimensions: _Optional[_Iterable[_Union[_common_pb2.DimensionAxes, _Mapping]]] = ..., view: _Optional[_Iterable[int]] = ...) -> None: ...

class ForcedPin(_message.Message):
    __slots__ = ("name_pattern", "dimension", "axes", "replicated")
    NAME_PATTERN_FIELD_NUMBER: _ClassVar[int]
    DIMENSION_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    REPLICATED_FIELD_NUMBER: _ClassVar[int]
    name_pattern: str
    dimension: int
    axes: str
    replicated: bool
    def __init__(self, name_pattern: _Optional[str] = ..., dimension: _Optional[int] = ..., axes: _Optional[str] = ..., replicated: _Optional[bool] = ...) -> None: ...

class PlanProgramRequest(_message.Message):
    __slots__ = ("session_id", "program_id", "mesh", "forced_strategy", "forced_pins", "argument_layouts", "output_layouts", "argument_names", "output_names", "memory_budget_bytes", "memory_fraction", "deadline_s", "effort", "rewrites", "mode", "first_device", "device_count", "micro_batches", "micro_batch_inexact", "stages", "schedule", "imbalance", "remat", "simple", "fused_attention", "expert_capacity", "offload", "constraints", "bucket_bytes", "rest", "local_arguments", "plan_gzip", "first_plan", "in_background")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_ID_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    FORCED_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    FORCED_PINS_FIELD_NUMBER: _ClassVar[int]
    ARGUMENT_LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    ARGUMENT_NAMES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_NAMES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FRACTION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    EFFORT_FIELD_NUMBER: _ClassVar[int]
    REWRITES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    FIRST_DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_INEXACT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    REMAT_FIELD_NUMBER: _ClassVar[int]
    SIMPLE_FIELD_NUMBER: _ClassVar[int]
    FUSED_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    EXPERT_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINTS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    PLAN_GZIP_FIELD_NUMBER: _ClassVar[int]
    FIRST_PLAN_FIELD_NUMBER: _ClassVar[int]
    IN_BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    program_id: str
    mesh: _containers.RepeatedCompositeFieldContainer[_common_pb2.MeshAxis]
    forced_strategy: str
    forced_pins: _containers.RepeatedCompositeFieldContainer[ForcedPin]
    argument_layouts: _containers.RepeatedCompositeFieldContainer[PinnedLayout]
    output_layouts: _containers.RepeatedCompositeFieldContainer[PinnedLayout]
    argument_names: _containers.RepeatedScalarFieldContainer[str]
    output_names: _containers.RepeatedScalarFieldContainer[str]
    memory_budget_bytes: int
    memory_fraction: float
    deadline_s: float
    effort: str
    rewrites: str
    mode: str
    first_device: int
    device_count: int
    micro_batches: int
    micro_batch_inexact: bool
    stages: int
    schedule: str
    imbalance: float
    remat: str
    simple: bool
    fused_attention: str
    expert_capacity: float
    offload: str
    constraints: str
    bucket_bytes: int
    rest: str
    local_arguments: _containers.RepeatedScalarFieldContainer[int]
    plan_gzip: bytes
    first_plan: bool
    in_background: bool
    def __init__(self, session_id: _Optional[str] = ..., program_id: _Optional[str] = ..., mesh: _Optional[_Iterable[_Union[_common_pb2.MeshAxis, _Mapping]]] = ..., forced_strategy: _Optional[str] = ..., forced_pins: _Optional[_Iterable[_Union[ForcedPin, _Mapping]]] = ..., argument_layouts: _Optional[_Iterable[_Union[PinnedLayout, _Mapping]]] = ..., output_layouts: _Optional[_Iterable[_Union[PinnedLayout, _Mapping]]] = ..., argument_names: _Optional[_Iterable[str]] = ..., output_names: _Optional[_Iterable[str]] = ..., memory_budget_bytes: _Optional[int] = ..., memory_fraction: _Optional[float] = ..., deadline_s: _Optional[float] = ..., effort: _Optional[str] = ..., rewrites: _Optional[str] = ..., mode: _Optional[str] = ..., first_device: _Optional[int] = ..., device_count: _Optional[int] = ..., micro_batches: _Optional[int] = ..., micro_batch_inexact: _Optional[bool] = ..., stages: _Optional[int] = ..., schedule: _Optional[str] = ..., imbalance: _Optional[float] = ..., remat: _Optional[str] = ..., simple: _Optional[bool] = ..., fused_attention: _Optional[str] = ..., expert_capacity: _Optional[float] = ..., offload: _Optional[str] = ..., constraints: _Optional[str] = ..., bucket_bytes: _Optional[int] = ..., rest: _Optional[str] = ..., local_arguments: _Optional[_Iterable[int]] = ..., plan_gzip: _Optional[bytes] = ..., first_plan: _Optional[bool] = ..., in_background: _Optional[bool] = ...) -> None: ...

class PlanProgress(_message.Message):
    __slots__ = ("phase", "detail", "incumbent_s", "lower_bound_s", "elapsed_s")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    INCUMBENT_S_FIELD_NUMBER: _ClassVar[int]
    LOWER_BOUND_S_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    phase: str
    detail: str
    incumbent_s: float
    lower_bound_s: float
    elapsed_s: float
    def __init__(self, phase: _Optional[str] = ..., detail: _Optional[str] = ..., incumbent_s: _Optional[float] = ..., lower_bound_s: _Optional[float] = ..., elapsed_s: _Optional[float] = ...) -> None: ...

class PlanResult(_message.Message):
    __slots__ = ("plan_id",)
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    plan_id: str
    def __init__(self, plan_id: _Optional[str] = ...) -> None: ...

class PlanProgramReply(_message.Message):
    __slots__ = ("progress", "result", "plan_chunk")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PLAN_CHUNK_FIELD_NUMBER: _ClassVar[int]
    progress: PlanProgress
    result: PlanResult
    plan_chunk: bytes
    def __init__(self, progress: _Optional[_Union[PlanProgress, _Mapping]] = ..., result: _Optional[_Union[PlanResult, _Mapping]] = ..., plan_chunk: _Optional[bytes] = ...) -> None: ...

class LoadPlanRequest(_message.Message):
    __slots__ = ("session_id", "plan_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    plan_id: str
    def __init__(self, session_id: _Optional[str] = ..., plan_id: _Optional[str] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("phase", "elapsed_s")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    phase: str
    elapsed_s: float
    def __init__(self, phase: _Optional[str] = ..., elapsed_s: _Optional[float] = ...) -> None: ...

class ObservedCollective(_message.Message):
    __slots__ = ("kind", "payload_bytes", "wire_bytes", "group_size", "group_count", "executions", "instruction", "op_name", "groups", "trip_counts_known")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    OP_NAME_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TRIP_COUNTS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    kind: str
    payload_bytes: int
    wire_bytes: int
    group_size: int
    group_count: int
    executions: int
    instruction: str
    op_name: str
    groups: str
    trip_counts_known: bool
    def __init__(self, kind: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., group_size: _Optional[int] = ..., group_count: _Optional[int] = ..., executions: _Optional[int] = ..., instruction: _Optional[str] = ..., op_name: _Optional[str] = ..., groups: _Optional[str] = ..., trip_counts_known: _Optional[bool] = ...) -> None: ...

class LoadResult(_message.Message):
    __slots__ = ("executable_id", "collectives", "arguments_bytes", "outputs_bytes", "temporaries_bytes", "aliased_bytes", "compile_s", "parts")
    EXECUTABLE_ID_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEMPORARIES_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALIASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPILE_S_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    executable_id: str
    collectives: _containers.RepeatedCompositeFieldContainer[ObservedCollective]
    arguments_bytes: int
    outputs_bytes: int
    temporaries_bytes: int
    aliased_bytes: int
    compile_s: float
    parts: _containers.RepeatedCompositeFieldContainer[LoadedPart]
    def __init__(self, executable_id: _Optional[str] = ..., collectives: _Optional[_Iterable[_Union[ObservedCollective, _Mapping]]] = ..., arguments_bytes: _Optional[int] = ..., outputs_bytes: _Optional[int] = ..., temporaries_bytes: _Optional[int] = ..., aliased_bytes: _Optional[int] = ..., compile_s: _Optional[float] = ..., parts: _Optional[_Iterable[_Union[LoadedPart, _Mapping]]] = ...) -> None: ...

class LoadedPart(_message.Message):
    __slots__ = ("name", "stage", "result")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    name: str
    stage: int
    result: LoadResult
    def __init__(self, name: _Optional[str] = ..., stage: _Optional[int] = ..., result: _Optional[_Union[LoadResult, _Mapping]] = ...) -> None: ...

class LoadPlanReply(_message.Message):
    __slots__ = ("progress", "result")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    progress: LoadProgress
    result: LoadResult
    def __init__(self, progress: _Optional[_Union[LoadProgress, _Mapping]] = ..., result: _Optional[_Union[LoadResult, _Mapping]] = ...) -> None: ...

class DumpPlanRequest(_message.Message):
    __slots__ = ("session_id", "plan_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    plan_id: str
    def __init__(self, session_id: _Optional[str] = ..., plan_id: _Optional[str] = ...) -> None: ...

class DumpPlanReply(_message.Message):
    __slots__ = ("program", "form", "chunk")
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    program: str
    form: str
    chunk: bytes
    def __init__(self, program: _Optional[str] = ..., form: _Optional[str] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class InlineArray(_message.Message):
    __slots__ = ("array_id", "layout", "data")
    ARRAY_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    array_id: int
    layout: _common_pb2.ArrayLayout
    data: bytes
    def __init__(self, array_id: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.ArrayLayout, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class RunStepsRequest(_message.Message):
    __slots__ = ("session_id", "number", "executable_id", "arguments", "outputs", "inline_arguments", "released", "read_back", "save", "restore", "read_batch", "move", "trace", "check_nans", "check_infs", "timeout_s", "snapshot", "restore_snapshot", "generation", "restores", "name", "resendable", "live_arrays", "kept", "protection")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLE_ID_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    INLINE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    READ_BACK_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    READ_BATCH_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    CHECK_NANS_FIELD_NUMBER: _ClassVar[int]
    CHECK_INFS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RESTORE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RESENDABLE_FIELD_NUMBER: _ClassVar[int]
    LIVE_ARRAYS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    PROTECTION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    number: int
    executable_id: str
    arguments: _containers.RepeatedScalarFieldContainer[int]
    outputs: _containers.RepeatedScalarFieldContainer[int]
    inline_arguments: _containers.RepeatedCompositeFieldContainer[InlineArray]
    released: _containers.RepeatedScalarFieldContainer[int]
    read_back: _containers.RepeatedScalarFieldContainer[int]
    save: SaveArrays
    restore: RestoreArrays
    read_batch: ReadBatch
    move: MoveArrays
    trace: bool
    check_nans: bool
    check_infs: bool
    timeout_s: float
    snapshot: SnapshotArrays
    restore_snapshot: RestoreSnapshot
    generation: int
    restores: bool
    name: str
    resendable: _containers.RepeatedScalarFieldContainer[int]
    live_arrays: _containers.RepeatedScalarFieldContainer[int]
    kept: KeptState
    protection: Protection
    def __init__(self, session_id: _Optional[str] = ..., number: _Optional[int] = ..., executable_id: _Optional[str] = ..., arguments: _Optional[_Iterable[int]] = ..., outputs: _Optional[_Iterable[int]] = ..., inline_arguments: _Optional[_Iterable[_Union[InlineArray, _Mapping]]] = ..., released: _Optional[_Iterable[int]] = ..., read_back: _Optional[_Iterable[int]] = ..., save: _Optional[_Union[SaveArrays, _Mapping]] = ..., restore: _Optional[_Union[RestoreArrays, _Mapping]] = ..., read_batch: _Optional[_Union[ReadBatch, _Mapping]] = ..., move: _Optional[_Union[MoveArrays, _Mapping]] = ..., trace: _Optional[bool] = ..., check_nans: _Optional[bool] = ..., check_infs: _Optional[bool] = ..., timeout_s: _Optional[float] = ..., snapshot: _Optional[_Union[SnapshotArrays, _Mapping]] = ..., restore_snapshot: _Optional[_Union[RestoreSnapshot, _Mapping]] = ..., generation: _Optional[int] = ..., restores: _Optional[bool] = ..., name: _Optional[str] = ..., resendable: _Optional[_Iterable[int]] = ..., live_arrays: _Optional[_Iterable[int]] = ..., kept: _Optional[_Union[KeptState, _Mapping]] = ..., protection: _Optional[_Union[Protection, _Mapping]] = ...) -> None: ...

class Protection(_message.Message):
    __slots__ = ("is_wanted", "is_ready", "snapshot")
    IS_WANTED_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    is_wanted: bool
    is_ready: bool
    snapshot: int
    def __init__(self, is_wanted: _Optional[bool] = ..., is_ready: _Optional[bool] = ..., snapshot: _Optional[int] = ...) -> None: ...

class SnapshotArrays(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestoreSnapshot(_message.Message):
    __slots__ = ("snapshot", "layouts", "stored")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    snapshot: int
    layouts: _containers.RepeatedCompositeFieldContainer[_common_pb2.ArrayLayout]
    stored: _containers.RepeatedCompositeFieldContainer[StoredArray]
    def __init__(self, snapshot: _Optional[int] = ..., layouts: _Optional[_Iterable[_Union[_common_pb2.ArrayLayout, _Mapping]]] = ..., stored: _Optional[_Iterable[_Union[StoredArray, _Mapping]]] = ...) -> None: ...

class StoredArray(_message.Message):
    __slots__ = ("ids", "parts", "first_row")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    parts: _containers.RepeatedCompositeFieldContainer[MovedPart]
    first_row: int
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[_Union[MovedPart, _Mapping]]] = ..., first_row: _Optional[int] = ...) -> None: ...

class SnapshotEnd(_message.Message):
    __slots__ = ("number", "error", "kept_bytes", "store_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: _common_pb2.Error
    kept_bytes: int
    store_s: float
    def __init__(self, number: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., kept_bytes: _Optional[int] = ..., store_s: _Optional[float] = ...) -> None: ...

class MoveArrays(_message.Message):
    __slots__ = ("arrays",)
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    arrays: _containers.RepeatedCompositeFieldContainer[MovedArray]
    def __init__(self, arrays: _Optional[_Iterable[_Union[MovedArray, _Mapping]]] = ...) -> None: ...

class MovedArray(_message.Message):
    __slots__ = ("sources", "targets")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[MovedPart]
    targets: _containers.RepeatedCompositeFieldContainer[MovedPart]
    def __init__(self, sources: _Optional[_Iterable[_Union[MovedPart, _Mapping]]] = ..., targets: _Optional[_Iterable[_Union[MovedPart, _Mapping]]] = ...) -> None: ...

class MovedPart(_message.Message):
    __slots__ = ("layout", "first_row")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    layout: _common_pb2.ArrayLayout
    first_row: int
    def __init__(self, layout: _Optional[_Union[_common_pb2.ArrayLayout, _Mapping]] = ..., first_row: _Optional[int] = ...) -> None: ...

class SaveArrays(_message.Message):
    __slots__ = ("directory", "step", "parts", "tree_json", "max_to_keep")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TREE_JSON_FIELD_NUMBER: _ClassVar[int]
    MAX_TO_KEEP_FIELD_NUMBER: _ClassVar[int]
    directory: str
    step: int
    parts: _containers.RepeatedCompositeFieldContainer[SavedPart]
    tree_json: str
    max_to_keep: int
    def __init__(self, directory: _Optional[str] = ..., step: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[SavedPart, _Mapping]]] = ..., tree_json: _Optional[str] = ..., max_to_keep: _Optional[int] = ...) -> None: ...

class SavedPart(_message.Message):
    __slots__ = ("name", "shape", "chunk", "first_row")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    chunk: _containers.RepeatedScalarFieldContainer[int]
    first_row: int
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., chunk: _Optional[_Iterable[int]] = ..., first_row: _Optional[int] = ...) -> None: ...

class RestoredPart(_message.Message):
    __slots__ = ("name", "layout", "first_row")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    name: str
    layout: _common_pb2.ArrayLayout
    first_row: int
    def __init__(self, name: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.ArrayLayout, _Mapping]] = ..., first_row: _Optional[int] = ...) -> None: ...

class RestoreArrays(_message.Message):
    __slots__ = ("directory", "step", "parts")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    directory: str
    step: int
    parts: _containers.RepeatedCompositeFieldContainer[RestoredPart]
    def __init__(self, directory: _Optional[str] = ..., step: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[RestoredPart, _Mapping]]] = ...) -> None: ...

class Dataset(_message.Message):
    __slots__ = ("dataset_id", "function", "batch", "options_json", "prefetch")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    function: str
    batch: int
    options_json: str
    prefetch: int
    def __init__(self, dataset_id: _Optional[str] = ..., function: _Optional[str] = ..., batch: _Optional[int] = ..., options_json: _Optional[str] = ..., prefetch: _Optional[int] = ...) -> None: ...

class BatchPart(_message.Message):
    __slots__ = ("leaf", "layout", "first_row")
    LEAF_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    leaf: int
    layout: _common_pb2.ArrayLayout
    first_row: int
    def __init__(self, leaf: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.ArrayLayout, _Mapping]] = ..., first_row: _Optional[int] = ...) -> None: ...

class ReadBatch(_message.Message):
    __slots__ = ("dataset", "position", "parts")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    dataset: Dataset
    position: int
    parts: _containers.RepeatedCompositeFieldContainer[BatchPart]
    def __init__(self, dataset: _Optional[_Union[Dataset, _Mapping]] = ..., position: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[BatchPart, _Mapping]]] = ...) -> None: ...

class AwaitBatchRequest(_message.Message):
    __slots__ = ("session_id", "dataset", "position", "first", "parts")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    dataset: Dataset
    position: int
    first: int
    parts: _containers.RepeatedCompositeFieldContainer[BatchPart]
    def __init__(self, session_id: _Optional[str] = ..., dataset: _Optional[_Union[Dataset, _Mapping]] = ..., position: _Optional[int] = ..., first: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[BatchPart, _Mapping]]] = ...) -> None: ...

class BatchLeaf(_message.Message):
    __slots__ = ("element_type", "row_shape")
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    ROW_SHAPE_FIELD_NUMBER: _ClassVar[int]
    element_type: str
    row_shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, element_type: _Optional[str] = ..., row_shape: _Optional[_Iterable[int]] = ...) -> None: ...

class AwaitBatchReply(_message.Message):
    __slots__ = ("ready", "is_end", "tree_json", "leaves")
    READY_FIELD_NUMBER: _ClassVar[int]
    IS_END_FIELD_NUMBER: _ClassVar[int]
    TREE_JSON_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    ready: int
    is_end: bool
    tree_json: str
    leaves: _containers.RepeatedCompositeFieldContainer[BatchLeaf]
    def __init__(self, ready: _Optional[int] = ..., is_end: _Optional[bool] = ..., tree_json: _Optional[str] = ..., leaves: _Optional[_Iterable[_Union[BatchLeaf, _Mapping]]] = ...) -> None: ...

class CloseDatasetRequest(_message.Message):
    __slots__ = ("session_id", "dataset_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    dataset_id: str
    def __init__(self, session_id: _Optional[str] = ..., dataset_id: _Optional[str] = ...) -> None: ...

class CloseDatasetReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WaitForSaveRequest(_message.Message):
    __slots__ = ("session_id", "number")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    number: int
    def __init__(self, session_id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class WaitForSaveReply(_message.Message):
    __slots__ = ("written_bytes", "save_s")
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVE_S_FIELD_NUMBER: _ClassVar[int]
    written_bytes: int
    save_s: float
    def __init__(self, written_bytes: _Optional[int] = ..., save_s: _Optional[float] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("session_id", "directory")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    directory: str
    def __init__(self, session_id: _Optional[str] = ..., directory: _Optional[str] = ...) -> None: ...

class ListCheckpointsReply(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, steps: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeCheckpointRequest(_message.Message):
    __slots__ = ("session_id", "directory", "step")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    directory: str
    step: int
    def __init__(self, session_id: _Optional[str] = ..., directory: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class CheckpointArray(_message.Message):
    __slots__ = ("name", "type")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: _common_pb2.ArrayType
    def __init__(self, name: _Optional[str] = ..., type: _Optional[_Union[_common_pb2.ArrayType, _Mapping]] = ...) -> None: ...

class DescribeCheckpointReply(_message.Message):
    __slots__ = ("tree_json", "arrays", "has_checksums")
    TREE_JSON_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    tree_json: str
    arrays: _containers.RepeatedCompositeFieldContainer[CheckpointArray]
    has_checksums: bool
    def __init__(self, tree_json: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[CheckpointArray, _Mapping]]] = ..., has_checksums: _Optional[bool] = ...) -> None: ...

class ReadBack(_message.Message):
    __slots__ = ("array_id", "type", "data")
    ARRAY_ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    array_id: int
    type: _common_pb2.ArrayType
    data: bytes
    def __init__(self, array_id: _Optional[int] = ..., type: _Optional[_Union[_common_pb2.ArrayType, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class RunStepsReply(_message.Message):
    __slots__ = ("number", "error", "values", "run_s", "traces", "not_finite", "waiting_for", "drain", "lost", "snapshot", "resend")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    RUN_S_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RESEND_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: _common_pb2.Error
    values: _containers.RepeatedCompositeFieldContainer[ReadBack]
    run_s: float
    traces: _containers.RepeatedCompositeFieldContainer[StageTrace]
    not_finite: _containers.RepeatedCompositeFieldContainer[NotFinite]
    waiting_for: str
    drain: DrainNotice
    lost: _common_pb2.Error
    snapshot: SnapshotEnd
    resend: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., values: _Optional[_Iterable[_Union[ReadBack, _Mapping]]] = ..., run_s: _Optional[float] = ..., traces: _Optional[_Iterable[_Union[StageTrace, _Mapping]]] = ..., not_finite: _Optional[_Iterable[_Union[NotFinite, _Mapping]]] = ..., waiting_for: _Optional[str] = ..., drain: _Optional[_Union[DrainNotice, _Mapping]] = ..., lost: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotEnd, _Mapping]] = ..., resend: _Optional[_Iterable[int]] = ...) -> None: ...

class DrainNotice(_message.Message):
    __slots__ = ("reason", "left_s", "is_over")
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    reason: str
    left_s: float
    is_over: bool
    def __init__(self, reason: _Optional[str] = ..., left_s: _Optional[float] = ..., is_over: _Optional[bool] = ...) -> None: ...

class CancelStepsRequest(_message.Message):
    __slots__ = ("session_id", "numbers")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[str] = ..., numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelStepsReply(_message.Message):
    __slots__ = ("cancelled", "running")
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    cancelled: _containers.RepeatedScalarFieldContainer[int]
    running: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cancelled: _Optional[_Iterable[int]] = ..., running: _Optional[_Iterable[int]] = ...) -> None: ...

class NotFinite(_message.Message):
    __slots__ = ("array_id", "nans", "infs")
    ARRAY_ID_FIELD_NUMBER: _ClassVar[int]
    NANS_FIELD_NUMBER: _ClassVar[int]
    INFS_FIELD_NUMBER: _ClassVar[int]
    array_id: int
    nans: bool
    infs: bool
    def __init__(self, array_id: _Optional[int] = ..., nans: _Optional[bool] = ..., infs: _Optional[bool] = ...) -> None: ...

class TaskSpan(_message.Message):
    __slots__ = ("task", "start_s", "end_s")
    TASK_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    task: int
    start_s: float
    end_s: float
    def __init__(self, task: _Optional[int] = ..., start_s: _Optional[float] = ..., end_s: _Optional[float] = ...) -> None: ...

class StageTrace(_message.Message):
    __slots__ = ("stage", "node", "spans", "peak_buffers", "peak_micro_batches", "peak_bytes")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    PEAK_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    PEAK_MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    stage: int
    node: int
    spans: _containers.RepeatedCompositeFieldContainer[TaskSpan]
    peak_buffers: int
    peak_micro_batches: int
    peak_bytes: int
    def __init__(self, stage: _Optional[int] = ..., node: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[TaskSpan, _Mapping]]] = ..., peak_buffers: _Optional[int] = ..., peak_micro_batches: _Optional[int] = ..., peak_bytes: _Optional[int] = ...) -> None: ...

class ReleaseArraysRequest(_message.Message):
    __slots__ = ("session_id", "array_ids", "after_step")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARRAY_IDS_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    array_ids: _containers.RepeatedScalarFieldContainer[int]
    after_step: int
    def __init__(self, session_id: _Optional[str] = ..., array_ids: _Optional[_Iterable[int]] = ..., after_step: _Optional[int] = ...) -> None: ...

class ReleaseArraysReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnloadPlanRequest(_message.Message):
    __slots__ = ("session_id", "executable_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    executable_id: str
    def __init__(self, session_id: _Optional[str] = ..., executable_id: _Optional[str] = ...) -> None: ...

class UnloadPlanReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "state", "generation", "detail", "host", "executor", "executor_pid", "executor_exits", "daemon_silent_s", "executor_silent_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_PID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EXITS_FIELD_NUMBER: _ClassVar[int]
    DAEMON_SILENT_S_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_SILENT_S_FIELD_NUMBER: _ClassVar[int]
    node: Node
    state: str
    generation: int
    detail: str
    host: _operators_pb2.HostFigures
    executor: _operators_pb2.ExecutorFigures
    executor_pid: int
    executor_exits: int
    daemon_silent_s: float
    executor_silent_s: float
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., state: _Optional[str] = ..., generation: _Optional[int] = ..., detail: _Optional[str] = ..., host: _Optional[_Union[_operators_pb2.HostFigures, _Mapping]] = ..., executor: _Optional[_Union[_operators_pb2.ExecutorFigures, _Mapping]] = ..., executor_pid: _Optional[int] = ..., executor_exits: _Optional[int] = ..., daemon_silent_s: _Optional[float] = ..., executor_silent_s: _Optional[float] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("session_id", "last_step", "array_count", "array_bytes", "executable_count", "snapshot", "snapshot_bytes", "name", "owner", "running_steps", "queued_steps", "steps_per_s", "idle_s", "is_connected", "snapshot_age_s", "protection")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    ARRAY_COUNT_FIELD_NUMBER: _ClassVar[int]
    ARRAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    RUNNING_STEPS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    IS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    PROTECTION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    last_step: int
    array_count: int
    array_bytes: int
    executable_count: int
    snapshot: int
    snapshot_bytes: int
    name: str
    owner: str
    running_steps: int
    queued_steps: int
    steps_per_s: float
    idle_s: float
    is_connected: bool
    snapshot_age_s: float
    protection: Protection
    def __init__(self, session_id: _Optional[str] = ..., last_step: _Optional[int] = ..., array_count: _Optional[int] = ..., array_bytes: _Optional[int] = ..., executable_count: _Optional[int] = ..., snapshot: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ..., name: _Optional[str] = ..., owner: _Optional[str] = ..., running_steps: _Optional[int] = ..., queued_steps: _Optional[int] = ..., steps_per_s: _Optional[float] = ..., idle_s: _Optional[float] = ..., is_connected: _Optional[bool] = ..., snapshot_age_s: _Optional[float] = ..., protection: _Optional[_Union[Protection, _Mapping]] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("server_version", "jax_version", "cluster_name", "platform", "state", "nodes", "sessions", "waiting_for", "recovered_sessions", "has_adopted", "uptime_s", "planning", "compiling", "people")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    JAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    HAS_ADOPTED_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    PLANNING_FIELD_NUMBER: _ClassVar[int]
    COMPILING_FIELD_NUMBER: _ClassVar[int]
    PEOPLE_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    jax_version: str
    cluster_name: str
    platform: str
    state: str
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    waiting_for: str
    recovered_sessions: int
    has_adopted: bool
    uptime_s: float
    planning: QueueStatus
    compiling: QueueStatus
    people: _containers.RepeatedCompositeFieldContainer[PersonStatus]
    def __init__(self, server_version: _Optional[str] = ..., jax_version: _Optional[str] = ..., cluster_name: _Optional[str] = ..., platform: _Optional[str] = ..., state: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., waiting_for: _Optional[str] = ..., recovered_sessions: _Optional[int] = ..., has_adopted: _Optional[bool] = ..., uptime_s: _Optional[float] = ..., planning: _Optional[_Union[QueueStatus, _Mapping]] = ..., compiling: _Optional[_Union[QueueStatus, _Mapping]] = ..., people: _Optional[_Iterable[_Union[PersonStatus, _Mapping]]] = ...) -> None: ...

class PersonStatus(_message.Message):
    __slots__ = ("name", "sessions", "session_limit", "array_bytes", "array_limit_bytes", "program_bytes", "program_limit_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSION_LIMIT_FIELD_NUMBER: _ClassVar[int]
    ARRAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARRAY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    sessions: int
    session_limit: int
    array_bytes: int
    array_limit_bytes: int
    program_bytes: int
    program_limit_bytes: int
    def __init__(self, name: _Optional[str] = ..., sessions: _Optional[int] = ..., session_limit: _Optional[int] = ..., array_bytes: _Optional[int] = ..., array_limit_bytes: _Optional[int] = ..., program_bytes: _Optional[int] = ..., program_limit_bytes: _Optional[int] = ...) -> None: ...

class QueueStatus(_message.Message):
    __slots__ = ("running", "waiting")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class PutArrayHeader(_message.Message):
    __slots__ = ("session_id", "array_id", "layout", "devices")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARRAY_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    array_id: int
    layout: _common_pb2.ArrayLayout
    devices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[str] = ..., array_id: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.ArrayLayout, _Mapping]] = ..., devices: _Optional[_Iterable[int]] = ...) -> None: ...

class PutArrayRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PutArrayHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[PutArrayHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class PutArrayReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchArrayRequest(_message.Message):
    __slots__ = ("session_id", "array_id", "devices")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARRAY_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    array_id: int
    devices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[str] = ..., array_id: _Optional[int] = ..., devices: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchArrayReply(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...

class NodeShards(_message.Message):
    __slots__ = ("array_id", "devices", "layout")
    ARRAY_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    array_id: int
    devices: _containers.RepeatedScalarFieldContainer[int]
    layout: int
    def __init__(self, array_id: _Optional[int] = ..., devices: _Optional[_Iterable[int]] = ..., layout: _Optional[int] = ...) -> None: ...

class PutArraysRequest(_message.Message):
    __slots__ = ("session_id", "layouts", "arrays", "chunk", "is_repeated")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    IS_REPEATED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    layouts: _containers.RepeatedCompositeFieldContainer[_common_pb2.ArrayLayout]
    arrays: _containers.RepeatedCompositeFieldContainer[NodeShards]
    chunk: bytes
    is_repeated: bool
    def __init__(self, session_id: _Optional[str] = ..., layouts: _Optional[_Iterable[_Union[_common_pb2.ArrayLayout, _Mapping]]] = ..., arrays: _Optional[_Iterable[_Union[NodeShards, _Mapping]]] = ..., chunk: _Optional[bytes] = ..., is_repeated: _Optional[bool] = ...) -> None: ...

class PutArraysReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchArraysRequest(_message.Message):
    __slots__ = ("session_id", "arrays")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    arrays: _containers.RepeatedCompositeFieldContainer[NodeShards]
    def __init__(self, session_id: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[NodeShards, _Mapping]]] = ...) -> None: ...

class UnreadArray(_message.Message):
    __slots__ = ("number", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: _common_pb2.Error
    def __init__(self, number: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class FetchArraysReply(_message.Message):
    __slots__ = ("unread", "chunk")
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    unread: _containers.RepeatedCompositeFieldContainer[UnreadArray]
    chunk: bytes
    def __init__(self, unread: _Optional[_Iterable[_Union[UnreadArray, _Mapping]]] = ..., chunk: _Optional[bytes] = ...) -> None: ...
