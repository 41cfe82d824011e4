"""A worker's daemon as a pure state machine: `DaemonState.handle(event, now_s) -> commands`.

| phase   | event                  | next    | commands                                |
|---------|------------------------|---------|-----------------------------------------|
| dialing | Dialed                 | joined  | SayHello                                |
| dialing | Undialed, in time      | dialing | Dial again, later                       |
| dialing | Undialed, `wait_s` over| ended   | Exit 75                                 |
| joined  | Undialed               | dialing | Dial: the executor has a connection     |
| joined  | Start                  | joined  | Spawn (once an older child is gone)     |
| joined  | Stop                   | joined  | KillExecutor                            |
| joined  | ChildExited            | joined  | ReportExit                              |
| joined  | DrainRequested         | joined  | AskToDrain: the master then ends it     |
| joined, draining | DrainExpired, Undialed | ended | KillExecutor, then Exit 0           |
| dialing | DrainRequested         | ended   | Exit 0                                  |
| any     | Refused, Ended, Asked  | ended   | KillExecutor, then Exit                 |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.errors import AuthenticationError, ServerUnavailableError, ShardwrightError
from shardwright.server.black_box import Work
from shardwright.server.tuning import FIRST_RETRY_S, LAST_RETRY_OF_A_KEPT_S, LAST_RETRY_S

#: Exit code of what may go well when it is started again: sysexits' EX_TEMPFAIL.
EXIT_TRY_AGAIN = 75

# ---- events ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOpened:
    """The Supervise stream is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLost:
    """The stream could not be opened, or ended."""

    error: ShardwrightError


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequested:
    """The master wants the executor of a generation. lease_s: how long it goes on without a master; 0: not at all."""

    generation: int
    coordinator_address: str
    process_count: int
    process_id: int
    data_port: int
    lease_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRefused:
    """The master does not want this node."""

    error: ShardwrightError


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterEnded:
    """The master is shutting the cluster down; is_failure: not as somebody asked."""

    reason: str
    is_failure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """A signal or a preemption notice: end when what runs has ended."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainExpired:
    """The master has not let go in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRequested:
    """A signal: stop, with this exit code."""

    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildExited:
    """works: what it was busy with. was_killed: by this daemon."""

    generation: int
    exit_code: int
    last_lines: str
    works: tuple[Work, ...] = ()
    was_killed: bool = False


Event = (
    ConnectionOpened
    | ConnectionLost
    | StartRequested
    | StopRequested
    | NodeRefused
    | MasterEnded
    | DrainRequested
    | DrainExpired
    | ExitRequested
    | ChildExited
)

# ---- commands --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SayHello:
    """generation: of the executor that runs; 0: none."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn:
    start: StartRequested


@dataclass(frozen=True, slots=True, kw_only=True)
class KillExecutor:
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportExit:
    child: ChildExited


@dataclass(frozen=True, slots=True, kw_only=True)
class AskToDrain:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End the process; `error` is printed as one line."""

    code: int
    error: ShardwrightError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    text: str


Command = Dial | SayHello | Spawn | KillExecutor | ReportExit | AskToDrain | Exit | Log


@dataclass(slots=True)
class DaemonState:
    """child: generation of the executor that may be running; wanted: the one to start after it.

    exit_: what to exit with once the child is gone. is_draining: whether it has asked the master to let it go.
    """

    master_address: str
    wait_s: float
    phase: Literal["dialing", "joined", "ended"] = "dialing"
    child: int | None = None
    wanted: StartRequested | None = None
    exit_: Exit | None = None
    is_draining: bool = False
    _deadline_s: float | None = None
    _retry_s: float = FIRST_RETRY_S

    @property
    def is_ready(self) -> bool:
        """Whether it is with the master, has an executor, and is to stay."""
        return self.phase == "joined" and self.child is not None and not self.is_draining

    def handle(self, event: Event, now_s: float) -> list[Command]:
        if isinstance(event, ChildExited):
            return self._child_exited(event)
        if self.phase == "ended":
            return []
        match event:
            case ConnectionOpened():
                self.phase, self._deadline_s, self._retry_s = "joined", None, FIRST_RETRY_S
                return [SayHello(generation=self.child or 0)]
            case ConnectionLost(error=error):
                return self._lose_connection(error, now_s)
            case StartRequested():
                return self._start(event)
            case StopRequested(generation=generation):
                return self._kill() if self.child == generation else []
            case NodeRefused(error=error):
                return self._end(Exit(code=1, error=error))
            case MasterEnded(reason=reason, is_failure=is_failure):
                code = EXIT_TRY_AGAIN if is_failure else 0
                return [Log(text=f"the master ends the cluster: {reason}"), *self._end(Exit(code=code))]
            case DrainRequested(reason=reason):
                if self.phase != "joined":
                    return self._end(Exit(code=0))
                is_first, self.is_draining = not self.is_draining, True
                return [AskToDrain(reason=reason)] if is_first else []
            case DrainExpired():
                return [Log(text="the master has not let this node go in time"), *self._end(Exit(code=0))]
            case ExitRequested(exit_code=code):
                return self._end(Exit(code=code))

    def _lose_connection(self, error: ShardwrightError, now_s: float) -> list[Command]:
        if isinstance(error, AuthenticationError):
            return self._end(Exit(code=1, error=error))
        if self.is_draining:
            return self._end(Exit(code=0))
        commands: list[Command] = []
        if self.phase == "joined":
            commands.append(Log(text=f"lost the master at {self.master_address}; dialing again"))
            self.phase = "dialing"
            self.wanted = None
        if self._deadline_s is None:
            self._deadline_s = now_s + self.wait_s
        if now_s >= self._deadline_s:
            gone = ServerUnavailableError(
                f"the master at {self.master_address} did not answer within {self.wait_s:g} s",
                remedy="start task 0, check the address in the cluster file, or wait longer with --wait",
            )
            return commands + self._end(Exit(code=EXIT_TRY_AGAIN, error=gone))
        last_s = LAST_RETRY_S if self.child is None else LAST_RETRY_OF_A_KEPT_S
        delay_s, self._retry_s = min(self._retry_s, last_s), min(2 * self._retry_s, last_s)
        return [*commands, Dial(delay_s=min(delay_s, self._deadline_s - now_s))]

    def _start(self, start: StartRequested) -> list[Command]:
        if self.phase != "joined":
            return []
        if self.child is not None:
            self.wanted = start
            return self._kill()
        self.child = start.generation
        return [Spawn(start=start)]

    def _child_exited(self, event: ChildExited) -> list[Command]:
        if event.generation != self.child:
            return []
        self.child = None
        if self.exit_ is not None:
            return [self.exit_]
        if self.phase != "joined":
            return []
        if self.wanted is not None:
            start, self.wanted = self.wanted, None
            return self._start(start)  # the old one was of a master or a generation that is forgotten
        return [ReportExit(child=event)]

    def _kill(self) -> list[Command]:
        return [] if self.child is None else [KillExecutor(generation=self.child)]

    def _end(self, exit_: Exit) -> list[Command]:
        self.phase, self.exit_, self.wanted = "ended", exit_, None
        return self._kill() or [exit_]

    def check_invariants(self) -> None:
        """What holds between any two events; AssertionError where it does not."""
        assert (self.phase == "ended") == (self.exit_ is not None)
        assert (self.wanted is not None) <= (self.phase == "joined" and self.child is not None)
        assert self._retry_s <= LAST_RETRY_S
