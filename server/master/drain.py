"""A server, or a node of it, that is about to end: no new steps, what runs ends, and clients hear of it in time.

Who begins one: a signal to the master or to a worker's daemon, or a preemption notice that either of them watches.

| meanwhile                             | then                                                                   |
|---------------------------------------|------------------------------------------------------------------------|
| a client has a stream                 | it is told at once                                                     |
| a step runs, a save is under way      | it goes on                                                             |
| a step comes, or waits for arguments  | it runs if it can within `drain_notice_s` (it may have been sent       |
|                                       | before its client was told); later it fails with `ServerDrainingError` |
| a save or a fetch comes               | it is carried out                                                      |
| a session, a plan or a load comes, or is waited for | it fails                                                 |

It is complete when nothing runs and every client that has arrays here has been quiet for `drain_idle_s`, or at its
limit. Then the whole server ends, or the daemons of its nodes. An elastic cluster that can spare a node lets it leave
without all this: see `elasticity.py`. Functions on `MasterState`, as in `saves.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.errors import ServerDrainingError
from shardwright.server.master import elasticity, saves
from shardwright.server.master import events as ev
from shardwright.server.master.sessions import StepOutcome

if TYPE_CHECKING:
    from shardwright.server.master.sessions import QueuedRequest, Session
    from shardwright.server.master.state import Commands, MasterState


@dataclass(slots=True)
class Drain:
    """nodes: those that leave; None: the whole server. active_s: when something last ran. is_complete: they may go."""

    reason: str
    nodes: frozenset[int] | None
    since_s: float
    until_s: float
    active_s: float
    is_complete: bool = False

    @property
    def subject(self) -> str:
        """What ends, and why: `the server is ending (SIGTERM)`."""
        if self.nodes is None:
            return f"the server is ending ({self.reason})"
        numbers = ", ".join(map(str, sorted(self.nodes)))
        return f"node{'s' * (len(self.nodes) > 1)} {numbers} will leave ({self.reason})"

    def error(self, now_s: float) -> ServerDrainingError:
        left_s = max(self.until_s - now_s, 0.0)
        return ServerDrainingError(
            f"{self.subject}: no new step begins",
            remedy=f"saves and reads of arrays still work, for {left_s:.0f} s at most: save now, and connect again or "
            "restore once it is back",
        )


def requested(state: MasterState, event: ev.DrainRequested) -> Commands:
    """Begin one, or add to the one that is under way."""
    nodes = _nodes_of(state, event.connection)
    if nodes is not None and not nodes:
        return []  # a daemon that has been replaced
    if nodes is not None and elasticity.can_spare(state, nodes):
        return elasticity.let_leave(state, nodes, event.reason)
    now_s, old = state._now_s, state.drain
    new = Drain(reason=event.reason, nodes=nodes, since_s=now_s, until_s=now_s + event.limit_s, active_s=now_s)
    if old is not None:
        if old.nodes is None or (nodes is not None and nodes <= old.nodes):
            return []
        new.nodes = None if nodes is None else old.nodes | nodes
        new.until_s = min(new.until_s, old.until_s)
    state.drain = new
    limit = f"{new.until_s - now_s:g} s"
    commands: Commands = [ev.Log(text=f"{new.subject}: no new steps; what runs has {limit} to end", is_warning=True)]
    streams = [session.stream for session in state.sessions.values() if session.stream is not None]
    commands += [notice for stream in streams for notice in notices(state, stream)]
    commands += _fail_waiting_calls(state, new.error(now_s))
    return [*commands, ev.DrainBegan(error=new.error(now_s)), *_advance(state)]


def notices(state: MasterState, stream: int) -> Commands:
    """What a client is told as soon as it has a stream."""
    if state.drain is None:
        return []
    left_s = max(state.drain.until_s - state._now_s, 0.0)
    return [ev.DrainNotice(stream=stream, reason=state.drain.subject, left_s=left_s)]


def refusal(state: MasterState, session: Session, item: QueuedRequest) -> ServerDrainingError | None:
    """Why a queued step does not run any more, or None."""
    drain, step = state.drain, item.request
    if drain is None or not isinstance(step, ev.StepRequested) or (step.files is not None and step.files.is_save):
        return None
    has_time = state._now_s <= drain.since_s + state.limits.drain_notice_s
    return None if has_time and session.is_open else drain.error(state._now_s)


def refusal_of_new(state: MasterState) -> ServerDrainingError | None:
    """Why nothing new may begin, or None."""
    return None if state.drain is None else state.drain.error(state._now_s)


def waiting_for(state: MasterState) -> str:
    """In words, for Status."""
    drain = state.drain
    assert drain is not None
    work = _work(state)
    return f"{drain.subject} within {max(drain.until_s - state._now_s, 0.0):.0f} s" + (f": {work}" if work else "")


def tick(state: MasterState) -> Commands:
    return [] if state.drain is None else _advance(state)


def _advance(state: MasterState) -> Commands:
    drain, now_s = state.drain, state._now_s
    assert drain is not None
    if drain.nodes is not None and all(state.formation.nodes[node].daemon is None for node in drain.nodes):
        return _end(state)
    work = _work(state)
    if work:
        drain.active_s = now_s
    if drain.is_complete or (now_s < drain.until_s and (work or not _is_quiet(state, drain))):
        return []
    drain.is_complete = True
    text = f"{drain.subject}: it has drained" if not work else f"{drain.subject}: its time is over; cut off: {work}"
    commands: Commands = [ev.Log(text=text, is_warning=bool(work))]
    if drain.nodes is None:
        commands += _cut_off(state, drain)
    else:
        for node in drain.nodes:
            state.formation.nodes[node].farewell = f"it was drained ({drain.reason})"
    return [*commands, ev.Drained(nodes=drain.nodes)]


def _is_quiet(state: MasterState, drain: Drain) -> bool:
    """Whether no client with arrays here is likely to want them yet."""
    attended = [session for session in state.sessions.values() if session.stream is not None and session.arrays]
    seen_s = max([drain.active_s, *(session.last_seen_s for session in attended)])
    return not attended or state._now_s - seen_s > state.limits.drain_idle_s


def _work(state: MasterState) -> str:
    """What has to end first, in words."""
    reasons = []
    for session in state.sessions.values():
        name = f"of session {session.session_id[:8]}"
        steps = [item.request.number for item in session.queue if isinstance(item.request, ev.StepRequested)]
        numbers = sorted([*session.running, *steps])
        save = saves.current_save(session)
        if numbers:
            reasons.append(f"step {numbers[0]} {name}" if len(numbers) == 1 else f"{len(numbers)} steps {name}")
        elif save is not None:
            reasons.append(f"the save of step {save.number} {name}")
    transfers = sum(record.transfers for record in state.formation.nodes.values() if record.executor_connection)
    return ", ".join([*reasons, f"{transfers} transfers of arrays"] if transfers else reasons)


def _fail_waiting_calls(state: MasterState, error: ServerDrainingError) -> Commands:
    """Whoever waits for workers, or for a program to be compiled, is told at once."""
    commands: Commands = []
    for session in list(state.sessions.values()):
        if session.open_call is not None:
            commands += state._end_session(session.session_id, error)
            continue
        for executable in session.executables.values():
            calls, executable.waiting_calls = executable.waiting_calls, []
            commands += [ev.Fail(call=call, error=error) for call in calls]
        commands += state._advance(session)
    return commands


def _cut_off(state: MasterState, drain: Drain) -> Commands:
    """Steps that run into the server's end fail by name, before the connection does."""
    error = ServerDrainingError(
        f"{drain.subject}, and the step did not end in time", remedy="connect again once it is back, and restore"
    )
    commands: Commands = []
    for session in state.sessions.values():
        commands += saves.lose(session, error, state._now_s)
        queued = [item.request.number for item in session.queue if isinstance(item.request, ev.StepRequested)]
        session.queue.clear()
        for number in sorted([*session.running, *queued]):
            session.finish(number, StepOutcome(error=error))
        commands += state._reply_steps(session)
    return commands


def _end(state: MasterState) -> Commands:
    """The nodes are gone: steps are taken again, and run when others have come in their place."""
    state.drain = None
    streams = [session.stream for session in state.sessions.values() if session.stream is not None]
    return [ev.DrainNotice(stream=stream, reason="", left_s=0.0) for stream in streams]


def _nodes_of(state: MasterState, connection: int) -> frozenset[int] | None:
    """The node of a daemon's connection; None, the whole server, for 0."""
    if connection == 0:
        return None
    return frozenset(node for node, record in state.formation.nodes.items() if record.daemon == connection)
