"""What the snapshot protocol runs on in `snapshot_world.py`: a disk, daemons, executors and clients, as data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from shardwright.client.journal import Journal, SentStep
from shardwright.client.protection import Protection
from shardwright.client.step_result import StepResult
from shardwright.errors import StateStoreError
from shardwright.proto.v1 import master_pb2
from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.store import SessionRow, StoredState
from shardwright.server.worker.snapshot_store import PartKey, SnapshotStore

NODES = 3
COPIES = 2
LIMITS = Limits(first_retry_s=0.0, last_retry_s=0.0, restart_patience_s=1e9, session_array_bytes=1 << 30)


class Disk:
    """A `StateStore` for the ledger. Changes are written in order; at the master's death some more of them are."""

    def __init__(self) -> None:
        self.rows: dict[str, SessionRow] = {}
        self.executors: tuple[int, tuple[int, ...]] = (0, ())
        self.waiting: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self.changes: deque[tuple[str, int | None]] = deque()  # (session, its snapshot then) of each that waits

    @property
    def loaded(self) -> StoredState:
        generation, team = self.executors
        return StoredState(generation=generation, team=team, sessions=tuple(self.rows.values()))

    def put_session(self, row: SessionRow) -> Future[None]:
        return self._add(partial(self.rows.__setitem__, row.session_id, row), row.session_id, row.snapshot)

    def delete_session(self, session_id: str) -> Future[None]:
        return self._add(partial(self._delete, session_id), session_id)

    def put_executors(self, generation: int, team: tuple[int, ...], ports: object) -> Future[None]:
        del ports
        return self._add(partial(self._set_executors, generation, team))

    def flush(self) -> Future[None]:
        return self._add(lambda: None)

    def _delete(self, session_id: str) -> None:
        self.rows.pop(session_id, None)

    def _set_executors(self, generation: int, team: tuple[int, ...]) -> None:
        self.executors = generation, team

    def _add(self, write: Callable[[], None], session_id: str = "", snapshot: int | None = None) -> Future[None]:
        future: Future[None] = Future()
        self.waiting.append((write, future))
        self.changes.append((session_id, snapshot))
        return future

    def end_one(self, *, fails: bool = False) -> None:
        """The next change is on the disk, or cannot be."""
        if self.waiting:
            write, future = self.waiting.popleft()
            self.changes.popleft()
            if fails:
                future.set_exception(StateStoreError("the disk is full"))
            else:
                write()
                future.set_result(None)

    def lose(self, written: int) -> None:
        """The master dies; so many changes had reached the disk, though nobody knew."""
        for write, _ in list(self.waiting)[:written]:
            write()
        self.waiting.clear()
        self.changes.clear()

    def nameable(self) -> Iterator[tuple[str, int]]:
        """(session, snapshot) that a next master may find, whenever this one dies."""
        rows = {name: row.snapshot for name, row in self.rows.items()}
        yield from rows.items()
        for session_id, snapshot in self.changes:
            if session_id and snapshot is not None:
                yield session_id, snapshot


@dataclass(eq=False)
class Daemon:
    """Of a node, from its start to its end. inbox: from the master, in order."""

    node: int
    store: SnapshotStore = field(default_factory=lambda: SnapshotStore(1 << 20))
    connection: int = 0
    inbox: deque[do.Command] = field(default_factory=deque)
    is_alive: bool = True


@dataclass(eq=False)
class Executor:
    """inbox: orders, with the daemons that the master knew when it gave them. outbox: to the master."""

    node: int
    generation: int
    connection: int = 0
    inbox: deque[tuple[do.ToWorkers, tuple[Daemon | None, ...]]] = field(default_factory=deque)
    outbox: deque[ev.Event] = field(default_factory=deque)
    log: list[tuple[do.ToWorkers, tuple[Daemon | None, ...]]] = field(default_factory=list)
    arrays: dict[str, dict[int, int]] = field(default_factory=dict)
    steps: dict[str, dict[int, ev.StepRecord]] = field(default_factory=dict)
    copied: dict[str, tuple[int, dict[PartKey, int | None]]] = field(default_factory=dict)
    stored: dict[str, set[int]] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    storing: deque[Iterator[None]] = field(default_factory=deque)


@dataclass(frozen=True)
class Layout:
    """Of an array, as far as a journal looks."""

    size_bytes: int = 8


LAYOUT = cast(Any, Layout())


class Client:
    """A process with a session. phase: "opening", "running", or of a recovery "lost", "restoring", "replaying"."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.journal = Journal()
        self.protection = Protection(self.journal)
        self.protection.ask(3)
        self.phase = "opening"
        self.stream = 0
        self.generation = 0
        self.next_number = self.next_id = 1
        self.sent_steps = 0
        self.is_lost_again = False
        self.values: dict[int, int] = {}  # of all arrays that it ever made
        self.unanswered: deque[tuple[dict[str, Any], StepResult]] = deque()
        self.outbox: deque[dict[str, Any]] = deque()
        self.inbox: deque[do.Command] = deque()
        self.restoring: StepResult | None = None

    def send(self, result: StepResult, **step: Any) -> None:
        result.number = self.next_number
        self.next_number += 1
        message = {"session_id": self.session_id, "number": result.number, "executable_id": ""} | step
        message["generation"] = self.generation
        self.unanswered.append((message, result))
        self.outbox.append(message)

    def tell(self) -> None:
        self.outbox.append({"protection": to_event(self.protection.message)})

    def check_journal(self) -> None:
        """What it would restore, and what it would send again, make all arrays that there are."""
        base = self.protection.base
        if not self.protection.is_on or base is None:
            return
        assert self.journal.position - len(self.journal.entries) <= base.position, "entries that are needed are gone"
        made = set(base.live)
        for entry in self.journal.entries[base.position - self.journal.position :] if self.journal.entries else ():
            if isinstance(entry, SentStep):
                made |= set(entry.request.outputs)
        assert made >= self.journal.live.keys(), "the journal does not make all arrays"


def to_event(message: master_pb2.Protection) -> ev.Protection:
    return ev.Protection(is_wanted=message.is_wanted, is_ready=message.is_ready, snapshot=message.snapshot)
