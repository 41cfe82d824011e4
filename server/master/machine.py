"""The master as a pure state machine: `handle(state, event, now_s) -> commands`.

No clock, no network, no randomness: the shell (`shell.py`) brings events and
carries out commands. `formation.py` decides which executors run, `sessions.py`
books arrays and steps; here they meet:

- the formation becomes *ready*: every session is opened on the executors and
  its executables are loaded again, then queues move on;
- it stops being ready: every array is gone, every running step has failed
  (WorkerLostError), what was being opened or loaded waits for the next generation.

Commands to executors are broadcast under one sequence number and are done when
every node has answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.server.master import (
    adoption,
    answers,
    cancels,
    causes,
    client_requests,
    deaths,
    dispatch,
    draining,
    elasticity,
    idle_sessions,
    loads,
    saves,
    snapshots,
    transitions,
    watchdog,
)
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.formation import Formation
from shardwright.server.master.state import MasterState


def handle(state: MasterState, event: ev.Event, now_s: float) -> Commands:
    """Take in one event at time `now_s` (seconds, any origin, never backwards)."""
    state.now_s = state.statistics.now_s = now_s
    state.watchdog.clock.advance(now_s)
    if isinstance(event, ev.ExecutorExited | ev.ExecutorLeft) and causes.is_unexplained(state, event):
        return causes.hold_back(state, event)
    commands = _take_in(state, event)
    for late in causes.release(state) if state.held_back else ():
        commands = commands + _take_in(state, late)
    return commands


def _take_in(state: MasterState, event: ev.Event) -> Commands:
    if isinstance(event, ev.ExecutorExited):
        return _executor_exited(state, event)
    formation_handler = _FORMATION_HANDLERS.get(type(event))
    if formation_handler is not None:
        commands = transitions.follow_formation(state, formation_handler(state.formation, event, state.now_s))
        return [*commands, snapshots.retain(state)] if isinstance(event, ev.DaemonJoined) else commands
    return _HANDLERS[type(event)](state, event)


def _executor_exited(state: MasterState, event: ev.ExecutorExited) -> Commands:
    """The loss names what the executor was busy with, and that is remembered."""
    nodes = state.formation.nodes.items()
    node = next((index for index, record in nodes if record.daemon == event.connection), None)
    doing = deaths.describe(state, event.works)
    commands = transitions.follow_formation(state, state.formation.executor_exited(event, state.now_s, doing))
    return commands + deaths.explain(state, event, node)


def _tick(state: MasterState, event: ev.Tick) -> Commands:
    del event
    commands = transitions.follow_formation(state, state.formation.tick(state.now_s))
    commands += transitions.follow_formation(state, state.formation.watch(state.watchdog.clock.now_s, state.now_s))
    for session in list(state.sessions.values()):
        commands += dispatch.advance(state, session) + loads.end_waits(state, session)
        commands += idle_sessions.expire(state, session)
    commands += saves.tick(state) + _check_divergence(state) + watchdog.tick(state) + elasticity.tick(state)
    return commands + draining.tick(state)


def _check_divergence(state: MasterState) -> Commands:
    for sequence, item in state.pending.items():
        if saves.is_file_work(item.command):
            continue
        if item.failed_s is not None and state.now_s - item.failed_s > state.limits.divergence_s:
            nodes = ", ".join(map(str, sorted(item.waiting)))
            reason = f"command {sequence} failed on one node ({item.error}) while node {nodes} went on"
            commands = transitions.follow_formation(state, state.formation.restart(reason, state.now_s))
            return commands + deaths.blame_command(state, item.command)
    return []


def check_invariants(state: MasterState) -> None:
    """Invariants between any two events; AssertionError on violation."""
    state.formation.check_invariants()
    is_ready = state.formation.phase == "ready"
    assert bool(state.pending) <= is_ready, "nothing is pending without a cluster"
    running = {
        item.command.step.session_id: item
        for item in state.pending.values()
        if isinstance(item.command, do.RunOnWorkers)
    }
    for sequence, item in state.pending.items():
        assert item.waiting, "a broadcast that all have answered is not pending"
        assert item.waiting <= set(state.formation.nodes)
        assert item.command.sequence == sequence <= state.sequence
    state.people.check_invariants((each.person, each.array_bytes) for each in state.sessions.values())
    for session in state.sessions.values():
        session.check_invariants()
        saves.check_invariants(state, session)
        assert session.is_open <= is_ready
        assert bool(session.running) <= (session.session_id in running)
        assert (session.open_call is None) or not session.is_open
        for executable in session.executables.values():
            assert (executable.state == "loaded") <= (session.is_open and not executable.waiting_calls)
            assert (executable.state == "compiling") == (executable.program is None)


_FORMATION_HANDLERS: dict[type[ev.Event], Callable[[Formation, Any, float], Commands]] = {
    ev.DaemonJoined: Formation.daemon_joined,
    ev.DaemonHeard: Formation.daemon_heard,
    ev.DaemonLeft: Formation.daemon_left,
    ev.MembersChanged: Formation.change_members,
    ev.ExecutorJoined: Formation.executor_joined,
    ev.ExecutorLeft: Formation.executor_left,
    ev.ExecutorHeard: Formation.executor_heard,
}
_HANDLERS: dict[type[ev.Event], Callable[[MasterState, Any], Commands]] = {
    ev.CommandDone: answers.command_done,
    ev.ArraysUploaded: client_requests.take_arrays,
    ev.SessionRequested: client_requests.open_session,
    ev.SessionClosed: client_requests.close_session,
    ev.SessionTouched: client_requests.touch_session,
    ev.ProgramsSent: client_requests.note_programs,
    ev.LoadRequested: loads.request,
    ev.LoadAbandoned: loads.abandon,
    ev.CompileFinished: loads.finish_compile,
    ev.UnloadRequested: loads.unload,
    ev.StepsOpened: client_requests.open_stream,
    ev.StepsClosed: client_requests.close_stream,
    ev.StepRequested: dispatch.request_step,
    ev.StepsCancelled: cancels.request,
    ev.StepsEnded: cancels.end_steps,
    ev.SaveAwaited: saves.wait_requested,
    ev.ReleaseRequested: dispatch.request_release,
    ev.DrainRequested: draining.begin_drain,
    ev.RecentReceived: adoption.take_recent,
    ev.ReportReceived: answers.take_report,
    ev.ProtectionChanged: snapshots.change_protection,
    ev.SnapshotNamed: snapshots.note_named,
    ev.Tick: _tick,
}
