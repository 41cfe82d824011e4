"""What a drain refuses and tells, where one is under way; `draining.py` begins and ends it."""

from __future__ import annotations

from shardwright.errors import ServerDrainingError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.session_records import QueuedRequest
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState


def notices(state: MasterState, stream: int) -> Commands:
    """What a client is told as soon as it has a stream."""
    if state.drain is None:
        return []
    left_s = max(state.drain.until_s - state.now_s, 0.0)
    return [do.DrainNotice(stream=stream, reason=state.drain.subject, left_s=left_s)]


def refusal(state: MasterState, session: Session, item: QueuedRequest) -> ServerDrainingError | None:
    """Why a queued step does not run any more, or None."""
    drain, step = state.drain, item.request
    if drain is None or not isinstance(step, ev.StepRequested) or (step.files is not None and step.files.is_save):
        return None
    has_time = state.now_s <= drain.since_s + state.limits.drain_notice_s
    return None if has_time and session.is_open else drain.error(state.now_s)


def refusal_of_new(state: MasterState) -> ServerDrainingError | None:
    """Why nothing new may begin, or None."""
    return None if state.drain is None else state.drain.error(state.now_s)
