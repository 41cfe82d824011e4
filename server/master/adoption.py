"""A restarted master takes up the executors of its predecessor.

| phase    | what runs                                                       | next                            |
|----------|-----------------------------------------------------------------|---------------------------------|
| joining  | daemons and executors of the last generation dial the master    | evening                         |
| evening  | executors get missing commands from the longest log   | reporting                       |
| reporting| each has carried all out, and lists its contents         | over: sessions are open again   |

All executors get the same commands in one order: each has a prefix of them. Steps of clients wait for the end. With an
executor missing, or a log too short, the generation is over: its arrays are lost, and sessions recover. Functions on
`MasterState`.
"""

from __future__ import annotations

from shardwright.errors import SessionError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import loads, recovered, snapshots, transitions
from shardwright.server.master.commands import Commands
from shardwright.server.master.records import Pending
from shardwright.server.master.session_records import Save, StepOutcome
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState


def take_recent(state: MasterState, event: ev.RecentReceived) -> Commands:
    """Hand commands on to the executors that lack them. A load goes without its program: it is done again later."""
    adoption, formation = state.adoption, state.formation
    if adoption is None or formation.connections.get(event.connection) != adoption.source:
        return []
    first = min((command.sequence for command in event.commands), default=adoption.top + 1)
    commands: Commands = []
    for connection, node in formation.connections.items():
        received = formation.nodes[node].received
        if 0 < received < first - 1:  # one that got nothing yet tells that no log was cut
            reason = f"node {node} lacks commands that no other one remembers"
            return transitions.follow_formation(state, formation.restart(reason, state.now_s))
        late = tuple(command for command in event.commands if command.sequence > received)
        if late:
            commands.append(do.Redeliver(connection=connection, commands=late))
    return commands + recovered.ask_for_reports(state, adoption)


def finish(state: MasterState, item: Pending) -> Commands:
    """All have reported: sessions are as they were."""
    del item
    adoption, state.adoption = state.adoption, None
    assert adoption is not None
    by_session: dict[str, dict[int, ev.SessionReport]] = {}
    for node, reports in adoption.reports.items():
        for report in reports:
            by_session.setdefault(report.session_id, {})[node] = report
    commands: Commands = [do.Log(text=f"took up the executors of generation {state.formation.generation}")]
    for session_id in by_session.keys() - state.sessions.keys():
        commands += _close(state, session_id)
    state.has_adopted = True
    for session in list(state.sessions.values()):
        session.is_unreported = False
        if len(by_session.get(session.session_id, {})) == len(state.formation.team):
            commands += _rebuild(state, session, by_session[session.session_id])
    commands += transitions.follow_formation(state, [])
    for session in list(state.sessions.values()):
        commands += recovered.release_held(state, session)
    return commands


def _close(state: MasterState, session_id: str) -> Commands:
    """A session that ended, and the executors were not told."""
    return state.broadcast(lambda sequence: do.CloseOnWorkers(sequence=sequence, session_id=session_id))


def _rebuild(state: MasterState, session: Session, reports: dict[int, ev.SessionReport]) -> Commands:
    for node, report in reports.items():
        for array in report.arrays:
            holders = state.formation.nodes_of(array.devices)
            session.record_arrival(array.array_id, array.size_bytes, node, holders)
    steps = _merge_steps(reports)
    session.outcomes = {number: outcome for number, (outcome, _) in steps.items()}
    if steps:
        session.first_number, session.last_number = min(steps), max(steps)
    else:
        session.first_number, session.last_number = 1, 0
    refused = SessionError("the step was refused by a master before this one", remedy="send it again as another step")
    for number in range(session.first_number, session.last_number + 1):
        session.outcomes.setdefault(number, StepOutcome(error=refused))
    described = session.kept.description if session.kept is not None else b""
    kept = next((report.kept for report in reports.values() if report.kept is not None), None)
    if kept is not None:
        session.kept = ev.Kept(
            description=kept.description or described, array_ids=kept.array_ids, updates=kept.updates
        )
        session.highest_id = max(session.highest_id, *kept.array_ids, 0)
    loaded = set.intersection(*(set(report.executables) for report in reports.values()))
    session.is_open = True
    commands: Commands = []
    for executable in session.executables.values():
        if executable.state == "loading" and executable.plan_id in loaded:
            executable.state = "loaded"
            calls, executable.waiting_calls = executable.waiting_calls, []
            commands += [do.Answer(call=call, value=executable.program) for call in calls]
    if session.open_call is not None:
        commands.append(do.Answer(call=session.open_call, value=session.session_id))
        session.open_call = None
    commands += loads.load_waiting(state, session)
    return commands + _resume_copies(state, session, steps)


def _merge_steps(
    reports: dict[int, ev.SessionReport],
) -> dict[int, tuple[StepOutcome, ev.StepRecord]]:
    """By number: what the steps came to on all nodes, and one node's record."""
    merged: dict[int, tuple[StepOutcome, ev.StepRecord]] = {}
    for node in sorted(reports):
        for record in reports[node].steps:
            before, first = merged.get(record.number, (StepOutcome(error=None), record))
            outcome = StepOutcome(
                error=before.error or record.error,
                values=before.values or record.values,
                run_s=max(before.run_s, record.run_s),
                traces=before.traces + record.traces,
                not_finite=before.not_finite + record.not_finite,
            )
            merged[record.number] = outcome, first
    return dict(sorted(merged.items()))


def _resume_copies(
    state: MasterState, session: Session, steps: dict[int, tuple[StepOutcome, ev.StepRecord]]
) -> Commands:
    """Go on with the copies of the last save and the last snapshot; finished ones get the same answer again."""
    commands: Commands = []
    copied = [record for outcome, record in steps.values() if record.is_snapshot and outcome.error is None]
    if copied and copied[-1].number > session.snapshots.complete:
        session.snapshots.copied_kept[copied[-1].number] = copied[-1].kept
        commands += snapshots.store(state, session, copied[-1].number)
    saved = [record.number for outcome, record in steps.values() if record.is_save and outcome.error is None]
    for number in saved:
        session.saves[number] = Save(
            number=number, expected_bytes=None, started_s=state.now_s, phase="done", work=session.statistics.saves
        )
    if saved:
        session.saves[saved[-1]].phase = "writing"
        commands += state.broadcast(
            lambda sequence: do.WriteOnWorkers(sequence=sequence, session_id=session.session_id, number=saved[-1])
        )
    return commands
