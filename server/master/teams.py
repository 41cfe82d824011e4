"""Programs of a team that is no more are dropped, and its daemons may end: clients plan for the new devices."""

from __future__ import annotations

from shardwright.errors import ClusterChangedError, WorkerLostError
from shardwright.server.master import commands as do
from shardwright.server.master import dispatch, loads
from shardwright.server.master.commands import Commands
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState
from shardwright.server.tuning import MAX_REMEMBERED_PROGRAMS


def cluster_changed_error() -> ClusterChangedError:
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
            commands += [do.Fail(call=call, error=cluster_changed_error()) for call in executable.waiting_calls]
            compiling += [plan_id] if executable.state == "compiling" else []
        retire_programs(session)
    commands += loads.cancel_compiles(state, compiling) + dismiss_leaving(state)
    for session in state.sessions.values():
        commands += dispatch.advance(state, session)
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


def dismiss_leaving(state: MasterState) -> Commands:
    """Daemons of nodes that take no part any more may end."""
    gone = state.formation.leaving.difference(state.formation.team)
    return [do.Drained(nodes=frozenset(gone))] if gone else []
