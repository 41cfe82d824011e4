"""What a session consists of: programs, requests that wait, outcomes, saves and snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.errors import ShardwrightError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.events import ProgramInfo, ReleaseRequested, StepRequested
from shardwright.server.master.statistics import Work, result_of


@dataclass(slots=True)
class Executable:
    """state: "compiling", "loading" (or waiting for a cluster to load on), "loaded". longest_run_s: of its steps.

    since_s: since when the calls wait that are as they are now: the latest call, the end of the compilation, a loss.
    """

    plan_id: str
    state: str = "compiling"
    program: ProgramInfo | None = None
    waiting_calls: list[int] = field(default_factory=list)
    since_s: float = 0.0
    longest_run_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step number ended with; kept until the client cannot ask again."""

    error: ShardwrightError | None
    values: tuple[object, ...] = ()
    run_s: float = 0.0
    traces: tuple[object, ...] = ()
    not_finite: tuple[object, ...] = ()


@dataclass(slots=True)
class QueuedRequest:
    """A step or a release in the session's queue, and since when it waits. is_again: after a loss of executors."""

    request: StepRequested | ReleaseRequested
    since_s: float
    is_again: bool = False


@dataclass(slots=True)
class Save:
    """One save of a session.

    expected_bytes: of all its arrays; None: unknown after a restart. calls: who waits for its end. work: counts saves.
    """

    number: int
    expected_bytes: int | None
    started_s: float
    phase: str = "copying"
    error: ShardwrightError | None = None
    written_bytes: int = 0
    save_s: float = 0.0
    calls: list[int] = field(default_factory=list)
    work: Work = field(default_factory=Work)

    @property
    def is_done(self) -> bool:
        return self.phase == "done"

    def end(self, now_s: float, error: ShardwrightError | None = None) -> Commands:
        """It is over; whoever waits is told."""
        self.phase, self.save_s = "done", now_s - self.started_s
        self.error = self.error or error
        self.work.end(result_of(self.error), self.save_s, self.written_bytes)
        calls, self.calls = self.calls, []
        return [self.answer(call) for call in calls]

    def answer(self, call: int) -> do.Command:
        if self.error is not None:
            return do.Fail(call=call, error=self.error)
        return do.Answer(call=call, value=(self.written_bytes, self.save_s))


@dataclass(slots=True)
class Snapshots:
    """Of a session. complete: step number of the newest that all executors have stored, 0: none; kept_bytes: of it.

    named: the one that the store names on the disk; the same without a store. protection: what the client says of
    itself; None: it has not come back to this master. stored_since_s: when the one under way was copied. completed_s:
    when the newest was stored. unnamed_end: of the newest, while the store does not name it; last_end: of the last one
    that the client was told. is_told: whether the client restores its arrays after a loss. kept: what its client kept
    when the newest complete one was taken; copied_kept: of those under way.
    """

    complete: int = 0
    named: int = 0
    protection: ev.Protection | None = field(default_factory=ev.Protection)
    unnamed_end: do.SnapshotEnded | None = None
    kept_bytes: int = 0
    stored_since_s: float = 0.0
    completed_s: float = -1.0
    last_end: do.SnapshotEnded | None = None
    is_told: bool = False
    kept: ev.Kept | None = None
    copied_kept: dict[int, ev.Kept | None] = field(default_factory=dict)
