"""Deaths of executors and who was there: what was there too often is stopped, see `quarantine.py`."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping

from shardwright.errors import RepeatedLossError, StepTimeoutError
from shardwright.log_lines import SESSION_DIGITS
from shardwright.server.black_box import Work
from shardwright.server.master import commands as do
from shardwright.server.master import dispatch
from shardwright.server.master import events as ev
from shardwright.server.master.commands import Commands
from shardwright.server.master.quarantine import charge_of, in_any_session
from shardwright.server.master.records import Charge, Pending, Record, Suspect
from shardwright.server.master.state import MasterState
from shardwright.server.tuning import CLEARING_SUCCESSES, CLEARING_SUCCESSES_OF_KILLED, FORGET_S, MOST_DEATHS

#: Ends that a process brings about itself, besides exit codes of its own choice.
_OWN_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
#: Exit codes with which executors say that something outside went wrong.
_ORDERLY = (0, 1)
#: Who is stopped first, where several have been there as often: users' own code.
_KINDS = ("dataset", "load", "step")


def note_loss(state: MasterState, pending: Mapping[int, Pending]) -> Commands:
    """The executors are lost; of what, they may say later. A step over its limit is a suspect at once."""
    quarantine = state.quarantine
    quarantine.generation, quarantine.is_explained = state.formation.lost_generation, False
    quarantine.next_trial = None
    quarantine.under_way = {
        sequence: charge for sequence, item in pending.items() if (charge := charge_of(item.command)) is not None
    }
    hung = [sequence for sequence, item in pending.items() if isinstance(item.verdict, StepTimeoutError)]
    charges = [quarantine.under_way[sequence] for sequence in hung if sequence in quarantine.under_way]
    return blame(state, charges, CLEARING_SUCCESSES_OF_KILLED)


def explain(state: MasterState, event: ev.ExecutorExited, node: int | None) -> Commands:
    """A daemon says what its executor was busy with: the first that ended by itself, or that had fallen silent."""
    quarantine = state.quarantine
    is_hung = node is not None and node == state.formation.silent_node
    if event.generation != quarantine.generation or quarantine.is_explained or (event.was_killed and not is_hung):
        return []
    quarantine.is_explained = True
    charges = list_charges(state, event.works)
    code = event.exit_code
    is_own = -code in _OWN_SIGNALS if code < 0 else code not in _ORDERLY
    needed = CLEARING_SUCCESSES if is_own else CLEARING_SUCCESSES_OF_KILLED
    return _fail_begun(state, charges) + blame(state, charges, needed)


def blame_command(state: MasterState, command: do.ToWorkers) -> Commands:
    """Executors were replaced for what a command did."""
    charge = charge_of(command)
    return [] if charge is None else blame(state, [charge], CLEARING_SUCCESSES_OF_KILLED)


def list_charges(state: MasterState, works: Iterable[Work]) -> list[Charge]:
    """Of what an executor's threads were busy with: commands first, in their order."""
    charges: dict[tuple[Suspect, int], Charge] = {}
    for work in works:
        charge: Charge | None
        if work.key:
            suspect = Suspect(work.session_id, "dataset", work.key)
            charge = Charge(suspect, f"batch {work.batch} of the dataset {work.function}")
        elif work.sequence in state.pending:
            charge = charge_of(state.pending[work.sequence].command)
        else:
            charge = state.quarantine.under_way.get(work.sequence)
        if charge is not None:
            charges[charge.suspect, charge.number] = charge
    return list(charges.values())


def describe(state: MasterState, works: Iterable[Work]) -> str:
    """E.g. `step 3 (train) of session 1a2b3c4d`; empty where nothing is known."""
    charges = list_charges(state, works)
    return "; ".join(f"{charge.what} of session {charge.suspect.session_id[:SESSION_DIGITS]}" for charge in charges)


def _fail_begun(state: MasterState, charges: list[Charge]) -> Commands:
    """Steps that ran when the executors ended do not run again by themselves: they may have been the reason."""
    loss, commands = state.formation.last_loss, list[do.Command]()
    assert loss is not None
    begun = {(charge.suspect.session_id, charge.number) for charge in charges if charge.number}
    for session in [each for each in state.sessions.values() if any(each.session_id == of for of, _ in begun)]:
        for item in list(session.queue):
            step = item.request
            if item.is_again and isinstance(step, ev.StepRequested) and (step.session_id, step.number) in begun:
                session.queue.remove(item)
                commands += dispatch.refuse_step(state, session, step, loss)
        commands += dispatch.advance(state, session)
    return commands


def blame(state: MasterState, charges: Iterable[Charge], needed: int) -> Commands:
    """Count a death; where it is one too many, the suspect that was there most often is stopped."""
    quarantine, now_s = state.quarantine, state.now_s
    guilty: list[Suspect] = []
    for charge in charges:
        suspect = charge.suspect
        if not suspect.key:  # a snapshot, a save: the server's own
            continue
        record = quarantine.records.get(suspect)
        if record is None or now_s - record.last_s > FORGET_S:
            record = quarantine.records[suspect] = Record(charge.what, _earlier_deaths(state, suspect), now_s)
        record.what, record.last_s, record.needed, record.successes = charge.what, now_s, needed, 0
        record.deaths.add(quarantine.generation)
        if len(record.deaths) >= MOST_DEATHS:
            guilty.append(suspect)
    if not guilty:
        return []
    return _stop(
        state, min(guilty, key=lambda suspect: (-len(quarantine.records[suspect].deaths), _KINDS.index(suspect.kind)))
    )


def _earlier_deaths(state: MasterState, suspect: Suspect) -> set[int]:
    """Of what was stopped in another session of its owner: all but one, under numbers of no generation."""
    seen = state.quarantine.seen.get(in_any_session(state, suspect))
    is_recent = seen is not None and state.now_s - seen.last_s <= FORGET_S
    return set(range(1 - MOST_DEATHS, 0)) if is_recent else set()


def _stop(state: MasterState, suspect: Suspect) -> Commands:
    quarantine = state.quarantine
    record = quarantine.records.pop(suspect)
    for other in quarantine.records.values():
        other.deaths -= record.deaths
    quarantine.records = {each: other for each, other in quarantine.records.items() if other.deaths}
    quarantine.seen[in_any_session(state, suspect)] = record
    session = state.sessions.get(suspect.session_id)
    label = session.label if session is not None else suspect.session_id[:SESSION_DIGITS]
    times = f"{MOST_DEATHS} times" if min(record.deaths) > 0 else "again, as in a session before,"
    error = quarantine.stopped[suspect] = RepeatedLossError(
        f"{record.what} of session {label} ended the executors {times} and is not run any more",
        remedy="mend it, and open a new session; the executors' last words are in the servers' log (shardwright logs "
        "HOST:PORT --level error). The session goes on without it: arrays that snapshots keep are restored, others are "
        "gone",
    )
    commands: Commands = [do.Log(text=error.message, is_warning=True, session=suspect.session_id)]
    if session is None:
        return commands
    if suspect.kind != "dataset":
        executable = session.executables.pop(suspect.key, None)
        session.retired[suspect.key] = error
        commands += [do.Fail(call=call, error=error) for call in executable.waiting_calls] if executable else []
    return commands + dispatch.advance(state, session)
