"""Snapshots on the master: copied off the devices by a numbered step, then stored with the nodes' daemons.

| phase   | what runs                                                        | next                         |
|---------|------------------------------------------------------------------|------------------------------|
| copying | the numbered step: each executor copies its parts to host memory | storing, or over             |
| storing | each executor stores them with two daemons, training goes on     | naming, or over              |
| naming  | the store writes its number to the disk                          | complete                     |

Whoever might restore a snapshot has its daemons keep it: the next master, which knows the one that the store names on
the disk; the client, which says which one its journal follows; this master, which has the newest one named. What is
older than all of these goes. After a restart it all stays until the client is back. The end of a generation ends what
is under way. A session whose steps name their generation is told of each loss: its client restores the newest complete
snapshot and sends the steps since again. So are all on an elastic cluster, for their plans may be for nodes that are
gone, and those whose steps run again by themselves, for what they uploaded before is gone. Functions on `MasterState`,
in the tables of `machine.py`.
"""

from __future__ import annotations

from shardwright.errors import ShardwrightError, WorkerLostError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.records import Pending
from shardwright.server.master.session_records import Snapshots
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState
from shardwright.server.master.statistics import result_of


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
    return [do.Notice(stream=session.stream, lost=loss)]


def begin_stream(state: MasterState, session: Session, event: ev.StepsOpened) -> Commands:
    """A client says what it would restore. It may have missed the end of its last snapshot."""
    snapshots = session.snapshots
    snapshots.protection = event.protection
    snapshots.is_told |= event.protection.is_wanted  # a master before may not have stored it
    commands: Commands = []
    if snapshots.last_end is not None:
        commands.append(do.Notice(stream=event.stream, snapshot=snapshots.last_end))
    return [*commands, retain(state)] if snapshots.complete else commands


def finish_copy(state: MasterState, session: Session, item: Pending) -> Commands:
    """All nodes have answered the step of a snapshot."""
    assert isinstance(item.command, do.RunOnWorkers)
    number = item.command.step.number
    if item.error is not None:
        return _end(session, do.SnapshotEnded(number=number, error=item.error))
    return store(state, session, number)


def store(state: MasterState, session: Session, number: int) -> Commands:
    """Have the executors store what they copied."""
    session.snapshots.stored_since_s = state.now_s
    return state.broadcast(
        lambda sequence: do.StoreOnWorkers(
            sequence=sequence,
            session_id=session.session_id,
            number=number,
            keep=_restorable(session.snapshots),
        )
    )


def finish_store(state: MasterState, item: Pending) -> Commands:
    """All nodes have stored their parts, or said why not."""
    assert isinstance(item.command, do.StoreOnWorkers)
    session, number = state.sessions.get(item.command.session_id), item.command.number
    if session is None:
        return []
    if item.error is not None:
        return _end(session, do.SnapshotEnded(number=number, error=item.error))
    snapshots = session.snapshots
    snapshots.complete, snapshots.kept_bytes = number, item.written_bytes
    snapshots.kept = snapshots.copied_kept.get(number)
    snapshots.completed_s = state.now_s
    session.is_protected = snapshots.is_told
    store_s = state.now_s - snapshots.stored_since_s
    snapshots.unnamed_end = do.SnapshotEnded(number=number, kept_bytes=item.written_bytes, store_s=store_s)
    return [do.NameSnapshot(session_id=session.session_id, number=number)]


def note_named(state: MasterState, event: ev.SnapshotNamed) -> Commands:
    """The store has written which snapshot a session has, or cannot write: its client goes by the newest either way."""
    session = state.sessions.get(event.session_id)
    if session is None:
        return [retain(state)]  # its end is on the disk
    snapshots, end = session.snapshots, session.snapshots.unnamed_end
    commands: Commands = []
    if end is not None and end.number == event.number:
        snapshots.unnamed_end = None
        commands += _end(session, end)
    if event.error is not None:
        return commands
    snapshots.named = event.number
    return [*commands, retain(state)]


def change_protection(state: MasterState, event: ev.ProtectionChanged) -> Commands:
    """The client of a session would restore another snapshot from now on."""
    session = state.sessions.get(event.session_id)
    if session is None or session.stream != event.stream:
        return []
    session.snapshots.protection = event.protection
    return [retain(state)]


def retain(state: MasterState) -> do.RetainOnDaemons:
    """What daemons are to keep: of each session the oldest snapshot that somebody may restore, and what is newer."""
    return do.RetainOnDaemons(
        generation=state.formation.generation,
        sequence=state.sequence,
        sessions=tuple((session.session_id, _oldest(session.snapshots)) for session in state.sessions.values()),
    )


def _restorable(snapshots: Snapshots) -> tuple[int, ...] | None:
    """Numbers of the snapshots that somebody may restore; None: it could be any."""
    if snapshots.protection is None:
        return None
    return tuple(sorted({snapshots.named, snapshots.complete, snapshots.protection.snapshot} - {0}))


def _oldest(snapshots: Snapshots) -> int:
    return min(_restorable(snapshots) or (), default=0)


def _end(session: Session, end: do.SnapshotEnded) -> Commands:
    session.snapshots.last_end = end
    session.snapshots.copied_kept.pop(end.number, None)
    session.statistics.snapshots.end(result_of(end.error), end.store_s, end.kept_bytes)
    return [] if session.stream is None else [do.Notice(stream=session.stream, snapshot=end)]
