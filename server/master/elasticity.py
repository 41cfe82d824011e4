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

from typing import TYPE_CHECKING

from shardwright.errors import ClusterChangedError, WorkerLostError
from shardwright.server.master import events as ev
from shardwright.server.master import loads, saves

if TYPE_CHECKING:
    from shardwright.server.master.sessions import Session
    from shardwright.server.master.state import Commands, MasterState

#: Seconds without a step after which a session is quiet: it may not take a snapshot for long.
QUIET_S = 5.0

#: Programs of earlier teams of which a session's steps are told what became of them.
MAX_REMEMBERED_PROGRAMS = 1_000


def changed() -> ClusterChangedError:
    return ClusterChangedError(
        "the cluster has other nodes than when this was planned", remedy="plan it again: clients do so by themselves"
    )


def follow_team(state: MasterState) -> Commands:
    """Drop the programs of a team that is no more."""
    if state.team == state.formation.team:
        return []
    state.team = state.formation.team
    commands: Commands = []
    compiling: list[str] = []
    for session in state.sessions.values():
        for plan_id, executable in session.executables.items():
            commands += [ev.Fail(call=call, error=changed()) for call in executable.waiting_calls]
            compiling += [plan_id] if executable.state == "compiling" else []
        retire_programs(session)
    commands += loads.cancel_compiles(state, compiling) + _dismiss_leaving(state)
    for session in state.sessions.values():
        commands += state._advance(session)
    return commands


def retire_programs(session: Session) -> None:
    """Its programs run no more: they are of another team."""
    for plan_id in session.executables:
        session.retired[plan_id] = WorkerLostError(
            "the program was planned for nodes that are not all there any more",
            remedy="call the step again: it is planned for those that are",
        )
    session.executables.clear()
    for old in list(session.retired)[:-MAX_REMEMBERED_PROGRAMS]:
        del session.retired[old]


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
    commands: Commands = [ev.Log(text=f"node {node} will leave ({reason})", is_warning=True) for node in sorted(new)]
    return [*commands, *_dismiss_leaving(state), *state._with_formation(state.formation.tick(state._now_s))]


def _dismiss_leaving(state: MasterState) -> Commands:
    """Daemons of nodes that take no part any more may end."""
    gone = state.formation.leaving.difference(state.formation.team)
    return [ev.Drained(nodes=frozenset(gone))] if gone else []


def tick(state: MasterState) -> Commands:
    """Let nodes join or leave as soon as no session loses by it."""
    formation = state.formation
    if not formation.wants_other_team or state.drain is not None or state.adoption is not None:
        state.wanted_since_s, state.held_up_by = None, ""
        return []
    if state.wanted_since_s is None:
        state.wanted_since_s = state._now_s
    if reason := _obstacle(state):
        is_news, state.held_up_by = reason != state.held_up_by, reason
        return [ev.Log(text=f"the cluster could change its nodes, but {reason}")] if is_news else []
    state.wanted_since_s, state.held_up_by = None, ""
    return state._with_formation(formation.regroup(state._now_s))


def _obstacle(state: MasterState) -> str:
    """Why the cluster cannot change now, in words; "": it can."""
    for session in state.sessions.values():
        name = f"session {session.session_id[:8]}"
        if saves.current_save(session) is not None:
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
    return is_idle and state._now_s - max(session.last_step_s, state.wanted_since_s) > QUIET_S
