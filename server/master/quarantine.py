"""What ends executors again and again is stopped, and only its session pays.

A *suspect* is what an executor was busy with when it ended: the steps or the load that its threads were at, or the
dataset whose function ran (its black box says so), or a step that ran into its time limit.

| deaths with it | then                                                                                   |
|----------------|----------------------------------------------------------------------------------------|
| 1              | it is noted                                                                            |
| 2 to 4         | a step is on trial: it runs alone, so that no innocent one is there at the next death  |
| 5              | it is stopped: refused in its session, with an error that names it                     |

One suspect is stopped at a time, and its deaths count for no other one any more. What goes on as never before (new
arrays, not those of a replay) is cleared: by one success, or by twenty where the executor ended of itself, by its exit
code. An hour without a death clears, too. What was stopped has one death left in other sessions of its owner.

Functions on `MasterState`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwright.errors import RepeatedLossError, ShardwrightError, StepTimeoutError
from shardwright.log_lines import SESSION_DIGITS
from shardwright.server.master import events as ev

if TYPE_CHECKING:
    from shardwright.server.black_box import Work
    from shardwright.server.master.sessions import Session
    from shardwright.server.master.state import Commands, MasterState, Pending

#: Deaths of executors that a suspect may be there at, …
MOST_DEATHS = 5
#: … from so many on it runs alone.
TRIAL_DEATHS = 2
#: Successes after which deaths are forgotten: of executors that ended of themselves, and of those that may have been
#: killed; and seconds.
CLEARING_SUCCESSES, CLEARING_SUCCESSES_OF_KILLED, FORGET_S = 20, 1, 3600.0
#: Ends that a process brings about itself, besides exit codes of its own choice.
_OWN_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
#: Exit codes with which executors say that something outside went wrong.
_ORDERLY = (0, 1)
#: Who is stopped first, where several have been there as often: users' own code.
_KINDS = ("dataset", "load", "step")


@dataclass(frozen=True, slots=True)
class Suspect:
    """kind: "step", "load" or "dataset". key: of its program, or of the dataset."""

    session_id: str
    kind: str
    key: str


@dataclass(frozen=True, slots=True)
class Charge:
    """A suspect at a death. what: in words; number: of the step."""

    suspect: Suspect
    what: str
    number: int = 0


@dataclass(slots=True)
class Record:
    """deaths: generations that ended with it. last_s: when the last of them did. needed: successes that clear it."""

    what: str
    deaths: set[int]
    last_s: float
    needed: int = CLEARING_SUCCESSES
    successes: int = 0


@dataclass(slots=True)
class Quarantine:
    """generation: of the executors that were lost last; under_way: its commands, by number; is_explained: whether an
    executor has said what it was busy with. stopped: errors. seen: what was stopped, by (owner, kind, key).
    next_trial: the step on trial that waits to be alone: session, number.
    """

    records: dict[Suspect, Record] = field(default_factory=dict)
    stopped: dict[Suspect, ShardwrightError] = field(default_factory=dict)
    seen: dict[tuple[str, str, str], Record] = field(default_factory=dict)
    generation: int = 0
    is_explained: bool = False
    under_way: dict[int, Charge] = field(default_factory=dict)
    next_trial: tuple[str, int] | None = None


# ---- deaths ----------------------------------------------------------------------------
def note_loss(state: MasterState, pending: Mapping[int, Pending]) -> Commands:
    """The executors are lost; of what, they may say later. A step over its limit is a suspect at once."""
    quarantine = state.quarantine
    quarantine.generation, quarantine.is_explained = state.formation.lost_generation, False
    quarantine.next_trial = None
    quarantine.under_way = {
        sequence: charge for sequence, item in pending.items() if (charge := _charge_of(item.command)) is not None
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


def blame_command(state: MasterState, command: ev.ToWorkers) -> Commands:
    """Executors were replaced for what a command did."""
    charge = _charge_of(command)
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
            charge = _charge_of(state.pending[work.sequence].command)
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
    loss, commands = state.formation.last_loss, list[ev.Command]()
    assert loss is not None
    begun = {(charge.suspect.session_id, charge.number) for charge in charges if charge.number}
    for session in [each for each in state.sessions.values() if any(each.session_id == of for of, _ in begun)]:
        for item in list(session.queue):
            step = item.request
            if item.is_again and isinstance(step, ev.StepRequested) and (step.session_id, step.number) in begun:
                session.queue.remove(item)
                commands += state._refuse_step(session, step, loss)
        commands += state._advance(session)
    return commands


def blame(state: MasterState, charges: Iterable[Charge], needed: int) -> Commands:
    """Count a death; where it is one too many, the suspect that was there most often is stopped."""
    quarantine, now_s = state.quarantine, state._now_s
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
    return _stop(state, min(guilty, key=lambda each: (-len(quarantine.records[each].deaths), _KINDS.index(each.kind))))


def _earlier_deaths(state: MasterState, suspect: Suspect) -> set[int]:
    """Of what was stopped in another session of its owner: all but one, under numbers of no generation."""
    seen = state.quarantine.seen.get(_in_any_session(state, suspect))
    is_recent = seen is not None and state._now_s - seen.last_s <= FORGET_S
    return set(range(1 - MOST_DEATHS, 0)) if is_recent else set()


def _in_any_session(state: MasterState, suspect: Suspect) -> tuple[str, str, str]:
    session = state.sessions.get(suspect.session_id)
    return session.owner if session is not None else "", suspect.kind, suspect.key


def _stop(state: MasterState, suspect: Suspect) -> Commands:
    quarantine = state.quarantine
    record = quarantine.records.pop(suspect)
    for other in quarantine.records.values():
        other.deaths -= record.deaths
    quarantine.records = {each: other for each, other in quarantine.records.items() if other.deaths}
    quarantine.seen[_in_any_session(state, suspect)] = record
    session = state.sessions.get(suspect.session_id)
    label = session.label if session is not None else suspect.session_id[:SESSION_DIGITS]
    times = f"{MOST_DEATHS} times" if min(record.deaths) > 0 else "again, as in a session before,"
    error = quarantine.stopped[suspect] = RepeatedLossError(
        f"{record.what} of session {label} ended the executors {times} and is not run any more",
        remedy="mend it, and open a new session; the executors' last words are in the servers' log (shardwright logs "
        "HOST:PORT --level error). The session goes on without it: arrays that snapshots keep are restored, others are "
        "gone",
    )
    commands: Commands = [ev.Log(text=error.message, is_warning=True, session=suspect.session_id)]
    if session is None:
        return commands
    if suspect.kind != "dataset":
        executable = session.executables.pop(suspect.key, None)
        session.retired[suspect.key] = error
        commands += [ev.Fail(call=call, error=error) for call in executable.waiting_calls] if executable else []
    return commands + state._advance(session)


# ---- what is stopped, and what is on trial -----------------------------------------------
def refused_datasets(state: MasterState, session_id: str) -> tuple[tuple[str, ShardwrightError], ...]:
    """Of a session, for its executors: by their keys."""
    return tuple(
        (suspect.key, error)
        for suspect, error in state.quarantine.stopped.items()
        if suspect.kind == "dataset" and suspect.session_id == session_id
    )


def refusal_of_load(state: MasterState, session_id: str, plan_id: str) -> ShardwrightError | None:
    """Why a program is not loaded again, or None."""
    stopped = state.quarantine.stopped
    own = (stopped.get(Suspect(session_id, kind, plan_id)) for kind in ("step", "load"))
    return next((error for error in own if error is not None), None)


def may_run(state: MasterState, session: Session, step: ev.StepRequested) -> bool:
    """Whether a step may be sent to the executors: one on trial runs alone, and its turn comes."""
    quarantine = state.quarantine
    if not quarantine.records:
        return True
    running = [item.command.step for item in state.pending.values() if isinstance(item.command, ev.RunOnWorkers)]
    if _is_on_trial(quarantine, step):
        quarantine.next_trial = (session.session_id, step.number) if running else None
        return not running
    waiting = quarantine.next_trial
    if waiting is not None and waiting != (session.session_id, step.number) and _is_next(state, *waiting):
        return False  # once a success has cleared it, it is not on trial any more, and waits for nobody
    return not any(_is_on_trial(quarantine, other) for other in running)


def _is_next(state: MasterState, session_id: str, number: int) -> bool:
    session = state.sessions.get(session_id)
    first = session.queue[0].request if session is not None and session.queue else None
    return isinstance(first, ev.StepRequested) and first.number == number


def _is_on_trial(quarantine: Quarantine, step: ev.StepRequested) -> bool:
    record = quarantine.records.get(_suspect_of(step))
    return record is not None and len(record.deaths) >= TRIAL_DEATHS


def note_end(state: MasterState, item: Pending) -> Commands:
    """All nodes have answered a command: a success may clear it, and after a trial others may run again."""
    has_records, command = bool(state.quarantine.records), item.command
    if isinstance(command, ev.RunOnWorkers) and item.error is None:
        _count_success(state, command.step)
    if not has_records:
        return []
    return [each for session in list(state.sessions.values()) for each in state._advance(session)]


def _count_success(state: MasterState, step: ev.StepRequested) -> None:
    """Of a step that made what was never made before."""
    session = state.sessions.get(step.session_id)
    newest = max(step.outputs, default=0)
    if session is None or newest <= session.highest_made:
        return
    session.highest_made = newest
    quarantine, suspect = state.quarantine, _suspect_of(step)
    if not (quarantine.records or quarantine.seen):
        return
    anywhere = _in_any_session(state, suspect)
    record, seen = quarantine.records.get(suspect), quarantine.seen.get(anywhere)
    if record is not None:
        record.successes += 1
        if record.successes >= record.needed:
            del quarantine.records[suspect]
    if seen is not None:
        seen.successes += 1
        if seen.successes >= CLEARING_SUCCESSES:
            del quarantine.seen[anywhere]


def forget(state: MasterState, session_id: str) -> None:
    """The session has ended."""
    quarantine = state.quarantine
    quarantine.records = {each: it for each, it in quarantine.records.items() if each.session_id != session_id}
    quarantine.stopped = {each: it for each, it in quarantine.stopped.items() if each.session_id != session_id}


def _charge_of(command: ev.ToWorkers) -> Charge | None:
    """What a command would be guilty as; None: it is none of a user's."""
    match command:
        case ev.RunOnWorkers(step=step):
            return Charge(_suspect_of(step), _words_of(step), step.number)
        case ev.LoadOnWorkers(session_id=session_id, program=program):
            return Charge(Suspect(session_id, "load", program.plan_id), f"the load of plan {program.plan_id[:12]}")
        case _:
            return None


def _suspect_of(step: ev.StepRequested) -> Suspect:
    if step.batch is not None:
        return Suspect(step.session_id, "dataset", step.batch.key)
    return Suspect(step.session_id, "step", step.executable_id)


def _words_of(step: ev.StepRequested) -> str:
    name = step.batch.function if step.batch is not None else step.name
    return f"{step.kind} {step.number}" + (f" ({name})" if name else "")
