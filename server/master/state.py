"""The master as a pure state machine: `MasterState.handle(event, now_s) -> commands`.

No clock, no network, no randomness: the shell (`shell.py`) brings events and
carries out commands. `formation.py` decides which executors run, `sessions.py`
books arrays and steps; here they meet:

- the formation becomes *ready*: every session is opened on the executors and
  its executables are loaded again, then queues move on;
- it stops being ready: every array is gone, every running step has failed
  (WorkerLostError), what was being opened or loaded waits for the next generation.

Commands to executors are broadcast under one sequence number and are done when
every node has answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardwright.errors import SessionError, ShardwrightError
from shardwright.server.limits import Limits
from shardwright.server.master import (
    adoption,
    cancels,
    drain,
    elasticity,
    idle_sessions,
    loads,
    losses,
    named,
    quarantine,
    recovered,
    reruns,
    saves,
    snapshots,
    watchdog,
)
from shardwright.server.master import events as ev
from shardwright.server.master.formation import Formation, Identity, Member
from shardwright.server.master.people import People
from shardwright.server.master.roster import Roster
from shardwright.server.master.sessions import QueuedRequest, Session, StepOutcome, lost_session, unknown_session
from shardwright.server.master.statistics import Statistics

Commands = list[ev.Command]


@dataclass(slots=True)
class Pending:
    """A broadcast that not every node has answered: `waiting` nodes, and what the others said.

    failed_s: when the first node reported an error; the divergence clock.
    sent_s, limit_s, usual_s, cancelled_s: the watchdog's; by its clock. ended_by: the operator who wants no
    wait. verdict: the error that the watchdog gave the command.
    """

    command: ev.ToWorkers
    waiting: set[int]
    sent_s: float
    limit_s: float
    usual_s: float = 0.0
    cancelled_s: float | None = None
    ended_by: str = ""
    verdict: ShardwrightError | None = None
    error: ShardwrightError | None = None
    failed_s: float | None = None
    values: tuple[Any, ...] = ()
    run_s: float = 0.0
    written_bytes: int = 0
    traces: tuple[Any, ...] = ()
    not_finite: tuple[Any, ...] = ()


@dataclass(slots=True)
class MasterState:
    """See the module's docstring. `check_invariants` holds between any two events."""

    formation: Formation
    limits: Limits
    people: People
    sessions: dict[str, Session] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)
    sequence: int = 0
    watchdog: watchdog.Watchdog = field(default_factory=lambda: watchdog.Watchdog(watchdog.AwakeClock()))
    drain: drain.Drain | None = None
    adoption: recovered.Adoption | None = None  # while executors of a master before may come back
    has_adopted: bool = False
    known: int = 0  # all executors have carried out the command of this number
    recovered_sessions: int = 0  # of a master before this one
    lost: dict[str, str] = field(default_factory=dict)  # why sessions of it are not there, by id
    lost_names: dict[str, str] = field(default_factory=dict)  # their ids, by name, until its user was told
    statistics: Statistics = field(default_factory=Statistics)
    quarantine: quarantine.Quarantine = field(default_factory=quarantine.Quarantine)
    team: tuple[int, ...] = ()  # nodes that programs are planned for
    wanted_since_s: float | None = None  # since when others could take part, and what is in the way
    held_up_by: str = ""
    _now_s: float = 0.0

    @classmethod
    def create(
        cls,
        members: tuple[Member, ...],
        identity: Identity,
        limits: Limits,
        *,
        wait_s: float,
        now_s: float = 0.0,
        roster: Roster | None = None,
    ) -> MasterState:
        formation = Formation(members, identity, limits, wait_s=wait_s, now_s=now_s, roster=roster)
        return cls(formation=formation, limits=limits, people=People(limits), team=formation.team)

    def handle(self, event: ev.Event, now_s: float) -> Commands:
        """Take in one event at time `now_s` (seconds, any origin, never backwards)."""
        self._now_s = self.statistics.now_s = now_s
        self.watchdog.clock.advance(now_s)
        if isinstance(event, ev.ExecutorExited):
            return self._executor_exited(event)
        formation_handler = _FORMATION_HANDLERS.get(type(event))
        if formation_handler is not None:
            commands = self._with_formation(formation_handler(self.formation, event, now_s))
            return [*commands, snapshots.retain(self)] if isinstance(event, ev.DaemonJoined) else commands
        return _HANDLERS[type(event)](self, event)

    # ---- the cluster comes and goes ----------------------------------------
    def _executor_exited(self, event: ev.ExecutorExited) -> Commands:
        """The loss names what the executor was busy with, and that is remembered."""
        nodes = self.formation.nodes.items()
        node = next((index for index, record in nodes if record.daemon == event.connection), None)
        doing = quarantine.describe(self, event.works)
        commands = self._with_formation(self.formation.executor_exited(event, self._now_s, doing))
        return commands + quarantine.explain(self, event, node)

    def _with_formation(self, commands: Commands) -> Commands:
        """Add what sessions need after the formation may have changed its phase."""
        phase = self.formation.phase
        if self.adoption is not None and phase == "ready":
            return commands + adoption.advance(self)
        if self.adoption is not None and phase != "adopting":
            if self.pending:
                commands = commands + losses.take(self)
            commands = commands + adoption.advance(self)
        opened = any(session.is_open for session in self.sessions.values())
        if phase != "ready" and (self.pending or opened):
            commands = commands + losses.take(self)
        commands += elasticity.follow_team(self)
        if phase == "ready":
            for session in self.sessions.values():
                if not session.is_open and not self._is_pending(ev.OpenOnWorkers, session.session_id):
                    commands = commands + self._open(session.session_id)
        return commands

    def _open(self, session_id: str) -> Commands:
        refused = quarantine.refused_datasets(self, session_id)
        return self._broadcast(
            lambda sequence: ev.OpenOnWorkers(sequence=sequence, session_id=session_id, refused=refused)
        )

    def _is_pending(self, kind: type[ev.ToWorkers], session_id: str) -> bool:
        return any(
            isinstance(item.command, kind) and item.command.session_id == session_id  # type: ignore[union-attr]
            for item in self.pending.values()
        )

    def _broadcast(self, make: Callable[[int], ev.ToWorkers]) -> Commands:
        self.sequence += 1
        command = make(self.sequence)
        self.pending[self.sequence] = Pending(
            command=command,
            waiting=set(self.formation.team),
            sent_s=self.watchdog.clock.now_s,
            limit_s=self.limits.load_s if isinstance(command, ev.LoadOnWorkers) else self.limits.step_s,
        )
        return [command]

    @property
    def summary(self) -> str:
        """The state of everything in a word; see `StatusReply.state`."""
        formation = self.formation
        if self.drain is not None:
            return "draining"
        if formation.phase != "ready":
            return "degraded" if any(formation.node_state(node) == "lost" for node in formation.nodes) else "waiting"
        if watchdog.find_stalled(self) is not None or formation.has_suspects:
            return "stalled"
        return "degraded" if formation.lacks_daemons else "ready"

    # ---- executors answer --------------------------------------------------
    def _command_done(self, event: ev.CommandDone) -> Commands:
        node = self.formation.connections.get(event.connection)
        item = self.pending.get(event.sequence)
        if node is None or item is None or node not in item.waiting:
            return []
        item.waiting.discard(node)
        item.run_s = max(item.run_s, event.run_s)
        item.values = item.values or event.values
        item.written_bytes += event.written_bytes
        item.traces += event.traces
        item.not_finite += event.not_finite
        is_news = event.error is not None and item.error is None
        if is_news:
            item.error, item.failed_s = event.error, self._now_s
        if item.waiting:
            return self._abort(item) if is_news else []
        del self.pending[event.sequence]
        self.known = max(self.known, event.sequence)
        self._record_run(item, watchdog.record_end(self, item))
        finish = _FINISHERS.get(type(item.command))
        commands = finish(self, item) if finish is not None else []
        return commands + quarantine.note_end(self, item)

    def _record_run(self, item: Pending, took_s: float) -> None:
        """Remember how long the steps of an executable take."""
        command = item.command
        if not isinstance(command, ev.RunOnWorkers) or item.error is not None:
            return
        session = self.sessions.get(command.step.session_id)
        executable = session.executables.get(command.step.executable_id) if session is not None else None
        if executable is not None:
            executable.longest_run_s = max(executable.longest_run_s, took_s)

    def _abort(self, item: Pending) -> Commands:
        """A step failed on one node: the others may be waiting on its transfers."""
        if not isinstance(item.command, ev.RunOnWorkers) or item.error is None:
            return []
        return [ev.AbortOnWorkers(sequence=item.command.sequence, nodes=frozenset(item.waiting), error=item.error)]

    def _finish_open(self, item: Pending) -> Commands:
        assert isinstance(item.command, ev.OpenOnWorkers)
        session = self.sessions.get(item.command.session_id)
        if session is None:
            return []
        session.is_open = True
        commands: Commands = []
        if session.open_call is not None:
            commands.append(ev.Answer(call=session.open_call, value=session.session_id))
            session.open_call = None
        commands += losses.tell_workers(self, session)
        commands += reruns.ask_for_arrays(session)
        return commands + self._load_waiting(session) + self._advance(session)

    def _load_waiting(self, session: Session) -> Commands:
        """Of an open session: have the executors load what is compiled."""
        waiting = [executable for executable in session.executables.values() if executable.state == "loading"]
        return [command for executable in waiting for command in loads.load(self, session, executable)]

    def _release_on_workers(
        self, session: Session, array_ids: tuple[int, ...], error: ShardwrightError | None
    ) -> Commands:
        return self._broadcast(
            lambda sequence: ev.ReleaseOnWorkers(
                sequence=sequence, session_id=session.session_id, array_ids=array_ids, error=error
            )
        )

    def _finish_run(self, item: Pending) -> Commands:
        assert isinstance(item.command, ev.RunOnWorkers)
        step = item.command.step
        session = self.sessions.get(step.session_id)
        if session is None:
            return []
        if item.error is not None:
            for array_id in step.outputs:
                if array_id in session.arrays:
                    session.drop_array(array_id, item.error)
        outcome = StepOutcome(
            error=item.error, values=item.values, run_s=item.run_s, traces=item.traces, not_finite=item.not_finite
        )
        session.finish(step.number, outcome, step.kind)
        session.last_step_s = self._now_s
        replies = self._reply_steps(session)
        if step.batch is not None:
            return replies + self._finish_batch(session, step, item.error)
        if step.snapshot is not None and not step.snapshot.is_restore:
            return replies + snapshots.finish_copy(self, session, item)
        is_save = step.files is not None and step.files.is_save
        return replies + (saves.finish_copy(self, session, item) if is_save else [])

    def _finish_batch(self, session: Session, step: ev.StepRequested, error: ShardwrightError | None) -> Commands:
        """All workers have their part of a batch, or none keeps it: what reads it may run, or is refused."""
        session.being_read.difference_update(step.outputs)
        for item in session.queue:  # that time is not theirs
            item.since_s = self._now_s
        commands = [] if error is None else self._release_on_workers(session, step.outputs, error)
        return commands + self._advance(session)

    # ---- sessions ----------------------------------------------------------
    def _session_requested(self, event: ev.SessionRequested) -> Commands:
        if (refused := drain.refusal_of_new(self)) is not None:
            return [ev.Fail(call=event.call, error=refused)]
        namesake = named.find(self, event.name)
        if namesake is not None:
            return named.take_up(self, namesake, event)
        if (lost := self.lost_names.pop(event.name, None)) is not None:
            return [ev.Fail(call=event.call, error=lost_session(self.lost[lost]))]
        person = self.people.find(event.person or event.owner)
        commands = idle_sessions.make_room(self, person)
        if (full := idle_sessions.refusal(self, person)) is not None:
            return [*commands, ev.Fail(call=event.call, error=full)]
        session = Session(
            session_id=event.session_id,
            limits=self.limits,
            last_seen_s=self._now_s,
            person=self.people.join(person),
            name=event.name,
            salt=event.salt,
            open_call=event.call,
            owner=event.owner,
            statistics=self.statistics,
        )
        self.sessions[event.session_id] = session
        self.statistics.sessions += 1
        return commands + self._with_formation([])

    def _session_closed(self, event: ev.SessionClosed) -> Commands:
        by = f" by {event.operator}" if event.operator else ""
        reason = SessionError(f"the session was closed{by}", remedy="open a new session")
        commands = self._end_session(event.session_id, reason) if event.session_id in self.sessions else []
        return [*commands, ev.Answer(call=event.call)]

    def _end_session(self, session_id: str, reason: ShardwrightError, away_s: float = 0.0) -> Commands:
        """away_s: seconds since its client was last heard, if that is why."""
        session = self.sessions.pop(session_id)
        quarantine.forget(self, session_id)
        self.people.leave(session.person, session.array_bytes)
        steps = [item.request.kind for item in session.queue if isinstance(item.request, ev.StepRequested)]
        steps += [_kind(self.pending[sequence].command) for sequence in session.running.values()]
        self.statistics.session_ended(session_id, steps)
        calls = [call for executable in session.executables.values() for call in executable.waiting_calls]
        calls += [session.open_call] if session.open_call is not None else []
        calls += [item.request.call for item in session.queue if isinstance(item.request, ev.ReleaseRequested)]
        commands: Commands = [ev.Fail(call=call, error=reason) for call in calls]
        compiling = [plan_id for plan_id, load in session.executables.items() if load.state == "compiling"]
        commands += loads.cancel_compiles(self, compiling) + saves.lose(session, reason, self._now_s)
        if session.stream is not None:
            commands.append(ev.EndStream(stream=session.stream, error=reason))
        for sequence in session.running.values():
            cancels.cancel_running(self, sequence, before_s=away_s)
        if session.is_open or self._is_pending(ev.OpenOnWorkers, session_id):
            commands += self._broadcast(lambda sequence: ev.CloseOnWorkers(sequence=sequence, session_id=session_id))
        return [*commands, ev.SessionEnded(session_id=session_id), snapshots.retain(self)]

    def _session_touched(self, event: ev.SessionTouched) -> Commands:
        if event.session_id in self.sessions:
            self.sessions[event.session_id].last_seen_s = self._now_s
        return []

    def _programs_sent(self, event: ev.ProgramsSent) -> Commands:
        if event.session_id in self.sessions:
            self.sessions[event.session_id].has_programs = True
        return []

    def _arrays_arrived(self, event: ev.ArraysUploaded) -> Commands:
        node = self.formation.connections.get(event.connection)
        session = self.sessions.get(event.session_id)
        if node is None or session is None:
            return []
        session.last_seen_s = self._now_s
        commands: Commands = []
        for array in event.arrays:
            self.statistics.uploads += 1
            self.statistics.upload_bytes += array.size_bytes
            session.record_arrival(array.array_id, array.size_bytes, node, self.formation.nodes_of(array.devices))
            excess = session.excess(0, 0)
            commands += self._reject_array(session, array.array_id, excess) if excess else []
        return [*commands, *self._advance(session)]

    def _reject_array(self, session: Session, array_id: int, error: ShardwrightError) -> Commands:
        """Free an array uploaded to a full session; its readers are told."""
        session.drop_array(array_id, error)
        return self._release_on_workers(session, (array_id,), error)

    # ---- steps -------------------------------------------------------------
    def _steps_opened(self, event: ev.StepsOpened) -> Commands:
        session = self.sessions.get(event.session_id)
        if session is None:
            return [ev.EndStream(stream=event.stream, error=unknown_session(event.session_id, self.lost))]
        session.last_seen_s = self._now_s
        self.people.move(session, event.person)
        old, session.stream = session.stream, event.stream
        session.live, session.held = event.live, []
        session.reply_cursor = 0  # the first number of the stream sets it
        newer = SessionError("a newer RunSteps stream of the session took over", remedy="use one stream a session")
        ended: Commands = [] if old is None else [ev.EndStream(stream=old, error=newer)]
        begun = snapshots.begin_stream(self, session, event)
        ended += drain.notices(self, event.stream) + recovered.greet(self, session, event.stream)
        ended += reruns.ask_for_arrays(session) if session.is_open else []
        return ended + begun

    def _steps_closed(self, event: ev.StepsClosed) -> Commands:
        for session in self.sessions.values():
            if session.stream == event.stream:
                session.stream = None
                session.last_seen_s = self._now_s
        return []

    def _step_requested(self, event: ev.StepRequested) -> Commands:
        session = self.sessions.get(event.session_id)
        if session is None:
            return [ev.EndStream(stream=event.stream, error=unknown_session(event.session_id, self.lost))]
        if session.stream != event.stream:
            return []  # left over from a stream that was replaced
        session.last_seen_s = self._now_s
        if session.is_unreported:
            if len(session.held) < self.limits.pending_steps:
                session.held.append(event)
            return []
        if session.awaits_number:
            recovered.take_number(session, event.number)
        refused = session.number_refusal(event.number)
        if refused is not None:
            session.stream = None
            return [ev.EndStream(stream=event.stream, error=refused)]
        session.reply_cursor = session.reply_cursor or event.number
        if event.number <= session.last_number:
            return self._reply_steps(session)  # sent again: it has run, or is about to
        session.last_number = event.number
        session.snapshots.is_told, session.is_protected = event.generation > 0, event.restores
        if event.number in session.cancelled:
            session.cancelled.discard(event.number)
            return self._refuse_step(session, event, cancels.cancelled_in_time(event.number))
        session.enqueue(event, self._now_s)
        return self._advance(session)

    def _reply_steps(self, session: Session) -> Commands:
        """Replies that are due on the session's stream, in the order of their numbers."""
        commands: Commands = []
        while session.stream is not None and session.reply_cursor in session.outcomes:
            outcome = session.outcomes[session.reply_cursor]
            commands.append(
                ev.ReplyStep(
                    stream=session.stream, number=session.reply_cursor, error=outcome.error, values=outcome.values,
                    run_s=outcome.run_s, traces=outcome.traces, not_finite=outcome.not_finite,
                )
            )  # fmt: skip
            session.reply_cursor += 1
        return commands

    def _release_requested(self, event: ev.ReleaseRequested) -> Commands:
        session = self.sessions.get(event.session_id)
        if session is None:
            return [ev.Fail(call=event.call, error=unknown_session(event.session_id, self.lost))]
        session.last_seen_s = self._now_s
        session.enqueue(event, self._now_s)
        return self._advance(session)

    def _advance(self, session: Session) -> Commands:
        """Dispatch from the head of the queue, until it has to wait."""
        commands: Commands = []
        if session.is_unreported:
            return commands
        queue: deque[QueuedRequest] = session.queue
        while queue:
            item = queue[0]
            request = item.request
            if isinstance(request, ev.ReleaseRequested):
                if request.after_step > session.last_number and not session.is_late(item, self._now_s):
                    break
                queue.popleft()
                commands += self._release(session, request)
                continue
            error = (
                drain.refusal(self, session, item)
                or snapshots.stale(self, request)
                or reruns.refusal(self, session, item)
                or session.refusal(request)
                or self._lateness(session, item)
            )
            if error is not None:
                queue.popleft()
                commands += self._refuse_step(session, request, error)
            elif self._can_run(session, request):
                queue.popleft()
                commands += self._run(session, request)
            else:
                break
        return commands

    def _lateness(self, session: Session, item: QueuedRequest) -> ShardwrightError | None:
        """Why a step has waited too long, or None."""
        if session.is_open:
            return session.lateness(item, self._now_s)
        if not isinstance(item.request, ev.StepRequested) or not session.is_late(item, self._now_s):
            return None
        return self.formation.not_ready(f"step {item.request.number}", self.limits.argument_wait_s)

    def _run(self, session: Session, step: ev.StepRequested) -> Commands:
        commands = self._broadcast(lambda sequence: ev.RunOnWorkers(sequence=sequence, step=step))
        executable = session.executables.get(step.executable_id)
        item = self.pending[self.sequence]
        item.limit_s = watchdog.step_limit_s(self.limits, step, executable)
        item.usual_s = watchdog.usual_s(executable)
        session.start(step, self.sequence, self._now_s)
        return commands

    def _can_run(self, session: Session, step: ev.StepRequested) -> bool:
        is_ready = session.is_open and session.is_loaded(step) and not session.missing_arguments(step)
        return is_ready and quarantine.may_run(self, session, step)

    def _refuse_step(self, session: Session, step: ev.StepRequested, error: ShardwrightError) -> Commands:
        """A step that never reaches the workers; clients waiting on its outputs are told."""
        outputs = tuple(array_id for array_id in step.outputs if array_id and array_id not in session.arrays)
        for array_id in outputs:
            session.drop_array(array_id, error)
        session.finish(step.number, StepOutcome(error=error), step.kind)
        commands = self._reply_steps(session)
        if session.is_open and outputs:
            commands += self._release_on_workers(session, outputs, error)
        return commands

    def _release(self, session: Session, request: ev.ReleaseRequested) -> Commands:
        there = tuple(array_id for array_id in dict.fromkeys(request.array_ids) if session.drop_array(array_id))
        commands: Commands = [ev.Answer(call=request.call)]
        if there and session.is_open:
            commands += self._release_on_workers(session, there, None)
        return commands

    # ---- time --------------------------------------------------------------
    def _tick(self, event: ev.Tick) -> Commands:
        del event
        commands = self._with_formation(self.formation.tick(self._now_s))
        commands += self._with_formation(self.formation.watch(self.watchdog.clock.now_s, self._now_s))
        for session in list(self.sessions.values()):
            commands += self._advance(session) + loads.end_waits(self, session)
            commands += idle_sessions.expire(self, session)
        commands += saves.tick(self) + self._check_divergence() + watchdog.tick(self) + elasticity.tick(self)
        return commands + drain.tick(self)

    def _check_divergence(self) -> Commands:
        for sequence, item in self.pending.items():
            if saves.is_file_work(item.command):
                continue
            if item.failed_s is not None and self._now_s - item.failed_s > self.limits.divergence_s:
                nodes = ", ".join(map(str, sorted(item.waiting)))
                reason = f"command {sequence} failed on one node ({item.error}) while node {nodes} went on"
                commands = self._with_formation(self.formation.restart(reason, self._now_s))
                return commands + quarantine.blame_command(self, item.command)
        return []

    # ---- invariants --------------------------------------------------------
    def check_invariants(self) -> None:
        """Invariants between any two events; AssertionError on violation."""
        self.formation.check_invariants()
        is_ready = self.formation.phase == "ready"
        assert bool(self.pending) <= is_ready, "nothing is pending without a cluster"
        running = {
            item.command.step.session_id: item
            for item in self.pending.values()
            if isinstance(item.command, ev.RunOnWorkers)
        }
        for sequence, item in self.pending.items():
            assert item.waiting, "a broadcast that all have answered is not pending"
            assert item.waiting <= set(self.formation.nodes)
            assert item.command.sequence == sequence <= self.sequence
        self.people.check_invariants(self.sessions.values())
        for session in self.sessions.values():
            session.check_invariants()
            saves.check_invariants(self, session)
            assert session.is_open <= is_ready
            assert bool(session.running) <= (session.session_id in running)
            assert (session.open_call is None) or not session.is_open
            for executable in session.executables.values():
                assert (executable.state == "loaded") <= (session.is_open and not executable.waiting_calls)
                assert (executable.state == "compiling") == (executable.program is None)


def _kind(command: ev.ToWorkers) -> str:
    return command.step.kind if isinstance(command, ev.RunOnWorkers) else "step"


_FORMATION_HANDLERS: dict[type[ev.Event], Callable[[Formation, Any, float], Commands]] = {
    ev.DaemonJoined: Formation.daemon_joined,
    ev.DaemonHeard: Formation.daemon_heard,
    ev.DaemonLeft: Formation.daemon_left,
    ev.MembersChanged: Formation.change_members,
    ev.ExecutorJoined: Formation.executor_joined,
    ev.ExecutorLeft: Formation.executor_left,
    ev.ExecutorHeard: Formation.executor_heard,
}
_HANDLERS: dict[type[ev.Event], Callable[[MasterState, Any], Commands]] = {
    ev.CommandDone: MasterState._command_done,
    ev.ArraysUploaded: MasterState._arrays_arrived,
    ev.SessionRequested: MasterState._session_requested,
    ev.SessionClosed: MasterState._session_closed,
    ev.SessionTouched: MasterState._session_touched,
    ev.ProgramsSent: MasterState._programs_sent,
    ev.LoadRequested: loads.request,
    ev.LoadAbandoned: loads.abandon,
    ev.CompileFinished: loads.finish_compile,
    ev.UnloadRequested: loads.unload,
    ev.StepsOpened: MasterState._steps_opened,
    ev.StepsClosed: MasterState._steps_closed,
    ev.StepRequested: MasterState._step_requested,
    ev.StepsCancelled: cancels.request,
    ev.StepsEnded: cancels.end_steps,
    ev.SaveAwaited: saves.wait_requested,
    ev.ReleaseRequested: MasterState._release_requested,
    ev.DrainRequested: drain.requested,
    ev.RecentReceived: adoption.take_recent,
    ev.ReportReceived: adoption.take_report,
    ev.ProtectionChanged: snapshots.change_protection,
    ev.SnapshotNamed: snapshots.note_named,
    ev.Tick: MasterState._tick,
}
_FINISHERS: dict[type[ev.ToWorkers], Callable[[MasterState, Pending], Commands]] = {
    ev.OpenOnWorkers: MasterState._finish_open,
    ev.ReportOnWorkers: adoption.finish,
    ev.LoadOnWorkers: loads.finish,
    ev.RunOnWorkers: MasterState._finish_run,
    ev.WriteOnWorkers: saves.finish_write,
    ev.FinishOnWorkers: saves.finish_commit,
    ev.StoreOnWorkers: snapshots.finish_store,
}
