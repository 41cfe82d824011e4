"""Sessions that nobody uses: they end after a while, or earlier where the server is full.

Functions on `MasterState`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.errors import SessionError
from shardwright.server.master import cancels, saves
from shardwright.server.master import events as ev

if TYPE_CHECKING:
    from shardwright.server.master.sessions import Session
    from shardwright.server.master.state import Commands, MasterState


def expire(state: MasterState, session: Session) -> Commands:
    """End a session whose client is away, or silent, for longer than the limits allow, unless it is busy.

    A step that runs for a client that is away holds nothing up for longer than others: it is cancelled.
    """
    limits, idle_s, text = state.limits, state._now_s - session.last_seen_s, ""
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
    commands: Commands = [ev.Log(text=f"session {session.label} expired: {text}", session=session.session_id)]
    return commands + state._end_session(session.session_id, reason, idle_s if is_away else 0.0)


def make_room(state: MasterState) -> Commands:
    """End the idle session that would be missed least, if there is one: see `Limits.evict_idle_s`."""
    limits = state.limits
    idle = [
        session
        for session in state.sessions.values()
        if state._now_s - session.last_seen_s > (limits.grace_s if session.name else limits.evict_idle_s)
        and not _is_busy(session)
        and (session.stream is None or not session.holds_anything)
    ]
    if not idle:
        return []
    least = min(
        idle, key=lambda each: (bool(each.name), each.holds_anything, each.stream is not None, each.last_seen_s)
    )
    why = f"the server was full, and the session had been idle for {state._now_s - least.last_seen_s:.0f} s"
    commands: Commands = [ev.Log(text=f"session {least.label} gives way to a new one", session=least.session_id)]
    return commands + state._end_session(least.session_id, SessionError(why, remedy="connect again"))


def _is_busy(session: Session) -> bool:
    """Whether somebody waits for something that it does."""
    return _is_awaited(session) or _has_steps(session)


def _is_awaited(session: Session) -> bool:
    waits = any(executable.waiting_calls for executable in session.executables.values())
    return waits or saves.current_save(session) is not None or session.open_call is not None


def _has_steps(session: Session) -> bool:
    return bool(session.running or session.queue)
