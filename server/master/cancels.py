"""Steps that are to end before their time: cancelled by their client, with its session, or by an operator.

A step that waits fails at once. One that runs may end by itself, for a while; then all executors are replaced, for a
computation of XLA cannot be interrupted:

| who would lose arrays by it, besides its own session          | it may run on for                              |
|---------------------------------------------------------------|------------------------------------------------|
| nobody: others have none, or restore them, or make them again | `cancel_grace_s`                               |
| somebody                                                      | that, or twice its longest run, if that is more |
| whoever it is, where an operator ends it                      | no time                                        |

Functions on `MasterState`; the watchdog ends what is over its time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from shardwright.errors import OptionError, ShardwrightError, StepCancelledError
from shardwright.server.master import commands as do
from shardwright.server.master import dispatch, named, reruns
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.records import Pending
from shardwright.server.master.sessions import Session, cancelled_in_time, unknown_session
from shardwright.server.master.state import MasterState
from shardwright.server.tuning import GRACE_FACTOR


# ---- asked for -------------------------------------------------------------------
def request(state: MasterState, event: ev.StepsCancelled) -> Commands:
    """By the client: steps that wait, or have yet to come, fail at once; those that run get their time."""
    session = state.sessions.get(event.session_id)
    if session is None:
        return [do.Fail(call=event.call, error=unknown_session(event.session_id, state.lost))]
    session.last_seen_s = state.now_s
    numbers = set(event.numbers)
    running = sorted(numbers & session.running.keys())
    for number in running:
        cancel_running(state, session.running[number])
    waiting, commands = _refuse_waiting(state, session, numbers, cancelled_in_time)
    last = session.last_number
    on_their_way = {number for number in numbers if last < number <= last + state.limits.pending_steps}
    session.cancelled |= on_their_way
    done = do.Cancellation(cancelled=tuple(sorted({*waiting, *on_their_way})), running=tuple(running))
    return [*commands, do.Answer(call=event.call, value=done), *dispatch.advance(state, session)]


def end_steps(state: MasterState, event: ev.StepsEnded) -> Commands:
    """By an operator: at once, whoever loses arrays by it."""
    session = state.sessions.get(event.session_id)
    if session is None:
        return _end_orphans(state, event)
    steps = [item.request.number for item in session.queue if isinstance(item.request, ev.StepRequested)]
    under_way = {*session.running, *steps}
    numbers = {event.number} if event.number else under_way
    if not numbers & under_way:
        what = f"step {event.number}" if event.number else "no step"
        text = f"{what} of session {session.label} is under way" if not event.number else f"{what} is not under way"
        return [do.Fail(call=event.call, error=OptionError(text, remedy="`shardwright status` shows what runs"))]
    running = sorted(numbers & session.running.keys())
    for number in running:
        _end_now(state, session.running[number], event.operator)
    waiting, commands = _refuse_waiting(
        state, session, numbers, lambda number: cancelled_in_time(number, f"by {event.operator} ")
    )
    done = do.Cancellation(cancelled=tuple(sorted(waiting)), running=tuple(running))
    return [*commands, do.Answer(call=event.call, value=done), *dispatch.advance(state, session)]


def _end_orphans(state: MasterState, event: ev.StepsEnded) -> Commands:
    """Steps that run on although their session is closed."""
    orphans = [
        sequence
        for sequence, item in state.pending.items()
        if isinstance(item.command, do.RunOnWorkers)
        and item.command.step.session_id == event.session_id
        and event.number in (0, item.command.step.number)
    ]
    if not orphans:
        return [do.Fail(call=event.call, error=unknown_session(event.session_id, state.lost))]
    for sequence in orphans:
        _end_now(state, sequence, event.operator)
    return [do.Answer(call=event.call, value=do.Cancellation(cancelled=(), running=(event.number,)))]


def _end_now(state: MasterState, sequence: int, operator: str) -> None:
    cancel_running(state, sequence)
    state.pending[sequence].ended_by = operator


def _refuse_waiting(
    state: MasterState, session: Session, numbers: set[int], why: Callable[[int], ShardwrightError]
) -> tuple[list[int], Commands]:
    """Take these steps out of the session's queue."""
    steps = [item.request for item in session.queue if isinstance(item.request, ev.StepRequested)]
    waiting = [step for step in steps if step.number in numbers]
    gone = {id(step) for step in waiting}
    session.queue = deque(item for item in session.queue if id(item.request) not in gone)
    commands: Commands = []
    for step in waiting:
        commands += dispatch.refuse_step(state, session, step, why(step.number))
    return [step.number for step in waiting], commands


def cancel_running(state: MasterState, sequence: int, *, before_s: float = 0.0) -> None:
    """A step that runs is to end. before_s: so long ago."""
    item = state.pending[sequence]
    if item.cancelled_s is None:
        item.cancelled_s = state.watchdog.clock.now_s - before_s


def abandon(state: MasterState, session: Session, away_s: float) -> None:
    """The client of a session that somebody may take up has been away for so long: its steps end, if it can be."""
    if session.running and not _would_lose(state, session):
        for sequence in session.running.values():
            cancel_running(state, sequence, before_s=away_s)


# ---- looked at by the watchdog ---------------------------------------------------------
def losers(state: MasterState, item: Pending) -> list[Session]:
    """Sessions, besides its own, that new executors would cost arrays."""
    own = session_of(item.command)
    return [session for session in state.sessions.values() if session.session_id != own and _would_lose(state, session)]


def _would_lose(state: MasterState, session: Session) -> bool:
    if session.is_protected:
        is_alone = bool(session.name) and session.stream is None  # what its successor finds, the snapshot has to have
        return is_alone and named.kept_now(session) != session.snapshots.kept
    waiting = [item.request for item in session.queue if isinstance(item.request, ev.StepRequested)]
    steps = [*reruns.list_steps(session, state.pending), *waiting]
    return bool(session.arrays.keys() - reruns.list_arrays(steps))


def time_left_s(state: MasterState, item: Pending) -> float:
    """Seconds until a head that was cancelled is ended."""
    if item.cancelled_s is None:
        return math.inf
    if item.ended_by:
        return 0.0
    state_clock = state.watchdog.clock
    began_s = max(item.sent_s, state.watchdog.ended_s)
    return max(began_s, item.cancelled_s) + grace_s(state, item) - state_clock.now_s


def grace_s(state: MasterState, item: Pending) -> float:
    """Seconds that a cancelled step may run on."""
    own_s = state.limits.cancel_grace_s
    return max(own_s, GRACE_FACTOR * item.usual_s) if losers(state, item) else own_s


def session_of(command: do.ToWorkers) -> str:
    """The id of a command's session."""
    return command.step.session_id if isinstance(command, do.RunOnWorkers) else command.session_id


# ---- errors -----------------------------------------------------------------------------
def cancelled(message: str) -> StepCancelledError:
    """Of a step that had begun."""
    return StepCancelledError(
        message,
        remedy="the session goes on: arrays that snapshots keep come back by themselves, others are gone, and those "
        "that the step took over, too: run init again, or restore a checkpoint",
    )
