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

from shardwright.errors import ServerDrainingError
from shardwright.server.master import commands as do
from shardwright.server.master import dispatch, drain, elasticity, saves, session_ends
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.records import Drain
from shardwright.server.master.session_records import StepOutcome
from shardwright.server.master.state import MasterState


def begin_drain(state: MasterState, event: ev.DrainRequested) -> Commands:
    """Begin one, or add to the one that is under way."""
    nodes = _nodes_of(state, event.connection)
    if nodes is not None and not nodes:
        return []  # a daemon that has been replaced
    if nodes is not None and elasticity.can_spare(state, nodes):
        return elasticity.let_leave(state, nodes, event.reason)
    now_s, old = state.now_s, state.drain
    new = Drain(reason=event.reason, nodes=nodes, since_s=now_s, until_s=now_s + event.limit_s, active_s=now_s)
    if old is not None:
        if old.nodes is None or (nodes is not None and nodes <= old.nodes):
            return []
        new.nodes = None if nodes is None else old.nodes | nodes
        new.until_s = min(new.until_s, old.until_s)
    state.drain = new
    limit = f"{new.until_s - now_s:g} s"
    commands: Commands = [do.Log(text=f"{new.subject}: no new steps; what runs has {limit} to end", is_warning=True)]
    streams = [session.stream for session in state.sessions.values() if session.stream is not None]
    commands += [notice for stream in streams for notice in drain.notices(state, stream)]
    commands += _fail_waiting_calls(state, new.error(now_s))
    return [*commands, do.DrainBegan(error=new.error(now_s)), *_go_on(state)]


def waiting_for(state: MasterState) -> str:
    """In words, for Status."""
    drain = state.drain
    assert drain is not None
    work = _work(state)
    return f"{drain.subject} within {max(drain.until_s - state.now_s, 0.0):.0f} s" + (f": {work}" if work else "")


def tick(state: MasterState) -> Commands:
    return [] if state.drain is None else _go_on(state)


def _go_on(state: MasterState) -> Commands:
    drain, now_s = state.drain, state.now_s
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
    commands: Commands = [do.Log(text=text, is_warning=bool(work))]
    if drain.nodes is None:
        commands += _cut_off(state, drain)
    else:
        for node in drain.nodes:
            state.formation.nodes[node].farewell = f"it was drained ({drain.reason})"
    return [*commands, do.Drained(nodes=drain.nodes)]


def _is_quiet(state: MasterState, drain: Drain) -> bool:
    """Whether no client with arrays here is likely to want them yet."""
    attended = [session for session in state.sessions.values() if session.stream is not None and session.arrays]
    seen_s = max([drain.active_s, *(session.last_seen_s for session in attended)])
    return not attended or state.now_s - seen_s > state.limits.drain_idle_s


def _work(state: MasterState) -> str:
    """What has to end first, in words."""
    reasons = []
    for session in state.sessions.values():
        name = f"of session {session.session_id[:8]}"
        steps = [item.request.number for item in session.queue if isinstance(item.request, ev.StepRequested)]
        numbers = sorted([*session.running, *steps])
        save = session.current_save
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
            commands += session_ends.end_session(state, session.session_id, error)
            continue
        for executable in session.executables.values():
            calls, executable.waiting_calls = executable.waiting_calls, []
            commands += [do.Fail(call=call, error=error) for call in calls]
        commands += dispatch.advance(state, session)
    return commands


def _cut_off(state: MasterState, drain: Drain) -> Commands:
    """Steps that run into the server's end fail by name, before the connection does."""
    error = ServerDrainingError(
        f"{drain.subject}, and the step did not end in time", remedy="connect again once it is back, and restore"
    )
    commands: Commands = []
    for session in state.sessions.values():
        commands += saves.lose(session, error, state.now_s)
        queued = [item.request.number for item in session.queue if isinstance(item.request, ev.StepRequested)]
        session.queue.clear()
        for number in sorted([*session.running, *queued]):
            session.finish(number, StepOutcome(error=error))
        commands += dispatch.reply_steps(state, session)
    return commands


def _end(state: MasterState) -> Commands:
    """The nodes are gone: steps are taken again, and run when others have come in their place."""
    state.drain = None
    streams = [session.stream for session in state.sessions.values() if session.stream is not None]
    return [do.DrainNotice(stream=stream, reason="", left_s=0.0) for stream in streams]


def _nodes_of(state: MasterState, connection: int) -> frozenset[int] | None:
    """The node of a daemon's connection; None, the whole server, for 0."""
    if connection == 0:
        return None
    return frozenset(node for node, record in state.formation.nodes.items() if record.daemon == connection)
