"""What the loss of all executors means to sessions: which arrays are gone, which steps failed, which run again.

Functions on `MasterState`.
"""

from __future__ import annotations

from shardwright.errors import ShardwrightError, WorkerLostError
from shardwright.server.master import cancels, deaths, dispatch, loads, reruns, saves, snapshots
from shardwright.server.master import commands as do
from shardwright.server.master.commands import Commands
from shardwright.server.master.records import Pending
from shardwright.server.master.session_records import StepOutcome
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState


def take(state: MasterState) -> Commands:
    """The executors are lost, and all arrays with them; what lost nothing by it waits for the next ones."""
    loss = state.formation.last_loss
    assert loss is not None
    pending = dict(state.pending)
    state.pending.clear()
    commands: Commands = []
    for session in state.sessions.values():
        session.is_open = False
        session.has_losses |= bool(session.arrays)
        again = reruns.list_steps(session, pending)
        for array_id in list(session.arrays):
            session.drop_array(array_id, loss)
        reruns.queue(session, again, state.now_s)
        for number, sequence in sorted(session.running.items()):
            item = pending[sequence]
            assert isinstance(item.command, do.RunOnWorkers)
            session.finish(number, StepOutcome(error=_loss_of(state, session, item, loss)), item.command.step.kind)
        for executable in session.executables.values():
            executable.since_s = state.now_s
            if executable.state == "loaded":
                executable.state = "loading"
        commands += loads.drop_refused(session, pending)
        commands += saves.lose(session, loss, state.now_s)
        if session.snapshots.is_told or state.formation.roster is not None or again:
            commands += snapshots.tell_loss(session, loss)
        commands += dispatch.reply_steps(state, session) + dispatch.advance(state, session)
    return commands + deaths.note_loss(state, pending)


def _loss_of(state: MasterState, session: Session, item: Pending, loss: ShardwrightError) -> ShardwrightError:
    """The watchdog's verdict, or the loss with the stages that the lost node computed in a step of a pipeline."""
    command = item.command
    assert isinstance(command, do.RunOnWorkers)
    if item.verdict is not None:
        return item.verdict
    if item.cancelled_s is not None:
        return cancels.cancelled(f"step {command.step.number} was cancelled before it had ended")
    executable = session.executable_of(command.step)
    nodes_of_stages = executable.program.stages if executable is not None and executable.program else ()
    stages = [str(number) for number, nodes in enumerate(nodes_of_stages) if state.formation.last_lost in nodes]
    if not stages:
        return loss
    what = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(stages)}"
    return type(loss)(f"{loss.message}; it computed {what} of step {command.step.number}", remedy=loss.remedy)


def tell_workers(state: MasterState, session: Session) -> Commands:
    """New executors know nothing of the arrays of before: who reads one shall not wait for it.

    A client that takes snapshots restores them under their ids.
    """
    if session.snapshots.is_told:
        return []
    lost: dict[int, tuple[ShardwrightError, list[int]]] = {}
    for array_id, why in session.drop_reasons.items():
        if isinstance(why, WorkerLostError):
            lost.setdefault(id(why), (why, []))[1].append(array_id)
    return [
        command
        for why, array_ids in lost.values()
        for command in state.release_on_workers(session, tuple(array_ids), why)
    ]
