"""What everybody waits for: time limits of steps, cancelled steps, and hangs that are named.

Executors carry out commands in order: everybody waits for the oldest one without an answer, the *head*. Its age counts
from the end of the command before it.

| the head                                                     | then                                              |
|--------------------------------------------------------------|---------------------------------------------------|
| is older than `stall_s`, and thrice its longest run so far   | log, Status and all waiting clients name it       |
| was cancelled, see `cancels.py`, and runs on                 | the same, with who would lose what by its end     |
| is older than its time limit                                 | it fails (StepTimeoutError), executors start anew |
| was cancelled, and its time is over                          | the same with StepCancelledError                  |

A computation of XLA cannot be interrupted: its executor is killed, and with it all executors of the generation.
Ages are read from an `AwakeClock`. Functions on `MasterState`, as in `saves.py`.
"""

from __future__ import annotations

from shardwright.errors import DeadlineError, ShardwrightError, StepTimeoutError
from shardwright.server.master import cancels, draining, node_reports, transitions
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.records import Pending
from shardwright.server.master.state import MasterState
from shardwright.server.tuning import SHOWN_S, STALL_FACTOR

#: Nodes that a text names, at most.
_MAX_NAMED = 4


def head(state: MasterState) -> Pending | None:
    """The command that everybody waits for; checkpoints and snapshots are written beside the others."""
    background = (do.WriteOnWorkers, do.FinishOnWorkers, do.StoreOnWorkers)
    return next((item for item in state.pending.values() if not isinstance(item.command, background)), None)


def age_s(state: MasterState, item: Pending) -> float:
    """Of the head."""
    watchdog = state.watchdog
    return watchdog.clock.now_s - max(item.sent_s, watchdog.ended_s)


def record_end(state: MasterState, item: Pending) -> float:
    """Take in that all nodes have answered; returns the seconds it took, without those of commands before it."""
    took_s = age_s(state, item)
    successor = head(state)
    if successor is None or successor.command.sequence > item.command.sequence:
        state.watchdog.ended_s = state.watchdog.clock.now_s
    return took_s


def find_stalled(state: MasterState) -> Pending | None:
    """The head, if it takes longer than it should."""
    item = head(state)
    if item is None or age_s(state, item) <= max(state.limits.stall_s, STALL_FACTOR * item.usual_s):
        return None
    return item


def waiting_for(state: MasterState) -> str:
    """What everybody waits for, in words; empty below `SHOWN_S`."""
    if state.drain is not None:
        return draining.waiting_for(state)
    item = head(state)
    return "" if item is None or age_s(state, item) < SHOWN_S else describe(state, item)


def describe(state: MasterState, item: Pending) -> str:
    """E.g. `step 5 of session 1a2b3c4d, 12 s so far: node 1 (host:2223), process 4242, device 3; …`."""
    text = f"{_name(item.command)}, {age_s(state, item):.0f} s so far: {_where(state, item)}"
    return f"{text}; {_outlook(state, item)}"


def _outlook(state: MasterState, item: Pending) -> str:
    """How long it may take."""
    limit = f"it is ended {_in_seconds(item.limit_s - age_s(state, item))} at the latest"
    if item.cancelled_s is None:
        session = state.sessions.get(cancels.session_of(item.command))
        if session is None or session.stream is not None or not isinstance(item.command, do.RunOnWorkers):
            return limit
        away_s = state.now_s - session.last_seen_s
        return f"{limit}; its client has been away for {away_s:.0f} of the {state.limits.grace_s:g} s that it may be"
    how = f"ended by {item.ended_by}" if item.ended_by else "cancelled"
    ended = f"{how}; unless it ends, all executors are replaced {_in_seconds(cancels.time_left_s(state, item))}"
    others = [session.label for session in cancels.losers(state, item)]
    if not others or item.ended_by:
        return ended
    more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
    named = ", ".join(others[:_MAX_NAMED]) + more
    number = f"/{item.command.step.number}" if isinstance(item.command, do.RunOnWorkers) else ""
    return (
        f"{ended}: that costs session {named} arrays that no snapshot keeps; an operator can end it at once: "
        f"shardwright cancel ADDRESS {cancels.session_of(item.command)[:8]}{number}"
    )


def _in_seconds(seconds: float) -> str:
    return f"in {seconds:.0f} s" if seconds >= 0.5 else "now"


def tick(state: MasterState) -> Commands:
    item = head(state)
    if item is None:
        return []
    verdict = _verdict(state, item)
    if verdict is not None:
        item.verdict = verdict
        return transitions.follow_formation(state, state.formation.replace_executors(verdict.message, state.now_s))
    return _tell(state, item)


def _tell(state: MasterState, item: Pending) -> Commands:
    """Name a head that takes longer than it should, or was cancelled: once in the log, and to each who waits for it."""
    watchdog = state.watchdog
    is_cancelled = item.cancelled_s is not None and watchdog.clock.now_s - item.cancelled_s >= SHOWN_S
    if not is_cancelled and find_stalled(state) is None:
        return []
    key, text, command = (
        (item.command.sequence, is_cancelled),
        f"everybody waits for {describe(state, item)}",
        item.command,
    )
    commands: Commands = []
    if watchdog.reported != key:
        watchdog.reported = key
        step = command.step.number if isinstance(command, do.RunOnWorkers) else 0
        commands.append(do.Log(text=text, is_warning=True, session=cancels.session_of(command), step=step))
    for session in state.sessions.values():
        if session.stream is not None and session.told != key and (session.running or session.queue):
            session.told = key
            commands.append(do.Notice(stream=session.stream, text=text))
    return commands


def _verdict(state: MasterState, item: Pending) -> ShardwrightError | None:
    """The error that the head is to end with now, or None."""
    age = age_s(state, item)
    what, where = _name(item.command), _where(state, item)
    is_step = isinstance(item.command, do.RunOnWorkers)
    if age > item.limit_s:
        error_type = StepTimeoutError if is_step else DeadlineError
        return error_type(
            f"{what} did not end within {item.limit_s:g} s: {where}",
            remedy="pass parallelize(…, step_timeout=SECONDS) if it needs longer; the executors were replaced, so run "
            "init again, or restore a checkpoint",
        )
    if item.cancelled_s is None:
        return None
    if cancels.time_left_s(state, item) > 0:
        return None
    if item.ended_by:
        return cancels.cancelled(f"{what} was ended by {item.ended_by}: {where}")
    grace_s = cancels.grace_s(state, item)
    return cancels.cancelled(f"{what} was cancelled, and did not end within {grace_s:g} s: {where}")


def _name(command: do.ToWorkers) -> str:
    session = f"of session {cancels.session_of(command)[:8]}"
    match command:
        case do.RunOnWorkers(step=step):
            return f"{_kind_of(step)} {step.number} of session {step.session_id[:8]}"
        case do.LoadOnWorkers(program=program):
            return f"the load of plan {program.plan_id[:12]} {session}"
        case do.OpenOnWorkers():
            return f"the opening {session}"
        case do.CloseOnWorkers():
            return f"the end {session}"
        case _:
            return f"housekeeping {session}"


def _kind_of(step: ev.StepRequested) -> str:
    if step.snapshot is not None:
        return "the restore in step" if step.snapshot.is_restore else "the snapshot in step"
    if step.files is not None:
        return "the save in step" if step.files.is_save else "the restore in step"
    if step.batch is not None:
        return "the batch in step"
    return "step"


def _where(state: MasterState, item: Pending) -> str:
    """The nodes without an answer: process, and what it says that it is busy with."""
    nodes = sorted(item.waiting)
    named = [
        node_reports.describe_executor(state.formation, node, item.command.sequence) for node in nodes[:_MAX_NAMED]
    ]
    more = len(nodes) - len(named)
    return "; ".join([*named, f"{more} more nodes"] if more else named)


def summarize(state: MasterState) -> str:
    """The state of everything in a word; see `StatusReply.state`."""
    formation = state.formation
    if state.drain is not None:
        return "draining"
    if formation.phase != "ready":
        states = [node_reports.node_state(formation, node) for node in formation.nodes]
        return "degraded" if "lost" in states else "waiting"
    if find_stalled(state) is not None or formation.has_suspects:
        return "stalled"
    return "degraded" if formation.lacks_daemons else "ready"
