"""Snapshots on the master: copied off the devices by a numbered step, then stored with the nodes' daemons.

| phase   | what runs                                                        | next                         |
|---------|------------------------------------------------------------------|------------------------------|
| copying | the numbered step: each executor copies its parts to host memory | storing, or over             |
| storing | each executor stores them with two daemons, training goes on     | complete, or over            |

A snapshot counts once every executor has stored its parts; then daemons may drop older ones. The end of a generation
ends what is under way. All sessions are told of each loss. A client whose steps name their generation then restores the
newest complete snapshot and sends the steps since again; others know that what they uploaded before is gone, and on an
elastic cluster that their plans may be for nodes that are gone. Functions on `MasterState`, registered in its tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwright.errors import ShardwrightError, WorkerLostError
from shardwright.server.master import events as ev
from shardwright.server.master.statistics import result_of

if TYPE_CHECKING:
    from shardwright.server.master.sessions import Session
    from shardwright.server.master.state import Commands, MasterState, Pending


@dataclass(slots=True)
class Snapshots:
    """Of a session. complete: step number of the newest complete one, 0: none; kept_bytes: of it, on all nodes.

    stored_since_s: when the one under way was copied. completed_s: when the newest was complete. last_end: of the last
    one. is_told: whether the client restores its arrays after a loss. kept: what its client kept when the newest
    complete one was taken; copied_kept: of those under way.
    """

    complete: int = 0
    kept_bytes: int = 0
    stored_since_s: float = 0.0
    completed_s: float = -1.0
    last_end: ev.SnapshotEnded | None = None
    is_told: bool = False
    kept: ev.Kept | None = None
    copied_kept: dict[int, ev.Kept | None] = field(default_factory=dict)


def stale(state: MasterState, step: ev.StepRequested) -> ShardwrightError | None:
    """Why a step that names its generation cannot run on this one, or None."""
    formation = state.formation
    if not step.generation or (formation.phase == "ready" and formation.generation == step.generation):
        return None
    over = f"generation {step.generation} of the executors is over"
    return formation.last_loss or WorkerLostError(over, remedy="run init again, or restore a checkpoint")


def tell_loss(session: Session, loss: ShardwrightError) -> Commands:
    """The executors, and all arrays of the session, are lost."""
    if session.stream is None:
        return []
    return [ev.Notice(stream=session.stream, lost=loss)]


def repeat_end(session: Session, stream: int) -> Commands:
    """At the beginning of a stream: the client may have missed the end of its last snapshot."""
    end = session.snapshots.last_end
    return [ev.Notice(stream=stream, snapshot=end)] if end is not None else []


def finish_copy(state: MasterState, session: Session, item: Pending) -> Commands:
    """All nodes have answered the step of a snapshot."""
    assert isinstance(item.command, ev.RunOnWorkers)
    number = item.command.step.number
    if item.error is not None:
        return _end(session, ev.SnapshotEnded(number=number, error=item.error))
    return store(state, session, number)


def store(state: MasterState, session: Session, number: int) -> Commands:
    """Have the executors store what they copied."""
    session.snapshots.stored_since_s = state._now_s
    return state._broadcast(
        lambda sequence: ev.StoreOnWorkers(
            sequence=sequence,
            session_id=session.session_id,
            number=number,
            complete=session.snapshots.complete,
        )
    )


def finish_store(state: MasterState, item: Pending) -> Commands:
    """All nodes have stored their parts, or said why not."""
    assert isinstance(item.command, ev.StoreOnWorkers)
    session, number = state.sessions.get(item.command.session_id), item.command.number
    if session is None:
        return []
    if item.error is not None:
        return _end(session, ev.SnapshotEnded(number=number, error=item.error))
    snapshots = session.snapshots
    snapshots.complete, snapshots.kept_bytes = number, item.written_bytes
    snapshots.kept = snapshots.copied_kept.get(number)
    snapshots.completed_s = state._now_s
    session.is_protected = snapshots.is_told
    store_s = state._now_s - snapshots.stored_since_s
    end = ev.SnapshotEnded(number=number, kept_bytes=item.written_bytes, store_s=store_s)
    return [*_end(session, end), retain(state)]


def retain(state: MasterState) -> ev.RetainOnDaemons:
    """What daemons are to keep: of each session its newest complete snapshot, and what is newer."""
    return ev.RetainOnDaemons(
        sessions=tuple((session.session_id, session.snapshots.complete) for session in state.sessions.values())
    )


def _end(session: Session, end: ev.SnapshotEnded) -> Commands:
    session.snapshots.last_end = end
    session.snapshots.copied_kept.pop(end.number, None)
    session.statistics.snapshots.end(result_of(end.error), end.store_s, end.kept_bytes)
    return [] if session.stream is None else [ev.Notice(stream=session.stream, snapshot=end)]
