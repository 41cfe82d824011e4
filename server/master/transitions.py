"""What sessions need when executors come or go: opened again, or told of the loss. Functions on `MasterState`."""

from __future__ import annotations

from shardwright.server.master import commands as do
from shardwright.server.master import losses, quarantine, recovered, teams
from shardwright.server.master.commands import Commands
from shardwright.server.master.state import MasterState


def follow_formation(state: MasterState, commands: Commands) -> Commands:
    """Add what sessions need after the formation may have changed its phase."""
    phase = state.formation.phase
    if state.adoption is not None and phase == "ready":
        return commands + recovered.advance_adoption(state)
    if state.adoption is not None and phase != "adopting":
        if state.pending:
            commands = commands + losses.take(state)
        commands = commands + recovered.advance_adoption(state)
    opened = any(session.is_open for session in state.sessions.values())
    if phase != "ready" and (state.pending or opened):
        commands = commands + losses.take(state)
    commands += teams.follow_team(state)
    if phase == "ready":
        for session in state.sessions.values():
            if not session.is_open and not state.is_pending(do.OpenOnWorkers, session.session_id):
                commands = commands + _open(state, session.session_id)
    return commands


def _open(state: MasterState, session_id: str) -> Commands:
    refused = quarantine.refused_datasets(state, session_id)
    return state.broadcast(lambda sequence: do.OpenOnWorkers(sequence=sequence, session_id=session_id, refused=refused))
