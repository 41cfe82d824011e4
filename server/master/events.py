"""Events of the master's state machine; what it decides is in `commands.py`.

Frozen values. `connection`, `call` and `stream` are numbers given by the shell to its gRPC streams and calls; their
meaning is the shell's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.errors import ShardwrightError
from shardwright.server.black_box import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonJoined:
    """A worker's daemon said hello on its Supervise stream."""

    connection: int
    node: int
    cluster_hash: str
    shardwright_version: str
    jax_version: str
    coordinator_address: str
    executor_generation: int = 0  # of an executor that it kept over a broken connection; 0: none
    snapshot_address: str = ""
    snapshot_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonHeard:
    """A daemon's sign of life."""

    connection: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """The server ends soon, or the node whose daemon has this connection; see `draining.py`. reason: in words."""

    reason: str
    limit_s: float
    connection: int = 0  # 0: the whole server


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersChanged:
    """Other nodes belong to an elastic cluster from now on; members: all of them."""

    members: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonLeft:
    """A Supervise stream ended."""

    connection: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorExited:
    """A daemon says that its executor ended, and what it was busy with. was_killed: by the daemon itself."""

    connection: int
    generation: int
    exit_code: int
    last_lines: str
    coordinator_address: str
    works: tuple[Work, ...] = ()
    was_killed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorJoined:
    """An executor owns its devices and opened its Execute stream.

    machine_code: see `machine_code_target`. received: sequence number of the last command that it got, of a master
    before; 0: none.
    """

    connection: int
    node: int
    generation: int
    data_address: str
    device_count: int
    transfer_address: str = ""
    pid: int = 0
    machine_code: str = ""
    received: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLeft:
    """An Execute stream ended."""

    connection: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorHeard:
    """An executor's sign of life. sequence: of the command that it has been busy with for seconds, 0: of none.

    doing: where in it. transfers: calls at its data port that move contents.
    """

    connection: int
    sequence: int = 0
    doing: str = ""
    transfers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandDone:
    """An executor finished the command `sequence`; of a step `values` by array id, and `traces` of its stages.

    not_finite: outputs with NaNs or infinities, if the step asked for the check. written_bytes: of a WriteOnWorkers or
    a StoreOnWorkers.
    """

    connection: int
    sequence: int
    error: ShardwrightError | None = None
    values: tuple[Any, ...] = ()
    run_s: float = 0.0
    written_bytes: int = 0
    traces: tuple[Any, ...] = ()
    not_finite: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedArray:
    """An array with all shards of one node present; its layout is over `devices` of the cluster."""

    array_id: int
    size_bytes: int
    devices: range


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraysUploaded:
    """A client put such arrays on the node of this connection."""

    connection: int
    session_id: str
    arrays: tuple[UploadedArray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a client wants a successor to find; see the message `KeptState`."""

    description: bytes = b""
    array_ids: tuple[int, ...] = ()
    updates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCommand:
    """A command that an executor got of a master before; `payload` is the message. is_load: its program came apart."""

    sequence: int
    is_load: bool = False
    payload: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentReceived:
    """The answer to an AskForRecent."""

    connection: int
    commands: tuple[LoggedCommand, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a step came to on one executor. kept: of a snapshot, as of its step."""

    number: int
    error: ShardwrightError | None = None
    values: tuple[Any, ...] = ()
    run_s: float = 0.0
    traces: tuple[Any, ...] = ()
    not_finite: tuple[Any, ...] = ()
    is_save: bool = False
    is_snapshot: bool = False
    kept: Kept | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReport:
    """A session on one executor: its arrays, loaded executables, last steps, and what is kept as of the last one."""

    session_id: str
    arrays: tuple[UploadedArray, ...] = ()
    executables: tuple[str, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    kept: Kept | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportReceived:
    """The answer to a ReportOnWorkers: all sessions on one executor."""

    connection: int
    sequence: int
    sessions: tuple[SessionReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequested:
    """name: of one to take up, or to open; "": a new one without a name. salt: of that one.

    owner: the name of the token that it comes with; empty where calls need none. A session is taken up by who knows its
    id, which takes the token that it was opened with: see `session_secrets.py`. person: whose share it takes; "": the
    owner's.
    """

    call: int
    session_id: str
    owner: str = ""
    name: str = ""
    salt: str = ""
    person: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramsSent:
    """A session sent a program."""

    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed:
    """By its client, or by an operator, in words."""

    call: int
    session_id: str
    operator: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTouched:
    """A sign of life from the client."""

    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequested:
    call: int
    session_id: str
    plan_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAbandoned:
    """The client of a LoadRequested does not wait for it any more."""

    call: int
    session_id: str
    plan_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramInfo:
    """The state machine's view of a compiled plan; `payload` is for the shell only.

    donated: argument numbers whose buffers the program reuses.
    output_bytes: logical bytes of each output.
    predicted_s: of a step, as the plan has it.
    stages: nodes of each stage of a pipeline; none for one program.
    """

    plan_id: str
    argument_count: int
    donated: frozenset[int]
    output_bytes: tuple[int, ...]
    stages: tuple[frozenset[int], ...] = ()
    predicted_s: float = 0.0
    payload: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFinished:
    """The compile child is done with a plan; exactly one of `program` and `error` is set."""

    plan_id: str
    program: ProgramInfo | None = None
    error: ShardwrightError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadRequested:
    call: int
    session_id: str
    executable_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What a client does after a loss: whether it takes snapshots, would go on, and with which one; 0: none."""

    is_wanted: bool = False
    is_ready: bool = False
    snapshot: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectionChanged:
    """A client restores another snapshot after a loss from now on, or none."""

    stream: int
    session_id: str
    protection: Protection


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotNamed:
    """The store on the disk names this snapshot of a session now; with an error it still names the one before."""

    session_id: str
    number: int
    error: ShardwrightError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsOpened:
    """A client opened a RunSteps stream and named its session. live: arrays that it takes to be there.

    person: who it is, as in `SessionRequested`.
    """

    stream: int
    session_id: str
    live: tuple[int, ...] = ()
    person: str = ""
    protection: Protection = Protection()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsClosed:
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStepInfo:
    """Of a step that saves its arguments, or makes its outputs (of so many logical bytes) from a checkpoint."""

    is_save: bool
    output_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStepInfo:
    """Of a step that takes a snapshot of its arguments, or makes its outputs (of so many logical bytes) from one."""

    is_restore: bool
    output_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStepInfo:
    """Of a step that makes its outputs (of so many logical bytes) from a batch that the workers read.

    key, function: of the dataset, see `Work`.
    """

    output_bytes: tuple[int, ...]
    key: str = ""
    function: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequested:
    """A numbered step; `inline` are the (id, bytes) of arrays that ride along, `payload` is the message.

    files: of a save or a restore, which has no executable. moved_bytes: of a move's outputs; it has none either, nor
    has a `snapshot` or a `batch`. timeout_s: the user's time limit; 0: none of his own. generation: of the executors
    that it may run on; 0: any. restores: whether its client makes all arrays again after a loss. kept: what a successor
    of the client finds from now on; None: as before. name: of the function. resendable: arguments that the client
    writes again where they are lost.
    """

    stream: int
    session_id: str
    number: int
    executable_id: str
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    inline: tuple[tuple[int, int], ...] = ()
    released: tuple[int, ...] = ()
    files: FileStepInfo | None = None
    moved_bytes: tuple[int, ...] | None = None
    snapshot: SnapshotStepInfo | None = None
    batch: BatchStepInfo | None = None
    timeout_s: float = 0.0
    generation: int = 0
    restores: bool = False
    name: str = ""
    resendable: tuple[int, ...] = ()
    kept: Kept | None = None
    payload: Any = None

    @property
    def kind(self) -> str:
        """`step`, `save`, `restore`, `move` or `snapshot`."""
        if self.files is not None:
            return "save" if self.files.is_save else "restore"
        if self.snapshot is not None:
            return "restore" if self.snapshot.is_restore else "snapshot"
        return "move" if self.moved_bytes is not None else "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsCancelled:
    """A client wants these steps to end; the answer is a `Cancellation`."""

    call: int
    session_id: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsEnded:
    """An operator, in words, wants a step to end at once, or (0) all of a session; the answer is a `Cancellation`."""

    call: int
    session_id: str
    number: int
    operator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAwaited:
    """A client waits for the end of the save whose step had this number."""

    call: int
    session_id: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequested:
    """Arrays to free once step `after_step` was dispatched."""

    call: int
    session_id: str
    array_ids: tuple[int, ...]
    after_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time went by."""


Event = (
    DaemonJoined | DaemonHeard | DaemonLeft | ExecutorExited | ExecutorJoined | ExecutorLeft | CommandDone
    | ArraysUploaded | SessionRequested | SessionClosed | SessionTouched | LoadRequested | CompileFinished
    | UnloadRequested | StepsOpened | StepsClosed | StepRequested | StepsCancelled | StepsEnded | SaveAwaited
    | ReleaseRequested | ExecutorHeard | MembersChanged | DrainRequested | LoadAbandoned | RecentReceived
    | ReportReceived | ProgramsSent | ProtectionChanged | SnapshotNamed | Tick
)  # fmt: skip
