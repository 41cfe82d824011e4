"""Requests of a session in their order: steps and releases go to the executors as soon as they may.

Functions on `MasterState`.
"""

from __future__ import annotations

from collections import deque

from shardwright.errors import ShardwrightError
from shardwright.server.master import commands as do
from shardwright.server.master import drain, node_reports, quarantine, reruns, snapshots, time_limits
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.session_records import QueuedRequest, StepOutcome
from shardwright.server.master.sessions import Session, cancelled_in_time, unknown_session
from shardwright.server.master.state import MasterState


def request_step(state: MasterState, event: ev.StepRequested) -> Commands:
    session = state.sessions.get(event.session_id)
    if session is None:
        return [do.EndStream(stream=event.stream, error=unknown_session(event.session_id, state.lost))]
    if session.stream != event.stream:
        return []  # left over from a stream that was replaced
    session.last_seen_s = state.now_s
    if session.is_unreported:
        if len(session.held) < state.limits.pending_steps:
            session.held.append(event)
        return []
    if session.awaits_number:
        session.take_number(event.number)
    refused = session.number_refusal(event.number)
    if refused is not None:
        session.stream = None
        return [do.EndStream(stream=event.stream, error=refused)]
    session.reply_cursor = session.reply_cursor or event.number
    if event.number <= session.last_number:
        return reply_steps(state, session)  # sent again: it has run, or is about to
    session.last_number = event.number
    session.snapshots.is_told, session.is_protected = event.generation > 0, event.restores
    if event.number in session.cancelled:
        session.cancelled.discard(event.number)
        return refuse_step(state, session, event, cancelled_in_time(event.number))
    session.enqueue(event, state.now_s)
    return advance(state, session)


def request_release(state: MasterState, event: ev.ReleaseRequested) -> Commands:
    session = state.sessions.get(event.session_id)
    if session is None:
        return [do.Fail(call=event.call, error=unknown_session(event.session_id, state.lost))]
    session.last_seen_s = state.now_s
    session.enqueue(event, state.now_s)
    return advance(state, session)


def advance(state: MasterState, session: Session) -> Commands:
    """Dispatch from the head of the queue, until it has to wait."""
    commands: Commands = []
    if session.is_unreported:
        return commands
    queue: deque[QueuedRequest] = session.queue
    while queue:
        item = queue[0]
        request = item.request
        if isinstance(request, ev.ReleaseRequested):
            if request.after_step > session.last_number and not session.is_late(item, state.now_s):
                break
            queue.popleft()
            commands += _release(state, session, request)
            continue
        error = (
            drain.refusal(state, session, item)
            or snapshots.stale(state, request)
            or reruns.refusal(state, session, item)
            or session.refusal(request)
            or _lateness(state, session, item)
        )
        if error is not None:
            queue.popleft()
            commands += refuse_step(state, session, request, error)
        elif _can_run(state, session, request):
            queue.popleft()
            commands += _run(state, session, request)
        else:
            break
    return commands


def _lateness(state: MasterState, session: Session, item: QueuedRequest) -> ShardwrightError | None:
    """Why a step has waited too long, or None."""
    if session.is_open:
        return session.lateness(item, state.now_s)
    if not isinstance(item.request, ev.StepRequested) or not session.is_late(item, state.now_s):
        return None
    return node_reports.not_ready(state.formation, f"step {item.request.number}", state.limits.argument_wait_s)


def _can_run(state: MasterState, session: Session, step: ev.StepRequested) -> bool:
    is_ready = session.is_open and session.is_loaded(step) and not session.missing_arguments(step)
    return is_ready and quarantine.may_run(state, session, step)


def _run(state: MasterState, session: Session, step: ev.StepRequested) -> Commands:
    commands = state.broadcast(lambda sequence: do.RunOnWorkers(sequence=sequence, step=step))
    executable = session.executables.get(step.executable_id)
    item = state.pending[state.sequence]
    item.limit_s = time_limits.step_limit_s(state.limits, step, executable)
    item.usual_s = time_limits.usual_s(executable)
    session.start(step, state.sequence, state.now_s)
    return commands


def refuse_step(state: MasterState, session: Session, step: ev.StepRequested, error: ShardwrightError) -> Commands:
    """A step that never reaches the workers; clients waiting on its outputs are told."""
    outputs = tuple(array_id for array_id in step.outputs if array_id and array_id not in session.arrays)
    for array_id in outputs:
        session.drop_array(array_id, error)
    session.finish(step.number, StepOutcome(error=error), step.kind)
    commands = reply_steps(state, session)
    if session.is_open and outputs:
        commands += state.release_on_workers(session, outputs, error)
    return commands


def _release(state: MasterState, session: Session, request: ev.ReleaseRequested) -> Commands:
    there = tuple(array_id for array_id in dict.fromkeys(request.array_ids) if session.drop_array(array_id))
    commands: Commands = [do.Answer(call=request.call)]
    if there and session.is_open:
        commands += state.release_on_workers(session, there, None)
    return commands


def reply_steps(state: MasterState, session: Session) -> Commands:
    """Replies that are due on the session's stream, in the order of their numbers."""
    commands: Commands = []
    while session.stream is not None and session.reply_cursor in session.outcomes:
        outcome = session.outcomes[session.reply_cursor]
        commands.append(
            do.ReplyStep(
                stream=session.stream, number=session.reply_cursor, error=outcome.error, values=outcome.values,
                run_s=outcome.run_s, traces=outcome.traces, not_finite=outcome.not_finite,
            )
        )  # fmt: skip
        session.reply_cursor += 1
    return commands
