"""Executors answer: a command that all nodes have carried out has consequences. Functions on `MasterState`."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.errors import ShardwrightError
from shardwright.server.master import adoption, dispatch, loads, losses, quarantine, reruns, saves, snapshots, watchdog
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.records import Pending
from shardwright.server.master.session_records import StepOutcome
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState


def command_done(state: MasterState, event: ev.CommandDone) -> Commands:
    node = state.formation.connections.get(event.connection)
    item = state.pending.get(event.sequence)
    if node is None or item is None or node not in item.waiting:
        return []
    item.waiting.discard(node)
    item.run_s = max(item.run_s, event.run_s)
    item.values = item.values or event.values
    item.written_bytes += event.written_bytes
    item.traces += event.traces
    item.not_finite += event.not_finite
    is_news = event.error is not None and item.error is None
    if is_news:
        item.error, item.failed_s = event.error, state.now_s
    if item.waiting:
        return _abort(state, item) if is_news else []
    del state.pending[event.sequence]
    state.known = max(state.known, event.sequence)
    _record_run(state, item, watchdog.record_end(state, item))
    finish = _FINISHERS.get(type(item.command))
    commands = finish(state, item) if finish is not None else []
    return commands + _note_end(state, item)


def take_report(state: MasterState, event: ev.ReportReceived) -> Commands:
    """An executor says what there is."""
    node = state.formation.connections.get(event.connection)
    if state.adoption is None or node is None:
        return []
    state.adoption.reports[node] = event.sessions
    return command_done(state, ev.CommandDone(connection=event.connection, sequence=event.sequence))


def _note_end(state: MasterState, item: Pending) -> Commands:
    """A success may clear what was suspected, and after a trial others may run again."""
    has_records, command = bool(state.quarantine.records), item.command
    if isinstance(command, do.RunOnWorkers) and item.error is None:
        quarantine.count_success(state, command.step)
    if not has_records:
        return []
    return [each for session in list(state.sessions.values()) for each in dispatch.advance(state, session)]


def _record_run(state: MasterState, item: Pending, took_s: float) -> None:
    """Remember how long the steps of an executable take."""
    command = item.command
    if not isinstance(command, do.RunOnWorkers) or item.error is not None:
        return
    session = state.sessions.get(command.step.session_id)
    executable = session.executables.get(command.step.executable_id) if session is not None else None
    if executable is not None:
        executable.longest_run_s = max(executable.longest_run_s, took_s)


def _abort(state: MasterState, item: Pending) -> Commands:
    """A step failed on one node: the others may be waiting on its transfers."""
    if not isinstance(item.command, do.RunOnWorkers) or item.error is None:
        return []
    return [do.AbortOnWorkers(sequence=item.command.sequence, nodes=frozenset(item.waiting), error=item.error)]


def _finish_open(state: MasterState, item: Pending) -> Commands:
    assert isinstance(item.command, do.OpenOnWorkers)
    session = state.sessions.get(item.command.session_id)
    if session is None:
        return []
    session.is_open = True
    commands: Commands = []
    if session.open_call is not None:
        commands.append(do.Answer(call=session.open_call, value=session.session_id))
        session.open_call = None
    commands += losses.tell_workers(state, session)
    commands += reruns.ask_for_arrays(session)
    return commands + loads.load_waiting(state, session) + dispatch.advance(state, session)


def _finish_run(state: MasterState, item: Pending) -> Commands:
    assert isinstance(item.command, do.RunOnWorkers)
    step = item.command.step
    session = state.sessions.get(step.session_id)
    if session is None:
        return []
    if item.error is not None:
        for array_id in step.outputs:
            if array_id in session.arrays:
                session.drop_array(array_id, item.error)
    outcome = StepOutcome(
        error=item.error, values=item.values, run_s=item.run_s, traces=item.traces, not_finite=item.not_finite
    )
    session.finish(step.number, outcome, step.kind)
    session.last_step_s = state.now_s
    replies = dispatch.reply_steps(state, session)
    if step.batch is not None:
        return replies + _finish_batch(state, session, step, item.error)
    if step.snapshot is not None and not step.snapshot.is_restore:
        return replies + snapshots.finish_copy(state, session, item)
    is_save = step.files is not None and step.files.is_save
    return replies + (saves.finish_copy(state, session, item) if is_save else [])


def _finish_batch(
    state: MasterState, session: Session, step: ev.StepRequested, error: ShardwrightError | None
) -> Commands:
    """All workers have their part of a batch, or none keeps it: what reads it may run, or is refused."""
    session.being_read.difference_update(step.outputs)
    for item in session.queue:  # that time is not theirs
        item.since_s = state.now_s
    commands = [] if error is None else state.release_on_workers(session, step.outputs, error)
    return commands + dispatch.advance(state, session)


_FINISHERS: dict[type[do.ToWorkers], Callable[[MasterState, Pending], Commands]] = {
    do.OpenOnWorkers: _finish_open,
    do.ReportOnWorkers: adoption.finish,
    do.LoadOnWorkers: loads.finish,
    do.RunOnWorkers: _finish_run,
    do.WriteOnWorkers: saves.finish_write,
    do.FinishOnWorkers: saves.finish_commit,
    do.StoreOnWorkers: snapshots.finish_store,
}
