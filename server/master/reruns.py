"""Steps that run again by themselves after a loss of executors.

A step under way whose arguments all come with it, are made by such a step before it, or are written by its client once
more, has lost nothing: nobody has seen a result, and it is a function of its arguments. It goes back to the queue of
its session, under its number. Clients that restore snapshots send their steps again themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwright.errors import ShardwrightError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import quarantine
from shardwright.server.master.records import Pending
from shardwright.server.master.session_records import QueuedRequest
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState


def list_steps(session: Session, pending: Mapping[int, Pending]) -> list[ev.StepRequested]:
    """Those of a session's steps under way that can run again, by number. pending: by sequence number."""
    steps: list[ev.StepRequested] = []
    there: set[int] = set()
    for _, sequence in sorted(session.running.items()):
        item = pending[sequence]
        assert isinstance(item.command, do.RunOnWorkers)
        step = item.command.step
        comes = there.union(_inline(step), step.resendable)
        if _may_repeat(step) and _is_blameless(item) and comes.issuperset(step.arguments):
            steps.append(step)
            there |= list_arrays([step])
    return steps


def list_arrays(steps: Iterable[ev.StepRequested]) -> set[int]:
    """Arrays that come with steps, or come again, and those that they make."""
    return {array_id for step in steps for array_id in (*step.outputs, *_inline(step), *step.resendable) if array_id}


def queue(session: Session, steps: Iterable[ev.StepRequested], now_s: float) -> None:
    """Have steps wait for the next executors, before those that wait already; arrays of both count as yet to come."""
    for step in steps:
        del session.running[step.number]
        for array_id in list_arrays([step]):
            session.drop_reasons.pop(array_id, None)
        session.enqueue(step, now_s, is_again=True)
    for item in session.queue:
        if isinstance(item.request, ev.StepRequested):
            item.since_s = now_s
            for array_id in item.request.resendable:
                session.drop_reasons.pop(array_id, None)


def refusal(state: MasterState, session: Session, item: QueuedRequest) -> ShardwrightError | None:
    """Why a step cannot run again by itself: its program was for nodes that were lost."""
    step = item.request
    if not (item.is_again and isinstance(step, ev.StepRequested) and step.executable_id):
        return None
    is_stopped = quarantine.refusal_of_load(state, session.session_id, step.executable_id) is not None
    return None if is_stopped or step.executable_id in session.executables else state.formation.last_loss


def ask_for_arrays(session: Session) -> list[do.Notice]:
    """Of a session that is open: what its client is to write again."""
    steps = [item.request for item in session.queue if isinstance(item.request, ev.StepRequested)]
    lost = {array_id for step in steps for array_id in step.resendable if array_id not in session.arrays}
    if session.stream is None or not lost:
        return []
    return [do.Notice(stream=session.stream, resend=tuple(sorted(lost)))]


def _may_repeat(step: ev.StepRequested) -> bool:
    """Whether it makes arrays, and nothing else; one that is for a generation is its client's business."""
    is_save = step.files is not None and step.files.is_save
    is_snapshot = step.snapshot is not None
    return not (step.generation or is_save or is_snapshot)


def _is_blameless(item: Pending) -> bool:
    return item.verdict is None and item.cancelled_s is None and item.error is None


def _inline(step: ev.StepRequested) -> set[int]:
    return {array_id for array_id, _ in step.inline}
