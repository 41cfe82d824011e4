"""Programs of sessions on the master: compiled once for all, loaded by every node, called for by clients.

| state     | what runs                          | next                      |
|-----------|------------------------------------|---------------------------|
| compiling | the compile child, for all who ask | loading, or an error      |
| loading   | each node loads it                 | loaded, or an error       |
| loaded    | nothing: steps may run it          | gone, once it is unloaded |

Functions on `MasterState`, in the tables of `machine.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.errors import SessionError
from shardwright.server.master import commands as do
from shardwright.server.master import dispatch, drain, node_reports, quarantine
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.records import Pending
from shardwright.server.master.session_records import Executable
from shardwright.server.master.sessions import Session, unknown_session
from shardwright.server.master.state import MasterState


def request(state: MasterState, event: ev.LoadRequested) -> Commands:
    """A client asks for a program."""
    session = state.sessions.get(event.session_id)
    if session is None:
        return [do.Fail(call=event.call, error=unknown_session(event.session_id, state.lost))]
    session.last_seen_s = state.now_s
    executable = session.executables.get(event.plan_id)
    if (stopped := quarantine.refusal_of_load(state, event.session_id, event.plan_id)) is not None:
        return [do.Fail(call=event.call, error=stopped)]
    refused = drain.refusal_of_new(state)
    if refused is not None and (executable is None or executable.state != "loaded"):
        return [do.Fail(call=event.call, error=refused)]
    if executable is None:
        executable = session.executables[event.plan_id] = Executable(plan_id=event.plan_id)
        executable.waiting_calls.append(event.call)
        return [
            do.Progress(call=event.call, phase="emit and compile"),
            do.Compile(plan_id=event.plan_id, session_id=event.session_id),
        ]
    if executable.state == "loaded":
        return [do.Answer(call=event.call, value=executable.program)]
    executable.waiting_calls.append(event.call)
    executable.since_s = state.now_s
    return [do.Progress(call=event.call, phase="emit and compile" if executable.program is None else "load")]


def abandon(state: MasterState, event: ev.LoadAbandoned) -> Commands:
    """A program that nobody waits for is not compiled to its end; one that is being loaded stays."""
    session = state.sessions.get(event.session_id)
    executable = session.executables.get(event.plan_id) if session is not None else None
    if session is None or executable is None or event.call not in executable.waiting_calls:
        return []
    executable.waiting_calls.remove(event.call)
    if executable.waiting_calls or executable.state != "compiling":
        return []
    del session.executables[event.plan_id]
    return cancel_compiles(state, [event.plan_id]) + dispatch.advance(state, session)


def cancel_compiles(state: MasterState, plan_ids: Iterable[str]) -> Commands:
    """End the compilations that no session has under way."""
    wanted = {
        executable.plan_id
        for session in state.sessions.values()
        for executable in session.executables.values()
        if executable.state == "compiling"
    }
    return [do.CancelCompile(plan_id=plan_id) for plan_id in plan_ids if plan_id not in wanted]


def finish_compile(state: MasterState, event: ev.CompileFinished) -> Commands:
    """A program is compiled, or was refused: for every session that waits for it."""
    commands: Commands = []
    for session in state.sessions.values():
        executable = session.executables.get(event.plan_id)
        if executable is None or executable.state != "compiling":
            continue
        if event.error is not None:
            del session.executables[event.plan_id]
            commands += [do.Fail(call=call, error=event.error) for call in executable.waiting_calls]
            commands += dispatch.advance(state, session)
            continue
        executable.program, executable.state, executable.since_s = event.program, "loading", state.now_s
        commands += [do.Progress(call=call, phase="load") for call in executable.waiting_calls]
        if session.is_open:
            commands += load(state, session, executable)
    return commands


def load(state: MasterState, session: Session, executable: Executable) -> Commands:
    """Have every node load a compiled program."""
    program = executable.program
    assert program is not None
    return state.broadcast(
        lambda sequence: do.LoadOnWorkers(sequence=sequence, session_id=session.session_id, program=program)
    )


def end_waits(state: MasterState, session: Session) -> Commands:
    """Fail calls that have waited too long for executors; their programs are loaded once there are some."""
    limits, commands = state.limits, list[do.Command]()
    wait_s = limits.restart_patience_s if session.snapshots.is_told else limits.argument_wait_s
    for executable in session.executables.values():
        is_late = not session.is_open and state.now_s - executable.since_s > wait_s
        if is_late and executable.state == "loading":
            calls, executable.waiting_calls = executable.waiting_calls, []
            error = node_reports.not_ready(state.formation, "the load of a program", wait_s)
            commands += [do.Fail(call=call, error=error) for call in calls]
    return commands


def unload(state: MasterState, event: ev.UnloadRequested) -> Commands:
    """A client needs a program no more."""
    session = state.sessions.get(event.session_id)
    if session is None:
        return [do.Fail(call=event.call, error=unknown_session(event.session_id, state.lost))]
    executable = session.executables.pop(event.executable_id, None)
    commands: Commands = [do.Answer(call=event.call)]
    if executable is not None:
        gone = SessionError(f"executable {event.executable_id} was unloaded while it was being loaded")
        commands += [do.Fail(call=call, error=gone) for call in executable.waiting_calls]
        if executable.state == "compiling":
            commands += cancel_compiles(state, [event.executable_id])
        if session.is_open and executable.state != "compiling":
            commands += state.broadcast(
                lambda sequence: do.UnloadOnWorkers(
                    sequence=sequence, session_id=event.session_id, executable_id=event.executable_id
                )
            )
        commands += dispatch.advance(state, session)
    return commands


def finish(state: MasterState, item: Pending) -> Commands:
    """All nodes have answered a load."""
    assert isinstance(item.command, do.LoadOnWorkers)
    session = state.sessions.get(item.command.session_id)
    executable = session.executables.get(item.command.program.plan_id) if session is not None else None
    if session is None or executable is None:
        return []
    calls, executable.waiting_calls = executable.waiting_calls, []
    if item.error is not None:
        del session.executables[executable.plan_id]
        fail: Commands = [do.Fail(call=call, error=item.error) for call in calls]
        return fail + dispatch.advance(state, session)
    executable.state = "loaded"
    return [*(do.Answer(call=call, value=executable.program) for call in calls), *dispatch.advance(state, session)]


def drop_refused(session: Session, pending: dict[int, Pending]) -> Commands:
    """A load that hung is not tried again."""
    commands: Commands = []
    for item in pending.values():
        command = item.command
        if item.verdict is None or not isinstance(command, do.LoadOnWorkers):
            continue
        if command.session_id == session.session_id and command.program.plan_id in session.executables:
            calls = session.executables.pop(command.program.plan_id).waiting_calls
            commands += [do.Fail(call=call, error=item.verdict) for call in calls]
    return commands


def load_waiting(state: MasterState, session: Session) -> Commands:
    """Of an open session: have the executors load what is compiled."""
    waiting = [executable for executable in session.executables.values() if executable.state == "loading"]
    return [command for executable in waiting for command in load(state, session, executable)]
