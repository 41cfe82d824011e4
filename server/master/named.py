"""Sessions with a name: a new process takes up the state of one that ended or crashed.

Arrays that were not kept are freed; steps in the queue never run. Functions on `MasterState`.
"""

from __future__ import annotations

from shardwright.errors import AuthenticationError, SessionError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.session_records import StepOutcome
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState
from shardwright.server.tuning import ID_MARGIN


def find(state: MasterState, name: str) -> Session | None:
    """The session of that name; names are given once."""
    return next((session for session in state.sessions.values() if name and session.name == name), None)


def take_up(state: MasterState, session: Session, event: ev.SessionRequested) -> Commands:
    """Another client has the session from now on; it is answered once the session is open on the executors.

    Refused without its id, a hash of its secret.
    """
    if event.session_id != session.session_id:
        return [do.Fail(call=event.call, error=_not_yours(session))]
    call = event.call
    over = SessionError(
        f"another client took up the session {session.name!r}",
        remedy="one process at a time may use it; open one of another name",
    )
    commands: Commands = []
    if session.stream is not None:
        commands.append(do.EndStream(stream=session.stream, error=over))
        session.stream = None
    if session.open_call is not None:
        commands.append(do.Fail(call=session.open_call, error=over))
        session.open_call = None
    for item in session.queue:
        if isinstance(item.request, ev.StepRequested):
            session.finish(item.request.number, StepOutcome(error=over))
        else:
            commands.append(do.Answer(call=item.request.call))
    session.queue.clear()
    session.cancelled.clear()
    session.last_seen_s = state.now_s
    session.snapshots.is_told = session.is_protected = False
    session.snapshots.last_end = session.snapshots.unnamed_end = None
    session.snapshots.protection = ev.Protection()
    kept = frozenset(session.kept.array_ids) if session.kept is not None else frozenset()
    dropped = tuple(array_id for array_id in session.arrays if array_id not in kept)
    for array_id in dropped:
        session.drop_array(array_id)
    if not session.is_open:
        session.open_call = call
        return commands
    if dropped:
        commands += state.release_on_workers(session, dropped, None)
    return [*commands, do.Answer(call=call, value=session.session_id)]


def _not_yours(session: Session) -> AuthenticationError:
    return AuthenticationError(
        f"the session {session.name!r} was opened with another token",
        remedy="use the token that it was opened with, or another name; an operator can close it (shardwright close)",
    )


def kept_now(session: Session) -> ev.Kept | None:
    """What was kept, where all of it is there."""
    kept = session.kept
    is_there = (
        kept is not None and bool(kept.array_ids) and all(array_id in session.arrays for array_id in kept.array_ids)
    )
    return kept if is_there else None


def last_number(session: Session) -> int:
    """Of the steps before a successor's: executors may know of none, but a snapshot has the number of its step."""
    return max(session.last_number, session.snapshots.complete)


def next_array_id(session: Session) -> int:
    """The first id for arrays of a successor."""
    return session.highest_id + 1 + ID_MARGIN
