"""Saves on the master: copied by a numbered step, then written by all nodes, then committed by the first.

| phase      | what runs                                         | next                            |
|------------|---------------------------------------------------|---------------------------------|
| copying    | the numbered step: arrays are copied on each node | writing, or abandoning          |
| writing    | each node writes its copies                       | committing, or abandoning       |
| committing | the first node makes it a checkpoint              | done                            |
| abandoning | the first node removes what there is              | done, with the error that it had |

Whatever ends the generation, the session or the time allowed ends the save with an error:
no worker waits for another. Functions on `MasterState`, in the tables of `machine.py`.
"""

from __future__ import annotations

from shardwright.errors import (
    CheckpointError,
    DeadlineError,
    InternalError,
    SessionError,
    ShardwrightError,
    WorkerLostError,
)
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.records import Pending
from shardwright.server.master.session_records import Save
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState


def is_file_work(command: do.ToWorkers) -> bool:
    """Whether it has no waits between workers: after one fails, the others end by themselves."""
    if isinstance(command, do.RunOnWorkers):
        step = command.step
        return step.files is not None or step.snapshot is not None or step.batch is not None
    return isinstance(command, do.WriteOnWorkers | do.FinishOnWorkers | do.StoreOnWorkers)


def wait_requested(state: MasterState, event: ev.SaveAwaited) -> Commands:
    session = state.sessions.get(event.session_id)
    if session is None:
        gone = SessionError("the session is closed, and its saves with it", remedy="open a new session")
        return [do.Fail(call=event.call, error=gone)]
    session.last_seen_s = state.now_s
    save = session.saves.get(event.number)
    if save is None and event.number < session.first_number:
        cut_off = f"the save of step {event.number} was cut off: the servers were started again"
        return [do.Fail(call=event.call, error=WorkerLostError(cut_off, remedy="save again"))]
    if save is None:
        unknown = CheckpointError(f"step {event.number} is no save, or one of long ago")
        return [do.Fail(call=event.call, error=unknown)]
    if save.is_done:
        return [save.answer(event.call)]
    save.calls.append(event.call)
    return []


def finish_copy(state: MasterState, session: Session, item: Pending) -> Commands:
    """All nodes have answered the step of a save."""
    assert isinstance(item.command, do.RunOnWorkers)
    save = session.saves[item.command.step.number]
    if save.is_done:
        return []  # it took too long
    save.error = item.error
    if save.error is not None:
        return _finish(state, session, save)
    save.phase = "writing"
    return state.broadcast(
        lambda sequence: do.WriteOnWorkers(sequence=sequence, session_id=session.session_id, number=save.number)
    )


def finish_write(state: MasterState, item: Pending) -> Commands:
    """All nodes have written, or said why not."""
    assert isinstance(item.command, do.WriteOnWorkers)
    session = state.sessions.get(item.command.session_id)
    if session is None or session.saves[item.command.number].is_done:
        return []
    save = session.saves[item.command.number]
    save.error, save.written_bytes = item.error, item.written_bytes
    if save.error is None and save.expected_bytes not in (None, save.written_bytes):
        save.error = InternalError(f"{save.written_bytes} bytes were written of {save.expected_bytes}")
    return _finish(state, session, save)


def finish_commit(state: MasterState, item: Pending) -> Commands:
    """The checkpoint is there, or what there was of it is gone."""
    assert isinstance(item.command, do.FinishOnWorkers)
    session = state.sessions.get(item.command.session_id)
    if session is None or session.saves[item.command.number].is_done:
        return []
    return session.saves[item.command.number].end(state.now_s, item.error)


def lose(session: Session, error: ShardwrightError, now_s: float) -> Commands:
    """The generation or the session ended."""
    save = session.current_save
    return save.end(now_s, error) if save is not None else []


def tick(state: MasterState) -> Commands:
    commands: Commands = []
    for session in state.sessions.values():
        save = session.current_save
        if save is not None and state.now_s - save.started_s > state.limits.save_s:
            waited = f"the save of step {save.number} was not complete within {state.limits.save_s:g} s ({save.phase})"
            commands += _abandon(state, session, save)
            commands += save.end(state.now_s, DeadlineError(waited, remedy="check the file system of the directory"))
    return commands


def check_invariants(state: MasterState, session: Session) -> None:
    """A save under way is carried out right now, by the step or the order of its phase."""
    assert all(save.is_done for save in list(session.saves.values())[:-1]), "one at a time"
    assert all(not save.calls for save in session.saves.values() if save.is_done), "nobody waits for what is over"
    save = session.current_save
    if save is None:
        return
    if save.phase == "copying":
        assert save.number in session.running
        return
    kind = do.WriteOnWorkers if save.phase == "writing" else do.FinishOnWorkers
    orders = [item.command for item in state.pending.values()]
    mine = [order for order in orders if isinstance(order, kind) and order.session_id == session.session_id]
    assert any(order.number == save.number for order in mine)


def _finish(state: MasterState, session: Session, save: Save) -> Commands:
    if save.error is not None:
        save.phase = "abandoning"
        return _abandon(state, session, save)
    save.phase = "committing"
    return state.broadcast(
        lambda sequence: do.FinishOnWorkers(
            sequence=sequence, session_id=session.session_id, number=save.number, is_commit=True
        )
    )


def _abandon(state: MasterState, session: Session, save: Save) -> Commands:
    return state.broadcast(
        lambda sequence: do.FinishOnWorkers(
            sequence=sequence, session_id=session.session_id, number=save.number, is_commit=False
        )
    )
