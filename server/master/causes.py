"""Of several ends that come together, which one was the cause: it is taken in first, and is what the loss names.

An executor that dies takes the others of its `jax.distributed` job with it, within milliseconds, and the master may
hear of those first. What does not explain itself is held back, as if it were still on its way:

| news                                                           | is taken in                                       |
|----------------------------------------------------------------|---------------------------------------------------|
| an executor ended                                              | at once                                           |
| it ended because jax.distributed missed another one, or by     |                                                    |
| SIGABRT without a word, as collectives under way end it        | after what ends the generation, or `CAUSE_S` later |
| its connection broke; its daemon, which is there, may say why  | likewise                                          |
| its connection broke, and its daemon is gone or silent         | at once                                           |

Functions on `MasterState`.
"""

from __future__ import annotations

import signal

from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.formation import Formation
from shardwright.server.master.records import HeldBack
from shardwright.server.master.state import MasterState
from shardwright.server.tuning import CAUSE_S

#: Last words of a process that jax.distributed ends (jaxlib, `client.cc`).
_MISSES_ANOTHER = "JAX distributed service detected fatal errors"


def is_unexplained(state: MasterState, event: ev.Event) -> bool:
    """Whether it may follow from something that the master has yet to hear of."""
    formation = state.formation
    if not _has_running_job(formation):
        return False
    match event:
        case ev.ExecutorExited():
            return event.generation == formation.generation and _follows_another(event)
        case ev.ExecutorLeft():
            return event.connection in formation.connections and _may_be_explained(formation, event)
        case _:
            return False


def _follows_another(event: ev.ExecutorExited) -> bool:
    """Whether an executor may have ended because another one did: it has no reason of its own to tell."""
    is_silent_abort = event.exit_code == -signal.SIGABRT and not event.last_lines.strip()
    return is_silent_abort or _MISSES_ANOTHER in event.last_lines


def hold_back(state: MasterState, event: ev.ExecutorExited | ev.ExecutorLeft) -> Commands:
    state.held_back.append(HeldBack(event, state.now_s + CAUSE_S))
    return [do.LookAgain(delay_s=CAUSE_S)]


def release(state: MasterState) -> list[ev.ExecutorExited | ev.ExecutorLeft]:
    """What was held back and is to be taken in now: all of it or nothing; what may be the cause comes first."""
    formation, held_back = state.formation, state.held_back
    is_over = not _has_running_job(formation) or any(
        held.until_s <= state.now_s
        or (isinstance(held.event, ev.ExecutorLeft) and not _may_be_explained(formation, held.event))
        for held in held_back
    )
    if not is_over:
        return []
    state.held_back = []
    ended = {held.event.connection for held in held_back if isinstance(held.event, ev.ExecutorExited)}
    daemons = {record.executor_connection: record.daemon for record in formation.nodes.values()}

    def follows_surely(event: ev.ExecutorExited | ev.ExecutorLeft) -> tuple[bool, bool]:
        is_stream = isinstance(event, ev.ExecutorLeft)
        return not is_stream or daemons.get(event.connection) in ended, is_stream

    return sorted((held.event for held in held_back), key=follows_surely)


def _has_running_job(formation: Formation) -> bool:
    return formation.phase in ("starting", "ready")


def _may_be_explained(formation: Formation, event: ev.ExecutorLeft) -> bool:
    """Whether a daemon is there that could say why its executor's connection broke."""
    node = formation.connections.get(event.connection)
    record = None if node is None else formation.nodes[node]
    return record is not None and record.daemon is not None and not record.is_daemon_silent
