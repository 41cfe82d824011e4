"""Commands of the master's state machine: what it decides, and its shell carries out. Frozen values.

`connection`, `call` and `stream` are the shell's numbers, as in `events.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.errors import ShardwrightError
from shardwright.server.master.events import LoggedCommand, ProgramInfo, StepRequested


@dataclass(frozen=True, slots=True, kw_only=True)
class StartExecutor:
    """To a daemon: start the executor of `generation`."""

    connection: int
    generation: int
    coordinator_address: str
    process_count: int
    process_id: int
    data_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopExecutor:
    """To a daemon: end the executor of `generation`."""

    connection: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """To a daemon or an executor: not you; the stream ends."""

    connection: int
    error: ShardwrightError


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """Of a daemon that has been silent: its stream ends; when it lives, it dials again."""

    connection: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForRecent:
    """To an executor: which commands did it get after this one?"""

    connection: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Redeliver:
    """To an executor: commands that a master before had not sent to it."""

    connection: int
    commands: tuple[LoggedCommand, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOnWorkers:
    """What is there? Answered once everything before is carried out."""

    sequence: int
    session_id: str = ""  # of all


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOnWorkers:
    """refused: datasets of the session, by their keys, that are not read any more."""

    sequence: int
    session_id: str
    refused: tuple[tuple[str, ShardwrightError], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseOnWorkers:
    sequence: int
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainOnDaemons:
    """To all daemons: (id, number of the oldest snapshot that somebody may restore, 0: any) of all sessions.

    generation, sequence: of the executors, and of the last command to them: sessions that were offered parts of a later
    one are not meant.
    """

    generation: int
    sequence: int
    sessions: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NameSnapshot:
    """Have the store name the newest complete snapshot of a session; the answer is a SnapshotNamed."""

    session_id: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOnWorkers:
    sequence: int
    session_id: str
    program: ProgramInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadOnWorkers:
    sequence: int
    session_id: str
    executable_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOnWorkers:
    sequence: int
    step: StepRequested


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOnWorkers:
    """Write what was copied for the save of step `number`."""

    sequence: int
    session_id: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishOnWorkers:
    """Make it a checkpoint, or remove what there is; forget the copies."""

    sequence: int
    session_id: str
    number: int
    is_commit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOnWorkers:
    """Store what was copied for the snapshot of step `number` with the daemons. keep: others that stay; None: all."""

    sequence: int
    session_id: str
    number: int
    keep: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortOnWorkers:
    """The step running under this number failed on a node: `nodes`, still running it, shall not wait for it."""

    sequence: int
    nodes: frozenset[int]
    error: ShardwrightError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseOnWorkers:
    """Frees arrays; with `error`, they will never exist, for this reason."""

    sequence: int
    session_id: str
    array_ids: tuple[int, ...]
    error: ShardwrightError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile:
    """Compile a plan in the compile child, unless that is under way; `CompileFinished` answers."""

    plan_id: str
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelCompile:
    """Nobody waits for a plan any more; no `CompileFinished` comes."""

    plan_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A call goes on, with a new reason of its wait."""

    call: int
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A call succeeded; of a load, `value` is the program, of a save (bytes written, seconds), of `StepsCancelled`
    a `Cancellation`.
    """

    call: int
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    call: int
    error: ShardwrightError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyStep:
    """One reply on a RunSteps stream."""

    stream: int
    number: int
    error: ShardwrightError | None
    values: tuple[Any, ...]
    run_s: float
    traces: tuple[Any, ...]
    not_finite: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancellation:
    """What became of steps that were to end: `cancelled` never ran, `running` end within the grace, or are ended."""

    cancelled: tuple[int, ...]
    running: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEnded:
    """A snapshot is complete, or has failed; see the message `SnapshotEnd`."""

    number: int
    error: ShardwrightError | None = None
    kept_bytes: int = 0
    store_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """To the client of a RunSteps stream: what it waits for, that all arrays are lost, or the end of a snapshot.

    resend: arrays that it is to write again.
    """

    stream: int
    text: str = ""
    lost: ShardwrightError | None = None
    snapshot: SnapshotEnded | None = None
    resend: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainNotice:
    """To the client of a RunSteps stream: what ends, and in how long; without a reason: it is over."""

    stream: int
    reason: str
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainBegan:
    """The shell ends what it has under way for clients, with this error."""

    error: ShardwrightError


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """The nodes may leave; None: the server may end."""

    nodes: frozenset[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStream:
    """End a RunSteps stream with an error."""

    stream: int
    error: ShardwrightError


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """The shell may forget the session's programs and plans."""

    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAgain:
    """Something is due before the next tick: a `Tick` in so many seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A line for people. session, step: what it is about, where that is one thing."""

    text: str
    is_warning: bool = False
    session: str = ""
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """The server cannot go on: print the error, exit not 0. is_final: starting it again will not help."""

    error: ShardwrightError
    is_final: bool = False


ToWorkers = (
    OpenOnWorkers
    | CloseOnWorkers
    | LoadOnWorkers
    | UnloadOnWorkers
    | RunOnWorkers
    | WriteOnWorkers
    | FinishOnWorkers
    | StoreOnWorkers
    | ReleaseOnWorkers
    | ReportOnWorkers
)
Command = (
    StartExecutor | StopExecutor | Refuse | Disconnect | AskForRecent | Redeliver | RetainOnDaemons | ToWorkers
    | AbortOnWorkers | Compile | CancelCompile | Progress | Answer | Fail | ReplyStep | Notice | DrainNotice
    | DrainBegan | Drained | EndStream | SessionEnded | NameSnapshot | LookAgain | Log | Halt
)  # fmt: skip
Commands = list[Command]
