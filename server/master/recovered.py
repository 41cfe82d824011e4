"""Sessions of a predecessor: their part in the store, and the rest, known again once their clients come back.

| question                      | who knows it                                                              |
|-------------------------------|---------------------------------------------------------------------------|
| sessions, their programs      | the store                                                                 |
| the next step number          | the client: it sends all again from the first unanswered step on          |
| arrays of executors that ended| nobody: the client's are lost                                             |

Functions on `MasterState`.
"""

from __future__ import annotations

from shardwright.errors import WorkerLostError
from shardwright.proto.v1 import master_pb2
from shardwright.server.master import commands as do
from shardwright.server.master import dispatch, teams
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.records import Adoption
from shardwright.server.master.session_records import Executable, Snapshots
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState
from shardwright.server.master.store import SessionRow, StoredState

_TEAM_IS_GONE = "the nodes that a master before ran are not all in the cluster file any more: all executors start anew"


def row_of(session: Session) -> SessionRow:
    """What the store keeps of a session. Of what is kept now the description alone: the steps bring the rest."""
    snapshots = session.snapshots
    description = ev.Kept(description=session.kept.description) if session.kept is not None else None
    return SessionRow(
        session_id=session.session_id,
        name=session.name,
        owner=session.owner,
        salt=session.salt,
        last_number=session.last_number,
        highest_id=session.highest_id,
        is_told=snapshots.is_told,
        snapshot=snapshots.complete,
        snapshot_bytes=snapshots.kept_bytes,
        executables=tuple(session.executables),
        kept=_to_bytes(description),
        snapshot_kept=_to_bytes(snapshots.kept),
    )


def restore(state: MasterState, stored: StoredState, now_s: float) -> Commands:
    """Take over a store's sessions; their executables are to be compiled, and loaded on new executors."""
    is_same_team = not stored.generation or state.formation.begin_adoption(stored.generation, stored.team, now_s)
    state.team = state.formation.team
    state.adoption = Adoption()
    for index, port in stored.ports.items():
        if index in state.formation.nodes:
            state.formation.nodes[index].data_port = port  # so that clients find it again
    for row in stored.sessions:
        session = state.sessions[row.session_id] = Session(
            session_id=row.session_id,
            limits=state.limits,
            last_seen_s=now_s,
            person=state.people.join(state.people.find(row.owner)),
            name=row.name,
            owner=row.owner,
            salt=row.salt,
            statistics=state.statistics,
            first_number=row.last_number + 1,
            last_number=row.last_number,
            highest_id=row.highest_id,
            kept=_from_bytes(row.kept),
            is_unreported=True,
            awaits_number=True,
        )
        end = do.SnapshotEnded(number=row.snapshot, kept_bytes=row.snapshot_bytes)
        session.snapshots = Snapshots(
            complete=row.snapshot,
            named=row.snapshot,
            protection=None,
            last_end=end if row.snapshot else None,  # its client may not have been told
            kept_bytes=row.snapshot_bytes,
            completed_s=now_s,  # at the latest
            is_told=row.is_told,
            kept=_from_bytes(row.snapshot_kept),
        )
        session.executables = {plan_id: Executable(plan_id=plan_id) for plan_id in row.executables}
        if not is_same_team:
            teams.retire_programs(session)
    state.recovered_sessions = len(stored.sessions)
    state.lost = dict(stored.lost)
    state.lost_names = {name: session_id for session_id, name in stored.lost_names.items() if name}
    return [] if is_same_team or not stored.team else [do.Log(text=_TEAM_IS_GONE, is_warning=True)]


def advance_adoption(state: MasterState) -> Commands:
    """The formation has changed: begin, or give up."""
    adoption, formation = state.adoption, state.formation
    assert adoption is not None
    if formation.phase == "adopting":
        return []
    if formation.phase != "ready":
        state.adoption = None
        return lose(state)
    if adoption.is_reporting or adoption.source is not None:
        return []
    received = {node: formation.nodes[node].received for node in formation.team}
    adoption.top, bottom = max(received.values()), min(received.values())
    state.sequence = adoption.top
    if bottom == adoption.top:
        return ask_for_reports(state, adoption)
    adoption.source = max(received, key=received.__getitem__)
    connection = formation.nodes[adoption.source].executor_connection
    assert connection is not None
    return [do.AskForRecent(connection=connection, after=bottom)]


def ask_for_reports(state: MasterState, adoption: Adoption) -> Commands:
    adoption.is_reporting = True
    return state.broadcast(lambda sequence: do.ReportOnWorkers(sequence=sequence))


def lose(state: MasterState) -> Commands:
    """The executors of before are not taken up: arrays are lost, and steps that were held are looked at."""
    loss = WorkerLostError(
        "the servers were started again, and arrays of before are gone",
        remedy="run init again, or restore a checkpoint; snapshot_every=… makes a session survive this",
    )
    commands: Commands = []
    for session in list(state.sessions.values()):
        if session.is_unreported:
            session.is_unreported, session.loss = False, loss
            if session.stream is not None:
                commands += greet(state, session, session.stream)
            commands += release_held(state, session)
    return commands


def release_held(state: MasterState, session: Session) -> Commands:
    """Take in the steps of the time without executors."""
    held, session.held = session.held, []
    commands: Commands = []
    for step in held:
        if session.session_id in state.sessions:
            commands += dispatch.request_step(state, step)
    return commands + dispatch.advance(state, session)


def greet(state: MasterState, session: Session, stream: int) -> Commands:
    """At the beginning of a stream: the fate of the client's arrays."""
    loss = session.loss
    if loss is None:
        return []
    lost = tuple(
        array_id for array_id in session.live if array_id not in session.arrays and array_id not in session.drop_reasons
    )
    for array_id in lost:
        session.drop_array(array_id, loss)
    commands: Commands = []
    if lost and session.is_open and not session.snapshots.is_told:
        commands += state.release_on_workers(session, lost, loss)
    is_told = session.snapshots.is_told or state.formation.roster is not None
    if is_told and not session.is_loss_told:
        commands.append(do.Notice(stream=stream, lost=loss))
    session.is_loss_told = True
    return commands


def _to_bytes(state: ev.Kept | None) -> bytes:
    return b"" if state is None else to_message(state).SerializeToString()


def to_message(state: ev.Kept) -> master_pb2.KeptState:
    """As clients get it."""
    return master_pb2.KeptState(description=state.description, array_ids=state.array_ids, updates=state.updates)


def from_message(message: master_pb2.KeptState) -> ev.Kept:
    """As clients send it."""
    return ev.Kept(description=message.description, array_ids=tuple(message.array_ids), updates=message.updates)


def _from_bytes(data: bytes) -> ev.Kept | None:
    return from_message(master_pb2.KeptState.FromString(data)) if data else None
