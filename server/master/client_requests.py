"""What clients ask for besides steps: sessions, streams, arrays that come. Functions on `MasterState`."""

from __future__ import annotations

from shardwright.errors import SessionError, ShardwrightError
from shardwright.server.master import commands as do
from shardwright.server.master import (
    dispatch,
    drain,
    idle_sessions,
    named,
    recovered,
    reruns,
    session_ends,
    snapshots,
    transitions,
)
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.sessions import Session, lost_session, unknown_session
from shardwright.server.master.state import MasterState


def open_session(state: MasterState, event: ev.SessionRequested) -> Commands:
    if (refused := drain.refusal_of_new(state)) is not None:
        return [do.Fail(call=event.call, error=refused)]
    namesake = named.find(state, event.name)
    if namesake is not None:
        return named.take_up(state, namesake, event)
    if (lost := state.lost_names.pop(event.name, None)) is not None:
        return [do.Fail(call=event.call, error=lost_session(state.lost[lost]))]
    person = state.people.find(event.person or event.owner)
    commands = idle_sessions.make_room(state, person)
    if (full := idle_sessions.refusal(state, person)) is not None:
        return [*commands, do.Fail(call=event.call, error=full)]
    session = Session(
        session_id=event.session_id,
        limits=state.limits,
        last_seen_s=state.now_s,
        person=state.people.join(person),
        name=event.name,
        salt=event.salt,
        open_call=event.call,
        owner=event.owner,
        statistics=state.statistics,
    )
    state.sessions[event.session_id] = session
    state.statistics.sessions += 1
    return commands + transitions.follow_formation(state, [])


def close_session(state: MasterState, event: ev.SessionClosed) -> Commands:
    by = f" by {event.operator}" if event.operator else ""
    reason = SessionError(f"the session was closed{by}", remedy="open a new session")
    commands = session_ends.end_session(state, event.session_id, reason) if event.session_id in state.sessions else []
    return [*commands, do.Answer(call=event.call)]


def touch_session(state: MasterState, event: ev.SessionTouched) -> Commands:
    if event.session_id in state.sessions:
        state.sessions[event.session_id].last_seen_s = state.now_s
    return []


def note_programs(state: MasterState, event: ev.ProgramsSent) -> Commands:
    if event.session_id in state.sessions:
        state.sessions[event.session_id].has_programs = True
    return []


def take_arrays(state: MasterState, event: ev.ArraysUploaded) -> Commands:
    node = state.formation.connections.get(event.connection)
    session = state.sessions.get(event.session_id)
    if node is None or session is None:
        return []
    session.last_seen_s = state.now_s
    commands: Commands = []
    for array in event.arrays:
        state.statistics.uploads += 1
        state.statistics.upload_bytes += array.size_bytes
        session.record_arrival(array.array_id, array.size_bytes, node, state.formation.nodes_of(array.devices))
        excess = session.excess(0, 0)
        commands += _reject_array(state, session, array.array_id, excess) if excess else []
    return [*commands, *dispatch.advance(state, session)]


def _reject_array(state: MasterState, session: Session, array_id: int, error: ShardwrightError) -> Commands:
    """Free an array uploaded to a full session; its readers are told."""
    session.drop_array(array_id, error)
    return state.release_on_workers(session, (array_id,), error)


def open_stream(state: MasterState, event: ev.StepsOpened) -> Commands:
    session = state.sessions.get(event.session_id)
    if session is None:
        return [do.EndStream(stream=event.stream, error=unknown_session(event.session_id, state.lost))]
    session.last_seen_s = state.now_s
    session.change_person(event.person)
    old, session.stream = session.stream, event.stream
    session.live, session.held = event.live, []
    session.reply_cursor = 0  # the first number of the stream sets it
    newer = SessionError("a newer RunSteps stream of the session took over", remedy="use one stream a session")
    ended: Commands = [] if old is None else [do.EndStream(stream=old, error=newer)]
    begun = snapshots.begin_stream(state, session, event)
    ended += drain.notices(state, event.stream) + recovered.greet(state, session, event.stream)
    ended += reruns.ask_for_arrays(session) if session.is_open else []
    return ended + begun


def close_stream(state: MasterState, event: ev.StepsClosed) -> Commands:
    for session in state.sessions.values():
        if session.stream == event.stream:
            session.stream = None
            session.last_seen_s = state.now_s
    return []
