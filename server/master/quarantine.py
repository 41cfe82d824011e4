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

from shardwright.errors import ShardwrightError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.records import Charge, Quarantine, Suspect
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState
from shardwright.server.tuning import CLEARING_SUCCESSES, TRIAL_DEATHS


def in_any_session(state: MasterState, suspect: Suspect) -> tuple[str, str, str]:
    session = state.sessions.get(suspect.session_id)
    return session.owner if session is not None else "", suspect.kind, suspect.key


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
    running = [item.command.step for item in state.pending.values() if isinstance(item.command, do.RunOnWorkers)]
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
    record = quarantine.records.get(suspect_of(step))
    return record is not None and len(record.deaths) >= TRIAL_DEATHS


def count_success(state: MasterState, step: ev.StepRequested) -> None:
    """Of a step that made what was never made before."""
    session = state.sessions.get(step.session_id)
    newest = max(step.outputs, default=0)
    if session is None or newest <= session.highest_made:
        return
    session.highest_made = newest
    quarantine, suspect = state.quarantine, suspect_of(step)
    if not (quarantine.records or quarantine.seen):
        return
    anywhere = in_any_session(state, suspect)
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


def charge_of(command: do.ToWorkers) -> Charge | None:
    """What a command would be guilty as; None: it is none of a user's."""
    match command:
        case do.RunOnWorkers(step=step):
            return Charge(suspect_of(step), _words_of(step), step.number)
        case do.LoadOnWorkers(session_id=session_id, program=program):
            return Charge(Suspect(session_id, "load", program.plan_id), f"the load of plan {program.plan_id[:12]}")
        case _:
            return None


def suspect_of(step: ev.StepRequested) -> Suspect:
    if step.batch is not None:
        return Suspect(step.session_id, "dataset", step.batch.key)
    return Suspect(step.session_id, "step", step.executable_id)


def _words_of(step: ev.StepRequested) -> str:
    name = step.batch.function if step.batch is not None else step.name
    return f"{step.kind} {step.number}" + (f" ({name})" if name else "")
