"""A cluster that shrinks and grows, as sessions meet it: programs of another team go, growth waits for snapshots.

| what happens                            | what is done                                                           |
|-----------------------------------------|------------------------------------------------------------------------|
| a generation starts with another team   | loaded programs are dropped: clients plan for the new devices          |
| a node could join, or has to leave      | once no session would lose by it, all executors start anew             |
| a session takes snapshots               | it loses nothing after the next one, or while it is quiet              |
| a node asks to leave, and can be spared | the same, and then it ends; no session is disturbed                    |
| a session has arrays, and no snapshots  | it would lose them: the node waits until they are released             |

Functions on `MasterState`.
"""

from __future__ import annotations

from shardwright.server.master import commands as do
from shardwright.server.master import teams, transitions
from shardwright.server.master.commands import Commands
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState
from shardwright.server.tuning import QUIET_S


def can_spare(state: MasterState, nodes: frozenset[int]) -> bool:
    """Whether nodes can leave at the cost of no session's arrays."""
    roster = state.formation.roster
    if roster is None or len(roster.candidates - nodes) < roster.min_nodes:
        return False
    return all(session.snapshots.is_told or not session.arrays for session in state.sessions.values())


def let_leave(state: MasterState, nodes: frozenset[int], reason: str) -> Commands:
    """Go on without nodes that ask to leave, once no session loses by it; then their daemons end."""
    new = nodes - state.formation.leaving
    state.formation.leaving |= nodes
    for node in new:
        state.formation.nodes[node].farewell = f"it was drained ({reason})"
    commands: Commands = [do.Log(text=f"node {node} will leave ({reason})", is_warning=True) for node in sorted(new)]
    return [
        *commands,
        *teams.dismiss_leaving(state),
        *transitions.follow_formation(state, state.formation.tick(state.now_s)),
    ]


def tick(state: MasterState) -> Commands:
    """Let nodes join or leave as soon as no session loses by it."""
    formation = state.formation
    if not formation.wants_other_team or state.drain is not None or state.adoption is not None:
        state.wanted_since_s, state.held_up_by = None, ""
        return []
    if state.wanted_since_s is None:
        state.wanted_since_s = state.now_s
    if reason := _obstacle(state):
        is_news, state.held_up_by = reason != state.held_up_by, reason
        return [do.Log(text=f"the cluster could change its nodes, but {reason}")] if is_news else []
    state.wanted_since_s, state.held_up_by = None, ""
    return transitions.follow_formation(state, formation.regroup(state.now_s))


def _obstacle(state: MasterState) -> str:
    """Why the cluster cannot change now, in words; "": it can."""
    for session in state.sessions.values():
        name = f"session {session.session_id[:8]}"
        if session.current_save is not None:
            return f"{name} is saving"
        if session.arrays and not session.snapshots.is_told:
            return f"{name} has arrays and takes no snapshots (connect(snapshot_every=…))"
        if session.arrays and not _is_safe(state, session):
            return f"{name} has yet to take its next snapshot"
    return ""


def _is_safe(state: MasterState, session: Session) -> bool:
    """Whether a session has just taken a snapshot, or is quiet."""
    assert state.wanted_since_s is not None
    if session.snapshots.completed_s >= state.wanted_since_s:
        return True
    is_idle = not session.running and not session.queue
    return is_idle and state.now_s - max(session.last_step_s, state.wanted_since_s) > QUIET_S
