"""The end of a session, by its client, an operator or time. Functions on `MasterState`."""

from __future__ import annotations

from shardwright.errors import ShardwrightError
from shardwright.server.master import cancels, loads, quarantine, saves, snapshots
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.state import MasterState


def end_session(state: MasterState, session_id: str, reason: ShardwrightError, away_s: float = 0.0) -> Commands:
    """away_s: seconds since its client was last heard, if that is why."""
    session = state.sessions.pop(session_id)
    quarantine.forget(state, session_id)
    state.people.leave(session.person, session.array_bytes)
    steps = [item.request.kind for item in session.queue if isinstance(item.request, ev.StepRequested)]
    steps += [_kind(state.pending[sequence].command) for sequence in session.running.values()]
    state.statistics.session_ended(session_id, steps)
    calls = [call for executable in session.executables.values() for call in executable.waiting_calls]
    calls += [session.open_call] if session.open_call is not None else []
    calls += [item.request.call for item in session.queue if isinstance(item.request, ev.ReleaseRequested)]
    commands: Commands = [do.Fail(call=call, error=reason) for call in calls]
    compiling = [plan_id for plan_id, load in session.executables.items() if load.state == "compiling"]
    commands += loads.cancel_compiles(state, compiling) + saves.lose(session, reason, state.now_s)
    if session.stream is not None:
        commands.append(do.EndStream(stream=session.stream, error=reason))
    for sequence in session.running.values():
        cancels.cancel_running(state, sequence, before_s=away_s)
    if session.is_open or state.is_pending(do.OpenOnWorkers, session_id):
        commands += state.broadcast(lambda sequence: do.CloseOnWorkers(sequence=sequence, session_id=session_id))
    return [*commands, do.SessionEnded(session_id=session_id), snapshots.retain(state)]


def _kind(command: do.ToWorkers) -> str:
    return command.step.kind if isinstance(command, do.RunOnWorkers) else "step"
