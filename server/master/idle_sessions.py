"""Sessions that nobody uses: they end after a while, or earlier where the server is full and they hold nothing.

Functions on `MasterState`.
"""

from __future__ import annotations

from shardwright.errors import ResourceLimitError, SessionError
from shardwright.server.master import cancels, session_ends
from shardwright.server.master import commands as do
from shardwright.server.master.commands import Commands
from shardwright.server.master.people import Person
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState


def expire(state: MasterState, session: Session) -> Commands:
    """End a session whose client is away, or silent, for longer than the limits allow, unless it is busy.

    A step that runs for a client that is away holds nothing up for longer than others: it is cancelled.
    """
    limits, idle_s, text = state.limits, state.now_s - session.last_seen_s, ""
    grace_s = limits.named_grace_s if session.name else limits.grace_s
    if session.stream is None and idle_s > grace_s:
        text = f"its client was away for {grace_s:g} s"
    elif idle_s > limits.session_idle_s:
        text = f"its client asked for nothing for {limits.session_idle_s:g} s"
    is_away = session.stream is None and idle_s > limits.grace_s
    if is_away and not text:
        cancels.abandon(state, session, idle_s)
    if not text or _is_awaited(session) or (_has_steps(session) and not is_away):
        return []
    reason = SessionError(f"the session ended: {text}", remedy="connect again")
    commands: Commands = [do.Log(text=f"session {session.label} expired: {text}", session=session.session_id)]
    return commands + session_ends.end_session(state, session.session_id, reason, idle_s if is_away else 0.0)


def make_room(state: MasterState, person: Person) -> Commands:
    """End the session that would be missed least, if there is no room for one of `person` and one may give way.

    Of a person with all the sessions that they may have, one of their own.
    """
    sessions = list(state.sessions.values())
    if person.has_all_sessions:
        sessions = [session for session in sessions if session.person is person]
    elif len(sessions) < state.limits.sessions:
        return []
    idle = [session for session in sessions if _may_give_way(state, session)]
    if not idle:
        return []
    least = min(
        idle,
        key=lambda session: (
            -session.person.sessions,
            bool(session.name),
            session.stream is not None,
            session.last_seen_s,
        ),
    )
    why = f"the server was full, and the session had been idle for {state.now_s - least.last_seen_s:.0f} s"
    commands: Commands = [do.Log(text=f"session {least.label} gives way to a new one", session=least.session_id)]
    return commands + session_ends.end_session(state, least.session_id, SessionError(why, remedy="connect again"))


def refusal(state: MasterState, person: Person) -> ResourceLimitError | None:
    """Why there is no room for a session of `person`, or None."""
    if person.has_all_sessions:
        return person.session_refusal()
    if len(state.sessions) < state.limits.sessions:
        return None
    return ResourceLimitError(
        f"the server has {len(state.sessions)} sessions, its limit, and none that holds nothing is idle",
        remedy="close sessions, wait for one to end, or have the operator raise --sessions",
    )


def _may_give_way(state: MasterState, session: Session) -> bool:
    """Nothing is lost with it, and nobody has used it for a while: see `Limits.evict_idle_s`."""
    limits = state.limits
    patience_s = limits.grace_s if session.name else limits.evict_idle_s
    is_idle = state.now_s - session.last_seen_s > patience_s
    return is_idle and not session.holds_anything and not _is_busy(session)


def _is_busy(session: Session) -> bool:
    """Whether somebody waits for something that it does."""
    return _is_awaited(session) or _has_steps(session)


def _is_awaited(session: Session) -> bool:
    waits = any(executable.waiting_calls for executable in session.executables.values())
    return waits or session.current_save is not None or session.open_call is not None


def _has_steps(session: Session) -> bool:
    return bool(session.running or session.queue)
